"""Compiled CPU kernels that come with a wheel, so that a machine without a compiler has them too.

`.ci/wheel.py` compiles one library per level of x86-64 processors into the folder `prebuilt` beside this file. A name
contains a digest of the source: a library that belongs to another source is never loaded. A source tree has none.
"""

from __future__ import annotations

import functools
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
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
SLOW_PAIRS = frozenset({"GenuineIntel", "avx512_fp16"})
"""What Intel's processors from Sapphire Rapids on list: they multiply floats four times as often as pairs of bf16."""
SLOW_PAIRS_FLAG = "-DSLOW_PAIRS"
LEVELS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "x86-64-v4-bf16-slow-pairs": ((*_BF16_FLAGS, SLOW_PAIRS_FLAG), _V4_BF16 | SLOW_PAIRS),
    "x86-64-v4-bf16": (_BF16_FLAGS, _V4_BF16),
    "x86-64-v4": (("-march=x86-64-v4",), _V4),
    "x86-64-v3": (("-march=x86-64-v3",), _V3),
}
"""Name -> flags of the compiler, and what `processor_flags` must have. The best level comes first."""


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


@functools.cache
def processor_flags() -> frozenset[str]:
    """Instruction sets and maker of this machine by their names in /proc/cpuinfo; empty on other systems and
    processors."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    told = {name.strip(): value.split() for name, _, value in (line.partition(":") for line in lines)}
    return frozenset([*told.get("flags", ()), *told.get("vendor_id", ())])
