"""Compiled decoding under the address and undefined-behaviour sanitizers, on random shapes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from glm5.ops import native

FLAGS = (
    "-std=c++17 -O1 -march=native -pthread -fopenmp -fno-math-errno -fsanitize=address,undefined "
    "-fno-sanitize-recover=undefined"
).split()


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason="no compiler here")
def test_random_shapes_under_sanitizers(tmp_path: Path) -> None:
    """No access outside of a buffer, no leak at exit, no undefined operation; drafts verified against their own logits
    are accepted."""
    program, source = tmp_path / "fuzz", Path(__file__).with_name("decode_fuzz.cpp")
    command = ["g++", *FLAGS, f"-I{native.SOURCE.parent}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    done = subprocess.run([str(program), "400"], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "well", done.stdout + done.stderr[-2000:]
