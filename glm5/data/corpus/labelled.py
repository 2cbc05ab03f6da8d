"""Trains a classifier on the texts of positive and negative sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from glm5.config.corpus import ClassifierRecipe, SourceConfig
from glm5.data.corpus.classifier import Evaluation, train_and_evaluate
from glm5.data.corpus.inputs import documents
from glm5.data.corpus.plan import list_inputs
from glm5.data.corpus.run import need_extra
from glm5.data.corpus.text import Extract, Text
from glm5.errors import DataError
from glm5.stats import Interval, wilson


def train_classifier(
    recipe: ClassifierRecipe, out: Path, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Write the classifier of `recipe` to `out`; returns what is known about it: counts of texts, its evaluation on
    held-out ones, and intervals (95 %, Wilson) of precision and recall.

    Raises DataError for a source without files or too few texts, MissingExtraError without the extra `data`.
    """
    need_extra("local")
    from datatrove.utils.logging import logger

    from glm5.data.corpus.read import sandboxed

    logger.remove()
    with ExitStack() as stack:
        extract = sandboxed(stack, recipe.limits)

        def read(sources: list[SourceConfig]) -> Iterator[str]:
            return (text for source in sources for text in _texts(source, recipe, extract))

        model, held_out, counts = train_and_evaluate(
            read(recipe.positive), read(recipe.negative), recipe.seed, progress
        )
    spans = _intervals(held_out)
    facts = {
        "name": recipe.name,
        "sources": {side: [source.path for source in getattr(recipe, side)] for side in ("positive", "negative")},
        "texts": counts,
        "held_out": held_out.plain(),
        "intervals": {name: [span.low, span.high] for name, span in spans.items()},
    }
    model.save(out, facts)
    return facts


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
