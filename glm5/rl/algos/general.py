"""General RL: exact rules reject answers; an outcome reward model scores those that pass (§3.4). The loss is Eq. 1."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

from glm5.chat import Tokenizer, parse_message
from glm5.config.recipe import GeneralStage
from glm5.parallel.ranks import Ranks
from glm5.records import TrainSample, Trajectory
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.reward_models import RewardModel, checked_scores, stage_reward_model
from glm5.rl.start import StageStart
from glm5.tasks import make_family


class GeneralRL(ReasoningRL):
    """reward = rules (0 or 1) * sigmoid(score of the reward model): style cannot make up for a violated rule.

    The reward model scores only the families that it knows (`RewardModel.domains`). Episodes of other families keep the
    reward of their own graders. With several ranks, rank 0 alone trains the reward model and has it score.
    """

    takes = GeneralStage
    tokenizer: Tokenizer

    def __init__(self, stage: GeneralStage, reward_model: RewardModel) -> None:
        super().__init__(stage)
        self.reward_model, self.ranks = reward_model, Ranks()

    @classmethod
    def of(cls, stage: Any) -> Self:
        return cls(stage, stage_reward_model(stage), **stage.algorithm_options)

    def prepare(self, start: StageStart) -> dict[str, float]:
        """Train or load the reward model. Returns its metrics, with names prefixed by `reward_model_`."""
        self.tokenizer, self.ranks = start.tokenizer, start.io.ranks
        families = [make_family(family.name, **family.options) for family in self.stage.families]
        numbers = self.ranks.on_main(lambda: self.reward_model.prepare(start, families))
        return {f"reward_model_{name}": n for name, n in numbers.items()}

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        passed = [t for group in groups for t in group if self._judged(t)]
        pairs = [self._pair(t) for t in passed]
        scores = self.ranks.on_main(lambda: checked_scores(self.reward_model, pairs)) if passed else []
        learned = (1.0 / (1.0 + math.exp(min(-score, 700.0))) for score in scores)
        rewarded = [
            [dataclasses.replace(t, reward=next(learned)) if self._judged(t) else t for t in group] for group in groups
        ]
        rows, numbers = super().samples(rewarded)
        combined = [t.reward for group in rewarded for t in group]
        numbers |= {"combined_reward": sum(combined) / len(combined)}
        if scores:
            numbers["orm_score"] = sum(scores) / len(scores)
        return rows, numbers

    def _pair(self, trajectory: Trajectory) -> tuple[str, str]:
        """The last user message and the last answer as text, without thinking, as a user sees them."""
        tokenizer, turn = self.tokenizer, trajectory.turns[-1]
        ids, special = turn.context_ids, tokenizer.special
        start = len(ids) - ids[::-1].index(special["<|user|>"])
        prompt = tokenizer.decode(ids[start : ids.index(special["<|assistant|>"], start)])
        thinking = ids[-1] == special["<think>"]  # with thinking, the prompt ends inside the think block
        message, _ = parse_message(tokenizer.decode(turn.output_ids), thinking=thinking)
        return prompt, message.content

    def _judged(self, trajectory: Trajectory) -> bool:
        """Whether the reward model scores this episode: it knows the family, and the answer passed the rules."""
        return trajectory.domain in self.reward_model.domains and trajectory.reward > 0
