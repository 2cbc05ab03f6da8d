"""Compiled CPU kernels that come with a wheel, so that a machine without a compiler has them too.

`.ci/wheel.py` compiles one library per level of x86-64 processors into the folder `prebuilt` beside this file. A name
contains a digest of the source: a library that belongs to another source is never loaded. A source tree has none.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Collection
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
FOLDER = Path(__file__).with_name("prebuilt")
FLAGS = "-std=c++17 -O3 -fopenmp -shared -fPIC -fno-math-errno -fno-trapping-math -ffp-contract=fast".split()
"""Flags of the compiler, without the processor."""

_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
LEVELS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "x86-64-v4-bf16": (("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"), _V4 | {"avx512_bf16", "avx512_vnni"}),
    "x86-64-v4": (("-march=x86-64-v4",), _V4),
    "x86-64-v3": (("-march=x86-64-v3",), _V3),
}
"""Name -> flags of the compiler, and what /proc/cpuinfo must list. The best level comes first."""


def sources() -> list[str]:
    """The text of all source files, in a fixed order."""
    return [file.read_text() for file in [*sorted(SOURCE.parent.glob("*.h")), SOURCE]]


def library(level: str, folder: Path = FOLDER) -> Path:
    """Path of the library for a level and the present source; it need not exist."""
    digest = hashlib.sha256("\n".join((*sources(), *FLAGS, *LEVELS[level][0])).encode()).hexdigest()
    return folder / f"kernels-{level}-{digest[:16]}.so"


def find(folder: Path = FOLDER, flags: Collection[str] | None = None) -> Path | None:
    """The best library in `folder` for a processor with these `flags` (None: this machine's), or None."""
    if not folder.is_dir():
        return None
    present = frozenset(processor_flags() if flags is None else flags)
    for level, (_, needed) in LEVELS.items():
        if needed <= present and (found := library(level, folder)).is_file():
            return found
    return None


def processor_flags() -> frozenset[str]:
    """Instruction sets of this machine by their names in /proc/cpuinfo; empty on other systems and processors."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())
