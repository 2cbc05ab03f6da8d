"""`glm5 logs`: what several ranks logged, as one."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from glm5.cli import app
from glm5.obs.logs import get_logger, logged


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for rank in (0, 2, 1, 0):
        monkeypatch.setenv("RANK", str(rank))
        with logged(tmp_path / "log.txt", logging.CRITICAL):
            get_logger("x").info("begins %d", rank)
            get_logger("x").warning("slow %d\nin two lines \x1b[2J", rank)
        time.sleep(0.003)  # times of logs are in milliseconds
    return tmp_path


def shown(*arguments: object) -> list[str]:
    result = CliRunner().invoke(app, ["logs", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_all_ranks_in_the_order_of_time(run: Path) -> None:
    lines = shown(run)
    heads = [line.split(" ", 2)[2] for line in lines if not line.startswith("in two")]
    first = ["INFO glm5.x: begins 0", "WARNING glm5.x: slow 0"]
    expected = [*first, "WARNING glm5.x: slow 2", "WARNING glm5.x: slow 1", *first]
    assert [head.split("] ")[1] for head in heads] == expected
    assert [head.split("]")[0][-1] for head in heads] == list("002100")
    assert len(lines) == 10 and not any("\x1b" in line for line in lines)


def test_a_part_of_it(run: Path) -> None:
    assert next(line for line in shown(run, "--rank", 2) if "two" not in line).endswith("glm5.x: slow 2")
    assert len(shown(run, "--level", "warning")) == 8
    assert len(shown(run, "--level", "warning", "--last", 1)) == 2
    for arguments in ((run, "--rank", "7"), (run / "none",), (run, "--level", "loud"), (run, "--level", "notset")):
        assert CliRunner().invoke(app, ["logs", *map(str, arguments)]).exit_code != 0
