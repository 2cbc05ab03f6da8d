"""A domain of dialogues: a folder with a policy, a database, tools and tasks; and its tools at work in a room.

The folder has tau2-bench's `policy.md`, `db.json` (or `db.toml`) and `tasks.json`, and `tools.py`, with `user_tools.py`
for tools of the user (see `domain_server`). The code may come from anywhere, so it runs in a room without a network.
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import DataError, GradingError
from glm5.records import ToolCall
from glm5.sandbox.container import open_environment
from glm5.sandbox.environment import NamespaceEnvironment, RoomLimits
from glm5.sandbox.room import interpreter
from glm5.sandbox.room_pipes import Pipes
from glm5.tasks.contract import ToolSpec

HERE = "/domain"
SECONDS = 30.0
"""Of one call, the start of Python included."""
LIMITS = RoomLimits(memory_mb=1024, processes=32, disk_mb=64, output_kb=64)
MOST_RESULT = 20_000
"""Characters of a tool's result that the agent sees."""
SERVER = Path(__file__).with_name("domain_server.py")


@dataclass(frozen=True)
class Domain:
    """A domain as its folder has it."""

    name: str
    folder: Path
    policy: str
    database: str
    """As JSON."""
    tasks: Sequence[Mapping[str, Any]]


@functools.lru_cache(maxsize=16)
def read_domain(folder: Path, tasks: str, stamp: tuple[int, ...]) -> Domain:
    """Raises DataError for a folder that is no domain."""
    try:
        policy = (folder / "policy.md").read_text(encoding="utf-8")
        toml = folder / "db.toml"
        database = (
            json.dumps(tomllib.loads(toml.read_text(encoding="utf-8")))
            if toml.is_file()
            else json.dumps(json.loads((folder / "db.json").read_bytes()))
        )
        rows = json.loads((folder / tasks).read_bytes())
    except OSError as error:
        name = Path(str(error.filename)).name
        raise DataError(f"{folder} is no domain of dialogues: {name}: {error.strerror}.") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{folder} is no domain of dialogues: {error!s:.200}.") from None
    if not (folder / "tools.py").is_file():
        raise DataError(f"{folder} has no tools.py with the functions of the domain (docs/evaluation.md).")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{folder / tasks} is not a list of tasks.")
    return Domain(folder.name, folder, policy, database, rows)


class World:
    """The tools of a domain in a room, over a database of its own for each `open`. `with` starts and stops it."""

    def __init__(self, domain: Domain) -> None:
        self._domain, self._room = domain, open_environment({HERE: domain.folder}, limits=LIMITS)
        self._open: list[State] = []

    @property
    def room(self) -> NamespaceEnvironment:
        return self._room

    def __enter__(self) -> World:
        self._room.start()
        files = {"/tmp/domain_server.py": SERVER.read_bytes(), "/tmp/db.json": self._domain.database.encode()}
        self._room.upload(files)
        return self

    def __exit__(self, *_: object) -> None:
        for state in self._open:
            state.pipes.close()
        self._open.clear()
        self._room.stop()

    def open(self, task: Mapping[str, Any]) -> State:
        """The tools over the database in which a task begins. Raises GradingError if its set-up fails."""
        program = "import sys, json; sys.path.insert(0, '/tmp'); import domain_server; "
        program += f"domain_server.main({HERE!r}, json.load(open('/tmp/db.json')))"
        state = State(Pipes(self._room, [interpreter(), "-I", "-B", "-c", program], HERE))
        self._open.append(state)
        begin = task.get("initial_state") or {}
        for data in (begin.get("initialization_data") or {}).values():
            if data:
                state.order(do="merge", data=data)
        for action in begin.get("initialization_actions") or ():
            name, side = str(action.get("func_name")), str(action.get("env_type", "assistant"))
            done = state.perform(side, name, action.get("arguments") or {})
            if not done["ok"]:
                raise GradingError(f"{self._domain.folder}: the set-up {name} failed: {done['value']!s:.200}.")
        return state


@dataclass
class State:
    """One database and the tools that change it."""

    pipes: Pipes

    def order(self, **order: Any) -> Any:
        """Raises GradingError if the program does not answer in time, or not in JSON."""
        self.pipes.write(json.dumps(order).encode(), SECONDS)
        try:
            return json.loads(self.pipes.read(SECONDS))
        except ValueError as error:
            raise GradingError("a domain's tools answered something that is not JSON.") from error

    def tools(self, side: str) -> list[ToolSpec]:
        return list(self.order(do="tools")[side])

    def perform(self, side: str, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call any function, as tasks do: "ok" and "value" of it."""
        return self.order(do="perform", side=side, name=name, arguments=dict(arguments))

    def call(self, side: str, call: ToolCall) -> str:
        """What the tool answers; its failures begin with "Error: "."""
        done = self.order(do="call", side=side, name=call.name, arguments=dict(call.arguments))
        value = done["value"]
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text[:MOST_RESULT] if done["ok"] else f"Error: {text[:MOST_RESULT]}"

    def digest(self) -> str:
        """A hash of the database: equal for equal ones; "" if it cannot be written as JSON."""
        return str(self.order(do="digest"))
