"""The ranks of a router: the role and the present worker of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.serve.router.workers import Worker

ANY, PREFILL, DECODE = "any", "prefill", "decode"
"""Roles. With prefill workers, requests go to those that decode, and these fetch their prompts from the others."""


@dataclass
class Place:
    """A rank, its role and its current worker."""

    rank: int
    role: str = ANY
    state: str = "starting"  # starting, up, draining, drained, down
    worker: Worker | None = None
    replaced: int = 0
    wanted: bool = True  # false while an administrator has drained the rank

    def shown(self) -> dict[str, Any]:
        worker = self.worker
        return {
            "id": self.rank,
            "role": self.role,
            "state": self.state,
            "pid": worker.process.pid if worker else None,
            "in_flight": worker.in_flight if worker else 0,
            "missed_heartbeats": worker.missed if worker else 0,
            "replaced": self.replaced,
            **(worker.shown if worker else {}),
        }


Stamp = tuple[tuple[str, int, int, int], ...]


def weights_stamp(folder: str) -> Stamp:
    """Names, sizes, times and inodes of a folder's weight files; empty for one that cannot be read."""
    try:
        files = sorted(Path(folder or "/nowhere").glob("*.safetensors*"))
        return tuple((f.name, (s := f.stat()).st_size, s.st_mtime_ns, s.st_ino) for f in files)
    except (OSError, ValueError):
        return ()
