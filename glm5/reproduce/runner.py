"""Runs as processes: one per worker at a time, in the order of seeds, to complete whole seeds first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from glm5.process import python_path
from glm5.reproduce.plan import METRICS, Experiment
from glm5.reproduce.worker import read_run, run_folder, run_one
from glm5.train.stop import TerminationAsInterrupt

POLL_SECONDS = 0.1
REPORT_SECONDS = 60.0
GRACE_SECONDS = 10.0
LOG = "log.txt"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Key = tuple[str, int]
"""Variant and seed."""
Say = Callable[[str], None]


@dataclass
class Report:
    """How the runs ended. `failed`: the reason per run; `left`: not started in time, or waiting for a failed run."""

    done: list[Key] = field(default_factory=list)
    failed: dict[Key, str] = field(default_factory=dict)
    left: list[Key] = field(default_factory=list)


def title(key: Key) -> str:
    return f"{key[0]} seed {key[1]}"


def run_all(
    experiment: Experiment, folder: Path, seeds: Sequence[int], workers: int, say: Say, deadline: float | None = None
) -> Report:
    """Do the unfinished runs. `workers=0` does them in this process. None starts after `deadline` (`time.monotonic`).

    Ctrl-C and SIGTERM end the workers. The next call resumes from their saved state and never repeats finished runs.
    """
    keys = [(variant.name, seed) for seed in seeds for variant in experiment.variants]
    report = Report(done=[key for key in keys if read_run(folder, *key) is not None])
    waiting = [key for key in keys if key not in report.done]
    if report.done and waiting:
        say(f"{len(report.done)} of {len(keys)} runs are done already")
    running: dict[Key, subprocess.Popen[bytes]] = {}
    told = time.monotonic()
    with TerminationAsInterrupt() as signals, ExitStack() as stack:
        stack.callback(lambda: _stop(list(running.values()), signals, say))
        while running or waiting:
            in_time = deadline is None or time.monotonic() < deadline
            ready = [key for key in waiting if _after(experiment, key) in (None, *report.done)] if in_time else []
            if not ready and not running:
                break
            for key in ready[: max(1, workers) - len(running)]:
                waiting.remove(key)
                if workers:
                    running[key] = _start(folder, key)
                else:
                    run_one(folder, *key)
                    _finish(folder, key, 0, report, len(keys), say)
            for key, process in list(running.items()):
                if process.poll() is not None:
                    del running[key]
                    _finish(folder, key, process.returncode, report, len(keys), say)
            if running:
                time.sleep(POLL_SECONDS)
            if time.monotonic() - told > REPORT_SECONDS:
                told = time.monotonic()
                say("; ".join(f"{title(key)} at step {_step(folder, key)}" for key in running))
    report.left = waiting
    return report


def _after(experiment: Experiment, key: Key) -> Key | None:
    before = experiment.variant(key[0]).after
    return (before, key[1]) if before else None


def _start(folder: Path, key: Key) -> subprocess.Popen[bytes]:
    own = run_folder(folder, *key)
    own.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": python_path(), "TOKENIZERS_PARALLELISM": "false"}
    environment |= dict.fromkeys(THREADS, "1")
    command = [sys.executable, "-P", "-m", "glm5.reproduce.worker", str(folder), key[0], str(key[1])]
    with (own / LOG).open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def _finish(folder: Path, key: Key, code: int, report: Report, total: int, say: Say) -> None:
    found = read_run(folder, *key)
    if code == 0 and found is not None:
        report.done.append(key)
        say(f"{len(report.done)}/{total} {title(key)}: {found['seconds']['wall']:.0f} s")
        return
    report.failed[key] = _reason(run_folder(folder, *key) / LOG, code)
    say(f"{title(key)} failed: {report.failed[key]}")


def _reason(log: Path, code: int) -> str:
    """Why a worker ended: its signal, or the last line of its log."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].removeprefix("Error: ")[:300] if lines else f"exit code {code}"


def _step(folder: Path, key: Key) -> int:
    """How many steps a run has written."""
    path = run_folder(folder, *key) / METRICS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _stop(processes: list[subprocess.Popen[bytes]], signals: TerminationAsInterrupt, say: Say) -> None:
    signals.ignore()  # a second Ctrl-C must not cost what the runs are saving
    for process in processes:
        process.terminate()
    if processes:
        say(f"stopping: runs save their state first, which takes {GRACE_SECONDS:g} seconds at most")
    until = time.monotonic() + GRACE_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    for process in processes:
        process.kill()
        process.wait()
