"""All others name a rank that ends within seconds, whatever they wait for, and the job goes on from its state."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from glm5.parallel.lifeline import Lifeline, _listen

RANK = """
import json, pathlib, sys, time
from glm5.parallel import lifeline
folder, rank, how = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
lifeline.GRACE_SECONDS.update(dict.fromkeys(lifeline.GRACE_SECONDS, 0.2))
def share(value):
    path = folder / "shared"
    if value is not None:
        path.with_suffix(".new").write_text(json.dumps(value)); path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return json.loads(path.read_text())
line = lifeline.Lifeline(rank, 4, "127.0.0.1", share)
(folder / f"ready-{rank}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
if how == "fails":
    line.close(ValueError("boom"))
elif how == "cut":
    line.report_cut()
    print(line.explain())
    line.close(RuntimeError("gloo"), cut=True)
elif how == "interrupted":
    line.close(KeyboardInterrupt())
elif how == "leaves":
    line.close()
else:
    time.sleep(60)
"""


class Four:
    """Four processes with nothing but their lifelines; `how` says what each does as soon as all are there."""

    def __init__(self, folder: Path, *how: str) -> None:
        self.folder = folder
        command = [sys.executable, "-c", RANK, str(folder)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self.ranks = [
            subprocess.Popen(
                [*command, str(r), what], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
            )
            for r, what in enumerate(how)
        ]
        deadline = time.monotonic() + 60
        while len(list(folder.glob("ready-*"))) < 4:
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in self.ranks)
            time.sleep(0.01)
        (folder / "go").touch()

    def kill(self, rank: int) -> None:
        self.ranks[rank].send_signal(signal.SIGKILL)

    def said(self, rank: int) -> tuple[int, str]:
        out, err = self.ranks[rank].communicate(timeout=15)
        return self.ranks[rank].returncode, out + err

    def __enter__(self) -> Four:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_all_others(tmp_path: Path, victim: int) -> None:
    with Four(tmp_path, *["waits"] * 4) as four:
        four.kill(victim)
        for rank in {0, 1, 2, 3} - {victim}:
            code, said = four.said(rank)
            assert code == 1 and f"Rank {victim} (" in said and f"process {four.ranks[victim].pid}" in said, said
            assert said.count("Error:") == 1 and "killed, out of memory" in said


def test_a_rank_that_fails_says_why_and_one_that_leaves_is_not_missed(tmp_path: Path) -> None:
    with Four(tmp_path, "waits", "leaves", "waits", "waits") as four:
        assert four.said(1) == (0, "")
        time.sleep(0.5)
        assert four.ranks[0].poll() is None
        four.kill(3)
        assert "Rank 3 (" in four.said(0)[1] and "Rank 3 (" in four.said(2)[1]
    for how, why in (("fails", "ValueError: boom"), ("interrupted", "it was interrupted.")):
        (folder := tmp_path / how).mkdir()
        with Four(folder, "waits", how, "waits", "leaves") as four:
            for rank in (0, 2):
                code, said = four.said(rank)
                assert code == 1 and f"has ended: {why}" in said and "Rank 1 (" in said


def test_a_dead_rank_explains_what_the_others_notice(tmp_path: Path) -> None:
    """Ranks whose collectives fail are no reason of their own, if one of them is known to be dead."""
    with Four(tmp_path, "cut", "cut", "waits", "cut") as four:
        four.kill(2)
        for rank in (0, 1, 3):
            code, said = four.said(rank)
            assert code == 0 and "Rank 2 (" in said, (rank, said)


def test_strangers_at_the_port_change_nothing() -> None:
    shared: queue.Queue[Any] = queue.Queue()
    lines: list[Lifeline] = []
    starter = threading.Thread(target=lambda: lines.append(Lifeline(0, 3, "127.0.0.1", shared.put)))
    starter.start()
    port, token, who = shared.get(timeout=10)
    for text in (b"\n", b"GET / HTTP/1.1\r\n\r\n", b'{"token": "x", "rank": 1}\n', b"[" * 60_000 + b"\n", b"[]\n"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(text)
    for rank in (0, 3, 7, True, "1"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(json.dumps({"token": token, "rank": rank, "who": "me"}).encode() + b"\n")
    others = [Lifeline(rank, 3, "127.0.0.1", lambda value: (port, token, who)) for rank in (1, 2)]
    starter.join(10)
    with pytest.raises(OSError):  # all are there: nobody else is let in
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert lines[0].lost is None and sorted(lines[0]._peers) == [1, 2]
    for line in (*others, *lines):
        line.close()
    assert lines[0].lost is None and others[0].lost is None


def test_a_name_that_means_this_machine_only_at_home_is_reached_from_outside() -> None:
    """Debian gives a machine's own name the address 127.0.1.1; the others know another one."""
    with _listen("a-name-of-this-machine") as server, socket.create_connection(("127.0.0.2", server.getsockname()[1])):
        pass


@pytest.mark.long
def test_a_rank_that_never_joins_is_reported(job: Any, tmp_path: Path) -> None:
    """Nobody knows it yet, so the others can only say that one is missing."""
    ranks = job.start(3, [{"kind": "run", "start": "", "timeout": 2}], missing=1)
    assert [rank.wait(30) for rank in ranks] == [1, 1]
    for rank in ranks:
        assert "LostRankError: Not all 3 ranks of the job joined within 2 s" in rank.err, rank.err


def _interrupted(job: Any, start: str, folder: Path, seed: int) -> None:
    """Kill one rank of three at a random moment; the others name it within ten seconds, and the same job, started
    again, ends with the bytes of one that nobody disturbed."""
    draw = random.Random(seed)
    task = {"kind": "run", "start": start, "ep": 1, "out": str(folder / "out")}
    seen = folder / draw.choice(["out", "out/state/step-00000002", "out/state/step-00000004"])
    ranks = job.start(3, [dict(task)])
    try:
        while not seen.exists() and ranks[0].process.poll() is None:
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.3))
        victim = draw.randrange(3)
        ranks[victim].process.kill()
        killed = time.monotonic()
        codes = {r: rank.wait(60) for r, rank in enumerate(ranks) if r != victim}
        took = time.monotonic() - killed
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes.values()):
        assert took < 10, took
        named = [r for r in codes if f"Rank {victim} (" in ranks[r].err]
        assert named == sorted(codes), [ranks[r].err for r in codes]
    assert job(3, dict(task))[0]["export"] == job(3, task | {"out": str(folder / "calm")})[0]["export"]


@pytest.mark.long
def test_a_job_whose_rank_is_killed(job: Any, start: str, tmp_path: Path) -> None:
    _interrupted(job, start, tmp_path, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 20))
def test_a_job_whose_rank_is_killed_at_any_moment(job: Any, start: str, tmp_path: Path, seed: int) -> None:
    _interrupted(job, start, tmp_path, seed)
