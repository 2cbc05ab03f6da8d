"""Commands as several ranks on this machine: environment, exit codes, signals, and who says what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5.launch import processes
from glm5.launch.processes import run_ranks

ROOT = Path(__file__).parents[2]
BEGIN = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
"""


@pytest.fixture
def ranks(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs some lines as ranks: exit code, stdout and stderr."""

    def run(code: str, count: int = 2) -> tuple[int, str, str]:
        found = run_ranks(count, ["an argument"], (sys.executable, "-c", BEGIN + code))
        return found, *capfd.readouterr()

    return run


def test_ranks_find_each_other_and_share_the_cores(
    ranks: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    code, out, err = ranks(
        f"print(os.environ['LOCAL_RANK'], sys.argv[1:], *(os.environ[n] for n in {names}), flush=True)", 3
    )
    assert code == 0 and not err
    rows = sorted(line.split(" ['an argument'] ") for line in out.splitlines())
    assert [row[0] for row in rows] == ["0", "1", "2"] and len({row[1] for row in rows}) == 1
    world, local, address, port, threads = rows[0][1].split()
    assert (world, local, address) == ("3", "3", "127.0.0.1") and int(port) > 1023
    assert int(threads) == max(1, len(os.sched_getaffinity(0)) // 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert ranks("print(os.environ['OMP_NUM_THREADS'])", 1) == (0, "7\n", "")


def test_an_error_is_told_once(ranks: Callable[..., tuple[int, str, str]]) -> None:
    assert ranks("sys.exit(f'Error: all fail, {rank} too')") == (1, "", "Error: all fail, 0 too\n")
    code, _, err = ranks("if rank: sys.exit('Error: alone')\nelse: os.kill(os.getpid(), signal.SIGKILL)")
    assert code == -9 and err == "Rank 1 of 2:\nError: alone\n"  # rank 0 could not say anything
    code, _, err = ranks("if rank: 1 / 0\nelse: sys.exit('Error: rank 1 is gone')")
    assert code == 1 and err.startswith("Error: rank 1 is gone\nRank 1 of 2:\nTraceback") and "ZeroDivision" in err
    code, _, err = ranks("sys.exit(3 * rank)")
    assert code == 3 and not err


def test_a_rank_that_does_not_end_is_killed(
    ranks: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    began = time.monotonic()
    assert ranks("time.sleep(60) if rank else sys.exit(4)")[0] == 4
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_signals_reach_all_ranks(sent: str, tmp_path: Path) -> None:
    code = (
        "import pathlib\n"
        f"def stop(number, frame): pathlib.Path({str(tmp_path)!r}, f'stopped-{{rank}}').touch(); sys.exit(5)\n"
        f"signal.signal(signal.{sent}, stop)\n"
        f"pathlib.Path({str(tmp_path)!r}, f'ready-{{rank}}').touch()\n"
        "time.sleep(60)"
    )
    program = (sys.executable, "-c", BEGIN + code)
    outer = f"import sys; from glm5.launch.processes import run_ranks; sys.exit(run_ranks(2, [], {program!r}))"
    parent = subprocess.Popen([sys.executable, "-c", outer], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < 2:
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.02)
        parent.send_signal(signal.Signals[sent])
        assert parent.wait(60) == 5
    finally:
        parent.kill()
    assert sorted(path.name for path in tmp_path.glob("stopped-*")) == ["stopped-0", "stopped-1"]


def test_a_command_says_what_is_wrong_once() -> None:
    command = (sys.executable, "-m", "glm5", "pipeline", "missing.toml", "--processes", "2")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1 and done.stderr.count("missing.toml does not exist") == 1 and not done.stdout
