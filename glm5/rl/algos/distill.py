"""On-policy cross-stage distillation: the advantage is the teacher's log-probability minus the student's (§3.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from glm5.config.recipe import DistillStage
from glm5.data.packing import pack_batch
from glm5.errors import ConfigError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import TrainSample, Trajectory
from glm5.rl.advantages import distillation
from glm5.rl.learner import PolicyBatch, packed_logprobs
from glm5.rl.losses import IcePop, Statistics, policy_loss
from glm5.tasks import make_family
from glm5.tasks.episode import to_samples


def domain_teachers(stage: DistillStage) -> dict[str, str]:
    """Domain -> name of the stage that teaches it. A prompt has one teacher, found by its domain, so this raises
    ConfigError for a family without one, and for two families of one domain that name different ones."""
    found: dict[str, tuple[str, str]] = {}
    for config in stage.families:
        if config.name not in stage.teachers:
            raise ConfigError(f"{stage.name} has no teacher for {config.name}: set teachers.{config.name}.")
        domain, teacher = make_family(config.name, **config.options).domain, stage.teachers[config.name]
        first, other = found.setdefault(domain, (config.name, teacher))
        if other != teacher:
            raise ConfigError(
                f'{stage.name}: {first} and {config.name} are both of the domain "{domain}", but their teachers are '
                f'"{other}" and "{teacher}"; give them the same teacher, or distil them in two stages.'
            )
    return {domain: teacher for domain, (_, teacher) in found.items()}


class Distillation:
    """Samples come from the student; each prompt is tagged with one teacher, the final checkpoint of an earlier stage.

    A_t = sg[log pi_teacher(y_t) - log pi_student(y_t)] takes the advantage's place in Eq. 1, group size 1. Its
    expectation is minus the reverse KL, so teacher = student means no change. `teachers` maps a domain to its model;
    `samples` raises ConfigError for a domain that has none.
    """

    def __init__(self, stage: DistillStage, teachers: Mapping[str, GLM5ForCausalLM]) -> None:
        self.stage, self.teachers = stage, teachers
        self.objective = IcePop(stage.beta, stage.clip_low, stage.clip_high)

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        rows = [row for group in groups for trajectory in group for row in to_samples(trajectory)]
        for domain in dict.fromkeys(row.domain for row in rows):
            if domain not in self.teachers:
                known = ", ".join(self.teachers) or "none"
                raise ConfigError(
                    f'{self.stage.name}: no teacher for the domain "{domain}" (domains with one: {known}); give its '
                    "family a teacher, or leave it out of the stage."
                )
            self._score(self.teachers[domain], [row for row in rows if row.domain == domain], domain)
        return rows, {}

    @torch.no_grad()
    def _score(self, teacher: GLM5ForCausalLM, rows: Sequence[TrainSample], name: str) -> None:
        """Write the teacher's log-probabilities into the advantages; the student's are subtracted in the loss."""
        width = max(self.stage.row_length, max(len(row.ids) for row in rows))
        batch, places = pack_batch([(row.ids, row.loss_mask) for row in rows], width)
        logprobs = iter(packed_logprobs(teacher, batch, self.stage.temperature)[0].tolist())
        for i in sorted(range(len(rows)), key=lambda i: (places[i].row, places[i].start)):
            rows[i].advantages = [next(logprobs) if wanted else 0.0 for wanted in rows[i].loss_mask]
            rows[i].teacher = name

    def loss(self, batch: PolicyBatch) -> tuple[Tensor, Statistics]:
        advantages = distillation(batch.advantages, batch.logprobs)
        loss, statistics = policy_loss(self.objective, replace(batch, advantages=advantages), "sequence")
        statistics.tokens_mean("reverse_kl", -advantages, batch.mask)
        return loss, statistics
