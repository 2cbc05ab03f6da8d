"""Who answers the problems of a suite: a checkpoint in this process, or a model behind a URL."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from glm5.agents.endpoint import Endpoint, EndpointError, Model
from glm5.agents.wire import OnDelta
from glm5.chat import Tokenizer
from glm5.config.suite import Suite, SuitePart
from glm5.engine.engine import Engine
from glm5.errors import GradingError, text_of
from glm5.eval.needle_recall import needle_recall, token_places
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import Message, Outcome, SamplingParams, StepResult, Trajectory
from glm5.seeds import derive_seed
from glm5.tasks import open_episodes, play
from glm5.tasks.contract import Problem
from glm5.tasks.episode import checked, takes_cut
from glm5.tasks.long_context.families import LongProblem

CHUNK = 64
"""Problems that a checkpoint in this process answers together."""


@dataclass(frozen=True)
class Played:
    """How one problem ended. `detail` is the environment's."""

    reward: float
    outcome: Outcome
    detail: Mapping[str, Any] = field(default_factory=dict)


class Player(Protocol):
    """Plays problems and yields (place in `problems`, result), in any order."""

    def play(
        self, problems: Sequence[Problem], suite: Suite, part: SuitePart, seed: int
    ) -> Iterator[tuple[int, Played]]: ...


@dataclass
class LocalPlayer:
    """A model in this process, in exact mode or fast. `needles`: also measure whether its indexers select the needles
    of long prompts, as `needle_recall` of the results; that reads every prompt a second time."""

    model: GLM5ForCausalLM
    tokenizer: Tokenizer
    exact: bool = True
    needles: bool = False
    engine: Engine | None = None

    def play(
        self, problems: Sequence[Problem], suite: Suite, part: SuitePart, seed: int
    ) -> Iterator[tuple[int, Played]]:
        positions = self.model.config.max_position_embeddings
        context = min(suite.max_context or positions, positions) - 1
        if self.engine is None:
            self.engine = Engine(self.model, self.tokenizer, max_batch=CHUNK, max_length=context + 1, exact=self.exact)
        params = SamplingParams(
            max_tokens=part.max_tokens or suite.max_tokens,
            temperature=suite.temperature,
            top_p=suite.top_p,
            seed=seed if suite.temperature else None,
        )
        for begin in range(0, len(problems), CHUNK):
            chunk = problems[begin : begin + CHUNK]
            options = {"max_turns": suite.max_turns, "max_context": context, "render_tools": suite.render_tools}
            episodes = open_episodes(list(enumerate(chunk)), self.tokenizer, **options)
            if params.seed is not None:  # the same draws, however many were played before
                params = dataclasses.replace(params, seed=derive_seed(seed, "chunk", begin))
            for place, trajectory in enumerate(play(episodes, self.engine, params)):
                detail = trajectory.detail
                if self.needles and (share := self._needle_recall(chunk[place], trajectory)) is not None:
                    detail = {**detail, "needle_recall": share}
                yield begin + place, Played(trajectory.reward, trajectory.outcome, detail)

    def _needle_recall(self, problem: Problem, trajectory: Trajectory) -> float | None:
        if not isinstance(problem, LongProblem) or not trajectory.turns:
            return None
        ids = trajectory.turns[0].context_ids
        return needle_recall(self.model, ids, token_places(self.tokenizer, ids, problem.plan.needles))


@dataclass
class RemotePlayer:
    """A chat endpoint, which gets `concurrency` problems at a time. Its draws are its own: it gets no seed."""

    endpoint: Endpoint
    concurrency: int = 8

    def play(
        self, problems: Sequence[Problem], suite: Suite, part: SuitePart, seed: int
    ) -> Iterator[tuple[int, Played]]:
        """Raises EndpointError if the server cannot be reached or refuses a request for another reason than length."""
        tokens = part.max_tokens or suite.max_tokens
        model = self.endpoint.asking(max_tokens=tokens, temperature=suite.temperature, top_p=suite.top_p)
        left, stopped = iter(enumerate(problems)), threading.Event()
        running: dict[Future[Played], int] = {}

        def told(kind: str, text: str) -> None:
            if stopped.is_set():
                raise EndpointError("The evaluation was stopped.")

        with ThreadPoolExecutor(self.concurrency, "eval") as threads:
            try:
                while True:
                    while len(running) < self.concurrency and (following := next(left, None)) is not None:
                        place, problem = following
                        running[threads.submit(play_messages, problem, model, suite.max_turns, told)] = place
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
            finally:
                stopped.set()
                for future in running:
                    future.cancel()


def play_messages(problem: Problem, model: Model, max_turns: int, told: OnDelta | None = None) -> Played:
    """Play one problem as text; `told` hears the replies as they come.

    A prompt that is too long for the server and a reply that is cut off are TRUNCATED; a failure of the environment is
    ENV_ERROR. Raises EndpointError for a server that does not answer.
    """
    try:
        env = problem.env()
        messages, tools, _ = env.start()
    except Exception as error:
        return _env_error(error)
    history: list[Message] = list(messages)
    for _ in range(max_turns):
        try:
            reply = model.complete(history, tools, told)
        except EndpointError as error:
            if error.too_long:
                return Played(0.0, Outcome.TRUNCATED, {"cut": "context", "text": _text(history)})
            raise
        cut = reply.finish_reason == "length"
        history.append(reply.message)
        try:
            unread = reply.broken or (cut and not takes_cut(env))
            result = checked(env.step(None if unread else reply.message))
        except Exception as error:
            return _env_error(error)
        if result.done or cut or (reply.broken and not result.messages):
            return _played(result, history, cut)
        history += result.messages
    return _played(StepResult(outcome=Outcome.TRUNCATED), history, cut=True)


def _played(result: StepResult, history: Sequence[Message], cut: bool) -> Played:
    solved = result.done and result.outcome is Outcome.SOLVED
    outcome = Outcome.TRUNCATED if cut and not solved else result.outcome
    return Played(result.reward if result.done else 0.0, outcome, {**result.detail, "text": _text(history)})


def _text(history: Sequence[Message]) -> str:
    """For readers."""
    return "\n".join(f"<|{message.role}|>{message.content}" for message in history)


def _env_error(error: Exception) -> Played:
    cause = "grading" if isinstance(error, GradingError) else "crash"
    return Played(0.0, Outcome.ENV_ERROR, {"error": text_of(error)[:500], "cause": cause})
