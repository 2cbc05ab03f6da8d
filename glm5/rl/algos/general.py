"""General RL: exact rules filter, a learned outcome reward model ranks the answers that pass (§3.4). Eq. 1 loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from glm5.chat import parse_message
from glm5.config.recipe import GeneralStage
from glm5.records import TrainSample, Trajectory
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.reward_model import RewardModel
from glm5.tasks.instructions.general import GeneralFamily


class GeneralRL(ReasoningRL):
    """reward = rules (0 or 1) * sigmoid(score of the reward model): style cannot make up for a violated rule.

    The reward model was trained on pairs of the family `general` and scores only its episodes. Episodes of other
    families keep the reward of their own graders.
    """

    def __init__(self, stage: GeneralStage, reward_model: RewardModel) -> None:
        super().__init__(stage)
        self.reward_model = reward_model

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        passed = [t for group in groups for t in group if _judged(t)]
        scores = self.reward_model.score([self._pair(t) for t in passed]) if passed else []
        learned = (1.0 / (1.0 + math.exp(min(-score, 700.0))) for score in scores)
        rewarded = [
            [dataclasses.replace(t, reward=next(learned)) if _judged(t) else t for t in group] for group in groups
        ]
        rows, numbers = super().samples(rewarded)
        combined = [t.reward for group in rewarded for t in group]
        numbers |= {"combined_reward": sum(combined) / len(combined)}
        if scores:
            numbers["orm_score"] = sum(scores) / len(scores)
        return rows, numbers

    def _pair(self, trajectory: Trajectory) -> tuple[str, str]:
        """The last user message and the last answer as text, without thinking: what a reader sees."""
        tokenizer, turn = self.reward_model.tokenizer, trajectory.turns[-1]
        ids, special = turn.context_ids, tokenizer.special
        start = len(ids) - ids[::-1].index(special["<|user|>"])
        prompt = tokenizer.decode(ids[start : ids.index(special["<|assistant|>"], start)])
        thinking = ids[-1] == special["<think>"]  # with thinking, the prompt ends inside the think block
        message, _ = parse_message(tokenizer.decode(turn.output_ids), thinking=thinking)
        return prompt, message.content


def _judged(trajectory: Trajectory) -> bool:
    """Whether the reward model scores this episode: it is of its family and passed the rules."""
    return trajectory.domain == GeneralFamily.domain and trajectory.reward > 0
