"""The learned reward model of General RL (§3.4): a scalar head on a copy of the policy, trained on preference pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from glm5.chat import Tokenizer, render_chat
from glm5.config.optim import OptimConfig
from glm5.config.reward_model import RewardModelConfig
from glm5.data.packing import pack_batch
from glm5.device import put
from glm5.errors import ConfigError, DataError
from glm5.model.context import packed_context
from glm5.model.dsa import INDEXER
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsLog
from glm5.optim.schedules import begin_step, scheduled_rate
from glm5.records import Message
from glm5.rl.reward_models.base import RewardModel
from glm5.rl.start import StageStart
from glm5.tasks import Family
from glm5.tasks.instructions.general import GeneralFamily
from glm5.train.loop import build_optimizer, clip_gradients


class PreferenceModel(nn.Module):
    """score = w . (hidden state of the conversation's last token). Larger is better; the scale has no meaning."""

    def __init__(self, policy: GLM5ForCausalLM, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.trunk = policy.clone().materialise()
        self.trunk.mtp = None
        self.head = nn.Linear(policy.config.hidden_size, 1, bias=False, device=policy.device)
        nn.init.zeros_(self.head.weight)
        self.head.weight.muon_split = (1,)  # type: ignore[attr-defined]
        self.tokenizer = tokenizer

    def ids(self, prompt: str, answer: str) -> list[int]:
        """Token ids of the conversation as the policy would produce it, including the closing token."""
        messages = [Message("user", prompt), Message("assistant", answer)]
        return render_chat(
            messages,
            tokenizer=self.tokenizer,
            enable_thinking=False,
            clear_thinking=False,
            add_generation_prompt=False,
            close_last=True,
        ).ids

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Scores [N] of N token rows."""
        width = max(256, max(map(len, rows)))
        batch, places = pack_batch([(row, [True] * len(row)) for row in rows], width)
        batch = batch.to(self.trunk.device)
        hidden = self.trunk.model(batch.ids, packed_context(batch.documents))
        last = [p.row * width + p.start + len(row) - 1 for row, p in zip(rows, places, strict=True)]
        return self.head(hidden[put(last, hidden.device)]).squeeze(-1)

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Scores of (prompt, answer) pairs. Raises DataError for a score that is not finite."""
        scores: list[float] = self([self.ids(prompt, answer) for prompt, answer in pairs]).tolist()
        _check_finite("a score", *scores)
        return scores


class LearnedRewardModel(RewardModel):
    """A `PreferenceModel` that is trained on preference pairs of the stage's family `general`, each time the stage
    starts. The training is short and reproducible bit for bit, so its state is not saved."""

    def __init__(self, optim: OptimConfig, pairs: int, held_out_pairs: int) -> None:
        self._optim, self._pairs, self._held_out_pairs = optim, pairs, held_out_pairs
        self._model: PreferenceModel | None = None

    @classmethod
    def of(cls, config: RewardModelConfig) -> Self:
        if config.optim is None:
            raise ConfigError(f'the reward model "{config.kind}" is trained; give it reward_model.optim.')
        return cls(config.optim, config.pairs, config.held_out_pairs, **config.options)

    def prepare(self, start: StageStart, families: Sequence[Family]) -> dict[str, float]:
        """Train the model; returns its accuracy on held-out pairs. Metrics are logged under the stage name
        `NAME/reward_model`."""
        family = next(family for family in families if isinstance(family, GeneralFamily))  # checked with the recipe
        self._model, accuracy = train_preferences(
            start.policy,
            start.tokenizer,
            family,
            self._optim,
            start.io.metrics,
            f"{start.io.name}/reward_model",
            pairs=self._pairs,
            held_out_pairs=self._held_out_pairs,
        )
        return {"accuracy": accuracy}

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        if self._model is None:
            raise RuntimeError("call prepare before score")
        return self._model.score(pairs)


def train_preferences(
    policy: GLM5ForCausalLM,
    tokenizer: Tokenizer,
    family: GeneralFamily,
    optim: OptimConfig,
    metrics: MetricsLog,
    stage: str,
    *,
    pairs: int,
    held_out_pairs: int,
) -> tuple[PreferenceModel, float]:
    """Bradley-Terry training: -log sigmoid(score(better) - score(worse)). Returns the model and its held-out accuracy.

    Raises DataError for a loss, a gradient or a held-out score that is not finite.
    """
    model = PreferenceModel(policy, tokenizer)
    optimizer = build_optimizer(model, optim, lambda name: INDEXER not in name and "lm_head" not in name)
    metrics.rewind(stage, 0)
    for step in range(optim.steps):
        batch = [family.preference_pair(step * pairs + i) for i in range(pairs)]
        better, worse = _pair_scores(model, batch)
        loss = -nn.functional.logsigmoid(better - worse).mean()
        rate = scheduled_rate(optim, step)
        begin_step(optimizer, rate)
        loss.backward()
        norm = clip_gradients(model, optim.clip)
        _check_finite(f"the loss or the gradient of step {step + 1}", float(loss.detach()), float(norm))
        optimizer.step()
        accuracy = float((better > worse).float().mean())
        metrics.write(stage, step + 1, {"loss": float(loss.detach()), "accuracy": accuracy, "lr": rate})
    with torch.no_grad():
        batch = [family.preference_pair(i, split="heldout") for i in range(held_out_pairs)]
        better, worse = _pair_scores(model, batch)
    _check_finite("a score of a held-out pair", *better.tolist(), *worse.tolist())
    return model.eval(), float((better > worse).float().mean())


def _pair_scores(model: PreferenceModel, pairs: Sequence[tuple[str, str, str]]) -> tuple[Tensor, Tensor]:
    rows = [model.ids(prompt, text) for prompt, better, worse in pairs for text in (better, worse)]
    scores = model(rows)
    return scores[0::2], scores[1::2]


def _check_finite(what: str, *values: float) -> None:
    if not all(map(math.isfinite, values)):
        raise DataError(f"The reward model diverged: {what} is not finite; lower reward_model.optim.lr.")
