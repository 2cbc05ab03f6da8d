"""The family `chained`: tasks in one repository, one after another; what one breaks, later ones suffer (§6.2, B.4).

After each task the tests of all tasks so far are run on what the model left. Its changes are committed, the files that
belong to no task are laid in as they are after the next one, and the next task is given. No task is ever repaired.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import Env, Message, Outcome, StepResult
from glm5.sandbox.cancel import due_in
from glm5.sandbox.dockerfile_build import BuildError
from glm5.sandbox.environment import NamespaceEnvironment, RoomFileError
from glm5.tasks.cc_bench.chain_build import read_chain
from glm5.tasks.contract import EvaluationProblem, Family
from glm5.tasks.harbor.family import ROOMS, TOOLS, VERDICT_SHARE, RoomEnv, RoomProblem
from glm5.tasks.harbor.folder import File, TaskFolder, test_dependencies
from glm5.tasks.harbor.schema import Environment, TaskConfig
from glm5.tasks.harbor.trial import TaskRoom
from glm5.tasks.swe.driver import APP
from glm5.tasks.swe.folder import SITE
from glm5.tasks.swe.grading import grade

COMMIT = "git add -A && git commit -qm 'Task {number}' --allow-empty"
START = f"git init -q && {COMMIT.format(number=0)}"
RULES = """

You work in {app} with your tools. Do not change the tests. When this task is done, answer without a call; {then}."""
NEXT = "The next task builds on what you have done.\n\n"


@dataclass(frozen=True)
class ChainProblem(EvaluationProblem, RoomProblem):
    """A chain; `path` is its folder. `max_turns` counts the messages of each task. `checks` are its tasks."""

    chain: Any = field(default_factory=dict)

    @functools.cached_property
    def folder(self) -> TaskFolder:
        repo = {f"repo/{name}": file for name, file in _files(self.path / "repo").items()}
        roots = [APP if one == "." else f"{APP}/{one}" for one in self.chain["paths"]]
        env = f"ENV PYTHONPATH={':'.join([*roots, SITE])} PYTHONDONTWRITEBYTECODE=1"
        docker = f"FROM python:3.11\nCOPY repo {APP}\nWORKDIR {APP}\n{env}\n"
        limits = Environment(memory_mb=2048, storage_mb=1024, network_mode="no-network", workdir=APP)
        config = TaskConfig(schema_version="1.4", environment=limits)
        environment = {**repo, "Dockerfile": File(docker.encode())}
        tests = self.tests(1)
        trees = test_dependencies(self.path, tests)
        return TaskFolder(self.id, config, self.prompt, environment, tests, {}, {}, trees=trees)

    def tests(self, number: int) -> dict[str, File]:
        """The files of the tests of a task, which are also those of all before."""
        return _files(self.path / "steps" / str(number) / "tests")

    def laid(self, number: int, part: str) -> tuple[dict[str, bytes], list[str]]:
        """The files of a task's part "golden" or "auto" by their paths in the room, and the paths that are gone."""
        files = _files(self.path / "steps" / str(number) / part)
        gone = self.chain["tasks"][number - 1]["gone" if part == "golden" else "auto_gone"]
        return {f"{APP}/{name}": file.data for name, file in files.items()}, [f"{APP}/{name}" for name in gone]

    @property
    def checks(self) -> tuple[str, ...]:
        return tuple(str(number) for number in range(1, len(self.chain["tasks"]) + 1))

    @property
    def prompt(self) -> str:
        return self.statement(1)

    def statement(self, number: int) -> str:
        last = number == len(self.chain["tasks"])
        then = "that ends the work" if last else "then the next task comes"
        return str(self.chain["tasks"][number - 1]["statement"]) + RULES.format(app=APP, then=then)

    def env(self) -> Env:
        return ChainEnv(self)


class ChainEnv(RoomEnv):
    """An episode over all tasks of a chain."""

    _source: ChainProblem

    def __init__(self, problem: ChainProblem) -> None:
        super().__init__(problem)
        self._now, self._found = 1, dict[str, str]()
        self._until: float | None = None

    def _open(self) -> TaskRoom:
        if self._room is None:
            room = super()._open()
            lay(room.room, *self._source.laid(1, "auto"))
            room.execute(room.room, START)
        return super()._open()

    def step(self, message: Message | None) -> StepResult:
        """Run the calls of a message; one without calls, or the last that the task may have, ends the task."""
        over = self._turns + 1 >= self._source.max_turns
        if message is not None and message.tool_calls and over:
            self._until = due_in(VERDICT_SHARE)  # before the calls take their part, whose end must not be the limit's
            try:
                with ROOMS:
                    texts, _ = self._observe(message)
                    result = self._judge()
                results = tuple(Message("tool", text) for text in texts)
                return result if result.done else replace(result, messages=(*results, *result.messages))
            except BuildError as error:
                raise GradingError(f"{self.problem} cannot be built here: {error}") from error
        return super().step(message)

    def _judge(self) -> StepResult:
        until, self._until = self._until or due_in(VERDICT_SHARE), None
        room, number = self._open(), self._now
        room.room.due = until
        self._found[str(number)] = "pass" if solved(room, self._source, number) else "fail"
        if number == len(self._source.checks):
            return self._end(Outcome.FAILED if "fail" in self._found.values() else Outcome.SOLVED)
        room.execute(room.room, COMMIT.format(number=number))
        lay(room.room, *self._source.laid(number + 1, "auto"))
        room.execute(room.room, COMMIT.format(number=f"{number + 1}, given files"))
        self._now, self._turns, self._malformed = number + 1, 0, 0
        return StepResult(messages=(Message("user", NEXT + self._source.statement(self._now)),))

    def _end(self, outcome: Outcome, reward: float = 0.0, detail: dict[str, Any] | None = None) -> StepResult:
        """However the episode ends, the reward is the share of tasks that are solved."""
        share = list(self._found.values()).count("pass") / len(self._source.checks)
        return super()._end(outcome, share, {**(detail or {}), "checks": dict(self._found)})


def lay(room: NamespaceEnvironment, files: dict[str, bytes], gone: Sequence[str]) -> None:
    """Lay files over those of a room, and remove others. What the model put in their way stays."""
    for path, data in files.items():
        try:
            room.upload({path: data})
        except RoomFileError:
            continue
    if gone:
        room.exec(["/bin/rm", "-f", "--", *gone])


def solved(room: TaskRoom, problem: ChainProblem, number: int) -> bool:
    """Whether all tests of the tasks up to this one pass on the room's files, which stay as they are."""
    tests = {name: file.data for name, file in problem.tests(number).items()}
    try:
        verdict = grade(room.room, tests, [SITE] if room.folder.trees else [], prepare=room.restore_startup)
    except RoomFileError:  # what the model left keeps the tests out
        return False
    return bool(verdict["reward"] == 1.0)


def replay(problem: ChainProblem, golden: bool) -> list[bool]:
    """Which tasks are solved if each one's own files are laid in, or nothing is done. Raises what `TaskRoom` raises."""
    found = list[bool]()
    with TaskRoom(problem.folder) as room:
        for number in range(1, len(problem.checks) + 1):
            lay(room.room, *problem.laid(number, "auto"))
            if golden:
                lay(room.room, *problem.laid(number, "golden"))
            found.append(solved(room, problem, number))
    return found


class ChainedFamily(Family):
    """The chains below `folder` (`glm5 task build chained`); all are held out. `turns_per_task` limits the messages of
    each task; the other options are those of "terminal"."""

    name = domain = "chained"

    def __init__(
        self,
        seed: int = 0,
        *,
        folder: str = "",
        tools: Sequence[str] = ("bash", "edit"),
        turns_per_task: int = 50,
        most_output: int = 8000,
        command_s: float = 120.0,
        thinking: bool = True,
    ) -> None:
        paths = sorted(path.parent for path in Path(folder).glob("**/chain.json")) if folder else []
        if not paths:
            raise ConfigError(
                'families: "chained" needs options = { folder = "DIR" }, made by `glm5 task build chained`.'
            )
        if not tools or isinstance(tools, str) or any(tool not in TOOLS for tool in tools):
            raise ConfigError(f"families: chained: tools is a list of {', '.join(TOOLS)}.")
        options = (tuple(TOOLS[name] for name in tools), thinking, turns_per_task, most_output, command_s)
        self._problems = [
            ChainProblem(f"chained/{path.name}", path.name, "chained", path, *options, chain=read_chain(path))
            for path in paths
        ]
        self.size = len(self._problems)

    def problem(self, split: str, index: int) -> ChainProblem:
        """Chain `index`, modulo their number. Raises DataError for another split than "heldout"."""
        if split != "heldout":
            raise DataError("chained: these tasks are for evaluation; there are none for another split.")
        return self._problems[index % self.size]


def _files(folder: Path) -> dict[str, File]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): File(path.read_bytes()) for path in found}
