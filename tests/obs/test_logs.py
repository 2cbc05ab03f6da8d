"""Logging by rank."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5.obs.logs import get_logger, logged, rank, setup_logging


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = logging.getLogger("glm5")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_rank_zero_speaks_on_stderr_and_into_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    setup_logging(file=tmp_path / "run" / "log.txt")
    get_logger("train.loop").info("step %d", 3)
    get_logger("train.loop").debug("hidden")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "step 3\n")
    assert (tmp_path / "run" / "log.txt").read_text().endswith("INFO glm5.train.loop: step 3\n")


def test_other_ranks_only_warn_and_say_who_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    setup_logging(file=tmp_path / "log.txt")
    get_logger("x").info("quiet")
    get_logger("glm5.x").warning("loud")
    assert capsys.readouterr().err == "[rank 3] loud\n"
    assert not (tmp_path / "log.txt").exists()
    monkeypatch.setenv("RANK", "many")
    assert rank() == 0


def test_a_run_logs_into_its_file_and_leaves_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    logger = get_logger()
    before = logger.handlers[:], logger.level, logger.propagate
    with pytest.raises(KeyboardInterrupt), logged(tmp_path / "log.txt"):
        get_logger("x").info("detail")
        get_logger("x").warning("trouble")
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "[log] trouble\n"
    assert [line.split(": ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["detail", "trouble"]
    assert (logger.handlers, logger.level, logger.propagate) == before
    with logged(tmp_path / "log.txt", logging.INFO):
        get_logger("x").info("said\nmore")
    assert capsys.readouterr().err == "[log] said\n[log] more\n"


def test_a_second_setup_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    setup_logging()
    get_logger().warning("once")
    assert capsys.readouterr().err == "once\n"


@pytest.mark.parametrize("close", ["sys.stderr.close()", "os.close(2)", "sys.stderr = None"])
def test_a_closed_stderr_does_not_stop_a_run(close: str) -> None:
    code = f"import os, sys; from glm5.obs.logs import *; setup_logging(); {close}; get_logger('x').warning('a' * 9999)"
    done = subprocess.run([sys.executable, "-c", f"{code}; print('went on')"], capture_output=True, timeout=60)
    assert done.stdout == b"went on\n"
