"""The learned reward model of General RL (§3.4): a scalar head on a copy of the policy, trained on preference pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from glm5.chat import Tokenizer, render_chat
from glm5.config.optim import OptimConfig
from glm5.config.recipe import GIVE_PAIRS
from glm5.config.reward_model import RewardModelConfig
from glm5.data.packing import pack_batch
from glm5.device import put
from glm5.errors import ConfigError, DataError
from glm5.model.context import packed_context
from glm5.model.dsa import INDEXER
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.logs import get_logger
from glm5.obs.metrics import MetricsLog
from glm5.optim.schedules import begin_step, scheduled_rate
from glm5.preferences.rows import read_preferences, write_preferences
from glm5.records import Message
from glm5.rl.reward_models.base import RewardModel
from glm5.rl.reward_models.pairs import PairSource, TrainingPair, families_with_pairs
from glm5.rl.start import StageStart, as_begun
from glm5.tasks import Family
from glm5.train.loop import build_optimizer, clip_gradients

_log = get_logger(__name__)
ANSWERS_PER_PASS, PAIRS_PER_PASS = 128, 64
"""Bounds of the memory of one forward pass; they do not change scores."""
BINS = 10
"""Of the expected calibration error."""
PREFERENCES = "preferences.jsonl"
"""People's votes in the stage's folder, as they were when the stage began."""


class PreferenceModel(nn.Module):
    """score = (w . h - offset) / temperature, with h the hidden state of the conversation's last token.

    `calibrate` sets offset and temperature: sigmoid(score(a) - score(b)) is then the probability that a is preferred to
    b, and answers of the calibration pairs have the mean score 0. Until then they are 0 and 1.
    """

    def __init__(self, policy: GLM5ForCausalLM, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.trunk = policy.clone().materialise()
        self.trunk.mtp = None
        self.head = nn.Linear(policy.config.hidden_size, 1, bias=False, device=self.trunk.device)
        nn.init.zeros_(self.head.weight)
        self.head.weight.muon_split = (1,)  # type: ignore[attr-defined]
        self.tokenizer = tokenizer
        self.offset, self.temperature = 0.0, 1.0

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
        return (self.head(hidden[put(last, hidden.device)]).squeeze(-1) - self.offset) / self.temperature

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Scores of (prompt, answer) pairs. Raises DataError for a score that is not finite."""
        scores: list[float] = self([self.ids(prompt, answer) for prompt, answer in pairs]).tolist()
        _check_finite("a score", *scores)
        return scores


class LearnedRewardModel(RewardModel):
    """A `PreferenceModel` that is trained each time the stage starts, on pairs of the stage's families and of people.
    The training is short and reproducible bit for bit, so its state is not saved. It scores the families that
    give pairs; with people's pairs alone, "general" and "assistant"."""

    domains = GIVE_PAIRS

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config
        self._model: PreferenceModel | None = None

    def check(self, families: Sequence[Family], folder: Path) -> None:
        self._source(families, folder)

    @classmethod
    def of(cls, config: RewardModelConfig) -> Self:
        if config.optim is None:
            raise ConfigError(f'the reward model "{config.kind}" is trained; give it reward_model.optim.')
        if config.options:
            raise TypeError("it takes no options; its keys are those of `reward_model`")
        return cls(config)

    def prepare(self, start: StageStart, families: Sequence[Family]) -> dict[str, float]:
        """Train the model; returns its measures on held-out pairs (`train_preferences`). Metrics are logged under the
        stage name `NAME/reward_model`. Raises ConfigError if neither the families nor people give pairs."""
        config = self._config
        assert config.optim is not None
        if config.preferences is not None:
            votes = Path(config.preferences)
            as_begun(start.io, PREFERENCES, [votes], lambda copy: write_preferences(votes, copy))
        source = self._source(families, start.io.folder)
        if not source.balanced:
            _log.warning("%s: in all of people's pairs of unequal length the better answer leans one way, so length "
                         "cannot be told from quality.", start.io.name)  # fmt: skip
        self._model, numbers = train_preferences(
            start.policy,
            start.tokenizer,
            source,
            config.optim,
            start.io.metrics,
            f"{start.io.name}/reward_model",
            pairs=config.pairs,
            held_out_pairs=config.held_out_pairs,
            margin=config.margin,
        )
        return numbers

    def _source(self, families: Sequence[Family], folder: Path) -> PairSource:
        config, own, people = self._config, families_with_pairs(families), []
        if config.preferences is not None:
            copy = folder / PREFERENCES
            people = read_preferences(copy if copy.exists() else Path(config.preferences))
        elif not own:
            raise ConfigError(
                "the stage's families give no preference pairs with their options, so nothing trains the reward model; "
                'add the family "general", classes of "assistant" with prose such as "emotion/listen", or '
                "reward_model.preferences."
            )
        return PairSource(own, people, config.preference_share, config.length_debias)

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        if self._model is None:
            raise RuntimeError("call prepare before score")
        scores: list[float] = []
        for at in range(0, len(pairs), ANSWERS_PER_PASS):
            scores += self._model.score(pairs[at : at + ANSWERS_PER_PASS])
        return scores


def train_preferences(
    policy: GLM5ForCausalLM,
    tokenizer: Tokenizer,
    source: PairSource,
    optim: OptimConfig,
    metrics: MetricsLog,
    stage: str,
    *,
    pairs: int,
    held_out_pairs: int,
    margin: float = 0.0,
) -> tuple[PreferenceModel, dict[str, float]]:
    """Bradley-Terry training: the mean of -log sigmoid(score(better) - score(worse) - margin * strength); then
    calibration on every other held-out pair.

    Returns the model and its measures on distinct held-out pairs: `held_out_pairs`, their number; `accuracy`;
    `length_accuracy`, that of preferring the longer answer; `calibration_error`, expected over the pairs that did not
    calibrate; `temperature`.

    Raises DataError for a loss, a gradient or a held-out score that is not finite.
    """
    model = PreferenceModel(policy, tokenizer)
    optimizer = build_optimizer(model, optim, lambda name: INDEXER not in name and "lm_head" not in name)
    metrics.rewind(stage, 0)
    for step in range(optim.steps):
        batch = [source.pair(step * pairs + i) for i in range(pairs)]
        better, worse = _pair_scores(model, batch)
        least = put([margin * pair.strength for pair in batch], better.device)
        loss = -nn.functional.logsigmoid(better - worse - least).mean()
        rate = scheduled_rate(optim, step)
        begin_step(optimizer, rate)
        loss.backward()
        norm = clip_gradients(model, optim.clip)
        _check_finite(f"the loss or the gradient of step {step + 1}", float(loss.detach()), float(norm))
        optimizer.step()
        accuracy = float((better > worse).float().mean())
        metrics.write(stage, step + 1, {"loss": float(loss.detach()), "accuracy": accuracy, "lr": rate})
    model.eval()
    return model, _measure(model, source.held_out(held_out_pairs))


@torch.no_grad()
def _measure(model: PreferenceModel, batch: Sequence[TrainingPair]) -> dict[str, float]:
    """Calibrate the model on every other pair, and measure it. The pairs are distinct, so none does both."""
    found = [_pair_scores(model, batch[at : at + PAIRS_PER_PASS]) for at in range(0, len(batch), PAIRS_PER_PASS)]
    better, worse = (torch.cat([part[side] for part in found]).cpu().double() for side in (0, 1))
    _check_finite("a score of a held-out pair", *better.tolist(), *worse.tolist())
    gaps = better - worse
    model.offset = float(torch.cat((better, worse)).mean())
    model.temperature = fit_temperature(gaps[0::2])
    longer = [(len(p.better) > len(p.worse)) + 0.5 * (len(p.better) == len(p.worse)) for p in batch]
    return {
        "held_out_pairs": float(len(batch)),
        "accuracy": float((gaps > 0).double().mean()),
        "length_accuracy": sum(longer) / len(longer),
        "calibration_error": calibration_error(gaps[1::2] / model.temperature) if len(batch) > 1 else 0.0,
        "temperature": model.temperature,
    }


def fit_temperature(gaps: Tensor) -> float:
    """The T in [1/16, 16] that minimises the mean of -log sigmoid(gap / T) over gaps score(better) - score(worse) [N],
    by a golden-section search over log T, of which the loss has one minimum."""
    if not len(gaps) or not bool((gaps != 0).any()):
        return 1.0
    low, high, ratio = -math.log(16.0), math.log(16.0), (math.sqrt(5) - 1) / 2

    def loss(log_t: float) -> float:
        return float(-nn.functional.logsigmoid(gaps / math.exp(log_t)).mean())

    for _ in range(40):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if loss(left) <= loss(right):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def calibration_error(gaps: Tensor) -> float:
    """Expected calibration error of sigmoid(|gap|), the probability that the preferred answer is the better one, over
    gaps score(better) - score(worse) [N]: in `BINS` bins of the probability, |share right - mean probability|, weighted
    by the bin's share."""
    sure, right = torch.sigmoid(gaps.abs()), (gaps > 0).double() + 0.5 * (gaps == 0)
    bins = ((sure - 0.5) * 2 * BINS).long().clamp(0, BINS - 1)
    error = 0.0
    for b in range(BINS):
        inside = bins == b
        if bool(inside.any()):
            error += float(inside.double().mean() * (right[inside].mean() - sure[inside].mean()).abs())
    return error


def _pair_scores(model: PreferenceModel, pairs: Sequence[TrainingPair]) -> tuple[Tensor, Tensor]:
    rows = [model.ids(pair.prompt, text) for pair in pairs for text in (pair.better, pair.worse)]
    scores = model(rows)
    return scores[0::2], scores[1::2]


def _check_finite(what: str, *values: float) -> None:
    if not all(map(math.isfinite, values)):
        raise DataError(f"The reward model diverged: {what} is not finite; lower reward_model.optim.lr.")
