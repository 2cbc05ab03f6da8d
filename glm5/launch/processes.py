"""A command again as several processes of this machine, which then are the ranks of one job; what torchrun does, with
one error message instead of many."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

from glm5 import process

GRACE_SECONDS = 90.0
"""The others end by themselves so long after one has failed (see `glm5.parallel.lifeline`); then they are killed."""
POLL_SECONDS = 0.1


def run_ranks(count: int, arguments: Sequence[str], program: Sequence[str] = (sys.executable, "-m", "glm5")) -> int:
    """Run `glm5 ARGUMENTS` as `count` ranks, each with its part of the cores, and return the exit code: that of rank 0,
    unless another one failed alone. Ctrl-C and SIGTERM go to all of them. Rank 0 says what there is to say; what the
    others wrote to stderr follows only if rank 0 said nothing, or if it is a traceback."""
    own = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "PYTHONPATH": process.python_path()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {"OMP_NUM_THREADS": str(max(1, cores // count))}
    with contextlib.ExitStack() as held:
        said = [held.enter_context(tempfile.TemporaryFile()) for _ in range(1, count)]
        ranks: list[subprocess.Popen[bytes]] = []
        held.enter_context(_forwarded(ranks))
        held.callback(_kill, ranks)
        for rank in range(count):
            environment = threads | dict(os.environ) | own | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(
                subprocess.Popen([*program, *arguments], env=environment, stderr=said[rank - 1] if rank else None)
            )
        codes = _ended(ranks)
        if any(codes):
            _tell(codes, said)
        return codes[0] or next((code for code in codes if code), 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _forwarded(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Send the ranks the signals that end this process. The terminal's Ctrl-C then reaches them twice, which counts as
    once (`glm5.train.stop`)."""

    def forward(number: int, frame: object) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """The exit codes of all ranks; those that outlive a failed one for too long are killed."""
    deadline = None
    while any(rank.poll() is None for rank in ranks):
        if deadline is None and any(rank.poll() for rank in ranks):
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            _kill(ranks)
        time.sleep(POLL_SECONDS)
    return [rank.returncode for rank in ranks]


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
            rank.wait()


def _tell(codes: Sequence[int], said: Sequence[IO[bytes]]) -> None:
    silent = codes[0] <= 0  # it was killed, or saw nothing wrong
    for rank, file in enumerate(said, start=1):
        file.seek(0)
        text = file.read().decode("utf-8", "replace").strip()
        if codes[rank] and text and (silent or "Traceback" in text):
            print(f"Rank {rank} of {len(codes)}:\n{text}", file=sys.stderr)
