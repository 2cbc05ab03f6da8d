"""Trains a classifier on the texts of positive and negative sources."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glm5.config.corpus import ClassifierRecipe, SourceConfig
from glm5.data.corpus.classifier import Classifier, Evaluation, class_weights, evaluate
from glm5.data.corpus.embeddings import Embeddings
from glm5.data.corpus.inputs import documents
from glm5.data.corpus.logistic import EmbeddingClassifier, fit, measures, probability
from glm5.data.corpus.plan import list_inputs
from glm5.data.corpus.run import need_extra
from glm5.data.corpus.text import Extract, Text
from glm5.errors import DataError
from glm5.stats import Interval, wilson

HELD_OUT = 5
"""One text in so many is held out, by the hash of its content: a copy is on the same side."""


def train_classifier(
    recipe: ClassifierRecipe, out: Path, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Write the classifier of `recipe` to `out`; returns what is known about it: counts of texts, its evaluation on
    held-out ones, and intervals (95 %, Wilson) of precision and recall.

    Raises DataError for a source without files or too few texts, MissingExtraError without the extra `data` (or
    `embeddings`).
    """
    need_extra("local")
    embeddings = None if recipe.embeddings is None else Embeddings(recipe.embeddings)
    if embeddings is not None:
        embeddings.sha256()  # fails now, not after reading
    from datatrove.utils.logging import logger

    from glm5.data.corpus.read import sandboxed

    logger.remove()
    with ExitStack() as stack:
        extract = sandboxed(stack, recipe.limits)

        def read(sources: list[SourceConfig]) -> Iterator[str]:
            return (text for source in sources for text in _texts(source, recipe, extract))

        found = train_and_evaluate(
            read(recipe.positive), read(recipe.negative), recipe.seed, progress, embeddings=embeddings
        )
    facts = {
        "name": recipe.name,
        "sources": {side: [source.path for source in getattr(recipe, side)] for side in ("positive", "negative")},
        "texts": found.counts,
        "held_out": found.held_out.plain(),
        "intervals": {name: [span.low, span.high] for name, span in _intervals(found.held_out).items()},
        "baseline": found.baseline.plain(),
    }
    found.model.save(out, facts)
    return facts


@dataclass(frozen=True)
class Trained:
    """A classifier, its evaluation on held-out texts, that of a baseline of length, little words and letters, and the
    numbers of texts."""

    model: Classifier | EmbeddingClassifier
    held_out: Evaluation
    baseline: Evaluation
    counts: dict[str, int]


def train_and_evaluate(
    positive: Iterable[str],
    negative: Iterable[str],
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
    *,
    embeddings: Embeddings | None = None,
) -> Trained:
    """Train on four texts in five: on their words, or on their embeddings. Copies count once; a text of both classes
    counts for none. Raises DataError for too few texts."""
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
    counts = {"train": len(texts[False]), "train_positive": sum(labels[False]), "held_out": len(texts[True])}
    model: Classifier | EmbeddingClassifier
    if embeddings is None:
        progress(f"training on {counts['train']:,} texts")
        model = Classifier.train(texts[False], labels[False], seed)
        scores = [model(text) for text in texts[True]]
    else:
        class_weights(labels[False])  # fails now, not after hours
        vectors = {side: _embedded(texts[side], embeddings, progress) for side in texts}
        model = EmbeddingClassifier.train(vectors[False], labels[False], embeddings)
        scores = [model.at(vector) for vector in vectors[True]]
    plain = fit(np.array([measures(text) for text in texts[False]]), labels[False])
    chances = probability(np.array([measures(text) for text in texts[True]]).reshape(-1, len(plain[0])), *plain)
    return Trained(model, evaluate(scores, labels[True]), evaluate(chances.tolist(), labels[True]), counts)


def _embedded(texts: list[str], embeddings: Embeddings, progress: Callable[[str], None]) -> np.ndarray:
    found = []
    for number, text in enumerate(texts):
        if number % 100 == 0:
            progress(f"embedding text {number:,} of {len(texts):,}")
        found.append(embeddings(text))
    return np.array(found)


def _digest(text: str) -> bytes:
    return hashlib.sha256(" ".join(text.split()).encode()).digest()


def _intervals(held_out: Evaluation) -> dict[str, Interval]:
    """Raises DataError if there is nothing to count."""
    said, wanted = held_out.true_positive + held_out.false_positive, held_out.true_positive + held_out.false_negative
    if not said or not wanted:
        raise DataError(
            f"Of the held-out texts {wanted:,} are positive, and the classifier calls {said:,} so: nothing to measure "
            "precision and recall on. Give it more texts."
        )
    return {"precision": wilson(held_out.true_positive, said), "recall": wilson(held_out.true_positive, wanted)}


def _texts(source: SourceConfig, recipe: ClassifierRecipe, extract: Extract) -> Iterator[str]:
    for one in list_inputs(source)[0]:
        for member in one.members or (one,):
            for found in documents(member, source, recipe.limits, extract):
                if isinstance(found, Text) and len(found.text) >= recipe.shortest:
                    yield found.text[: recipe.characters]
