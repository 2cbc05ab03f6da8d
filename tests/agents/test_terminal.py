"""The terminal agent: its screen model, the form of its replies, and sessions in a room's real terminal."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from glm5.agents.endpoint import Endpoint, EndpointError
from glm5.agents.terminal import (
    MOST_OUTPUT,
    QUESTIONS,
    SUMMARY,
    Command,
    Outcome,
    TerminalAgent,
    keys_of,
    limited,
    parse,
)
from glm5.agents.virtual_terminal import MOST_HISTORY, VirtualTerminal
from glm5.cli.options import app
from glm5.data.sft import read_conversations
from glm5.errors import UsageError
from glm5.sandbox.environment import NamespaceEnvironment
from tests.agents.scripted_model import Say, ScriptedModel
from tests.rooms import needs_rooms
from tests.tasks.harbor.tasks import make_task


def screen(data: bytes, columns: int = 10, rows: int = 4) -> list[str]:
    terminal = VirtualTerminal(columns, rows)
    terminal.feed(data)
    return terminal.lines()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"one\r\ntwo", ["one", "two"]),
        (b"abc\rX", ["Xbc"]),
        (b"abc\b\bX", ["aXc"]),
        (b"a\tb", ["a       b"]),
        (b"0123456789ab", ["0123456789", "ab"]),
        (b"0123456789\r\nab", ["0123456789", "ab"]),  # the cursor waits past the last column
        (b"1\r\n2\r\n3\r\n4\r\n5", ["2", "3", "4", "5"]),
        (b"\x1b[31mred\x1b[0m", ["red"]),
        (b"\x1b]0;title\x07x\x1b]8;;u\x1b\\y", ["xy"]),
        (b"abc\x1b[2D\x1b[K", ["a"]),
        (b"one\r\ntwo\x1b[2J\x1b[Hx", ["x"]),
        (b"\x1b[2;3Hx\x1b[Ay", ["   y", "  x"]),
        (b"main\x1b[?1049hpager\x1b[?1049l!", ["main!"]),
        (b"abcdef\x1b[3G\x1b[2P", ["abef"]),
        (b"abc\x1b[1G\x1b[2@", ["  abc"]),
        (b"1\r\n2\r\n3\x1b[1;1H\x1b[L", ["", "1", "2", "3"]),
        (b"1\r\n2\r\n3\x1b[1;1H\x1b[M", ["2", "3"]),
        (b"1\r\n2\r\n3\r\n4\x1b[2;3r\x1b[3;1H\n", ["1", "3", "", "4"]),
        ("é漢字".encode(), ["é漢字"]),
        (b"\xff\xfe", ["\ufffd\ufffd"]),
        (b"\x1b7ab\x1b8c\x1bMd", [" d", "cb"]),
        (b"x\x1bcy", ["y"]),
    ],
)
def test_the_screen(data: bytes, lines: list[str]) -> None:
    assert screen(data) == lines
    terminal = VirtualTerminal(10, 4)
    for byte in data:  # in pieces of any size
        terminal.feed(bytes([byte]))
    assert terminal.lines() == lines


def test_output_that_is_all_escapes_costs_no_minutes() -> None:
    """The screen is drawn outside of the room: what a program prints must not keep this process busy."""
    terminal, start = VirtualTerminal(10, 4), time.process_time()
    terminal.feed(b"\x1b" * (1 << 18) + b"[")
    terminal.feed(b"1mdone")
    assert (terminal.lines(), time.process_time() - start < 5.0) == (["done"], True)


def test_the_screen_takes_any_bytes_in_bounded_memory() -> None:
    rng = random.Random(0)
    alphabet = b"\x1b[0123456789;?HJKmABCDLMPXrsuhl\n\r\t\bab\xc3\xa9\x9b]P\\"
    terminal = VirtualTerminal(20, 5)
    for _ in range(300):
        terminal.feed(bytes(rng.choice(alphabet) for _ in range(100)))
        assert all(len(row) == 20 for row in terminal._cells) and len(terminal._cells) == 5
    terminal.feed(b"\x1b]" + b"x" * 10_000 + b"\x1b[99999999999999;1H")
    terminal.feed(b"line\n" * (2 * MOST_HISTORY))
    assert len(terminal.history) == MOST_HISTORY and len(terminal._rest) < 300


def reply(*commands: tuple[str, float], complete: bool = False) -> str:
    told = [{"keystrokes": keys, "duration": seconds} for keys, seconds in commands]
    return json.dumps({"analysis": "a", "plan": "p", "commands": told, "task_complete": complete})


def test_replies_are_read() -> None:
    assert parse(reply(("ls\n", 0.1), complete=True)).commands == (Command("ls\n", 0.1),)
    assert parse(reply(complete=True)).complete and not parse(reply()).complete
    fenced = parse(f"```json\n{reply()}\n```")
    assert fenced.error == "" and fenced.warnings == ()
    assert len(parse(f"Let me see. {reply()} Done.").warnings) == 2
    assert parse(reply(("sleep\n", 1e9))).commands[0].duration == 60
    assert parse('{"commands": [{"keystrokes": "x\n"}]}').commands == (Command("x\n", 1.0),)  # a real new line
    wrong: list[Any] = ["", "no", "{", "[" * 100_000, "{" * 5000, '{"commands": 1}', '{"commands": [1]}']
    wrong += ['{"commands": [{"keystrokes": 1}]}', '{"a": {}}']
    for text in wrong:
        assert parse(text).error, text[:40]
    assert parse('{"commands": [{"keystrokes": "a\\n", "duration": "x"}]}').warnings
    many = parse(reply(*[("x\n", 0.0)] * 500))
    assert len(many.commands) == 100 and many.warnings


def test_keys_and_limits() -> None:
    cases = {"ls\n": b"ls\r", "C-c": b"\x03", "C-d": b"\x04", "Up": b"\x1b[A", "M-x": b"\x1bx", "C-cc": b"C-cc"}
    assert {keys: keys_of(keys) for keys in cases} == cases
    text = "é" * 20_000
    assert limited("short") == "short"
    assert len(limited(text).encode()) < MOST_OUTPUT + 100 and "30,000 bytes left out" in limited(text)


def play(script: Any, tmp_path: Path, **settings: Any) -> tuple[Outcome, ScriptedModel]:
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    with ScriptedModel(script) as model, NamespaceEnvironment({"/work": work}) as room:
        endpoint = Endpoint(model.url, pauses=())
        outcome = TerminalAgent(endpoint, room, cwd="/work", **settings).run("Write 42 to the file answer.")
        assert outcome.why == ""
        answer = room.exec("cat /work/answer 2>&1").stdout.decode()
        endpoint.close()
    assert list(work.iterdir()) == []
    model.answer = answer  # type: ignore[attr-defined]
    return outcome, model


def shown(model: ScriptedModel, turn: int) -> str:
    return str(model.bodies[turn]["messages"][-1]["content"])


@needs_rooms
def test_a_session_in_a_terminal(tmp_path: Path) -> None:
    script = [
        Say(reply(("echo $((40 + 2)) > answer\n", 0.3), ("cat answer\n", 0.3))),
        Say("not JSON"),
        Say(reply(("cat\n", 0.2), ("typed\n", 0.2), ("C-d", 0.3))),
        Say(reply(complete=True)),
        Say(reply(("seq 1 30000\n", 1.0))),
        Say(reply(complete=True)),
        Say(reply(complete=True)),
    ]
    outcome, model = play(script, tmp_path)
    assert (outcome.reason, outcome.turns, len(outcome.pieces)) == ("done", 7, 1)
    assert model.answer == "42\n"  # type: ignore[attr-defined]
    assert "160 columns" in shown(model, 0) and "Screen of the terminal:" in shown(model, 0)
    assert shown(model, 1).startswith("New output on the terminal:\n") and "\n42\n" in shown(model, 1)
    assert "could not be read" in shown(model, 2)
    assert shown(model, 3).count("typed") == 2 and "echo" not in shown(model, 3)
    assert '"task_complete": true again' in shown(model, 4)
    assert len(shown(model, 5).encode()) < MOST_OUTPUT + 300 and "left out" in shown(model, 5)
    assert "30000" in shown(model, 5)
    assert len(model.bodies[-1]["messages"]) == 13


@needs_rooms
def test_a_full_context_is_summarised(tmp_path: Path) -> None:
    def script(body: dict[str, Any], turn: int) -> Say:
        last = body["messages"][-1]["content"]
        if last == SUMMARY:
            return Say("The summary.")
        if last.startswith(QUESTIONS[:30]):
            return Say("What now?")
        if last.startswith("The colleague who takes over"):
            return Say("Only to write it.")
        if last.startswith("Here are the answers."):
            return Say(reply(("echo 42 > answer\n", 0.2)))
        if "You say that" in last:
            return Say(reply(complete=True))
        return Say(reply(("seq 1 9000\n", 0.5)) if len(body["messages"]) < 6 else reply(complete=True))

    outcome, model = play(script, tmp_path, context_tokens=13_000)
    assert outcome.reason == "done" and model.answer == "42\n"  # type: ignore[attr-defined]
    assert len(outcome.pieces) >= 5
    first, asked, other, answering, second = outcome.pieces[:5]
    assert asked[: len(first) - 1] == first[:-1] and asked[-2].content == SUMMARY
    assert "The summary." in other[0].content and "What now?" in answering[-2].content
    assert second[0] == first[0] and "Only to write it." in second[4].content
    assert [m.role for m in second] == ["user", "assistant"] * (len(second) // 2)


@pytest.mark.long
@needs_rooms
def test_an_overflow_unwinds_and_limits_end_a_session(tmp_path: Path) -> None:
    refused = []

    def script(body: dict[str, Any], turn: int) -> Say:
        last = body["messages"][-1]["content"]
        if turn == 3 and not refused:
            refused.append(turn)
            model.refuse.append((400, '{"error": {"message": "maximum context length"}}'))
        if last == SUMMARY or last.startswith((QUESTIONS[:30], "The colleague")):
            return Say("text")
        return Say(reply(("true\n", 0.05)))

    model = ScriptedModel(script)
    work = tmp_path / "work"
    work.mkdir()
    with model, NamespaceEnvironment({"/work": work}) as room:
        endpoint = Endpoint(model.url, pauses=())
        outcome = TerminalAgent(endpoint, room, turns=6).run("Nothing.")
        assert (outcome.reason, outcome.turns, len(outcome.pieces)) == ("turns", 6, 5)
        assert TerminalAgent(endpoint, room, seconds=0.8).run("Nothing.").reason == "seconds"
        model.refuse = [(400, "no")]
        assert TerminalAgent(endpoint, room).run("Nothing.").reason == "endpoint"
        endpoint.close()


@needs_rooms
def test_a_context_that_is_smaller_than_told(tmp_path: Path) -> None:
    """The server refuses long before the agent's own limit: turns are dropped before the summary is asked for."""
    summarised: list[int] = []

    def script(body: dict[str, Any], turn: int) -> Say:
        last, size = body["messages"][-1]["content"], sum(len(message["content"]) for message in body["messages"])
        summarised.extend([size] * (last == SUMMARY))
        if last == SUMMARY or last.startswith((QUESTIONS[:30], "The colleague")):
            return Say("text")
        if size > 20_000:
            model.refuse.append((400, '{"error": {"message": "maximum context length"}}'))
        done = last.startswith("Here are the answers") or "You say that" in last
        return Say(reply(complete=True) if done else reply(("seq 1 9000\n", 0.3)))

    model = ScriptedModel(script)
    work = tmp_path / "work"
    work.mkdir()
    with model, NamespaceEnvironment({"/work": work}) as room:
        endpoint = Endpoint(model.url, pauses=())
        assert TerminalAgent(endpoint, room, turns=9).run("Nothing.").reason == "done"
        endpoint.close()
    assert len(summarised) == 1 and summarised[0] < 20_000


@needs_rooms
def test_a_task_is_played_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`glm5 task run --agent terminal`: the variables of the image, the verdict, the session as SFT data."""
    docker = "FROM ubuntu\nWORKDIR /app\nENV WORD='hel lo'\n"
    test = "#!/bin/bash\n[ \"$(cat /app/out.txt)\" = 'hel lo' ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    task = make_task(tmp_path / "task", environment__Dockerfile=docker, tests__test_dot_sh=test)
    script = [Say(reply(('echo "$WORD" > out.txt\n', 0.2))), Say(reply(complete=True)), Say(reply(complete=True))]
    monkeypatch.setattr("glm5.agents.endpoint.PAUSES_S", ())
    with ScriptedModel(script) as model:

        def run(*words: str) -> Result:
            line = ["task", "run", str(task), "--agent", "terminal", *words, "--json"]
            return CliRunner().invoke(app, line)

        done = run("--model", model.url, "--sft", str(tmp_path / "sft.jsonl"))
        said = json.loads(done.stdout)
        assert (said["reward"], said["ended"], said["turns"], said["error"]) == (1.0, "done", 3, None)
        assert len(list(read_conversations(tmp_path / "sft.jsonl"))) == 1
        assert json.loads(run("--model", model.url, "--timeout", "0.1").stdout)["error"] == "AgentTimeoutError"
        model.refuse = [(400, "no")]
        assert isinstance(run("--model", model.url).exception, EndpointError)
        assert isinstance(run().exception, UsageError)
