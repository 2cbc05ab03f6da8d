"""`benchmarks/gpu.py` without a GPU: its comparison of every kernel with its torch form, in the interpreter."""

from __future__ import annotations

import contextlib
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from glm5.launch.kernels import shape_of
from glm5.ops import operators
from glm5.ops.operators import TRITON_KERNELS
from glm5.ops.triton import Shape
from tests.ops.triton import interpreter  # noqa: F401 - prepares the interpreter

from triton.runtime.errors import OutOfResources  # isort: skip - after the interpreter was set up

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FILE = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
TINY = Shape(
    heads=2, latent=16, rope=4, topk=6, index_heads=2, index_dim=8, nope=8, value=8, query_latent=12, hidden=24,
    inner=16, experts=4, experts_per_token=2, expert_inner=8, vocabulary=50, queries=5, context=128, sequences=2,
)  # fmt: skip
sys.path.insert(0, str(FILE.parent))
GPU = runpy.run_path(str(FILE), run_name="gpu")
sys.path.remove(str(FILE.parent))


@pytest.mark.parametrize("name", GPU["WORK"])
def test_a_kernel_is_right(name: str) -> None:
    row = GPU["check"](name, TINY, "cpu")
    assert row["right"] and row["errors"].keys() == {"float32", "bfloat16"}, row


def test_every_kernel_is_measured() -> None:
    assert {operator for operator, *_ in GPU["WORK"].values()} == TRITON_KERNELS.keys() - {"draw_tokens"}


@pytest.mark.parametrize("name", ["select", "select_8bit"])
def test_selection_is_compared_with_exact_scores(name: str) -> None:
    """With index keys of 128 numbers, the factor d^-1/2 rounds even in fp64: ties of whole numbers would break."""
    row = GPU["check"](name, replace(TINY, index_dim=128, index_heads=4, topk=16, queries=12), "cpu")
    assert row["right"], row


def test_a_kernel_that_does_not_run_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("out of shared memory")

    monkeypatch.setitem(TRITON_KERNELS, "swiglu", fails)
    row = GPU["check"]("swiglu", TINY, "cpu")
    assert not row["right"] and row["error"] == "ValueError: out of shared memory"


def test_the_least_time_of_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    shape = shape_of("glm5")
    least = {name: GPU["least_us"](names, shape) for name, (_, names, _) in GPU["WORK"].items()}
    assert [name for name, time in least.items() if time is None] == ["indexer_kl"]
    moved = 2 * (256 * 4096 * 6144 + 4096 * 8 * (6144 + 4096))
    assert least["grouped_rows"] == pytest.approx(1e6 * moved / 3.35e12)
    assert least["select_8bit"] == pytest.approx(least["select"] / 2, rel=0.01)


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, FILE, "kernels"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("No GPU: nothing was run.")


def meta(results: Any) -> list[tuple[Any, ...]]:
    found = (results,) if isinstance(results, Tensor) else results
    return [(x.shape, x.dtype, x.stride()) for x in found]


@pytest.mark.parametrize("name", [n for n, (o, *_) in GPU["WORK"].items() if o not in ("attend", "select_8bit")])
def test_results_have_the_layout_that_fake_tensors_have(name: str) -> None:
    """For arguments whose columns lie in memory first, where rows need not be contiguous. (The saved sums of `attend`
    exist on a GPU only.)"""
    operator, _, make = GPU["WORK"][name]
    arguments = make(GPU["Draw"](TINY, torch.float32, "cpu", torch.Generator().manual_seed(1)))
    pools = arguments[8:10] if operator == "mla_latents" else ()
    if operator not in ("attend_backward", "select", "selected", "selected_backward"):  # callers make them contiguous
        arguments = tuple(
            x
            if any(x is p for p in pools)
            else tree_map_only(Tensor, lambda t: t.mT.contiguous().mT if t.ndim > 1 else t, x)
            for x in arguments
        )
    with FakeTensorMode() as mode:

        def fake(tensor: Tensor) -> Tensor:
            if operator not in ("attend_ranges", "expert_layout"):
                return mode.from_tensor(tensor)  # type: ignore[no-any-return]
            # On a CPU these two have other results.
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

        expected = meta(getattr(torch.ops.glm5, operator).default(*tree_map_only(Tensor, fake, arguments)))
    assert meta(TRITON_KERNELS[operator](*arguments)) == expected
    assert meta(operators._contiguous(operators.TORCH_FORMS[operator])(*arguments)) == expected


def test_a_kernel_runs_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on: list[Any] = []

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        on.append(which)
        yield
        on.append(None)

    monkeypatch.setattr(torch.cuda, "device", device)
    run = operators._on_gpu(lambda _: on[-1], lambda _: "torch form")
    assert run(torch.ones(2)) == torch.device("cpu") and on[-1] is None
    assert run(torch.ones(0)) == run(torch.ones(2, dtype=torch.float64)) == "torch form"


def test_a_kernel_that_does_not_fit_a_gpu_leaves_the_work_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    tried: list[torch.dtype] = []

    def kernel(x: Tensor) -> str:
        tried.append(x.dtype)
        if x.dtype == torch.float32:
            raise OutOfResources(300_000, 100_000, "shared memory")
        if x.dtype == torch.float16:
            raise ValueError("something else")
        return "kernel"

    run = operators._on_gpu(kernel, lambda _: "torch form")
    assert [run(torch.ones(2)) for _ in range(3)] == ["torch form"] * 3 and tried == [torch.float32]
    assert run(torch.ones(2, dtype=torch.bfloat16)) == "kernel" and len(caplog.records) == 1
    with pytest.raises(ValueError, match="something else"):
        run(torch.ones(2, dtype=torch.float16))
