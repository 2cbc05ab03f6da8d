"""The family `frontend`: a model builds a web page in a room; a judge with a browser checks it item by item (§6.2).

A problem ends with the project's build. Whether its check-items hold is decided afterwards (`glm5.eval.cc_bench`).
"""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import Env, Message, Outcome, StepResult
from glm5.sandbox.cancel import due_in
from glm5.sandbox.dockerfile_build import BuildError, File
from glm5.sandbox.environment import RoomFileError
from glm5.tasks.cc_bench import page_seeds, page_seeds_data, page_seeds_show  # noqa: F401 - they register the seeds
from glm5.tasks.cc_bench.checks import PAGES, FrontendTask, frontend_task
from glm5.tasks.cc_bench.kinds import Kind, find_kind
from glm5.tasks.cc_bench.project import APP, MOST_PACKED, build_project, files_of_answer
from glm5.tasks.contract import EvaluationProblem, Family
from glm5.tasks.harbor.family import ROOMS, TOOLS, VERDICT_SHARE, RoomEnv, RoomProblem
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.harbor.schema import Environment, TaskConfig, Verifier
from glm5.tasks.judged import WAITING

NUMBERS = 4
"""Tasks of each seed."""
RULES = """\

The project lies in {app}: {about}. It works without a network: nothing is loaded from elsewhere, and no package is
installed. All files together, and what is built, are smaller than {most} KiB when they are compressed. Roles and names
in this text are those of the accessibility tree; texts are exactly as given."""
ANSWER = """\

Answer with all files that you write. Each is a fenced block, and its path stands on the line of the opening fence:

```html index.html
...
```"""
AGENT = "\nWork with your tools. When the project is done, answer without a call."


@dataclass(frozen=True)
class FrontendProblem(EvaluationProblem, RoomProblem):
    """`checks` names the check-items by their numbers; `glm5.eval.cc_bench` decides them."""

    task: FrontendTask = None  # type: ignore[assignment]
    kind: Kind = None  # type: ignore[assignment]

    @functools.cached_property
    def folder(self) -> TaskFolder:
        """A task folder in memory; its verifier is the judge."""
        environment = {f"files/{name}": File(text.encode()) for name, text in self.kind.starter.items()}
        base = "node:20" if self.kind.build else "debian:bookworm"
        copy = f"COPY files/ {APP}/\n" if environment else ""
        environment["Dockerfile"] = File(f"FROM {base}\nWORKDIR {APP}\n{copy}".encode())
        limits = Environment(memory_mb=self.kind.memory_mb, storage_mb=512, network_mode="no-network", workdir=APP)
        config = TaskConfig(schema_version="1.4", environment=limits, verifier=Verifier())
        trees = {f"{posixpath.dirname(APP)}/node_modules": self.path / "node_modules"} if self.kind.build else {}
        return TaskFolder(self.id, config, self.prompt, environment, {}, {}, {}, trees=trees)

    @property
    def prompt(self) -> str:
        rules = RULES.format(app=APP, about=self.kind.about, most=MOST_PACKED >> 10)
        return self.task.statement + "\n" + rules + "\n" + (AGENT if self.tools else ANSWER)

    @property
    def needs_judge(self) -> bool:
        return True

    @property
    def checks(self) -> tuple[str, ...]:
        return tuple(str(number) for number in range(1, len(self.task.items) + 1))

    def env(self) -> Env:
        return FrontendEnv(self)


class FrontendEnv(RoomEnv):
    """An episode that ends with a build. The result's detail has the packed project, for the judge."""

    _source: FrontendProblem

    def step(self, message: Message | None) -> StepResult:
        if message is not None and not message.tool_calls and (files := files_of_answer(message.content)):
            try:
                with ROOMS:
                    self._open().room.upload({f"{APP}/{path}": text.encode() for path, text in files.items()})
            except RoomFileError:  # a path that cannot be written: then it is missing
                pass
            except BuildError as error:
                raise GradingError(f"{self.problem} cannot be built here: {error}") from error
        return super().step(message)

    def _judge(self) -> StepResult:
        until = due_in(VERDICT_SHARE)
        room = self._open()
        room.room.due = until
        project = build_project(room.room, self._source.kind)
        detail = {"built": project.built, "log": project.log}
        if not project.built:
            return self._end(Outcome.FAILED, 0.0, detail)
        return self._end(Outcome.ENV_ERROR, 0.0, {**detail, "project": project.packed(), **WAITING})


class FrontendFamily(Family):
    """Frontend tasks of one `kind` (see `KINDS`); all are held out.

    Without `tools` the model answers once, with all files. `packages` is a folder with the npm packages of the
    frameworks. The other options are those of "terminal". Raises ConfigError for an unusable option.
    """

    name = domain = "frontend"

    def __init__(
        self,
        seed: int = 0,
        *,
        kind: str = "html",
        packages: str = "",
        tools: Sequence[str] = ("bash", "edit"),
        max_turns: int = 60,
        most_output: int = 8000,
        command_s: float = 120.0,
        thinking: bool = True,
    ) -> None:
        if isinstance(tools, str) or any(tool not in TOOLS for tool in tools):
            raise ConfigError(f"families: frontend: tools is a list of {', '.join(TOOLS)}, or empty.")
        found = find_kind(kind, packages)
        names = [(name, number) for number in range(NUMBERS) for name in sorted(PAGES)]
        options = (
            Path(packages).absolute(),
            tuple(TOOLS[name] for name in tools),
            thinking,
            max_turns,
            most_output,
            command_s,
        )
        self._problems = [
            FrontendProblem(f"frontend/{kind}/{name}-{number}", f"{kind}/{name}-{number}", "frontend", *options,
                            task=frontend_task(name, number), kind=found)
            for name, number in names
        ]  # fmt: skip
        self._problems = [replace(one, key=f"{one.key} {one.task.digest()[:16]}") for one in self._problems]
        self.size = len(self._problems)

    def problem(self, split: str, index: int) -> FrontendProblem:
        """Task `index`, modulo their number. Raises DataError for another split than "heldout"."""
        if split != "heldout":
            raise DataError("frontend: these tasks are for evaluation; no task is for another split.")
        return self._problems[index % self.size]
