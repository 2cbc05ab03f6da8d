"""Who answers the problems of a suite: here a checkpoint in this process; `remote_player` has a model behind a URL. And
who judges answers that no program can grade."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from glm5.chat import Tokenizer
from glm5.config.suite import Suite, SuitePart
from glm5.engine.engine import Engine
from glm5.errors import ConfigError
from glm5.eval.needle_recall import needle_recall, token_places
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import Message, Outcome, SamplingParams, Trajectory
from glm5.tasks import open_episodes, play
from glm5.tasks.contract import Problem
from glm5.tasks.long_context.families import LongProblem

CHUNK = 64
"""Problems that a checkpoint in this process answers together."""


@dataclass(frozen=True)
class Played:
    """How one problem ended. `detail` is the environment's. `messages` is the whole conversation, if the player has
    it."""

    reward: float
    outcome: Outcome
    detail: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] = ()


Numbered = Sequence[tuple[int, Problem]]
"""Problems with their places in the evaluation."""


class Player(Protocol):
    """Plays problems and yields (place, result), in any order. Draws depend on `seed` and the place alone."""

    def play(self, problems: Numbered, suite: Suite, part: SuitePart, seed: int) -> Iterator[tuple[int, Played]]: ...


Spot = tuple[str, int, int]
"""An answer of an evaluation: its cell, place and repeat."""


class Judge(Protocol):
    """Decides answers that no program can grade."""

    def judged(
        self, left: Sequence[tuple[Spot, Problem, Mapping[str, Any]]]
    ) -> Iterator[tuple[Spot, dict[str, Any] | str]]:
        """For rows of a record without a verdict: the keys that it changes, or why there is none; in any order."""
        ...


@dataclass
class LocalPlayer:
    """A model in this process, in exact mode or fast. `needles`: also measure whether its indexers select the needles
    of long prompts, as `needle_recall` of the results; that reads every prompt a second time."""

    model: GLM5ForCausalLM
    tokenizer: Tokenizer
    exact: bool = True
    needles: bool = False
    engine: Engine | None = None

    def play(self, problems: Numbered, suite: Suite, part: SuitePart, seed: int) -> Iterator[tuple[int, Played]]:
        if suite.context != "none" or suite.plain or suite.stop:
            raise ConfigError("A context policy and plain prompts need a server; `glm5 eval DIR` starts one.")
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
        options = {"max_turns": suite.max_turns, "max_context": context, "render_tools": suite.render_tools}
        for begin in range(0, len(problems), CHUNK):
            chunk = problems[begin : begin + CHUNK]
            episodes = open_episodes(chunk, self.tokenizer, **options)
            played = play(episodes, self.engine, params, places=[place for place, _ in chunk])
            for (place, problem), trajectory in zip(chunk, played, strict=True):
                detail = trajectory.detail
                if self.needles and (share := self._needle_recall(problem, trajectory)) is not None:
                    detail = {**detail, "needle_recall": share}
                yield place, Played(trajectory.reward, trajectory.outcome, detail)

    def _needle_recall(self, problem: Problem, trajectory: Trajectory) -> float | None:
        if not isinstance(problem, LongProblem) or not trajectory.turns:
            return None
        ids = trajectory.turns[0].context_ids
        return needle_recall(self.model, ids, token_places(self.tokenizer, ids, problem.plan.needles))
