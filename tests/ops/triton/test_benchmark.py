"""`benchmarks/gpu.py` without a GPU: its comparison of every kernel with its torch form, in the interpreter."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from glm5.ops.operators import TRITON_KERNELS
from glm5.ops.triton import Shape
from tests.ops.triton import interpreter  # noqa: F401 - prepares the interpreter

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FILE = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
TINY = Shape(
    heads=2, latent=16, rope=4, topk=6, index_heads=2, index_dim=8, nope=8, value=8, query_latent=12, hidden=24,
    inner=16, experts=4, experts_per_token=2, expert_inner=8, vocabulary=50, queries=5, context=128, sequences=2,
)  # fmt: skip
GPU = runpy.run_path(str(FILE), run_name="gpu")


@pytest.mark.parametrize("name", GPU["WORK"])
def test_a_kernel_is_right(name: str) -> None:
    row = GPU["check"](name, TINY, "cpu")
    assert row["right"] and row["errors"].keys() == {"float32", "bfloat16"}, row


def test_every_kernel_is_measured() -> None:
    assert {operator for operator, *_ in GPU["WORK"].values()} == TRITON_KERNELS.keys() - {"draw_tokens"}


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, FILE, "kernels"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("No GPU: nothing was run.")
