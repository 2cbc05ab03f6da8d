"""Logistic regression on a few hundred numbers per text: on embeddings (the second classifier of §2.2), and on plain
measures of a text as the baseline that a classifier has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glm5.data.corpus.classifier import Classifier, class_weights, foreign_model, read_model, write_model
from glm5.data.corpus.embeddings import Embeddings
from glm5.data.dedup import plain_words
from glm5.errors import DataError

_STEPS = 50
_PENALTY = 1.0
_LITTLE = frozenset("the be to of and that have with".split())  # as in Gopher's rules


def fit(rows: np.ndarray, labels: Sequence[bool]) -> tuple[np.ndarray, float]:
    """Weights [d] and bias of the regression on rows [n, d]: Newton's method, each column scaled to unit variance, with
    a ridge penalty of 1 on what remains. Both classes count the same."""
    worth, wanted = class_weights(labels), np.asarray(labels, dtype=np.float64)
    middle, spread = rows.mean(axis=0), rows.std(axis=0)
    spread = np.where(spread > 0, spread, 1.0)
    inputs = np.column_stack([(rows - middle) / spread, np.ones(len(rows))])
    penalty = np.append(np.full(rows.shape[1], _PENALTY), 1e-9)
    found = np.zeros(inputs.shape[1])
    for _ in range(_STEPS):
        said = 1 / (1 + np.exp(-np.clip(inputs @ found, -30, 30)))
        slope = inputs.T @ (worth * (said - wanted)) + penalty * found
        bend = (inputs * (worth * said * (1 - said))[:, None]).T @ inputs + np.diag(penalty)
        step = np.linalg.solve(bend, slope)
        found -= step
        if np.abs(step).max() < 1e-8:
            break
    weights = found[:-1] / spread
    return weights, float(found[-1] - weights @ middle)


def probability(rows: np.ndarray, weights: np.ndarray, bias: float) -> np.ndarray:
    """Probabilities [n] for rows [n, d]."""
    chances: np.ndarray = 1 / (1 + np.exp(-np.clip(rows @ weights + bias, -30, 30)))
    return chances


def measures(text: str) -> list[float]:
    """What rules of thumb look at: length, the shares of little words and of letters, words per line."""
    words = plain_words(text)
    little = sum(word in _LITTLE for word in words) / max(1, len(words))
    letters = sum(map(str.isalpha, text)) / max(1, len(text))
    return [float(np.log1p(len(text))), little, letters, len(words) / (1 + text.count("\n"))]


class EmbeddingClassifier:
    """The probability that a text belongs to the positive class, by its embedding."""

    def __init__(self, weights: np.ndarray, bias: float, embeddings: Embeddings, sha256: str) -> None:
        self.weights, self.bias = weights.astype(np.float64), bias
        self.embeddings, self.sha256 = embeddings, sha256

    def __call__(self, text: str) -> float:
        return self.at(self.embeddings(text))

    def at(self, vector: np.ndarray) -> float:
        """The probability for an embedding."""
        return float(probability(vector.astype(np.float64), self.weights, self.bias))

    @classmethod
    def train(cls, vectors: np.ndarray, labels: Sequence[bool], embeddings: Embeddings) -> EmbeddingClassifier:
        """Fit to embeddings [n, d] of texts."""
        weights, bias = fit(vectors.astype(np.float64), labels)
        return cls(weights.astype(np.float32), bias, embeddings, embeddings.sha256())

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write the model and what is known about it."""
        model = {"model": self.embeddings.model, "sha256": self.sha256}
        write_model(folder, self.weights, {"embeddings": model, "bias": self.bias, **facts})

    @classmethod
    def load(cls, folder: Path) -> EmbeddingClassifier:
        """Raises DataError for a folder without a classifier of embeddings, or a damaged one."""
        weights, bias, facts = read_model(folder)
        model = facts.get("embeddings")
        if not isinstance(model, dict) or not all(isinstance(model.get(key), str) for key in ("model", "sha256")):
            raise foreign_model(folder)
        return cls(weights, bias, Embeddings(model["model"]), model["sha256"])

    def check(self, folder: Path) -> None:
        """Raise DataError unless its embeddings are there, and those that it was trained on."""
        if self.embeddings.sha256() != self.sha256:
            raise DataError(
                f"{folder} was trained on embeddings of another state of {self.embeddings.model:.200}; train it again."
            )


def load_classifier(folder: Path) -> Classifier | EmbeddingClassifier:
    """A classifier of either kind. Raises DataError for a folder without one, or a damaged one."""
    return EmbeddingClassifier.load(folder) if "embeddings" in read_model(folder)[2] else Classifier.load(folder)
