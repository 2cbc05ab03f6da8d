"""`glm5 chat`: through pipes and on a terminal, with a real small model and with one that says what the test wants."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import typer.main

from glm5 import cli
from glm5.chat import Tokenizer, render_chat
from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import Message, SamplingParams
from glm5.terminal.conversation import Conversation
from glm5.terminal.screen import Screen
from tests.forks import COMMAND_LINE, Forks
from tests.serve.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(cli.app)
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}, "days": {}}}},
}
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key><arg_value>2"
CALL += "</arg_value></tool_call>"
SPEED = re.compile(r"^(\d+) tokens, [\d.]+ tokens/s(.*)$", re.MULTILINE)


@dataclass
class Said:
    """What a chat wrote and how it ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line.removeprefix("Error: ") for line in self.err.splitlines() if line.startswith("Error: ")]


def glm5(*arguments: object, stdin: str = "") -> Said:
    """A command in this process, with pipes."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["glm5", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main(COMMANDS)
        except SystemExit as end:
            code = int(end.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model as `glm5 init` makes one."""
    path = tmp_path_factory.mktemp("terminal") / "nano"
    done = glm5("init", "nano", "--out", path, "--set", "num_hidden_layers=2")
    assert done.code == 0, done.err
    return path


@pytest.fixture(scope="module")
def endless(folder: Path) -> Path:
    """The same model, which greedily never ends: the logits of its special tokens are zero, the largest is positive."""
    path, tokenizer = folder.with_name("endless"), Tokenizer.load(folder)
    model = GLM5ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[list(tokenizer.special.values())] = 0
    model.save_pretrained(path)
    tokenizer.save(path)
    return path


Chat = Callable[..., tuple[Said, Any]]


@pytest.fixture
def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Chat with a model that gives `answers` in turn; the second result is the engine, with the prompts that it saw."""

    def chat(answers: list[str], stdin: str, *options: object, version: str = "5.2") -> tuple[Said, Any]:
        tokenizer = Tokenizer.byte_level(version)

        class Script(ScriptedEngine):
            def __init__(self) -> None:
                super().__init__([])
                self.tokenizer, self.left = tokenizer, iter(answers)
                self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=tokenizer.vocab_size))

            def submit(self, prompt: Any, params: Any) -> Any:
                self.ids = tokenizer.encode(next(self.left), allow_special=True)
                return super().submit(prompt, params)

            @property
            def texts(self) -> list[str]:
                return [tokenizer.decode(prompt) for prompt in self.prompts]

        engine = Script()
        monkeypatch.setattr(Engine, "from_pretrained", classmethod(lambda *args, **kwargs: engine))
        return glm5("chat", folder, *options, stdin=stdin), engine

    return chat


def test_answers_are_all_of_stdout_and_repeatable(folder: Path) -> None:
    first, again, other = (
        glm5("chat", folder, "--max-tokens", 8, "--seed", seed, "--no-thinking", stdin="hi\nhi\n") for seed in (1, 1, 2)
    )
    assert first.code == again.code == other.code == 0
    assert first.out == again.out != other.out
    assert len(SPEED.findall(first.err)) == 2 and all(int(count) <= 8 for count, _ in SPEED.findall(first.err))


def test_greedy_answers_are_the_engines(endless: Path) -> None:
    engine = Engine.from_pretrained(endless)
    assert engine.tokenizer is not None
    prompt = render_chat([Message("user", "hi")], tokenizer=engine.tokenizer, enable_thinking=False).ids
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=8, temperature=0))
    text = (
        "".join(
            c if c in "\t\n" or unicodedata.category(c) != "Cc" else "\ufffd"
            for c in engine.tokenizer.decode(done.token_ids)
        )
        + "\n"
    )
    said = glm5("chat", endless, "--max-tokens", 8, "--temperature", 0, "--no-thinking", stdin="hi\n/retry\n")
    assert said.out == text * 2 and said.err.count("8 tokens, ") == said.err.count("cut off by /max") == 2


def test_thoughts_are_folded_and_shown_on_demand(scripted: Chat) -> None:
    said, engine = scripted(["let me see</think>Hello!<|user|>", "</think>x<|user|>"], "hi\n/thinking\nso\n/thinking\n")
    assert said.out == "Hello!\nx\n"
    notes = SPEED.sub("SPEED", said.err).splitlines()
    assert notes == [
        "Thought for 10 tokens; /thinking shows it.",
        "SPEED",
        "let me see",
        "SPEED",
        "The last answer has no reasoning.",
    ]
    assert SPEED.findall(said.err)[0] == ("18", "")
    assert engine.texts[1].endswith("<|user|>hi<|assistant|><think></think>Hello!<|user|>so<|assistant|><think>")


def test_tools_are_called_and_their_results_typed(scripted: Chat, tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([TOOL]), encoding="utf-8")
    said, engine = scripted(
        [f"hm</think>Wait{CALL}{CALL}<|observation|>", "</think>Dry.<|user|>"],
        "rain?\nsunny\\\nwarm\n/home\n",
        *("--tools", path, "--system", "Be terse."),
    )
    call = "  Tool call: weather\n".lstrip() + '    city: "Rome"\n    days: 2\n'
    assert said.out == f"Wait\n{call}{call}Dry.\n"
    assert "<|system|>Be terse.<|user|>rain?" in engine.texts[0] and '"name": "weather"' in engine.texts[0]
    results = "<|observation|><tool_response>sunny\nwarm</tool_response><tool_response>/home</tool_response>"
    assert engine.texts[1].endswith(f"<think>hm</think>Wait{CALL}{CALL}{results}<|assistant|><think>")


def test_without_tools_a_call_is_text(scripted: Chat) -> None:
    said, _ = scripted([f"</think>{CALL}<|user|>"], "rain?\n")
    assert said.out == CALL + "\n"


def test_a_call_that_was_cut_off_is_no_call(scripted: Chat, tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOL), encoding="utf-8")
    said, engine = scripted([f"</think>a{CALL[:-20]}<|user|>", "</think>b<|user|>"], "q\nr\n", "--tools", path)
    assert said.out == "a\nb\n" and "inside a tool call" in said.err
    assert CALL[:-20] in engine.texts[1]


def test_the_end_of_input_at_a_tool_is_the_end(scripted: Chat, tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([TOOL]), encoding="utf-8")
    said, engine = scripted([f"</think>{CALL}<|user|>"], "q\n", "--tools", path)
    assert said.code == 0 and len(engine.prompts) == 1


def test_commands_change_what_the_model_sees(scripted: Chat, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = [
        *("one", "two", "/undo", "/system Be kind.", "three \\", "lines", "/temperature 0", "/max 2", "/retry"),
        *(f"/save {file}", "/clear", "/system", "/thinking off", "//slash", f"/load {file}", "/effort high"),
        *("/thinking on", "again", "/quit", "never"),
    ]
    said, engine = scripted([f"</think>{word}<|user|>" for word in "abcdefghi"], "\n".join(lines))
    assert (said.code, said.errors) == (0, [])
    ends = [text.rpartition("<sop>")[2] for text in engine.texts]
    head, one = "<|system|>Reasoning Effort: Max", "<|user|>one<|assistant|><think>"
    three = f"<|system|>Be kind.{one}</think>a<|user|>three \nlines<|assistant|><think>"
    last = f"<|system|>Reasoning Effort: High{three}</think>d<|user|>again<|assistant|><think>"
    assert ends == [
        head + one,
        f"{head}{one}</think>a<|user|>two<|assistant|><think>",
        head + three,
        head + three,
        "<|user|>/slash<|assistant|><think></think>",
        last,
    ]
    assert [(p.temperature, p.max_tokens) for p in engine.params] == [(1.0, 1024)] * 3 + [(0.0, 2)] * 3
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert saved["messages"][3]["content"] == "three \nlines" and saved["tools"] == []


def test_a_saved_conversation_is_the_same_after_loading(scripted: Chat, tmp_path: Path) -> None:
    tools, files = tmp_path / "tools.json", [tmp_path / "a.json", tmp_path / "b.json"]
    tools.write_text(json.dumps([TOOL]), encoding="utf-8")
    scripted(
        [f"why é</think>ok{CALL}<|observation|>", "</think>2<|user|>"], f"q\n20°\n/save {files[0]}", "--tools", tools
    )
    said, engine = scripted(["</think>3<|user|>"], f"/load {files[0]}\n/save {files[1]}\nmore\n")
    assert files[0].read_bytes() == files[1].read_bytes() and said.errors == []
    assert CALL in engine.texts[0] and '"name": "weather"' in engine.texts[0] and "20°" in engine.texts[0]


def test_an_answer_that_mentions_a_think_tag_is_saved_whole(tmp_path: Path) -> None:
    turns = [Message("user", "q"), Message("assistant", "The tag </think> ends it.")]
    Conversation(messages=turns).save(tmp_path / "a.json")
    again = Conversation.load(tmp_path / "a.json").messages
    assert [turn.content for turn in again] == [turn.content for turn in turns]


def test_a_bare_list_of_messages_keeps_the_tools_of_the_chat(scripted: Chat, tmp_path: Path) -> None:
    tools, file = tmp_path / "tools.json", tmp_path / "list.json"
    tools.write_text(json.dumps([TOOL]), encoding="utf-8")
    file.write_text('[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]', encoding="utf-8")
    _, engine = scripted(["</think>b<|user|>"], f"/load {file}\nmore\n", "--tools", tools)
    assert (
        '"name": "weather"' in engine.texts[0]
        and "<|user|>q<|assistant|><think></think>a<|user|>more" in engine.texts[0]
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/bogus", ["/bogus", "/help"]),
        ("/tinking on", ['"thinking"']),
        ("/thinking maybe", ["on or off", "maybe"]),
        ("/effort huge", ["high, max", "huge"]),
        ("/temperature hot", ["number", "hot"]),
        ("/temperature -1", ["0 (greedy)", "-1"]),
        ("/temperature nan", ["nan"]),
        ("/max 0", ["at least 1"]),
        ("/max 1e3", ["1e3"]),
        ("/max ²", ["²"]),
        ("/retry", ["no question"]),
        ("/undo", ["no question"]),
        ("/save", ["needs a file name"]),
        ("/save FOLDER/config.json/x.json", ["config.json"]),
        ("/load /nowhere", ["/nowhere", "no such file"]),
        ("/load FOLDER", ["directory"]),
        ("/load FOLDER/config.json", ["not a conversation"]),
        ("/load FOLDER/model.safetensors", ["not a JSON file"]),
        ("/load BAD", ["messages[0]", "'king'"]),
        ("word " * 500, ["limit is 2047", "/clear"]),
    ],
)
def test_bad_input_gets_one_sentence(scripted: Chat, folder: Path, tmp_path: Path, line: str, words: list[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('[{"role": "king"}]', encoding="utf-8")
    line = line.replace("FOLDER", str(folder)).replace("BAD", str(bad))
    said, engine = scripted(["</think>fine<|user|>"], f"{line}\nhi\n")
    (error,) = said.errors
    assert [word for word in words if word not in error] == [], error
    assert said.code == 0 and said.out == "fine\n"
    assert engine.texts[0].endswith("Max<|user|>hi<|assistant|><think>"), "the conversation is as before"


def test_templates_differ_in_what_can_be_chosen(scripted: Chat) -> None:
    said, _ = scripted([], "/thinking off\n", version="5.3")
    assert said.errors == ["The template of GLM-5.3 cannot switch thinking off."]
    said, _ = scripted([], "/effort high\n", version="5.0")
    assert said.errors == ["The template of GLM-5.0 has no effort levels."]


def test_control_characters_of_the_model_do_not_reach_the_terminal(scripted: Chat) -> None:
    said, _ = scripted(["\x1b[2J</think>a\x1b]0;x\x07\tb\r\x9b\u202e<|user|>"], "hi\n/thinking\n")
    assert said.out == "a\ufffd]0;x\ufffd\tb\ufffd\ufffd\ufffd\n"
    assert "\x1b" not in said.err


def test_the_name_of_a_call_does_not_reach_the_terminal_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, ask = Screen(), mock.Mock(return_value="4")
    monkeypatch.setattr("builtins.input", ask)
    for screen.interactive in (True, False):
        monkeypatch.setattr("sys.stdin", io.StringIO("4\n"))
        assert screen.read("result of f\x1b]0;owned\x07\x1b[2J\x9b\n> > ") == "4"
    ask.assert_called_once_with("result of f\ufffd]0;owned\ufffd\ufffd[2J\ufffd > > ")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--max-tokens", 0], 2, ["--max-tokens"]),
        (["--temperature", -1], 2, ["temperature", "-1"]),
        (["--tools", "/nowhere"], 1, ["/nowhere"]),
        (["--tools", ROOT / "README.md"], 1, ["README.md", "JSON"]),
        (["--seed", "x"], 2, ["--seed"]),
    ],
)
def test_bad_options(folder: Path, options: list[object], code: int, words: list[str]) -> None:
    said = glm5("chat", folder, *options, stdin="hi\n")
    assert (said.code, said.out) == (code, "")
    assert len(said.err.strip().splitlines()) <= 3 and [word for word in words if word not in said.err] == []


def test_a_folder_that_is_no_model(tmp_path: Path, folder: Path) -> None:
    assert glm5("chat", tmp_path, stdin="hi\n").code == 1
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    said = glm5("chat", tmp_path, stdin="hi\n")
    assert said.code == 1 and "tokenizer.json" in said.err


class Terminal:
    """`glm5 chat` as a process on a pseudo-terminal."""

    def __init__(self, forks: Forks, *arguments: object) -> None:
        self.place, inside = pty.openpty()
        env, streams = {"TERM": "xterm", "COLUMNS": "100"}, {"stdin": inside, "stdout": inside, "stderr": inside}
        self.process = forks(COMMAND_LINE, "chat", *arguments, env=env, **streams)
        os.close(inside)
        self.text = ""

    def read(self) -> bool:
        try:
            data = os.read(self.place, 65536)
        except OSError as error:
            assert error.errno == errno.EIO
            data = b""
        self.text += data.decode(errors="replace")
        return bool(data)

    def until(self, pattern: str, again: Callable[[], None] = lambda: None, seconds: float = 120) -> str:
        """Wait until what came since the last call has `pattern`, and return it.

        `again` is called in every silent second: what is pressed just when a prompt appears may be lost, as for people.
        """
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.text)):
            assert time.monotonic() < end, self.text
            if not select.select([self.place], [], [], 1.0)[0]:
                again()
            else:
                assert self.read(), self.text
        seen, self.text = self.text[: match.end()], self.text[match.end() :]
        return seen

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def leave(self) -> int:
        """Press Ctrl-D until the chat ends."""
        for _ in range(60):
            self.type("\x04")
            while select.select([self.place], [], [], 1.0)[0]:
                if not self.read():
                    return self.process.wait(60)
        raise AssertionError(self.text)

    def type(self, text: str) -> None:
        os.write(self.place, text.encode())


@pytest.fixture
def terminal(forks: Forks, endless: Path) -> Iterator[Terminal]:
    chat = Terminal(forks, endless, "--temperature", 0, "--seed", 1, "--max-tokens", 1000000, "--no-thinking")
    yield chat
    chat.process.kill()
    chat.process.wait(60)
    os.close(chat.place)


def test_on_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    """Ctrl-C ends an answer and keeps the chat, at the prompt it is harmless; Ctrl-D ends the chat."""
    file = tmp_path / "talk.json"
    terminal.until(r"/help lists the commands")
    terminal.until("> ")
    terminal.interrupt()
    terminal.until(r"Ctrl-D to end", again=terminal.interrupt)
    terminal.until("> ")
    terminal.type("hello \\\n")
    terminal.until(r"\.\.\. ")
    terminal.type("there\n")
    terminal.until(r"there[\s\S]{60}")  # the answer is under way
    terminal.interrupt()
    assert "stopped" in terminal.until(r"tokens/s[^\n]*\n")
    terminal.until("> ")
    terminal.type(f"/save {file}\n")
    terminal.until(r"Saved 2 messages")
    question, answer = json.loads(file.read_text(encoding="utf-8"))["messages"]
    assert question["content"] == "hello \nthere" and answer["content"]
    terminal.until("> ")
    terminal.type("/thinking on\n")
    terminal.until(r"Thinking is on")
    terminal.until("> ")
    terminal.type("more\n")
    terminal.until(r"Thinking, \d+ tokens")
    terminal.interrupt()
    terminal.until(r"Thought for \d+ tokens")
    terminal.until("> ")
    assert terminal.leave() == 0
    assert "Traceback" not in terminal.text


def test_bytes_that_are_no_text_in_a_pipe(forks: Forks, folder: Path) -> None:
    """With the streams of the locale C, which knows ASCII alone."""
    plain = """
import sys
sys.stdin.reconfigure(encoding="ascii", errors="surrogateescape")
sys.stdout.reconfigure(encoding="ascii", errors="surrogateescape")
sys.stderr.reconfigure(encoding="ascii", errors="backslashreplace")
"""
    reading, writing = os.pipe()
    os.write(writing, b"\xff\xfe h\xc3\xa9\n")
    os.close(writing)
    chat = forks(plain + COMMAND_LINE, "chat", folder, "--max-tokens", 2, stdin=reading, stderr=subprocess.PIPE)
    os.close(reading)
    _, error = chat.communicate(120)
    assert chat.wait(0) == 0 and "2 tokens, " in error, error
