"""The families "swe" and "terminal": Harbor tasks that the policy plays with tools, in a room of its own per episode.

Tools: `bash` runs a line in the task's working folder; `edit` replaces a text that occurs once in a file. An answer
without calls ends the work. Then the task's own verifier judges what is there, in a verifier room (§4.2). What the
policy does to its room is its own result; only faults of the machine are environment errors.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError, GradingError
from glm5.files import sha256_file
from glm5.records import Env, Message, Outcome, StepResult, ToolCall
from glm5.sandbox.cancel import due_in
from glm5.sandbox.dockerfile_build import BuildError
from glm5.sandbox.environment import ExecResult, RoomFileError
from glm5.tasks.contract import SPLITS, Family, ToolSpec, function_tool
from glm5.tasks.harbor import swe
from glm5.tasks.harbor.changes import FolderDiff
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.harbor.trial import TaskRoom, TrialResult
from glm5.tasks.tools.python_tool import cut

TOOLS: dict[str, ToolSpec] = {
    "bash": function_tool("bash", "command"),
    "edit": function_tool("edit", "path", "old", "new"),
}
MOST_ARGUMENT = 65_536
"""Bytes of a call's argument."""
MOST_FILE = 1 << 20
"""Bytes of a file that `edit` changes."""
MOST_CALLS = 4
MOST_MALFORMED = 3
MOST_SHOWN = 65_536
MOST_DIFF = 20_000
"""Characters of all diffs of an episode."""
COMMANDS_SHARE, VERDICT_SHARE = 0.5, 0.8
"""Shares of an environment's time for the commands of a message, and for the verdict. What takes longer is stopped, and
is the policy's result: it could make the environment time out to escape a verdict."""
DERIVED = re.compile(r"-(write-test|pick)$")
"""At the end of the name of a task that another one has given: it shows the solution, so both are held out or none."""
ROOMS = threading.BoundedSemaphore(16)
"""Rooms that do something at a time, over all episodes."""


@dataclass(frozen=True)
class RoomProblem:
    """One Harbor task. `max_turns` counts assistant messages, `most_output` characters of a tool's answer, `command_s`
    seconds of a command. `judged` gives the verdict on a room."""

    id: str
    key: str
    domain: str
    path: Path
    tools: Sequence[ToolSpec]
    thinking: bool
    max_turns: int
    most_output: int
    command_s: float
    judged: Callable[[TaskRoom], TrialResult] = TaskRoom.judge

    @functools.cached_property
    def folder(self) -> TaskFolder:
        """Read when it is needed: those who count tasks do not. Raises DataError for an unusable one."""
        return TaskFolder.read(self.path)

    @property
    def prompt(self) -> str:
        return self.folder.instruction

    @property
    def grading(self) -> Any:
        """What grades the answers: the files of the tests, as hashes, and the configuration."""
        files = [self.path / "task.toml", *(self.path / "tests").rglob("*")]
        return sorted((str(f.relative_to(self.path)), sha256_file(f)) for f in files if f.is_file())

    def env(self) -> Env:
        return RoomEnv(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """The task's own solution as one call of `bash`, if it is a single script. Raises DataError otherwise."""
        files = self.folder.solution
        if set(files) != {"solve.sh"} or not any(tool is TOOLS["bash"] for tool in self.tools):
            raise DataError(f"{self.id}: its solution is not one script, so there is no demonstration.")
        reasoning = "run the solution" if self.thinking else None
        call = ToolCall("bash", {"command": files["solve.sh"].data.decode("utf-8", "replace")})
        done = Message("assistant", "done", reasoning="it is done" if self.thinking else None)
        start = Message("user", self.prompt)
        return [
            start,
            Message("assistant", reasoning=reasoning, tool_calls=(call,)),
            Message("tool", "[no output]"),
            done,
        ]


class RoomEnv:
    """An episode. Its room opens with the first call, and ends with the verdict or with this object. `diffs` of the
    result's detail are the changes in the working folder after each message with calls."""

    def __init__(self, problem: RoomProblem) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source = problem
        self._turns = self._malformed = self._calls = 0
        self._room: TaskRoom | None = None
        self._changes: FolderDiff | None = None
        self._diffs = list[str]()

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return (Message("user", self._source.prompt),), self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        """Run the calls of a message; a message without calls is the end of the work. Raises GradingError for a fault
        of the machine."""
        self._turns += 1
        try:
            with ROOMS:
                if message is not None and not message.tool_calls:
                    return self._judge()
                texts, bad = self._observe(message)
                new = self._changes.new() if self._changes is not None else ""
        except BuildError as error:
            raise GradingError(f"{self.problem} cannot be built here: {error}") from error
        except BaseException:
            self._stop()
            raise
        self._diffs.append(cut(new, max(20, MOST_DIFF - sum(map(len, self._diffs)))))
        self._malformed += bad
        if self._malformed >= MOST_MALFORMED:
            return self._end(Outcome.MALFORMED)
        if self._turns >= self._source.max_turns:
            return self._end(Outcome.TRUNCATED)
        return StepResult(messages=tuple(Message("tool", text) for text in texts))

    def _open(self) -> TaskRoom:
        if self._room is None:
            self._room = TaskRoom(self._source.folder, agent_timeout_s=self._source.command_s)
            weakref.finalize(self, self._room.room.stop)  # an episode that is given up
            self._room.__enter__()
            self._changes = FolderDiff(self._room.room, self._room.workdir)
        return self._room

    def _observe(self, message: Message | None) -> tuple[list[str], bool]:
        if message is None:
            return ["error: bad call"], True
        texts, bad, due = [], False, time.monotonic() + self._source.command_s
        until = due_in(COMMANDS_SHARE)
        for number, call in enumerate(message.tool_calls):
            problem = "too many calls at once" if number >= MOST_CALLS else self._misuse(call)
            bad |= problem is not None
            if problem is None and time.monotonic() > due:
                problem = "no time left"
            if problem is not None:
                texts.append(f"error: {problem}")
                continue
            self._calls += 1
            if call.name == "bash":
                room = self._open()
                room.room.due = until
                texts.append(observation(room.execute(room.room, call.arguments["command"]), self._source.most_output))
            else:
                texts.append(self._edit(**call.arguments))
        return texts, bad

    def _misuse(self, call: ToolCall) -> str | None:
        """What is wrong with a call, or None."""
        tool = next((tool for tool in self._source.tools if tool["function"]["name"] == call.name), None)
        if tool is None:
            return "no such tool"
        if set(call.arguments) != set(tool["function"]["parameters"]["properties"]):
            return "bad arguments"
        for name, value in call.arguments.items():
            if not isinstance(value, str) or "\0" in value or len(value.encode("utf-8", "replace")) > MOST_ARGUMENT:
                return f"{name}: a short text"
            if value.encode("utf-8", "ignore").decode() != value:
                return f"{name}: not text"
        return None

    def _edit(self, path: str, old: str, new: str) -> str:
        room = self._open()
        place = posixpath.normpath(posixpath.join(room.workdir, path))
        try:
            text = room.room.download(place, MOST_FILE).decode("utf-8", "surrogateescape")
        except RoomFileError as error:
            return f"error: {error}"
        if text.count(old) != 1 or not old:
            return f"error: the old text occurs {text.count(old) if old else 0} times in {path}"
        data = text.replace(old, new).encode("utf-8", "surrogateescape")
        try:
            found = (e.mode for e in room.room.files.entries(posixpath.dirname(place)) if e.path == place)
            room.room.upload({place: data}, {place: next(found, 0o644)})
        except RoomFileError as error:  # a full disk, a folder of the system
            return f"error: {error}"
        return "[edited]"

    def _judge(self) -> StepResult:
        until = due_in(VERDICT_SHARE)
        room = self._open()
        room.room.due = until
        result = self._source.judged(room)
        if result.reward is None:
            raise GradingError(f"{self.problem}: {result.error}: {result.message}")
        reward = min(max(result.reward, 0.0), 1.0)
        detail = {"rewards": dict(result.rewards)} | ({"error": result.error} if result.error else {})
        return self._end(Outcome.SOLVED if reward == 1.0 else Outcome.FAILED, reward, detail)

    def _end(self, outcome: Outcome, reward: float = 0.0, detail: dict[str, Any] | None = None) -> StepResult:
        self._stop()
        found = {"calls": self._calls, "malformed": self._malformed, **(detail or {}), "diffs": self._diffs}
        return StepResult(done=True, reward=reward, outcome=outcome, detail=found)

    def _stop(self) -> None:
        if self._room is not None:
            self._room.room.stop()


def observation(done: ExecResult, most: int) -> str:
    """What the policy sees of a command: its output, then its errors, and how it ended; the middle is left out."""
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    if done.stopped is not None:
        text += f"[stopped: {done.stopped}]"
    elif done.exit_code:
        text += f"[exit code {done.exit_code}]"
    return cut(text or "[no output]", most)


class RoomFamily(Family):
    """The Harbor tasks below `folder`, each a folder with a task.toml.

    `tools` is "bash", "edit" or both; `held_out` the share of tasks that are only for evaluation; the others are for
    demonstrations and rollouts. `command_s` limits a command, `max_turns` the assistant messages, `most_output` the
    characters of a tool's answer. Raises ConfigError for an unusable option, DataError for an unusable task.
    """

    name = domain = "terminal"

    def __init__(
        self,
        seed: int = 0,
        *,
        folder: str = "",
        tools: Sequence[str] = ("bash", "edit"),
        held_out: float = 0.2,
        max_turns: int = 20,
        most_output: int = 4000,
        command_s: float = 30.0,
        thinking: bool = True,
    ) -> None:
        if not folder or not Path(folder).is_dir():
            raise ConfigError(
                f'families: "{self.name}" needs options = {{ folder = "DIR" }}, a folder of Harbor tasks.'
            )
        if not tools or isinstance(tools, str) or any(tool not in TOOLS for tool in tools):
            raise ConfigError(f'families: "{self.name}": tools is a list of {", ".join(TOOLS)}.')
        if not 0 <= held_out <= 1 or max_turns < 1 or not 100 <= most_output <= MOST_SHOWN or not command_s > 0:
            raise ConfigError(
                f'families: "{self.name}": held_out is 0 to 1, max_turns at least 1, command_s '
                f"above 0, most_output 100 to {MOST_SHOWN}."
            )
        self._options = (tuple(TOOLS[name] for name in tools), thinking, max_turns, most_output, command_s)
        paths = sorted(path.parent for path in Path(folder).glob("**/task.toml"))
        random.Random(f"{self.name} {seed}").shuffle(paths)
        self._paths: dict[str, list[Path]] = {"rl": [], "heldout": []}
        for path in paths:
            self._paths["heldout" if _share(DERIVED.sub("", path.name)) < held_out else "rl"].append(path)
        if not paths:
            raise DataError(f"{self.name}: there is no task.toml below {folder}.")

    def problem(self, split: str, index: int) -> RoomProblem:
        """Task `index`, modulo the number of tasks. "heldout" has the share `held_out`, the other splits the rest."""
        if split not in SPLITS:
            raise ConfigError(f'unknown split "{split}"; use one of {", ".join(SPLITS)}.')
        paths = self._paths["heldout" if split == "heldout" else "rl"]
        if not paths:
            raise DataError(f"{self.name}: no task is for the split {split}; change `held_out`.")
        path = paths[index % len(paths)]
        return RoomProblem(f"{self.name}/{path.name}", path.name, self.domain, path, *self._options, self._judged)

    _judged: Callable[[TaskRoom], TrialResult] = staticmethod(TaskRoom.judge)


class SweFamily(RoomFamily):
    """Tasks from repositories (`glm5 task build swe`), or any Harbor tasks. Options as of "terminal"."""

    name = domain = "swe"

    _judged = staticmethod(swe.judge)


def _share(name: str) -> float:
    return int.from_bytes(hashlib.sha256(f"held out {name}".encode()).digest()[:8], "big") / 2**64
