"""Environments of outside packages: made once for each set of requirements, in the user's cache. pip takes what it
needs from where it usually does."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def newer_python(least: tuple[int, int]) -> str:
    """A Python of at least this version: ours, one on the PATH or one of pyenv. Skips the test if there is none."""
    if sys.version_info >= least:
        return sys.executable
    versions = range(least[1], least[1] + 4)
    found = [shutil.which(f"python{least[0]}.{minor}") for minor in versions]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found += [str(path) for minor in versions for path in sorted(pyenv.glob(f"{least[0]}.{minor}.*/bin/python3"))]
    for python in filter(None, found):  # a shim of pyenv may stand for none
        if subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, timeout=60).returncode == 0:
            return python
    pytest.skip(f"needs Python {least[0]}.{least[1]} or newer, which is neither on the PATH nor in {pyenv}")


def interpreter(name: str, *more: str, ours: bool = False, python: str = sys.executable) -> Path:
    """The interpreter of an environment with the packages of `requirements-NAME.txt` and of `more`, made with `python`.
    With `ours`, it also finds the packages of our own environment, after its own. Skips the test if pip cannot install
    them."""
    requirements = HERE / f"requirements-{name}.txt"
    key = " ".join((requirements.read_text(encoding="utf-8"), sys.prefix, sys.version, *more))
    key += "" if python == sys.executable else python
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glm5"
    folder = cache / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            _make(folder, python, ours, ["-r", str(requirements), *more])
    return folder / "bin" / "python"


def unpacked(python: Path, name: str, version: str) -> Path:
    """The files of a package without its dependencies, unpacked once: vLLM's from its source, for its wheel has the
    size of CUDA. Skips the test if pip cannot get them."""
    folder = python.parents[1] / f"{name}-{version}"
    with (folder.parent.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as place:
                _unpack(str(python), name, version, Path(place), folder)
    return folder


def _unpack(python: str, name: str, version: str, place: Path, folder: Path) -> None:
    options = "--disable-pip-version-check --no-input --no-deps -q".split()
    options += ["--no-binary", name, "--no-build-isolation"] if name == "vllm" else ["--only-binary", name]
    env = os.environ | {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version, "PYTHONPATH": ""}
    command = [python, "-m", "pip", "download", *options, f"{name}=={version}", "-d", str(place / "archive")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    if done.returncode != 0:
        pytest.skip(f"pip cannot get {name}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    archive = next((place / "archive").iterdir())
    shutil.unpack_archive(
        archive, place / "files", **({"format": "zip"} if archive.suffix == ".whl" else {"filter": "data"})
    )
    roots = [path for path in (place / "files", *(place / "files").iterdir()) if (path / name).is_dir()]
    roots[0].rename(folder)


def _make(folder: Path, base: str, ours: bool, packages: list[str]) -> None:
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True, timeout=120)
    python = str(folder / "bin" / "python")
    if ours:
        where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        own = subprocess.run(where, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
        Path(own, "ours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    options = "--disable-pip-version-check --no-input --prefer-binary --no-compile -q".split()
    done = subprocess.run(
        [python, "-m", "pip", "install", *options, *packages], capture_output=True, text=True, timeout=900
    )
    if done.returncode != 0:
        pytest.skip(f"pip cannot install {packages[1]}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    (folder / "ready").touch()
