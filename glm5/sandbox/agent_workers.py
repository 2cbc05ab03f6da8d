"""Runs an agent that is a Python function many times, and imports it once per worker.

A worker is a room (`agent_room.py`) with a process that has imported the agent. For every rollout this process forks a
child, which finds an empty `/tmp` and a working folder with its task's files. A worker has one rollout at a time; after
each, its processes are ended and its files are removed. A worker that died, that could not be cleared, or that had its
number of rollouts is replaced. A rollout can neither read nor write the process that is forked for the next one; if it
kills that process, this rollout has failed and the worker is replaced.

Each rollout has pipes of its own for stdout, stderr and its result. Descriptors that the import left open lead to
/dev/null in a rollout, but for files and devices that are read-only in the room: an agent opens its connections, event
loops and log files in its function. Not cut off is memory that the import itself shares between processes: file
mappings, and `multiprocessing`'s locks and values. `rollouts=1` gives every rollout a room and an import of its own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from glm5.sandbox.agent_request import WORKER, Task, base_environment
from glm5.sandbox.agent_result import AgentRun, Stale
from glm5.sandbox.agent_room import AGENT_LIMITS, AgentRoom
from glm5.sandbox.cancel import CancelToken
from glm5.sandbox.forward import Address
from glm5.sandbox.room import Limits, interpreter

SOURCE = Path(__file__).with_name("agent_worker.py")
IMPORT_S = 120.0
"""Time limit to build a room and import the agent."""


class AgentWorkers:
    """Runs `agent`, "module:function". The function is called as `function(base_url, api_key, task)` in a process of
    its own; it returns None or a str. Environment and limits are those of `agent_room.run_agent`, per rollout;
    `memory_mb` includes what the agent imports.

    Thread-safe: each thread that calls `run` has a worker of its own meanwhile. At most `idle` workers wait for the
    next call, and none has more than `rollouts`. `path` are folders to import from; they are shown read-only, as are
    the paths of `read_only`. `python` is the interpreter, by default ours without its virtual environment; that of
    another environment needs this environment in `read_only`. `env` holds for the import and for every rollout.
    """

    def __init__(
        self,
        agent: str,
        *,
        gateway_socket: Address,
        path: Sequence[str | Path] = (),
        read_only: Sequence[str | Path] = (),
        python: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        limits: Limits = AGENT_LIMITS,
        idle: int = 2,
        rollouts: int = 100,
    ) -> None:
        folders = [str(Path(folder).absolute()) for folder in path]
        self._command = [str(python or interpreter()), "-B", WORKER, agent, json.dumps(folders)]
        self._gateway, self._limits, self._shown = gateway_socket, limits, [*read_only, *folders]
        self._env, self._idle, self._rollouts = dict(env or {}), idle, rollouts
        self._free: list[tuple[AgentRoom, int]] = []  # with the number of its rollouts
        self._lock, self._closed = threading.Lock(), False

    def run(
        self,
        files: Mapping[str, str | bytes],
        *,
        base_path: str,
        api_key: str,
        task: object = None,
        env: Mapping[str, str] | None = None,
        token: CancelToken | None = None,
    ) -> AgentRun:
        """Run the agent once and wait for its end. `task` is JSON. An exception in the agent is exit code 1, with its
        traceback in `stderr`.

        Raises:
            GradingError: as `run_agent`; the agent cannot be imported; or the token was cancelled.
        """
        job = Task(base_path, api_key, files, self._env | dict(env or {}), task)
        while True:
            with self._lock:
                room, played = self._free.pop() if self._free else (None, 0)
            if room is None:
                room = self._new_room(token)
            try:
                return room.play(job, token)
            except Stale:
                if not played:
                    raise
            finally:
                self._give_back(room, played + 1)

    def start(self) -> None:
        """Have a worker ready. Raises GradingError if it cannot be built, or the agent cannot be imported."""
        self._give_back(self._new_room(None), 0)

    def _new_room(self, token: CancelToken | None) -> AgentRoom:
        return AgentRoom(
            self._command,
            self._gateway,
            self._limits,
            self._shown,
            texts={WORKER: SOURCE.read_text(encoding="utf-8")},
            worker_env=base_environment() | self._env,
            token=token,
            import_s=IMPORT_S,
        )

    def _give_back(self, room: AgentRoom, played: int) -> None:
        with self._lock:
            keep = not (self._closed or room.spent) and played < self._rollouts and len(self._free) < self._idle
            if keep:
                self._free.append((room, played))
        if not keep:
            room.stop()

    def close(self) -> None:
        """End the waiting workers; those at work end with their rollouts."""
        with self._lock:
            self._closed, rooms, self._free = True, self._free, []
        for room, _ in rooms:
            room.stop()

    def __enter__(self) -> AgentWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
