"""A wheel with compiled CPU kernels: `make wheel`. Copies the package, compiles its kernels for every level of
`glm5/ops/native/prebuilt.py`, and packs the copy. The source tree is not changed.

    python .ci/wheel.py [--out dist] [--level x86-64-v3]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
FILES = ("pyproject.toml", "README.md", "LICENSE")
COMPILE_SECONDS = 900


def prebuilt_of(tree: Path) -> ModuleType:
    """`glm5.ops.native.prebuilt` of a source tree, without importing torch."""
    spec = importlib.util.spec_from_file_location("prebuilt", tree / "glm5/ops/native/prebuilt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_kernels(tree: Path, levels: list[str]) -> None:
    """Compile the kernels of `tree` into its folder `prebuilt`, one process per core."""
    prebuilt, compiler = prebuilt_of(tree), os.environ.get("CXX") or "g++"
    prebuilt.FOLDER.mkdir()

    def compile_level(level: str) -> None:
        made = prebuilt.library(level, prebuilt.FOLDER)
        command = [compiler, *prebuilt.FLAGS, *prebuilt.LEVELS[level][0], "-w", str(prebuilt.SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, timeout=COMPILE_SECONDS)
        print(f"wheel: {made.name}, {made.stat().st_size:,} bytes", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_level, levels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--level", action="append", choices=list(prebuilt_of(ROOT).LEVELS), help="default: all")
    options = parser.parse_args()
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        parser.exit(1, "wheel: the kernels need GCC (g++); name another compiler with CXX.\n")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in FILES:
            shutil.copy(ROOT / name, tree)
        shutil.copytree(ROOT / "glm5", tree / "glm5", ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
        compile_kernels(tree, options.level or list(prebuilt_of(ROOT).LEVELS))
        # The wheel has no module that Python imports as compiled code, so setuptools would call it "any".
        tag = "--config-settings=--build-option=--plat-name=linux_x86_64"
        pack = "-m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation --no-cache-dir".split()
        subprocess.run([sys.executable, *pack, tag, "-w", str(options.out.resolve()), str(tree)], check=True)
    print(f"wheel: {sorted(options.out.glob('glm5-*linux_x86_64.whl'))[-1]}")


if __name__ == "__main__":
    main()
