"""An episode with MCP servers: one room with a working folder, the servers in it, and the agent's calls."""

from __future__ import annotations

import contextlib
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import GradingError
from glm5.records import Message, Outcome, StepResult
from glm5.sandbox.container import open_environment
from glm5.sandbox.environment import RoomLimits
from glm5.tasks.contract import EvaluationProblem, ToolSpec
from glm5.tasks.mcp.client import ServerConfig, Servers

WORKSPACE = "/workspace"
LIMITS = RoomLimits(memory_mb=4096, processes=512, disk_mb=1024)
MOST_CALLS = 16
MOST_MALFORMED = 3


@dataclass(frozen=True)
class Setting:
    """What the episodes of a family have in common: the servers, folders of the machine that the room shows, and the
    limits of an episode, in messages and seconds."""

    servers: Sequence[ServerConfig]
    show: tuple[str, ...] = ()
    max_turns: int = 100
    seconds: float = 600.0
    thinking: bool = True


@dataclass(frozen=True)
class McpProblem(EvaluationProblem):
    """A task for an agent with MCP servers. `offered` are the tools that it gets, by their own or their full names; all
    if there are none. `files` is the folder that the working folder shows at first."""

    id: str
    key: str
    prompt: str
    setting: Setting
    system: str = ""
    offered: frozenset[str] = frozenset()
    files: Path | None = None
    domain: str = "mcp"
    tools: Sequence[ToolSpec] = ()

    @property
    def thinking(self) -> bool:
        return self.setting.thinking


class McpEnv(ABC):
    """One episode. The room and the servers start with `start`, and end with the verdict or with this object."""

    def __init__(self, problem: McpProblem) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source = problem
        self._turns = self._malformed = self._calls = self._failed = 0
        self._stack = contextlib.ExitStack()

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        """Raises GradingError if the room or a server does not start."""
        source = self._source
        trees: dict[str, Any] = {WORKSPACE: source.files or []}
        self.room = open_environment(trees, read_only=source.setting.show, limits=LIMITS)
        weakref.finalize(self, self._stack.close)  # an episode that is given up
        self._stack.enter_context(self.room)
        self._prepare()
        self._servers = self._stack.enter_context(Servers(self.room, source.setting.servers, WORKSPACE))
        self._due = time.monotonic() + source.setting.seconds
        tools = [
            tool.spec
            for name, tool in self._servers.tools.items()
            if not source.offered or source.offered & {name, tool.name}
        ]
        if source.offered and not tools:
            wanted = min(source.offered)
            raise GradingError(f"{self.problem}: the servers have none of its tools, such as {wanted:.80}.")
        system = [Message("system", source.system)] if source.system else []
        return [*system, Message("user", source.prompt)], tools, source.thinking

    def step(self, message: Message | None) -> StepResult:
        """Raises GradingError for a fault of the machine."""
        self._turns += 1
        if message is not None and not message.tool_calls:
            with self._ending():
                return self._answer(message.content)
        if message is None:
            self._malformed += 1
            texts = ["Error: these are no calls"]
        else:
            texts = [self._call(number, call) for number, call in enumerate(message.tool_calls)]
        if self._malformed >= MOST_MALFORMED:
            return self._end(Outcome.MALFORMED)
        if self._turns >= self._source.setting.max_turns or time.monotonic() > self._due:
            return self._end(Outcome.TRUNCATED)
        return StepResult(messages=tuple(Message("tool", text) for text in texts))

    def _call(self, number: int, call: Any) -> str:
        if number >= MOST_CALLS or time.monotonic() > self._due:
            return "Error: too many calls at once" if number >= MOST_CALLS else "Error: no time left"
        tool = self._servers.tools.get(call.name)
        if self._source.offered and tool is not None and not self._source.offered & {call.name, tool.name}:
            return f"Error: there is no tool {call.name}"
        text = self._servers.call(call)
        self._calls += 1
        self._failed += text.startswith("Error: ")
        return text

    def _prepare(self) -> None:
        """What happens in the room before the servers start: here nothing."""
        return

    @abstractmethod
    def _answer(self, text: str) -> StepResult:
        """The end of an episode with an answer."""

    def _end(self, outcome: Outcome, reward: float = 0.0, **detail: Any) -> StepResult:
        with self._ending():
            return StepResult(done=True, reward=reward, outcome=outcome, detail=self._counts() | detail)

    def _counts(self) -> dict[str, Any]:
        return {"turns": self._turns, "calls": self._calls, "failed_calls": self._failed}

    def close(self) -> None:
        """End an episode that is given up: its servers, the thread that speaks to them, and its room."""
        self._stack.close()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._stack.close()
