"""Adapter for the package `verifiers`: its tasks as a family of ours, and our problems as a taskset of it.

It uses the interface of `verifiers.v1` (0.4): a `Taskset` yields tasks, a task has `data` and scores a `Trace`. Only
single-answer tasks without tools, containers and runtime hooks are supported. Other tasks are refused by name, because
their rewards would be skipped silently.

The package is third-party and not in our extras; it is imported when a family or a taskset is made.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import Env, Message, Outcome, StepResult
from glm5.tasks.contract import SPLITS, Family, Problem, ToolSpec, split_of

MODULE = "verifiers.v1"


def import_verifiers() -> Any:
    """The module `verifiers.v1`. Without it, raises ConfigError with install instructions."""
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise ConfigError(
            f'the task family "verifiers" needs the package verifiers with {MODULE} ({error}); '
            "it comes with `pip install 'verifiers>=0.4'`."
        ) from error


@dataclass(frozen=True)
class VerifiersProblem:
    """A single-turn task of a taskset."""

    id: str
    key: str
    prompt: str
    system: str
    task: Any = field(compare=False)
    solved_at: float
    thinking: bool
    domain: str = "verifiers"
    tools: Sequence[ToolSpec] = ()

    @property
    def opening(self) -> tuple[Message, ...]:
        system = (Message("system", self.system),) if self.system else ()
        return (*system, Message("user", self.prompt))

    def env(self) -> Env:
        return VerifiersEnv(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """Raises DataError: tasksets have no model solutions."""
        raise DataError(f"{self.id}: tasksets of verifiers hold no demonstrations; use them in RL and evaluation only.")

    def score(self, text: str, reasoning: str | None) -> float:
        """The task's own reward for an answer. Raises GradingError on a failure of its scoring."""
        vf = import_verifiers()
        trace = vf.Trace(
            task=vf.TraceTask(type=type(self.task).__name__, data=self.task.data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=[
                vf.MessageNode(message=vf.UserMessage(content=self.prompt)),
                vf.MessageNode(
                    parent=0, message=vf.AssistantMessage(content=text, reasoning_content=reasoning), sampled=True
                ),
            ],
            is_completed=True,
            ok=True,
        )
        try:
            # In a new thread, because the caller's thread may already run an event loop.
            with ThreadPoolExecutor(max_workers=1) as pool:
                pool.submit(asyncio.run, self.task.score(trace)).result()
        except Exception as error:
            raise GradingError(f"{self.id}: the task's scoring failed: {type(error).__name__}: {error}") from error
        return float(trace.reward)


class VerifiersEnv:
    """Asks once; the task scores the answer."""

    def __init__(self, problem: VerifiersProblem) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source = problem

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return self._source.opening, self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        """The task's reward, unchanged; SOLVED if it is at least `solved_at`."""
        if message is None or message.tool_calls:
            return StepResult(done=True, outcome=Outcome.MALFORMED)
        reward = self._source.score(message.content, message.reasoning)
        return StepResult(
            done=True, reward=reward, outcome=Outcome.SOLVED if reward >= self._source.solved_at else Outcome.FAILED
        )


class VerifiersFamily(Family):
    """The taskset `taskset` (the id of an installed plugin) with its own `config`.

    The constructor reads the first `limit` tasks. A hash of the prompt assigns each task to a split. Indices cycle
    through the split in an order shuffled by `seed`. A reward of at least `solved_at` counts as solved. Raises
    ConfigError without the package, and for a task that is not supported.
    """

    name = "verifiers"
    domain = "verifiers"

    def __init__(
        self,
        seed: int = 0,
        taskset: str = "",
        config: Mapping[str, Any] | None = None,
        limit: int = 10_000,
        solved_at: float = 1.0,
        thinking: bool = True,
    ) -> None:
        if not taskset or limit < 1:
            raise ConfigError(f"verifiers taskset={taskset!r}, limit={limit}: name an installed taskset and read some.")
        vf = import_verifiers()
        try:
            settings = vf.taskset_config_type(taskset).model_validate({**(config or {}), "id": taskset})
            source = vf.load_taskset(settings)
            tasks = list(itertools.islice(iter(source), limit))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f'verifiers taskset "{taskset}": {error}') from error
        if type(source).toolsets(settings):
            raise ConfigError(f'verifiers taskset "{taskset}" shares tools among its tasks, which cannot cross.')
        self._taskset, self._solved_at, self._thinking = taskset, solved_at, thinking
        self._split: dict[str, list[tuple[str, str, str, Any]]] = {split: [] for split in SPLITS}
        for task in tasks:
            _check_task(vf, taskset, task)
            prompt, system = _texts(taskset, task)
            key = f"verifiers {taskset} {prompt}"
            self._split[split_of(key)].append((key, prompt, system, task))
        self.seed = seed
        for split, rows in self._split.items():
            random.Random(f"verifiers/{split}-{seed}").shuffle(rows)

    def problem(self, split: str, index: int) -> VerifiersProblem:
        """Raises ConfigError for an unknown split, DataError for a taskset without a task of that split."""
        if split not in SPLITS:
            raise ConfigError(f'unknown split "{split}"; use one of {", ".join(SPLITS)}.')
        rows = self._split[split]
        if not rows:
            raise DataError(f'verifiers taskset "{self._taskset}" has no {split} task; read more of it.')
        key, prompt, system, task = rows[index % len(rows)]
        name = f"verifiers/{split}/{self.seed}/{index}"
        return VerifiersProblem(name, key, prompt, system, task, self._solved_at, self._thinking)


def _check_task(vf: Any, taskset: str, task: Any) -> None:
    """Raises ConfigError for a task that needs something that we do not support."""
    kind = type(task)
    reasons = [
        f"overrides {hook}" for hook in ("setup", "finalize") if getattr(kind, hook) is not getattr(vf.Task, hook)
    ]
    reasons += ["needs a container"] if task.NEEDS_CONTAINER else []
    reasons += ["has tools"] if kind.toolsets(task.config) else []
    signals = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    for signal in signals:
        runtime = inspect.signature(signal).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            reasons.append(f"scores {getattr(signal, '__name__', 'a judge')} in a runtime")
    if not signals:
        reasons.append("has no reward of its own")
    if reasons:
        raise ConfigError(f'verifiers taskset "{taskset}": {kind.__name__} {", ".join(reasons)}; it cannot cross.')


def _texts(taskset: str, task: Any) -> tuple[str, str]:
    """(user prompt, system prompt) of a task. Raises ConfigError unless it opens with one user message of text."""
    prompt, system = task.data.prompt, task.data.system_prompt or ""
    if isinstance(prompt, str) and prompt:
        return prompt, system
    messages = prompt or []
    if [message.role for message in messages] == ["system", "user"] and not system:
        system, messages = messages[0].content, messages[1:]
    if [message.role for message in messages] != ["user"] or not isinstance(messages[0].content, str):
        raise ConfigError(f'verifiers taskset "{taskset}": a task opens otherwise than with one text; it cannot cross.')
    if not isinstance(system, str):
        raise ConfigError(f'verifiers taskset "{taskset}": a system prompt is not text; it cannot cross.')
    return messages[0].content, system


def as_taskset(family: Family, split: str = "train", count: int = 1000) -> Any:
    """Problems 0 to `count` - 1 of a split as a `verifiers.v1.Taskset`, each scored by its own environment.

    Only single-answer families are supported. Raises ConfigError for a problem with tools.
    """
    vf = import_verifiers()

    def problem_of(index: int) -> Problem:
        problem = family.problem(split, index)
        if problem.tools:
            raise ConfigError(f"{problem.id}: its tools cannot cross to verifiers; only single answers can.")
        return problem

    class Glm5Data(vf.TaskData):  # type: ignore[name-defined]
        """The index of a problem in its family."""

        index: int

    class Glm5Task(vf.Task[Glm5Data, vf.State, vf.TaskConfig]):  # type: ignore[name-defined]
        """One of our problems as a `verifiers` task."""

        @vf.reward
        async def solved(self, trace: Any) -> float:
            """The reward of our environment for the last answer."""
            env = problem_of(self.data.index).env()
            env.start()
            answer = Message("assistant", trace.last_reply)
            result = await asyncio.to_thread(env.step, answer)
            return result.reward if result.done else 0.0

    class Glm5Taskset(vf.Taskset[Glm5Task, vf.TasksetConfig]):  # type: ignore[name-defined]
        """The problems by index."""

        def load(self) -> Iterator[Any]:
            for index in range(count):
                problem = problem_of(index)
                yield Glm5Task(Glm5Data(prompt=problem.prompt, id=problem.id, index=index), self.config.task)

    return Glm5Taskset(vf.TasksetConfig())
