"""Whether threads wait for cores, and what is done about it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from glm5 import shared_cores
from glm5.shared_cores import BUSY, CALM, Waiting, waited


def test_busy_at_the_first_wait_and_idle_after_a_while() -> None:
    state = Waiting()
    assert [state.note(share) for share in (0.0, BUSY, BUSY + 0.01)] == [False, False, True]
    assert all(state.note(0.0) for _ in range(CALM - 1)) and state.note(1.0)
    assert all(state.note(0.0) for _ in range(CALM - 1)) and not state.note(0.0) and not state.note(0.0)


@pytest.mark.skipif(waited() is None, reason="the system does not tell how long threads wait")
def test_waiting_for_a_core_is_counted() -> None:
    """Of two processes on one core."""
    code = (
        "import os, subprocess, sys\n"
        "from glm5.shared_cores import waited\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "before, other = waited(), subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "while waited() - before < 20_000_000: sum(range(100_000))\n"
        "other.kill()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True, timeout=60)


def test_one_more_team_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.0, 0.5, *[0.0] * CALM, None])
    counted, seen = 0, []
    clock = iter(range(100))

    def count() -> int | None:
        nonlocal counted
        share = next(shares)
        counted += 0 if share is None else int(1e9 * share)
        seen.append([t.name for t in threading.enumerate() if t.name == "glm5-more-threads"])
        return None if share is None else counted

    monkeypatch.setattr(shared_cores, "waited", count)
    monkeypatch.setattr(shared_cores.time, "sleep", lambda _: None)
    monkeypatch.setattr(shared_cores.time, "monotonic_ns", lambda: next(clock) * 1_000_000_000)
    monkeypatch.setattr(shared_cores, "_hold", lambda leave: leave.wait(30))
    import torch  # noqa: F401  # without it nothing is held

    shared_cores._watch()
    assert seen[1] == [] and seen[2:-1] == [["glm5-more-threads"]] * CALM and len(seen) == CALM + 3
    for thread in threading.enumerate():
        if thread.name == "glm5-more-threads":
            thread.join(30)
            assert not thread.is_alive()


def test_one_watch_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(shared_cores, "_watching", threading.Lock())
    monkeypatch.setattr(shared_cores, "waited", lambda: 0)
    monkeypatch.setattr(shared_cores, "_watch", lambda: begun.append("one"))
    monkeypatch.setattr(shared_cores.sys, "platform", "linux")
    for _ in range(3):
        shared_cores.watch_cores()
    for thread in threading.enumerate():
        if thread.name == "glm5-cores":
            thread.join(30)
    assert begun == ["one"]


def test_a_system_that_does_not_tell_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cores.os, "listdir", lambda _: (_ for _ in ()).throw(PermissionError))
    assert waited() is None
    before = threading.active_count()
    shared_cores.watch_cores()
    assert threading.active_count() == before
