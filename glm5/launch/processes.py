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
from glm5.errors import UsageError

OURS = "GLM5_RANKS"
"""Environment variable of the ranks that `run_ranks` started."""
GRACE_SECONDS = 10.0, 90.0
"""If a rank fails, the others end by themselves (see `glm5.parallel.lifeline`), unless they wait to join the job: after
the first time all get SIGTERM, after the second they are killed."""
POLL_SECONDS = 0.1
Rank = subprocess.Popen[bytes]


def is_rank() -> bool:
    """Whether this process is one that `run_ranks` started; it then ends with its parent. Raises UsageError in one of
    torchrun's."""
    if OURS in os.environ:
        process.end_with_parent()
        return True
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        raise UsageError(
            "--processes starts the ranks of a job, and this process is one already (RANK or WORLD_SIZE is set, as by "
            "torchrun); leave out --processes, or unset the variables."
        )
    return False


def run_ranks(count: int, arguments: Sequence[str], program: Sequence[str] = (sys.executable, "-m", "glm5")) -> int:
    """Run `glm5 ARGUMENTS` as `count` ranks, each with its part of the cores, and return the exit code: that of rank 0,
    unless another one failed alone. Ctrl-C and SIGTERM go to all of them; KeyboardInterrupt is raised if that ended
    rank 0 before it could say so. Rank 0 says what there is to say; what another one that failed wrote to stderr
    follows only if rank 0 said nothing, if that rank was killed, or if it is a traceback."""
    own = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), OURS: str(count)}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "PYTHONPATH": process.python_path()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {"OMP_NUM_THREADS": str(max(1, cores // count))}
    ranks: list[Rank] = []
    with contextlib.ExitStack() as held:
        said = [held.enter_context(tempfile.TemporaryFile()) for _ in range(1, count)]
        held.callback(_kill, ranks)
        sent = held.enter_context(_forwarded(ranks))
        for rank in range(count):
            environment = threads | dict(os.environ) | own | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            stderr = said[rank - 1] if rank else None
            ranks.append(
                subprocess.Popen([*program, *arguments], env=environment, stdin=subprocess.PIPE, stderr=stderr)
            )
            for number in sent:  # before this one was there
                ranks[-1].send_signal(number)
        codes = _ended(ranks)
        if sent and -codes[0] in sent:
            raise KeyboardInterrupt
        if any(codes) and not sent:
            _tell(codes, said)
    code = codes[0] or next((code for code in codes if code), 0)
    return 128 - code if code < 0 else code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _forwarded(ranks: Sequence[Rank]) -> Iterator[Sequence[int]]:
    """Send the ranks the signals that end this process; gives those that came. The terminal's Ctrl-C then reaches them
    twice, which counts as once (`glm5.train.stop`)."""
    sent: list[int] = []

    def forward(number: int, frame: object) -> None:
        sent.append(number)
        for rank in ranks:
            rank.send_signal(number)  # does nothing if it has ended

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield sent
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended(ranks: Sequence[Rank]) -> list[int]:
    """The exit codes of all ranks, once they have ended (see `GRACE_SECONDS`)."""
    failed, asked = None, False
    while any(rank.poll() is None for rank in ranks):
        now = time.monotonic()
        if failed is None and any(rank.poll() for rank in ranks):
            failed = now
        if failed is not None and not asked and now > failed + GRACE_SECONDS[0]:
            asked = True
            for rank in ranks:
                rank.terminate()
        if failed is not None and now > failed + GRACE_SECONDS[1]:
            _kill(ranks)
        time.sleep(POLL_SECONDS)
    return [rank.returncode for rank in ranks]


def _kill(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
            rank.wait()
        if rank.stdin is not None:
            rank.stdin.close()


def _tell(codes: Sequence[int], said: Sequence[IO[bytes]]) -> None:
    silent = codes[0] <= 0  # it was killed, or saw nothing wrong
    for rank, file in enumerate(said, start=1):
        file.seek(0)
        text = file.read().decode("utf-8", "replace").strip()
        if codes[rank] and text and (silent or codes[rank] < 0 or "Traceback" in text):
            print(f"Rank {rank} of {len(codes)}:\n{text}", file=sys.stderr)
