"""An agent on a terminal, compatible with Terminus 2: the same JSON, screen size and limits, on a room's own terminal.

The model sees the screen and answers with keystrokes. Each reply is a JSON object:

    {"analysis": "...", "plan": "...", "commands": [{"keystrokes": "ls\\n", "duration": 0.1}], "task_complete": false}

It is told only what is new on the screen, at most 10,000 bytes of it. Mistakes in the form go back to it as text.
Completion must be claimed twice in a row. When the context is nearly full, three further requests (a summary, questions
about it, answers to them) make a new, short conversation; so a session consists of several linear conversations.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from glm5.agents.context import Counter, approximate_tokens
from glm5.agents.endpoint import EndpointError, Model, Reply
from glm5.agents.virtual_terminal import VirtualTerminal
from glm5.records import Message
from glm5.sandbox.limits import ExecResult
from glm5.sandbox.programs import Room
from glm5.sandbox.room_terminal import Terminal
from glm5.tasks.harbor.trial import Agent, TaskRoom

COLUMNS, ROWS = 160, 40
MOST_OUTPUT = 10_000
"""Bytes of the screen that one message shows."""
SUMMARISE_BELOW, UNWIND_TO = 8000, 4000
"""Free tokens of context below which the session is summarised; that are made free first if the context overflowed."""
DURATION_S, MOST_DURATION_S = 1.0, 60.0
MOST_COMMANDS = 100
KEYS = {
    "Enter": "\r",
    "Tab": "\t",
    "Escape": "\x1b",
    "Space": " ",
    "BSpace": "\x7f",
    "Up": "\x1b[A",
    "Down": "\x1b[B",
    "Right": "\x1b[C",
    "Left": "\x1b[D",
    "Home": "\x1b[H",
    "End": "\x1b[F",
    "PageUp": "\x1b[5~",
    "PPage": "\x1b[5~",
    "PageDown": "\x1b[6~",
    "NPage": "\x1b[6~",
    "DC": "\x1b[3~",
}
"""tmux's names of keys; `C-x` is Ctrl and a letter, `M-x` is Alt."""

INSTRUCTIONS = """\
You work in a Linux terminal of {columns} columns and {rows} rows to do the task below. You see its screen, and answer \
with the keys to press. Every answer is one JSON object:

{{
  "analysis": "what the screen shows, and what is done and what is missing",
  "plan": "what to do next, and what each command is for",
  "commands": [{{"keystrokes": "ls -la\\n", "duration": 0.1}}],
  "task_complete": false
}}

"keystrokes" are typed as they are: end a command with \\n to run it. Names such as C-c or Up, alone in \
"keystrokes", press that key. "duration" is how many seconds to wait before the next command, 1 if it is left out and \
at most 60: 0.1 is enough for cd or ls; wait again with empty keystrokes rather than long. "commands" may be empty. \
Set "task_complete" to true when the task is done; you will be asked once more.

Task:
{task}

{screen}"""
CONFIRM = """\
{screen}

You say that the task is complete. What you leave is then judged, and nothing can be corrected afterwards. If you are \
sure, answer with "task_complete": true again."""
UNREADABLE = "Your answer could not be read."
FIX = UNREADABLE + "\nERROR: {error}\n{warnings}Answer with one JSON object of the form above."
SUMMARY = """\
Your context is nearly full. Summarise this session for a colleague who takes over and sees nothing but the task and \
your summary: what was done and found, with names, paths and commands; the state of the system; what failed; what is \
left to do."""
QUESTIONS = """\
You take over this task from a colleague.

Task:
{task}

Summary of your colleague:
{summary}

{screen}

Ask your colleague all questions whose answers you need to finish the task, at least five, and nothing else."""
ANSWERS = "The colleague who takes over asks the questions below. Answer each of them in detail.\n\n{questions}"
GO_ON = "Here are the answers.\n\n{answers}\n\nGo on with the task from here, with one JSON object as described."

Reason = Literal["done", "turns", "seconds", "endpoint", "interrupted"]


@dataclass(frozen=True)
class Command:
    """Keys to press and seconds to wait afterwards."""

    keystrokes: str
    duration: float = DURATION_S


@dataclass(frozen=True)
class Parsed:
    """A reply as read. With an `error`, nothing of it is carried out."""

    commands: tuple[Command, ...] = ()
    complete: bool = False
    error: str = ""
    warnings: tuple[str, ...] = ()


@dataclass
class Outcome:
    """How a session ended. `pieces` are its linear conversations in order: a summary begins a new one, and its helper
    requests are pieces of their own."""

    reason: Reason
    turns: int
    seconds: float
    pieces: list[list[Message]] = field(default_factory=list)
    why: str = ""


def parse(text: str) -> Parsed:
    """Read a reply. Text around the object is a warning; anything else that is wrong is an error."""
    found, warnings = _object(text), list[str]()
    if found is None:
        return Parsed(error="There is no complete JSON object in the answer.")
    value, before, after = found
    warnings += ["There is text before the JSON object."] * bool(before.strip().removeprefix("```json").strip("`\n "))
    warnings += ["There is text after the JSON object."] * bool(after.strip("`\n "))
    for name in ("analysis", "plan"):
        if not isinstance(value.get(name), str):
            warnings.append(f'The field "{name}" is missing or not text.')
    commands, told = [], value.get("commands")
    if not isinstance(told, list):
        return Parsed(error='The field "commands" must be a list.', warnings=tuple(warnings))
    for i, entry in enumerate(told[:MOST_COMMANDS]):
        keys = entry.get("keystrokes") if isinstance(entry, dict) else None
        if not isinstance(keys, str):
            return Parsed(error=f'commands[{i}] needs text in "keystrokes".', warnings=tuple(warnings))
        seconds = entry.get("duration", DURATION_S)
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):
            warnings.append(f"commands[{i}] has no valid duration; it was {DURATION_S:g} s.")
            seconds = DURATION_S
        if i + 1 < len(told) and keys and not keys.endswith("\n") and "\n" not in keys and keys not in KEYS:
            warnings.append(f"commands[{i}] does not end with a new line, so the next one follows on the same line.")
        commands.append(Command(keys, min(float(seconds), MOST_DURATION_S)))
    if len(told) > MOST_COMMANDS:
        warnings.append(f"Only the first {MOST_COMMANDS} commands were carried out.")
    complete = value.get("task_complete", False)
    done = complete is True or (isinstance(complete, str) and complete.strip().lower() == "true")
    return Parsed(tuple(commands), done, "", tuple(warnings))


def _object(text: str) -> tuple[dict[str, Any], str, str] | None:
    """The first JSON object of a text, and the text around it."""
    decoder, at, tries = json.JSONDecoder(strict=False), text.find("{"), 0
    while at >= 0 and tries < 100:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            pass
        else:
            if isinstance(value, dict):
                return value, text[:at], text[end:]
        at, tries = text.find("{", at + 1), tries + 1
    return None


def keys_of(keystrokes: str) -> bytes:
    """The bytes that a terminal gets."""
    name = keystrokes.strip()
    if name in KEYS:
        return KEYS[name].encode()
    if len(name) == 3 and name[1] == "-" and name[0] == "C" and "@" <= name[2].upper() <= "_":
        return bytes([ord(name[2].upper()) - 64])
    if len(name) == 3 and name.startswith("M-"):
        return b"\x1b" + name[2].encode("utf-8", "replace")
    return keystrokes.encode("utf-8", "replace").replace(b"\n", b"\r")


def limited(text: str, most: int = MOST_OUTPUT) -> str:
    """Head and tail of a text, at most `most` bytes of UTF-8 of it."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most:
        return text
    half = most // 2
    left = len(data) - 2 * half
    head, tail = (part.decode("utf-8", "ignore") for part in (data[:half], data[-half:]))
    return f"{head}\n[... {left:,} bytes left out; at most {most:,} bytes are shown ...]\n{tail}"


class Watched:
    """A room's terminal with a model of its screen."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._screen = VirtualTerminal(COLUMNS, ROWS)
        self._before = ""
        self._seen = 0  # lines of history, the lost ones included, at the last look

    def press(self, command: Command) -> None:
        """Type and wait."""
        self._terminal.write(keys_of(command.keystrokes))
        self._screen.feed(self._terminal.read(command.duration))

    def new(self) -> str:
        """What is new on the screen since the last call, or the whole screen if it was redrawn."""
        screen = self._screen
        fresh = screen.history[max(0, self._seen - screen.lost) :]
        whole = "\n".join([*fresh, *screen.lines()])
        text: str | None = None
        if self._seen < screen.lost:  # what came in between is not known any more
            text = whole
        elif self._before and whole.startswith(self._before):
            text = whole[len(self._before) :].lstrip("\n")
        self._seen, self._before = screen.lost + len(screen.history), "\n".join(screen.lines())
        if text is None or not text.strip():
            return f"Screen of the terminal:\n{limited(self._before)}"
        return f"New output on the terminal:\n{limited(text)}"


@dataclass
class TerminalAgent:
    """Plays one task in a room.

    Args:
        context_tokens: the model's context length.
        record: called with every message in the order of the session.
        env: variables of the terminal's bash.
    """

    model: Model
    room: Room
    turns: int = 100
    seconds: float = 3600.0
    context_tokens: int = 128_000
    count: Counter = approximate_tokens
    cwd: str = "/"
    record: Callable[[Message], None] | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def run(self, task: str) -> Outcome:
        """Play a task to its end. Raises GradingError if the room fails."""
        began = time.monotonic()
        self._pieces: list[list[Message]] = []
        self._task = task
        turn, claimed, why = 0, False, ""
        reason: Reason = "turns"
        with self.room.terminal(COLUMNS, ROWS, self.cwd) as terminal:
            watched = Watched(terminal)
            exports = " ".join(shlex.quote(f"{name}={value}") for name, value in self.env.items())
            watched.press(Command(f"export {exports}; clear\n" if exports else "", 0.5))
            self._begin(INSTRUCTIONS.format(columns=COLUMNS, rows=ROWS, task=task, screen=watched.new()))
            try:
                while turn < self.turns:
                    if time.monotonic() - began >= self.seconds:
                        reason = "seconds"
                        break
                    self._make_room(watched)
                    parsed = parse(self._ask_or_unwind(watched).message.content)
                    turn += 1
                    left = self.seconds - (time.monotonic() - began)
                    for command in parsed.commands if not parsed.error else ():
                        if left > 0:
                            watched.press(Command(command.keystrokes, min(command.duration, left)))
                        left = self.seconds - (time.monotonic() - began)
                    warnings = "".join(f"WARNING: {warning}\n" for warning in parsed.warnings)
                    if parsed.error:
                        claimed = False
                        self._say(FIX.format(error=parsed.error, warnings=warnings))
                    elif parsed.complete and claimed:
                        reason = "done"
                        break
                    else:
                        claimed = parsed.complete
                        screen = watched.new()
                        self._say(warnings + (CONFIRM.format(screen=screen) if claimed else screen))
            except EndpointError as error:
                reason, why = "endpoint", str(error)
            except KeyboardInterrupt:
                reason = "interrupted"
        return Outcome(reason, turn, time.monotonic() - began, self._pieces, why)

    def _begin(self, text: str) -> None:
        self._pieces.append([])
        self._say(text)

    def _say(self, text: str) -> None:
        self._add(self._pieces[-1], Message("user", text))

    def _add(self, piece: list[Message], message: Message) -> None:
        piece.append(message)
        if self.record is not None:
            self.record(message)

    def _ask(self, piece: list[Message]) -> Reply:
        reply = self.model.complete(piece, ())
        self._add(piece, reply.message)
        return reply

    def _ask_or_unwind(self, watched: Watched) -> Reply:
        """Ask for the next reply. If the context overflowed, drop turns from the end and summarise first."""
        try:
            return self._ask(self._pieces[-1])
        except EndpointError as error:
            if not error.too_long or len(self._pieces[-1]) < 3:
                raise
        kept = list(self._pieces[-1])
        most = min(self.context_tokens, self._size(kept)) - UNWIND_TO  # the server may count more, or allow less
        while len(kept) > 1 and self._size(kept) > most:
            del kept[-2:]
        self._summarise(kept[:-1] if kept[-1].role == "user" and len(kept) > 1 else kept, watched)
        return self._ask(self._pieces[-1])

    def _size(self, messages: Sequence[Message]) -> int:
        return sum(map(self.count, messages))

    def _make_room(self, watched: Watched) -> None:
        if len(self._pieces[-1]) > 2 and self.context_tokens - self._size(self._pieces[-1]) < SUMMARISE_BELOW:
            self._summarise(self._pieces[-1][:-1], watched)

    def _summarise(self, history: Sequence[Message], watched: Watched) -> None:
        """A new conversation from a summary, questions about it, and answers to them."""
        first = history[0]
        asked = [*history, Message("user", SUMMARY)]
        self._pieces.append(asked)
        summary = self._ask(asked).message.content
        screen = watched.new()
        other = [Message("user", QUESTIONS.format(task=self._task, summary=summary, screen=screen))]
        self._pieces.append(other)
        questions = self._ask(other).message.content
        answering = [*history, Message("user", ANSWERS.format(questions=questions))]
        self._pieces.append(answering)
        answers = self._ask(answering).message.content
        self._pieces.append([first, Message("assistant", summary), Message("user", f"{screen}\n\nAny questions?")])
        self._add(self._pieces[-1], Message("assistant", questions))
        self._say(GO_ON.format(answers=answers))


def trial_agent(model: Model, ended: Callable[[Outcome], None] = lambda _: None, **settings: Any) -> Agent:
    """A `TerminalAgent` with `settings` as the agent of trials (`TaskRoom.trial`), with the time, folder and variables
    of the task. `ended` gets its outcome. It raises EndpointError if the model's server fails."""

    def play(room: Room, task: TaskRoom) -> ExecResult | None:
        agent = TerminalAgent(model, room, seconds=task.agent_timeout_s, cwd=task.workdir, env=task.env, **settings)
        outcome = agent.run(task.folder.instruction)
        ended(outcome)
        if outcome.reason == "endpoint":
            raise EndpointError(outcome.why)
        if outcome.reason == "interrupted":
            raise KeyboardInterrupt
        return ExecResult(-9, b"", b"", "wall", outcome.seconds) if outcome.reason == "seconds" else None

    return play
