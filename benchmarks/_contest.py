"""Contestants in processes of their own, so that peak memory means something; the parent lets them take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

TUNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""The allocator setting that `glm5` gives its own process."""


class Process:
    """`script --child TOLD`, which calls `answer`. Upper-case keys of `told` become its environment."""

    def __init__(self, script: str, told: Mapping[str, str]) -> None:
        environment = os.environ | {k: v for k, v in told.items() if k.isupper()}
        command = [sys.executable, script, "--child", json.dumps(told)]
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, env=environment, text=True)
        self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a contestant died: {self.process.args}")
        return dict(json.loads(line))

    def run(self, job: str, length: int = 0) -> dict[str, float]:
        """Let it do a job: its answer holds `seconds` and `bytes`, the peak memory above what was there before."""
        assert self.process.stdin is not None
        print(job, length, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def answer(jobs: Mapping[str, Callable[[int], float | dict[str, float]]]) -> None:
    """Inside a process: run jobs named on stdin, each of which returns its seconds or several numbers."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job, length = line.split()
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = peak_bytes()
        found = jobs[job](int(length))
        numbers = found if isinstance(found, dict) else {"seconds": found}
        print(json.dumps({**numbers, "bytes": peak_bytes() - before, "resident": peak_bytes()}), flush=True)
