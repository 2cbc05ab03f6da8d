"""Commands as several ranks on this machine: environment, exit codes, signals, and who says what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import UsageError
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
    assert code == 137 and err == "Rank 1 of 2:\nError: alone\n"  # rank 0 could not say anything
    code, _, err = ranks("if rank: 1 / 0\nelse: sys.exit('Error: rank 1 is gone')")
    assert code == 1 and err.startswith("Error: rank 1 is gone\nRank 1 of 2:\nTraceback") and "ZeroDivision" in err
    end = "if rank: print('no memory', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    code, _, err = ranks(end + "else: sys.exit('Error: rank 1 is gone')")
    assert code == 1 and err == "Error: rank 1 is gone\nRank 1 of 2:\nno memory\n"
    code, _, err = ranks("sys.exit(3 * rank)")
    assert code == 3 and not err


def test_a_rank_that_does_not_end_is_killed(
    ranks: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", (0.2, 0.4))
    began = time.monotonic()
    assert ranks("time.sleep(60) if rank else sys.exit(4)")[0] == 4
    monkeypatch.setattr(processes, "GRACE_SECONDS", (60.0, 0.3))  # it does not hear SIGTERM
    assert ranks("time.sleep(60) if rank else sys.exit(4)")[0] == 4
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("sent", "handled", "expected"),
    [("SIGINT", True, 5), ("SIGTERM", True, 5), ("SIGINT", False, -2), ("SIGTERM", False, -2), ("SIGKILL", True, -9)],
)
def test_signals_reach_all_ranks(sent: str, handled: bool, expected: int, tmp_path: Path) -> None:
    """Also one that comes before they have handlers. If the parent is killed they end too."""
    heard = f"signal.signal(signal.{sent}, stop)\n" if handled and sent != "SIGKILL" else ""
    code = (
        "import pathlib\n"
        "from glm5.process import end_with_parent\n"
        "def end(): pathlib.Path(FOLDER, f'stopped-{rank}').touch()\n"
        "def stop(number, frame): end(); sys.exit(5)\n"
        f"signal.signal(signal.SIGINT, signal.SIG_DFL)\n{heard}end_with_parent(end)\n"
        "pathlib.Path(FOLDER, f'ready-{rank}').touch()\n"
        "time.sleep(60)"
    ).replace("FOLDER", repr(str(tmp_path)))
    program = (sys.executable, "-c", BEGIN + code)
    outer = f"import sys; from glm5.launch.processes import run_ranks; sys.exit(run_ranks(2, [], {program!r}))"
    parent = subprocess.Popen([sys.executable, "-c", outer], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < 2:
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.02)
        parent.send_signal(signal.Signals[sent])
        assert parent.wait(60) == expected
        while handled and len(list(tmp_path.glob("stopped-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        parent.kill()


def test_a_signal_while_ranks_are_started_reaches_the_later_ones(
    ranks: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class First(subprocess.Popen[bytes]):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            if options["env"]["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(processes.subprocess, "Popen", First)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ranks("time.sleep(60)")
    assert time.monotonic() - began < 30


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not processes.is_rank()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="leave out --processes"):
        processes.is_rank()


@pytest.mark.long
def test_a_command_says_what_is_wrong_once() -> None:
    command = (sys.executable, "-m", "glm5", "pipeline", "recipes/laptop.toml", "--processes", "2", "--set")
    done = subprocess.run([*command, "parallel.ep=3"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1 and done.stderr.count("does not divide the 2 processes") == 1 and not done.stdout
