"""The model of `glm5 task build swe`: answers prompts, and adds features to packages as the coding agent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from glm5.agents.coding import Budget, CodingAgent, Settings, View
from glm5.agents.context import ContextPolicy
from glm5.agents.endpoint import Dialect, Endpoint, EndpointError, Reply
from glm5.agents.models import Measure, open_model
from glm5.agents.session_log import SessionLog, read_log
from glm5.agents.tools import SPECS
from glm5.agents.wire import OnDelta
from glm5.agents.workspace import ROOT
from glm5.errors import DataError, GradingError
from glm5.records import Message
from glm5.sandbox.environment import NamespaceEnvironment, RoomLimits
from glm5.sandbox.room import interpreter
from glm5.serve.keys import find_key
from glm5.tasks.swe.candidate import Repository
from glm5.tasks.swe.featadd import Session

BUDGET = Budget(turns=60, seconds=1800.0)
CONTEXT = ContextPolicy("keep-recent", keep=10)
LIMITS = RoomLimits(memory_mb=2048, disk_mb=512)
TEST_COMMAND = "python3 -m pytest -q -o addopts= -p no:cacheprovider"


@dataclass(frozen=True)
class TaskModel:
    """A model that is reachable. Sessions may be played side by side."""

    endpoint: Endpoint
    measure: Measure
    model: str
    dialect: Dialect = "openai"
    budget: Budget = BUDGET

    def ask(self, prompt: str) -> str:
        """One answer to a prompt; "" if the prompt is too long. Raises GradingError if the model fails."""
        try:
            return self.endpoint.complete([Message("user", prompt)], []).message.content or ""
        except EndpointError as error:
            if error.too_long:
                return ""
            raise GradingError(str(error)) from error

    def play(self, repository: Repository, request: str, log: Path, stopping: Callable[[], bool]) -> Session | None:
        """See `glm5.tasks.swe.featadd.Play`. A log that cannot be read is begun anew."""
        try:
            resume = bool(read_log(log)[0])
        except DataError:
            log.unlink(missing_ok=True)
            resume = False
        site = [os.path.abspath(folder) for folder in repository.site]
        roots = [os.path.normpath(f"{ROOT}/{path}") for path in repository.paths]
        folders = [os.path.dirname(interpreter()), "/usr/local/bin", "/usr/bin", "/bin"]
        env = {"PATH": ":".join(folders), "PYTHONPATH": ":".join([*roots, *site]), "PYTHONDONTWRITEBYTECODE": "1"}
        settings = Settings(
            request, str(repository.root.resolve()), self.model, self.dialect, CONTEXT, self.budget, TEST_COMMAND
        )
        watched, view = _Watched(self.endpoint), _Stoppable(stopping)
        with (
            SessionLog(log, resume=resume) as opened,
            NamespaceEnvironment({ROOT: repository.root}, read_only=site, limits=LIMITS) as room,
        ):
            count, overhead = self.measure.count, self.measure.overhead
            outcome = CodingAgent(settings, watched, room, opened, view, count, overhead, env).run()
        if outcome.reason == "interrupted":
            return None
        if outcome.reason == "endpoint" and not watched.too_long:
            raise GradingError(outcome.summary)
        files = {path: file.data for path, file in outcome.changes.files.items()}
        return Session(files, tuple(outcome.changes.left_out), "" if outcome.ok else outcome.reason)


@dataclass
class _Watched:
    """Remembers whether a prompt was too long: the same request then fails again."""

    endpoint: Endpoint
    too_long: bool = False

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], on_delta: OnDelta | None = None
    ) -> Reply:
        try:
            return self.endpoint.complete(messages, tools, on_delta)
        except EndpointError as error:
            self.too_long = error.too_long
            raise


@dataclass
class _Stoppable(View):
    """Stops a session when the build stops."""

    stopping: Callable[[], bool]

    def delta(self, kind: str, text: str) -> None:
        if self.stopping():
            raise KeyboardInterrupt

    def output(self, stream: str, data: bytes) -> None:
        self.delta("", "")


@contextlib.contextmanager
def open_task_model(model: str, name: str, dialect: str, key_file: Path | None) -> Iterator[TaskModel]:
    """The model behind a URL or of a checkpoint directory. Raises UsageError, CheckpointError."""
    key, spoken = find_key("api", None, key_file), cast(Dialect, dialect)
    with open_model(model, name, spoken, key, tools=SPECS) as (endpoint, measure):
        yield TaskModel(endpoint, measure, model, spoken)
