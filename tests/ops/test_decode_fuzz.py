"""Compiled kernels under the address and undefined-behaviour sanitizers, on random shapes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from glm5.ops import native
from glm5.ops.native.prebuilt import SLOW_PAIRS_FLAG

FLAGS = (
    "-std=c++17 -O1 -march=native -pthread -fopenmp -fno-math-errno -fsanitize=address,undefined "
    "-fno-sanitize-recover=undefined"
).split()
V3 = ("-march=x86-64-v3",)


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason="no compiler here")
@pytest.mark.parametrize(
    ("program", "flags"),
    [("decode_fuzz", ()), ("decode_fuzz", (SLOW_PAIRS_FLAG,)), ("kernel_fuzz", ()), ("kernel_fuzz", V3)],
    ids=["decoding", "decoding, slow pairs", "kernels", "kernels, AVX2"],
)
def test_random_shapes_under_sanitizers(program: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """500 shapes of each family, fp32 and bf16, plain rows and pages, an int8 cache too: no access outside of a buffer,
    no leak at exit, no undefined operation. Drafts verified against their own logits are accepted. Keys that are
    selected do not depend on the other queries of a call, which decide whether int8 scores come first."""
    built, source = tmp_path / program, Path(__file__).with_name(f"{program}.cpp")
    command = ["g++", *FLAGS, *flags, f"-I{native.SOURCE.parent}", str(source), "-o", str(built)]
    subprocess.run(command, check=True, timeout=600)
    done = subprocess.run([str(built), "500"], capture_output=True, text=True, timeout=1200)
    assert done.stdout.strip() == "well", done.stdout + done.stderr[-2000:]
