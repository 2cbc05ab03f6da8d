"""Environment of a run, shown in its report beside the numbers. Does not import torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path

PACKAGES = ("torch", "numpy", "tokenizers", "transformers")
FILE = "environment.json"


def describe() -> dict[str, str | int]:
    """Versions, the machine and the size of the job; no names of people, machines or folders."""
    facts: dict[str, str | int] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    facts["processor"] = _processor()
    facts["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    world = os.environ.get("WORLD_SIZE", "1")
    facts["processes"] = int(world) if world.isdecimal() else 1
    return facts


def write_environment(run: Path) -> None:
    """Write `environment.json` into a run folder."""
    run.mkdir(parents=True, exist_ok=True)
    fresh = run / f"{FILE}.tmp"
    fresh.write_text(json.dumps(describe(), indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, run / FILE)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
