"""A text classifier as DCLM uses fastText: hashed words and pairs of words, a linear model, a probability.

Written here because fastText's packages either cannot train, have no wheels for current Pythons, or replace the module
that recognises languages. With two labels fastText's model is linear in its features too. Training is one thread of
stochastic gradient descent in a fixed order, so the same texts and seed give the same weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glm5.data.dedup import ngram_hashes, plain_words
from glm5.data.shards import map_array
from glm5.errors import DataError
from glm5.files import publish_dir, read_small, verify_manifest
from glm5.seeds import derive_seed

BITS = 18
EPOCHS = 5
RATE = 0.5
HELD_OUT = 5
"""One text in so many is held out, by the hash of its content: a copy is on the same side."""
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
    area: float

    @property
    def precision(self) -> float:
        return self.true_positive / max(1, self.true_positive + self.false_positive)

    @property
    def recall(self) -> float:
        return self.true_positive / max(1, self.true_positive + self.false_negative)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"precision": self.precision, "recall": self.recall}


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
        wanted = np.asarray(labels, dtype=np.float64)
        if not 0 < wanted.sum() < len(wanted):
            raise DataError("A classifier needs texts of both classes.")
        worth = np.where(wanted > 0, 0.5 / wanted.mean(), 0.5 / (1 - wanted.mean()))
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

    def evaluate(self, texts: Sequence[str], labels: Sequence[bool]) -> Evaluation:
        """Count right and wrong answers."""
        scores, wanted = np.array([self(text) for text in texts]), np.asarray(labels, dtype=bool)
        yes = scores >= 0.5
        below = np.sort(scores[~wanted])
        beaten = sum(np.searchsorted(below, scores[wanted], side).sum() for side in ("left", "right")) / 2
        counts = [int((a & b).sum()) for a, b in ((yes, wanted), (yes, ~wanted), (~yes, wanted), (~yes, ~wanted))]
        return Evaluation(
            counts[0], counts[1], counts[2], counts[3], float(beaten / max(1, len(below) * int(wanted.sum())))
        )

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write the model and what is known about it."""
        with publish_dir(folder) as new:
            (new / _WEIGHTS).write_bytes(self.weights.astype("<f4").tobytes())
            text = json.dumps({"bits": BITS, "bias": self.bias, **facts}, indent=1) + "\n"
            (new / _FACTS).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Classifier:
        """Raises DataError for a folder without a classifier, or a damaged one."""
        try:
            facts = json.loads(read_small(folder / _FACTS, _MOST_FACTS))
            bias, bits = float(facts["bias"]), int(facts["bits"])
            weights = map_array(folder / _WEIGHTS, np.dtype("<f4"))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            raise DataError(f"{folder} has no classifier; make one with `glm5 data classifier`.") from None
        if bits != BITS or len(weights) != 1 << BITS or not np.isfinite(weights).all() or not np.isfinite(bias):
            raise DataError(f"{folder} has a classifier of another version, or a damaged one; train it again.")
        verify_manifest(folder, DataError, "classifier", "Train it again.")
        return cls(weights, bias)


def features(text: str) -> np.ndarray:
    """Places of the distinct words and pairs of words of a text among the weights."""
    words = plain_words(text[: 20 * MOST_WORDS])[:MOST_WORDS]
    hashes = np.concatenate([ngram_hashes(words, 1), ngram_hashes(words, 2)])
    return np.unique(hashes >> np.uint64(64 - BITS)).astype(np.int64)


def train_and_evaluate(
    positive: Iterable[str], negative: Iterable[str], seed: int = 0, progress: Callable[[str], None] = lambda _: None
) -> tuple[Classifier, Evaluation, dict[str, int]]:
    """A classifier, its evaluation on held-out texts, and the numbers of texts. Copies count once; a text of both
    classes counts for none."""
    progress("reading texts")
    classes = [{_digest(text): text for text in texts} for texts in (positive, negative)]
    both = classes[0].keys() & classes[1].keys()
    texts: dict[bool, list[str]] = {True: [], False: []}
    labels: dict[bool, list[bool]] = {True: [], False: []}
    for label, found in zip((True, False), classes, strict=True):
        for digest, text in found.items():
            if digest not in both:
                texts[digest[0] % HELD_OUT == 0].append(text)
                labels[digest[0] % HELD_OUT == 0].append(label)
    progress(f"training on {len(texts[False]):,} texts")
    model = Classifier.train(texts[False], labels[False], seed)
    progress(f"evaluating on {len(texts[True]):,} texts")
    counts = {"train": len(texts[False]), "train_positive": sum(labels[False]), "held_out": len(texts[True])}
    return model, model.evaluate(texts[True], labels[True]), counts


def _digest(text: str) -> bytes:
    return hashlib.sha256(" ".join(text.split()).encode()).digest()


def _sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-np.clip(value, -30, 30))))
