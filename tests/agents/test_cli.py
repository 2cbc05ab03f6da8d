"""`glm5 agent` from the command line: a killed session goes on, in place, questions, the terminal view, refusals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.console import Console
from typer.testing import CliRunner, Result

from glm5 import cli
from glm5.agents.session_log import read_log
from glm5.errors import UsageError
from glm5.process import python_path
from glm5.records import ToolCall
from glm5.terminal.agent_view import AgentView
from glm5.terminal.screen import Screen
from tests.agents.scripted_model import Say, ScriptedModel
from tests.agents.test_coding import FIX, repo, snapshot  # noqa: F401
from tests.rooms import needs_rooms

pytestmark = needs_rooms
TEST = ("--test", "python3 test_sums.py")


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.place, inside = pty.openpty()
        self.process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=env)
        os.close(inside)
        self.seen = ""

    def until(self, text: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.place], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, self.seen
            try:
                self.seen += os.read(self.place, 4096).decode()
            except OSError:  # it has ended
                assert text in self.seen, self.seen
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.place, text.encode())

    def close(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self.place)


def environment(tmp_path: Path) -> dict[str, str]:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": python_path(), "TERM": "xterm", "COLUMNS": "100"}
    return dict(os.environ) | cache


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "glm5", "agent", *map(str, arguments)]


def glm5(tmp_path: Path, *arguments: object) -> Result:
    """In this process: a second for each would be too long."""
    return CliRunner().invoke(cli.app, ["agent", *map(str, arguments)], env=environment(tmp_path))


def test_a_killed_session_goes_on(repo: Path, tmp_path: Path) -> None:  # noqa: F811
    before, log, asked = snapshot(repo), tmp_path / "log", threading.Event()
    killed = threading.Event()

    def script(body: dict[str, Any], turn: int) -> Say:
        if turn == 2 and not asked.is_set():
            asked.set()
            killed.wait(60)
        return FIX[turn]

    with ScriptedModel(script) as model:
        first = command("Fix add.", "--repo", repo, "--model", model.url, "--log", log, "--json", *TEST)
        process = subprocess.Popen(first, env=environment(tmp_path), stdout=subprocess.PIPE)
        assert asked.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed.set()
        assert process.stdout is not None
        process.stdout.close()
        assert [e["kind"] for e in read_log(log)[0]].count("reply") == 2
        done = glm5(tmp_path, "--resume", log, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["ok"] and told["reason"] == "done" and told["turns"] == 4 and told["changed"] == ["sums.py"]
    assert "+    return a + b" in told["diff"] and told["log"] == str(log)
    assert snapshot(repo) == before
    assert sum(len(body["messages"]) == 2 for body in model.bodies) == 1  # nothing was asked twice from the start


def test_the_patch_is_not_lost_with_the_state_before(
    repo: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if large files that git does not ignore took longer than its time."""

    def fails(*_: object) -> None:
        raise UsageError("git add timed out")

    subprocess.run(["git", "init", "-q"], cwd=repo, check=True)
    monkeypatch.setattr("glm5.agents.session.safety_commit", fails)
    with ScriptedModel(FIX) as model:
        done = glm5(tmp_path, "Fix add.", "--repo", repo, "--model", model.url, *TEST, "--in-place", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["ok"], told["reason"]) == (1, False, "done") and "+    return a + b" in told["diff"]
    assert "was not changed" in told["notes"][-1] and "a - b" in (repo / "sums.py").read_text()


def test_in_place_with_the_text_view(repo: Path, tmp_path: Path) -> None:  # noqa: F811
    for line in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *line], cwd=repo, check=True)
    with ScriptedModel(FIX) as model:
        options = ("--repo", repo, "--model", model.url, "--dialect", "anthropic", *TEST)
        done = glm5(tmp_path, "Fix add.", *options, "--in-place", "--diff", tmp_path / "patch")
    assert done.exit_code == 0, done.output
    assert "Fixed the sign." in done.stdout and "+    return a + b" in done.stdout
    assert "Look first." not in done.stdout + done.stderr and "Thought, 2 words." in done.stderr
    assert "done: 1 files changed; 4 turns" in done.stderr and "restore --source refs/glm5/agent-" in done.stderr
    assert "a + b" in (repo / "sums.py").read_text()
    assert (tmp_path / "patch").read_text().startswith("diff --git")
    assert len(list((tmp_path / "cache" / "glm5" / "agent").glob("*.jsonl"))) == 1


def test_questions_on_a_terminal(repo: Path, tmp_path: Path) -> None:  # noqa: F811
    script = [
        Say(calls=[("read", {"path": "sums.py"}), ("run", {"command": "echo \x1b[31mred"})]),
        Say(calls=[("edit", {"path": "sums.py", "old": "a - b", "new": "a + b"})]),
        Say(calls=[("test", {})]),
        Say(calls=[("run", {"command": "false"})]),
    ]
    with ScriptedModel(script) as model:
        line = command("Fix add.", "--repo", repo, "--model", model.url, "--approve", "--log", tmp_path / "log", *TEST)
        terminal = Terminal(line, environment(tmp_path))
        terminal.until("run echo \ufffd[31mred")
        terminal.until("Carry this out?")
        terminal.type("n\n")
        terminal.until("+ ")
        terminal.until("Carry this out?")
        terminal.type("do not do that\n")
        terminal.until("Carry this out?")
        terminal.type("a\n")
        terminal.until("exit code 1")
        terminal.until("turns")
        assert terminal.close() == 1
    results = [e["content"] for e in read_log(tmp_path / "log")[0] if e["kind"] == "result"]
    assert results[1] == "The user did not allow this call."
    assert results[2] == "The user did not allow this call. The user says: do not do that"
    assert results[3].startswith("[exit code 1]") and results[4] == "[exit code 1]\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Give a task and --model"),
        (["x", "--model", "http://127.0.0.1:9"], ""),
        (["x", "--model", "none"], "neither a checkpoint directory nor"),
        (["x", "--model", "http://x", "--dialect", "soap"], "openai or anthropic"),
        (["x", "--model", "http://x", "--context", "keep-recnt"], 'did you mean "keep-recent"'),
        (["x", "--model", "http://x", "--repo", "none"], "not a folder"),
        (["x", "--model", "http://x", "--in-place"], "git work tree"),
        (["x", "--model", "http://x", "--log", "log.jsonl"], "lies in the repository"),
        (["x", "--model", "http://x", "--approve", "--json"], "give one of them"),
        (["x", "--resume", "log"], "leave out the task"),
        (["--resume", "log"], "Cannot read log"),
    ],
)
def test_refusals(arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    monkeypatch.setattr(sys, "argv", ["glm5", "agent", *arguments])
    monkeypatch.setattr("glm5.agents.endpoint.PAUSES_S", ())
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as end:
        cli.main(typer.main.get_command(cli.app))
    assert end.value.code in (1, 2)
    assert words in err.getvalue()


def test_output_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command's last line is shown while it runs; rich would read brackets, and the terminal escape sequences."""
    out = io.StringIO()
    screen = Screen()
    screen._out = Console(file=out, force_terminal=True, width=80)
    AgentView(screen).approve(ToolCall("run", {"command": "true; " * 1000 + "rm -rf ."}))
    assert "rm -rf ." in out.getvalue() and "characters left out" in out.getvalue()
    AgentView(screen).output("stdout", b"x\n[/red] [bold] \x1b[2J\x1b]0;title\x07")
    screen.end_line()
    assert "[/red] [bold] \ufffd[2J\ufffd]0;title\ufffd" in out.getvalue()
