"""The section on a DSA adaptation, from its record: recall, attention mass, KL, and the loss beside a dense model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from glm5.report.artifacts import Adaptation
from glm5.report.figures import LAYERS, TOKENS, Axis, Panel, Series, curves
from glm5.report.results import finite
from glm5.report.wording import number


@dataclass(frozen=True)
class AdaptationSection:
    """`stage` is empty for a record of the whole run."""

    stage: str
    said: list[str]
    panels: list[Panel]


def adaptation_section(stage: str, record: Adaptation) -> AdaptationSection | None:
    """None for a record with nothing to show."""
    mass, baseline = record.mass_curve, record.baseline
    at = f" at k = {record.topk:,}" if record.topk is not None else ""
    losses = [
        Series("dense", _points(baseline.tokens, baseline.dense)),
        Series("sparse", _points(baseline.tokens, baseline.sparse)),
    ]
    dense = dict(losses[0].points)
    gap = [(x, value - dense[x]) for x, value in losses[1].points if x in dense]
    masses = [_positive("indexer", mass.k, mass.indexer), _positive("best k", mass.k, mass.oracle)]
    made = [
        curves(
            "Recall by layer",
            [Series("recall", _by_layer(record.recall), dots=True)],
            f"share of attention{at}",
            LAYERS,
        ),
        curves("Attention mass", masses, "share that k tokens hold", Axis("k", "large", log=True)),
        curves("Indexer KL (nats)", [Series("KL", _pairs(record.kl))]),
        curves("Loss", losses, "nats per token", TOKENS),
        curves("Loss gap", [Series("sparse − dense", gap)], "nats per token", TOKENS, reference=("no gap", 0.0)),
    ]
    panels = [panel for panel in made if panel is not None]
    said = _said(record)
    return AdaptationSection(stage, said, panels) if panels or said else None


def _said(record: Adaptation) -> list[str]:
    found, said = record.held_out, []
    recalls = [value for _, value in _by_layer(record.recall)]
    if recalls:
        at = f" {record.topk:,}" if record.topk is not None else ""
        said.append(
            f"The{at} tokens that the indexers pick hold {sum(recalls) / len(recalls):.1%} of attention on the mean of "
            f"{len(recalls)} layers, {min(recalls):.1%} in the worst."
        )
    if finite(found.dense) is not None and finite(found.sparse) is not None:
        long = f" of {found.length:,} tokens" if found.length is not None else ""
        gap = "" if found.gap_percent is None else f", a gap of {found.gap_percent:+.2f}%".replace("-", "−")
        said.append(
            f"On held-out documents{long} the loss is {number(found.sparse, 4)} with sparse attention and "
            f"{number(found.dense, 4)} with dense attention{gap}."
        )
    return said


def _by_layer(recall: dict[str, float | None]) -> list[tuple[float, float]]:
    named = ((re.fullmatch(r"L?(\d{1,4})", name), finite(value)) for name, value in recall.items())
    return sorted((float(match[1]), value) for match, value in named if match and value is not None)


def _positive(label: str, k: Sequence[float], share: Sequence[float | None]) -> Series:
    """Points for a logarithmic axis, without 0."""
    return Series(label, [(x, value) for x, value in _points(k, share) if x > 0], dots=True)


def _points(x: Sequence[float], y: Sequence[float | None]) -> list[tuple[float, float]]:
    return _pairs(list(zip(x, y)))


def _pairs(pairs: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    both = ((finite(x), finite(value)) for x, value in pairs)
    return sorted((x, value) for x, value in both if x is not None and value is not None)
