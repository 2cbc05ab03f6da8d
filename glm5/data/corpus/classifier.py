"""A text classifier as DCLM uses fastText: hashed words and pairs of words, a linear model, a probability.

Written here because fastText's packages either cannot train, have no wheels for current Pythons, or replace the module
that recognises languages. With two labels fastText's model is linear in its features too. Training is one thread of
stochastic gradient descent in a fixed order, so the same texts and seed give the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glm5.data.dedup import ngram_hashes, plain_words
from glm5.data.shards import map_array
from glm5.errors import DataError
from glm5.files import publish_dir, read_small, verify_manifest
from glm5.seeds import derive_seed
from glm5.stats import Interval, roc_area

BITS = 18
EPOCHS = 5
RATE = 0.5
MOST_WORDS = 5000
_WEIGHTS, _FACTS = "weights.f32", "classifier.json"
_MOST_FACTS = 1 << 20


@dataclass(frozen=True)
class Evaluation:
    """Counts on held-out texts at the threshold 0.5, and the area under the ROC curve."""

    true_positive: int
    false_positive: int
    false_negative: int
    true_negative: int
    area: Interval

    @property
    def precision(self) -> float:
        return self.true_positive / max(1, self.true_positive + self.false_positive)

    @property
    def recall(self) -> float:
        return self.true_positive / max(1, self.true_positive + self.false_negative)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        area = {"area": self.area.value, "area_interval": [self.area.low, self.area.high]}
        return asdict(self) | {"precision": self.precision, "recall": self.recall} | area


def evaluate(scores: Sequence[float], labels: Sequence[bool]) -> Evaluation:
    """Count right and wrong answers. Raises DataError for labels of one class."""
    if all(labels) or not any(labels):
        raise DataError("The held-out texts are of one class only, so there is nothing to measure; give more texts.")
    pairs = list(zip(scores, map(bool, labels), strict=True))
    said = [(score >= 0.5, label) for score, label in pairs]
    tp, fp, fn, tn = (said.count(one) for one in ((True, True), (True, False), (False, True), (False, False)))
    area = roc_area([s for s, label in pairs if label], [s for s, label in pairs if not label])
    return Evaluation(tp, fp, fn, tn, area)


def class_weights(labels: Sequence[bool]) -> np.ndarray:
    """A weight per text, so that both classes count the same. Raises DataError for labels of one class."""
    wanted = np.asarray(labels, dtype=np.float64)
    if not 0 < wanted.sum() < len(wanted):
        raise DataError("A classifier needs texts of both classes.")
    return np.where(wanted > 0, 0.5 / wanted.mean(), 0.5 / (1 - wanted.mean()))


class Classifier:
    """The probability that a text belongs to the positive class."""

    def __init__(self, weights: np.ndarray, bias: float) -> None:
        self.weights, self.bias = weights, bias

    def __call__(self, text: str) -> float:
        return float(_sigmoid(self._logit(features(text))))

    def _logit(self, places: np.ndarray) -> float:
        return self.bias + float(self.weights[places].sum()) / max(1, len(places)) ** 0.5

    @classmethod
    def train(cls, texts: Sequence[str], labels: Sequence[bool], seed: int = 0) -> Classifier:
        """Fit to texts; both classes count the same, however many texts each has."""
        found = [features(text) for text in texts]
        worth, wanted = class_weights(labels), np.asarray(labels, dtype=np.float64)
        model = cls(np.zeros(1 << BITS, dtype=np.float32), 0.0)
        generator = np.random.default_rng(derive_seed(seed, "classifier"))
        steps, total = 0, EPOCHS * len(found)
        for _ in range(EPOCHS):
            for index in generator.permutation(len(found)).tolist():
                places = found[index]
                gap = (wanted[index] - _sigmoid(model._logit(places))) * worth[index]
                change = RATE * (1 - steps / total) * gap
                model.weights[places] += np.float32(change / max(1, len(places)) ** 0.5)
                model.bias += 0.1 * change
                steps += 1
        return model

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write the model and what is known about it."""
        write_model(folder, self.weights, {"bits": BITS, "bias": self.bias, **facts})

    @classmethod
    def load(cls, folder: Path) -> Classifier:
        """Raises DataError for a folder without a classifier of words, or a damaged one."""
        weights, bias, facts = read_model(folder)
        if facts.get("bits") != BITS or len(weights) != 1 << BITS:
            raise foreign_model(folder)
        return cls(weights, bias)


def features(text: str) -> np.ndarray:
    """Places of the distinct words and pairs of words of a text among the weights."""
    words = plain_words(text[: 20 * MOST_WORDS])[:MOST_WORDS]
    hashes = np.concatenate([ngram_hashes(words, 1), ngram_hashes(words, 2)])
    return np.unique(hashes >> np.uint64(64 - BITS)).astype(np.int64)


def write_model(folder: Path, weights: np.ndarray, facts: dict[str, Any]) -> None:
    """Write the weights of a classifier and what is known about it."""
    with publish_dir(folder) as new:
        (new / _WEIGHTS).write_bytes(weights.astype("<f4").tobytes())
        (new / _FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read_model(folder: Path) -> tuple[np.ndarray, float, dict[str, Any]]:
    """Weights, bias and facts of a classifier. Raises DataError for a folder without one, or a damaged one."""
    try:
        facts = json.loads(read_small(folder / _FACTS, _MOST_FACTS))
        bias = float(facts["bias"])
        weights = map_array(folder / _WEIGHTS, np.dtype("<f4"))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise DataError(f"{folder} has no classifier; make one with `glm5 data classifier`.") from None
    if not np.isfinite(weights).all() or not np.isfinite(bias):
        raise foreign_model(folder)
    verify_manifest(folder, DataError, "classifier", "Train it again.")
    return weights, bias, facts


def foreign_model(folder: Path) -> DataError:
    """The error for a classifier that is not what was looked for."""
    return DataError(f"{folder} has a classifier of another kind or version, or a damaged one; train it again.")


def _sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-np.clip(value, -30, 30))))
