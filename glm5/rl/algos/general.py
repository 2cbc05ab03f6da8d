"""General RL: exact rules are the gate, a learned outcome reward model ranks what passes (§3.4). Eq. 1 loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from glm5.chat import opens_thinking, parse_message
from glm5.config.recipe import GeneralStage
from glm5.records import TrainSample, Trajectory
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.reward_model import RewardModel


class GeneralRL(ReasoningRL):
    """reward = rules (0 or 1) * sigmoid(score of the reward model): a violated rule leaves nothing for style to win."""

    def __init__(self, stage: GeneralStage, reward_model: RewardModel) -> None:
        super().__init__(stage)
        self.reward_model = reward_model

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        passed = [t for group in groups for t in group if t.reward > 0]
        scores = self.reward_model.score([self._pair(t) for t in passed]) if passed else []
        learned = (1.0 / (1.0 + math.exp(min(-score, 700.0))) for score in scores)
        rewarded = [
            [dataclasses.replace(t, reward=next(learned) if t.reward > 0 else 0.0) for t in group] for group in groups
        ]
        rows, numbers = super().samples(rewarded)
        combined = [t.reward for group in rewarded for t in group]
        numbers |= {"combined_reward": sum(combined) / len(combined)}
        if scores:
            numbers["orm_score"] = sum(scores) / len(scores)
        return rows, numbers

    def _pair(self, trajectory: Trajectory) -> tuple[str, str]:
        """Prompt and answer as text: the reward model sees what a reader sees."""
        tokenizer = self.reward_model.tokenizer
        turn = trajectory.turns[0]
        prompt = tokenizer.decode([t for t in turn.context_ids if t not in tokenizer.special.values()])
        thinking = opens_thinking(tokenizer.template_version, False)
        message, _ = parse_message(tokenizer.decode(turn.output_ids), thinking=thinking)
        return prompt, message.content
