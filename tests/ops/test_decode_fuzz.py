"""Compiled kernels under the sanitizers of addresses, undefined behaviour and threads, on random shapes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from glm5.ops import native
from glm5.ops.native.prebuilt import SLOW_PAIRS_FLAG

FLAGS = "-std=c++17 -O1 -march=native -pthread -fopenmp -fno-math-errno".split()
ADDRESSES = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
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
    run(build(program, [*ADDRESSES, *flags], tmp_path), 500)


@pytest.mark.slow
@pytest.mark.skipif(not native.available() or shutil.which("setarch") is None, reason="no compiler or no setarch here")
def test_the_threads_of_decoding_do_not_race(tmp_path: Path) -> None:
    """Addresses are not drawn at random, because the sanitizer of GCC 12 needs some of them; it does not know the locks
    of OpenMP."""
    quiet = ["env", "OMP_NUM_THREADS=1", "setarch", "--addr-no-randomize"]
    run([*quiet, *build("decode_fuzz", ["-g", "-fsanitize=thread"], tmp_path)], 150)


def build(program: str, flags: Sequence[str], folder: Path) -> list[str]:
    built, source = folder / program, Path(__file__).with_name(f"{program}.cpp")
    command = ["g++", *FLAGS, *flags, f"-I{native.SOURCE.parent}", str(source), "-o", str(built)]
    subprocess.run(command, check=True, timeout=600)
    return [str(built)]


def run(command: Sequence[str], rounds: int) -> None:
    done = subprocess.run([*command, str(rounds)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and done.stdout.strip() == "well", done.stdout + done.stderr[-2000:]
