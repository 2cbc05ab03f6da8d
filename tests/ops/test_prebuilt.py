"""Kernels of a wheel: the best library that the processor can run, and only of the same source."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from glm5.ops import native
from glm5.ops.native import prebuilt

ROOT = Path(__file__).parents[2]
V3 = set("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave sse2".split())
V4 = V3 | set("avx512f avx512bw avx512cd avx512dq avx512vl".split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for level in prebuilt.LEVELS:
        prebuilt.library(level, tmp_path).write_bytes(b"not a library")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (V4 | {"avx512_bf16", "avx512_vnni", "AuthenticAMD", "avx512_fp16"}, "x86-64-v4-bf16"),
        (V4 | {"avx512_bf16", "avx512_vnni", "GenuineIntel"}, "x86-64-v4-bf16"),
        (V4 | {"avx512_bf16", "avx512_vnni", "GenuineIntel", "avx512_fp16"}, "x86-64-v4-bf16-slow-pairs"),
        (V4, "x86-64-v4"),
        (V3 | {"avx512f"}, "x86-64-v3"),
        (V3, "x86-64-v3"),
        (V3 - {"fma"}, None),
        ((), None),
    ],
)
def test_the_best_level_that_the_processor_has(folder: Path, flags: set[str], level: str | None) -> None:
    assert prebuilt.find(folder, flags) == (None if level is None else prebuilt.library(level, folder))


def test_a_missing_level_is_passed_over_and_so_is_another_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuilt.library("x86-64-v4", folder).unlink()
    assert prebuilt.find(folder, V4) == prebuilt.library("x86-64-v3", folder)
    monkeypatch.setattr(prebuilt, "sources", lambda: ["int changed;"])
    assert prebuilt.find(folder, V4) is None
    assert prebuilt.find(folder / "none", V4) is None


def test_a_library_that_does_not_load_is_not_the_end(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The compiler comes next."""
    made = ctypes.CDLL(None)
    monkeypatch.setattr(prebuilt, "find", lambda: prebuilt.library("x86-64-v3", folder))
    monkeypatch.setattr(native, "_compiled", lambda: made)
    monkeypatch.setattr(native, "Kernels", lambda library, suffix: (library, suffix))
    monkeypatch.setenv("GLM5_NATIVE", "1")
    assert [library for library, _ in native._load().values()] == [made, made]  # type: ignore[misc]


CHILD = """
import torch
import glm5
from glm5.ops import native
from glm5.ops.elementwise import rms_norm
assert glm5.__file__.startswith({target!r}), glm5.__file__
assert native.available()
loaded = {{line.split()[-1] for line in open("/proc/self/maps") if "/kernels-" in line}}
assert len(loaded) == 1 and loaded.pop().startswith({target!r}), loaded
x, weight = torch.randn(3, 64), torch.rand(64)
found, wanted = rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (64,), weight, 1e-5)
torch.testing.assert_close(found, wanted)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None or not prebuilt.LEVELS["x86-64-v3"][1] <= prebuilt.processor_flags(),
    reason="needs GCC and an x86-64-v3 processor",
)
def test_a_wheel_in_a_fresh_folder_needs_no_compiler(tmp_path: Path) -> None:
    dist, target = tmp_path / "dist", tmp_path / "target"
    before = set((ROOT / "glm5/ops/native").iterdir())
    build = [sys.executable, str(ROOT / ".ci/wheel.py"), "--out", str(dist), "--level", "x86-64-v3"]
    subprocess.run(build, check=True, timeout=600, capture_output=True)
    (wheel,) = dist.glob("*.whl")
    assert wheel.name.endswith("py3-none-linux_x86_64.whl")
    assert set((ROOT / "glm5/ops/native").iterdir()) == before  # nothing is left in the source tree
    install = "-m pip install -q --no-deps --no-index --disable-pip-version-check --target".split()
    subprocess.run([sys.executable, *install, str(target), str(wheel)], check=True, timeout=300)
    environment = {
        "PATH": str(tmp_path / "no-compiler"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(target),
        "HOME": os.environ.get("HOME", str(tmp_path)),
    }
    command = [sys.executable, "-c", CHILD.format(target=str(target))]
    subprocess.run(command, check=True, timeout=300, env=environment, cwd=tmp_path)
    assert not (tmp_path / "cache").exists()  # nothing was compiled
