"""A readable, token-by-token record of one trajectory of an update: what the loss saw, and the ratios after the step.

`RolloutTrace` observes the loss of an update and keeps one row with an advantage other than 0: the row with the `rho`
farthest from 1. Of several such rows, it keeps the one with the largest absolute advantage. After the step the row's
tokens are scored again and written to `rollout.json` in the stage's folder. Nothing flows back into training. The file
depends only on the batch and the weights, so a resumed run writes the same file. Keys:

    step, loss                               the update, as in `metrics.jsonl`, and the name of its objective
    problem, domain, outcome, reward, teacher
    tokens                                   [{text, loss, ...}, ...], a context and the tokens sampled after it

A token whose own `loss` is true was sampled by the policy. Such tokens also have `rho` = pi_theta / pi_rollout before
the step (the loss used it), `ratio` (the same after the step), `advantage`, `masked` (the loss dropped the token),
`clipped` (the loss clipped its ratio) and `version` (of the weights that sampled it). Bytes that are not UTF-8 are
written as \\xNN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.chat import Tokenizer
from glm5.config.optim import OptimConfig
from glm5.files import atomic_write
from glm5.records import TrainSample, Trajectory
from glm5.rl.learner import Learner, PolicyBatch
from glm5.rl.losses import Terms, Tokens
from glm5.rl.losses.tokens import MAX_LOG_RATIO

FILE = "rollout.json"


@dataclass(frozen=True)
class _Seen:
    """The sampled tokens of one row as the loss saw them, all tensors [T] without padding."""

    sample: TrainSample
    log_rho: Tensor
    advantages: Tensor
    masked: Tensor
    clipped: Tensor


class RolloutTrace:
    """Observes an update's micro-batches (`policy_loss` calls it with each) and keeps the row for `write`.
    `loss` is the name of the objective."""

    def __init__(self, loss: str) -> None:
        self.loss = loss
        self._seen: _Seen | None = None
        self._rank = (-1.0, -1.0)

    @torch.no_grad()
    def __call__(self, tokens: Tokens, terms: Terms) -> None:
        if not isinstance(tokens, PolicyBatch):
            return
        log_rho = (tokens.old - tokens.rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        zeros = torch.zeros_like(log_rho)
        advantages = tokens.advantages.detach()
        deviation = torch.where(tokens.mask, log_rho.abs(), zeros).amax(1).tolist()
        credit = torch.where(tokens.mask, advantages.abs(), zeros).amax(1).tolist()
        for i, rank in enumerate(zip(deviation, credit, strict=True)):
            if rank[1] > 0.0 and rank > self._rank:
                own = tokens.mask[i]
                parts = (part[i][own].cpu() for part in (log_rho, advantages, terms.masked, terms.clipped))
                self._seen, self._rank = _Seen(tokens.samples[i], *parts), rank

    def write(
        self, folder: Path, learner: Learner, groups: Sequence[Sequence[Trajectory]], tokenizer: Tokenizer
    ) -> bool:
        """Write the row's file; call it after the step, on all ranks. With all advantages 0, writes no file and returns
        False."""
        ranks = learner.ranks
        self._rank, self._seen = max(ranks.gather((self._rank, self._seen)), key=lambda found: found[0])
        if self._seen is None:
            return False
        sample = self._seen.sample
        with torch.no_grad():
            batch = learner.forward([sample])
        after = (batch.logprobs - batch.rollout_logprobs)[0].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        found = {"step": learner.version, "loss": self.loss}
        found |= _origin(sample, groups)
        found["tokens"] = _tokens(self._seen, after, tokenizer)
        text = json.dumps(found, allow_nan=False) + "\n"
        ranks.on_main(lambda: atomic_write(folder / FILE, text))
        return True


def is_due(step: int, config: OptimConfig) -> bool:
    """Whether to write a trace of update `step`: true for the last update, and for every update that saves a state."""
    return step == config.steps or (config.save_every > 0 and step % config.save_every == 0)


def _origin(sample: TrainSample, groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """Data of the trajectory that a row came from: one of its turns has exactly the row's tokens."""
    row = tuple(sample.ids)
    for trajectory in (t for group in groups for t in group if t.group == sample.group):
        if any((*turn.context_ids, *turn.output_ids) == row for turn in trajectory.turns):
            return {
                "problem": trajectory.problem,
                "domain": trajectory.domain,
                "outcome": str(trajectory.outcome),
                "reward": _number(trajectory.reward),
                "teacher": sample.teacher,
            }
    return {"domain": sample.domain, "teacher": sample.teacher}


def _tokens(seen: _Seen, after: Tensor, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    columns = zip(
        seen.log_rho.exp().tolist(),
        after.exp().tolist(),
        seen.advantages.tolist(),
        seen.masked.tolist(),
        seen.clipped.tolist(),
        strict=True,
    )
    sample, found = seen.sample, []
    for token, wanted, version in zip(sample.ids, sample.loss_mask, sample.weight_versions, strict=True):
        text = tokenizer.decode_bytes([token]).decode("utf-8", "backslashreplace")
        entry: dict[str, Any] = {"text": text, "loss": wanted}
        if wanted:
            rho, ratio, advantage, masked, clipped = next(columns)
            entry |= {"ratio": _number(ratio), "rho": _number(rho), "advantage": _number(advantage)}
            entry |= {"masked": masked, "clipped": clipped, "version": version}
        found.append(entry)
    return found


def _number(value: float) -> float | None:
    """`value` with nine significant digits, enough for every fp32 number; None for infinity and NaN."""
    return float(f"{value:.9g}") if math.isfinite(value) else None
