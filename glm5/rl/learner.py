"""The learner: token rows in, one optimizer step out; its log-probabilities are compared with the engine's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.config.recipe import OptimConfig
from glm5.data.packing import Batch, pack_batch
from glm5.errors import DataError
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import TrainSample
from glm5.train.loop import build_optimizer, clip_gradients
from glm5.train.losses import target_logprobs

ROWS_PER_STEP = 16
"""Packed rows per forward pass; it bounds memory and changes no gradient."""


@dataclass(frozen=True)
class PolicyBatch:
    """Sampled tokens of some train samples, one line each, [N, L] padded on the right; `mask` marks real tokens.

    `logprobs` are the learner's (with gradient); the others come from the samples.
    """

    logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    versions: Tensor
    samples: Sequence[TrainSample]
    entropy: float


PolicyLoss = Callable[[PolicyBatch], tuple[Tensor, dict[str, float]]]


@dataclass
class Agreement:
    """How learner and engine compare on tokens that were sampled with exactly the learner's weights."""

    tokens: int = 0
    mismatches: int = 0
    max_abs_diff: float = 0.0

    def add(self, learner: Tensor, engine: Tensor) -> None:
        self.tokens += learner.numel()
        if learner.numel():
            self.mismatches += int((learner != engine).sum())
            self.max_abs_diff = max(self.max_abs_diff, float((learner - engine).abs().max()))


class Learner:
    """Owns the trained model and its optimizer. The indexers are frozen, as in all of the paper's RL (§3.2)."""

    def __init__(self, model: GLM5ForCausalLM, config: OptimConfig, *, row_length: int, temperature: float) -> None:
        self.model, self.config = model, config
        self.row_length, self.temperature = row_length, temperature
        self.version = 0
        self.agreement = Agreement()
        self.optimizer = build_optimizer(model, config, lambda name: ".indexer." not in name and "mtp." not in name)

    def reset_optimizer(self) -> None:
        """Forget momentum (after a weight push in agentic RL, §4.1)."""
        self.optimizer.state.clear()

    def step(self, samples: Sequence[TrainSample], loss_of: PolicyLoss, rate: float) -> dict[str, float]:
        """One update from all samples. Micro-batches add up: each loss is weighted by its share of the samples, so
        `loss_of` must average per sequence, or per token where all its samples come in one micro-batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, float] = {}
        for part in self._parts(samples):
            batch = self.forward(part)
            share = len(part) / len(samples)
            loss, stats = loss_of(batch)
            (loss * share).backward()
            self._compare(batch)
            for key, value in {**stats, "loss": float(loss.detach()), "entropy": batch.entropy}.items():
                if key.endswith("_max"):
                    totals[key] = max(totals.get(key, 0.0), value)
                else:
                    totals[key] = totals.get(key, 0.0) + share * value
        norm = float(clip_gradients(self.model, self.config.clip))
        if not math.isfinite(norm):
            raise DataError(f"The policy gradient of update {self.version + 1} is not finite; lower optim.lr.")
        self.optimizer.step()
        self.version += 1
        return totals | {"grad_norm": norm, "lr": rate}

    def _parts(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        budget = ROWS_PER_STEP * self.row_length
        parts: list[list[TrainSample]] = [[]]
        used = 0
        for sample in samples:
            if parts[-1] and used + len(sample.ids) > budget:
                parts.append([])
                used = 0
            parts[-1].append(sample)
            used += len(sample.ids)
        return parts

    def forward(self, samples: Sequence[TrainSample]) -> PolicyBatch:
        """Log-probabilities of all sampled tokens, computed over packed rows, returned one line per sample."""
        row_length = max(self.row_length, max(len(s.ids) for s in samples))
        batch, places = pack_batch([(s.ids, s.loss_mask) for s in samples], row_length)
        logprobs, entropy = packed_logprobs(self.model, batch, self.temperature)
        order = sorted(range(len(samples)), key=lambda i: (places[i].row, places[i].start))
        counts = [sum(s.loss_mask) for s in samples]
        width = max(counts)
        position = torch.zeros(len(samples), width, dtype=torch.long)
        mask = torch.zeros(len(samples), width, dtype=torch.bool)
        at = 0
        for i in order:
            position[i, : counts[i]] = torch.arange(at, at + counts[i])
            mask[i, : counts[i]] = True
            at += counts[i]

        def lines(values: Callable[[TrainSample], Sequence[float]]) -> Tensor:
            out = torch.zeros(len(samples), width)
            for i, sample in enumerate(samples):
                picked = [v for v, m in zip(values(sample), sample.loss_mask, strict=True) if m]
                out[i, : counts[i]] = torch.tensor(picked)
            return out

        return PolicyBatch(
            logprobs=torch.where(mask, logprobs[position], 0.0),
            rollout_logprobs=lines(lambda s: s.rollout_logprobs),
            advantages=lines(lambda s: s.advantages),
            mask=mask,
            versions=lines(lambda s: [float(v) for v in s.weight_versions]).long(),
            samples=samples,
            entropy=float(entropy.mean()),
        )

    def _compare(self, batch: PolicyBatch) -> None:
        same = batch.mask & (batch.versions == self.version)
        self.agreement.add(batch.logprobs.detach()[same], batch.rollout_logprobs[same])


def packed_logprobs(model: GLM5ForCausalLM, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of all loss tokens of a packed batch, in row-major order."""
    hidden = model.model(batch.ids, packed_context(batch.documents))
    targets, wanted = batch.targets()
    return target_logprobs(model, hidden, targets, wanted, temperature)
