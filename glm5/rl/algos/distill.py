"""On-policy cross-stage distillation: the advantage is the teacher's log-probability minus the student's (Eq. 2, §3.5).

    A_t = sg[ log pi_teacher(y_t) - log pi_theta(y_t) ]    replaces the advantage in Eq. 1; the student samples y

There is one rollout per prompt. Every prompt is tagged with one teacher. The expectation of A_t is minus the reverse
KL(student || teacher) per token: it is 0 once the student equals the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from glm5.config.recipe import DistillStage
from glm5.data.packing import Batch, pack_batch
from glm5.device import put
from glm5.engine.engine import Engine
from glm5.errors import ConfigError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.parallel.ranks import Ranks
from glm5.records import TrainSample, Trajectory
from glm5.rl.advantages import distillation
from glm5.rl.algos.base import Algorithm
from glm5.rl.learner import ROWS_PER_STEP, PolicyBatch, packed_logprobs
from glm5.rl.losses import IcePop, KLPenalty, Objective, Observer, Statistics, policy_loss
from glm5.rl.start import StageStart
from glm5.tasks.episode import to_samples


class Teacher(Protocol):
    """Scores tokens: with a forward pass like the learner's, or with an inference engine."""

    def score(self, rows: Sequence[TrainSample], temperature: float) -> list[list[float]]:
        """Log-probabilities of every row's sampled tokens (its loss mask), in order."""
        ...


class ModelTeacher:
    """Scores packed rows with a forward pass, as the learner does. `source` is a model or a checkpoint folder. A folder
    is loaded onto `device` at the first call and kept; with `keep=False` it is loaded again for every call."""

    def __init__(
        self,
        source: GLM5ForCausalLM | Path | str,
        row_length: int,
        *,
        exact: bool = True,
        keep: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self._source, self._row_length, self._exact, self._keep = source, row_length, exact, keep
        self._device = device

    @torch.no_grad()
    def score(self, rows: Sequence[TrainSample], temperature: float) -> list[list[float]]:
        model = self._model()
        width = max(self._row_length, max(len(row.ids) for row in rows))
        whole, places = pack_batch([(row.ids, row.loss_mask) for row in rows], width)
        found: list[float] = []
        for at in range(0, len(whole.ids), ROWS_PER_STEP):
            span = slice(at, at + ROWS_PER_STEP)
            part = Batch(whole.ids[span], whole.documents[span], whole.loss_mask[span])
            found += packed_logprobs(model, part, temperature, self._exact)[0].tolist()
        values = iter(found)
        scores: list[list[float]] = [[] for _ in rows]
        for i in sorted(range(len(rows)), key=lambda i: (places[i].row, places[i].start)):
            scores[i] = [next(values) for wanted in rows[i].loss_mask if wanted]
        return scores

    def _model(self) -> GLM5ForCausalLM:
        if isinstance(self._source, GLM5ForCausalLM):
            return self._source
        model = GLM5ForCausalLM.from_pretrained(self._source, device=self._device).eval()
        if self._keep:
            self._source = model
        return model


class EngineTeacher:
    """Scores with the inference engine, as in the paper."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def score(self, rows: Sequence[TrainSample], temperature: float) -> list[list[float]]:
        scores = self._engine.score([row.ids for row in rows], temperature)
        return [
            [score[i - 1] for i, wanted in enumerate(row.loss_mask) if wanted]
            for row, score in zip(rows, scores, strict=True)
        ]


class Distillation(Algorithm):
    """Eq. 1 with the advantage of Eq. 2. `teachers` maps the tags of prompts to teachers. The teachers score one
    after the other; with several ranks, each has whole teachers and lets them score a part of the rows. The metrics are
    `reverse_kl` over all tokens and `reverse_kl/NAME` per teacher."""

    takes = DistillStage

    def __init__(self, stage: DistillStage, teachers: Mapping[str, Teacher]) -> None:
        self.stage, self.teachers, self.ranks = stage, teachers, Ranks()
        self.objective: Objective = IcePop(stage.beta, stage.clip_low, stage.clip_high)
        self.penalty: KLPenalty | None = None

    @classmethod
    def of(cls, stage: Any) -> Self:
        return cls(stage, {}, **stage.algorithm_options)

    def prepare(self, start: StageStart) -> dict[str, float]:
        """Find the teachers' checkpoints; a teacher is loaded when it first scores."""
        stage, self.ranks = self.stage, start.io.ranks
        names = {name: None for family in stage.families if (name := stage.teacher_of(family)) is not None}
        exact, keep = stage.rollouts == "exact", stage.keep_teachers
        folders = {name: start.checkpoint(name) for name in names}
        self.teachers = {
            name: ModelTeacher(folder, stage.row_length, exact=exact, keep=keep, device=self.ranks.device)
            for name, folder in folders.items()
        }
        return {}

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        """Rows with their teachers' log-probabilities; `loss` subtracts the student's. Raises ConfigError for a tag
        that names no teacher."""
        rows = [row for group in groups for trajectory in group for row in to_samples(trajectory)]
        for name in dict.fromkeys(row.teacher for row in rows):
            own = [row for row in rows if row.teacher == name]
            if name not in self.teachers:
                raise ConfigError(
                    f'{self.stage.name}: a prompt of the domain "{own[0].domain}" has the teacher "{name}", which this '
                    f"stage does not have; its teachers are: {', '.join(self.teachers) or 'none'}."
                )
            for row, scores in zip(own, self._scores(self.teachers[name], own), strict=True):
                values = iter(scores)
                row.teacher_logprobs = [next(values) if wanted else 0.0 for wanted in row.loss_mask]
        return rows, {}

    def _scores(self, teacher: Teacher, rows: Sequence[TrainSample]) -> list[list[float]]:
        """The teacher's scores of all rows, of which every rank computes a part."""
        ranks = self.ranks
        mine = rows[ranks.rank :: ranks.world]
        score = partial(teacher.score, mine, self.stage.temperature)
        parts = [iter(part) for part in ranks.gather(ranks.together(lambda: score() if mine else [], patient=True))]
        return [next(parts[i % ranks.world]) for i in range(len(rows))]

    def loss(self, batch: PolicyBatch, observe: Observer | None = None) -> tuple[Tensor, Statistics]:
        """The loss of a micro-batch that has `teacher_logprobs`."""
        assert batch.teacher_logprobs is not None
        advantages = distillation(batch.teacher_logprobs, batch.logprobs)
        batch = replace(batch, advantages=advantages)
        loss, statistics = policy_loss(self.objective, batch, "sequence", observe=observe)
        statistics.tokens_mean("reverse_kl", -advantages, batch.mask)
        for name in dict.fromkeys(sample.teacher for sample in batch.samples):
            own = put([sample.teacher == name for sample in batch.samples], batch.mask.device)
            statistics.tokens_mean(f"reverse_kl/{name}", -advantages, batch.mask & own[:, None])
        return loss, statistics
