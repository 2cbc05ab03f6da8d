"""The result of `glm5 adapt`: `adaptation.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from glm5.config.recipe import DsaStage
from glm5.config.schema import Frozen
from glm5.obs.metrics import read_metrics
from glm5.stats import paired_difference
from glm5.train.dsa_adapt import HeldOut

WARMUP, SPARSE, BASELINE = "dsa-warmup", "dsa-sparse", "dense-baseline"


class Settings(Frozen):
    """Settings of a run. They cannot change after it has started."""

    model: str
    data: str
    seed: int
    baseline: bool = Field(validation_alias=AliasChoices("baseline", "twin"))
    index_topk: int
    index_heads: int
    index_dim: int
    held_out_length: int
    held_out_tokens: int
    warmup: DsaStage
    sparse: DsaStage


def record_of(s: Settings, text: HeldOut, entries: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """`adaptation.json`."""
    mass, warm = entries[SPARSE]["mass"], entries[WARMUP]
    ks = sorted(int(key.removeprefix("oracle/")) for key in mass if key.startswith("oracle/"))
    rows = {name: [r for r in read_metrics(folder / "metrics.jsonl") if r["stage"] == name] for name in entries}
    kl = [[r["step"], r["indexer_kl"]] for r in rows[WARMUP]]
    kl += [[s.warmup.optim.steps + r["step"], r["indexer_kl"]] for r in rows[SPARSE]]
    step_tokens = s.sparse.rows * s.sparse.row_length
    curve = {
        name: {r["step"]: r["held_out_loss"] for r in found if "held_out_loss" in r} for name, found in rows.items()
    }
    start = {SPARSE: mean(warm["losses"]["beyond"]), BASELINE: mean(warm["before"]["beyond"])}
    points = {name: {0: start[name], **curve[name]} for name in (SPARSE, BASELINE) if name in entries}
    return {
        "topk": s.index_topk,
        "recall": _by_layer(mass),
        "recall_after_warmup": _by_layer(warm["mass"]),
        "mean_recall": mass["indexer_recall"],
        "mass_curve": {
            "k": ks,
            "indexer": [mass[f"indexer/{k}"] for k in ks],
            "oracle": [mass[f"oracle/{k}"] for k in ks],
        },
        "kl": kl,
        "held_out_kl": {"after_warmup": warm["mass"]["indexer_kl"], "after_sparse": mass["indexer_kl"]},
        "baseline": {
            "tokens": [step * step_tokens for step in points[SPARSE]],
            "dense": [points[BASELINE].get(step) for step in points[SPARSE]] if BASELINE in points else [],
            "sparse": list(points[SPARSE].values()),
        },
        "held_out": _held_out(s, text, entries),
        "settings": s.model_dump(mode="json"),
    }


def _held_out(s: Settings, text: HeldOut, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Sparse against dense over the tokens with more than index_topk tokens before them; also over all tokens."""
    sparse, warm = entries[SPARSE]["losses"], entries[WARMUP]
    dense = entries[BASELINE]["losses"] if BASELINE in entries else None
    length = s.held_out_length
    counts = {"all": length - 1, "beyond": length - 1 - s.index_topk, "far": max(0, length - 1 - 4 * s.index_topk)}
    parts = {name: _gap(sparse[name], dense[name] if dense else None) for name in counts if sparse[name]}
    tokens = {name: {"tokens": counts[name] * len(sparse[name])} for name in parts}
    return {
        "length": length,
        **parts["beyond"],
        **tokens["beyond"],
        "documents": text.documents,
        "concatenated": text.documents == 0,
        "positions": f"behind the first {s.index_topk} tokens",
        "all_positions": parts["all"] | tokens["all"],
        "beyond_4_topk": parts["far"] | tokens["far"] if "far" in parts else None,
        "dense_before": mean(warm["before"]["beyond"]),
        "sparse_after_warmup": mean(warm["losses"]["beyond"]),
    }


def _gap(sparse: list[float], dense: list[float] | None) -> dict[str, Any]:
    """Means, the gap in percent of the dense loss, and its 95 % interval over rows."""
    found: dict[str, Any] = {"sparse": mean(sparse), "dense": mean(dense) if dense else None, "gap_percent": None}
    if dense:
        between = paired_difference(sparse, dense)
        low, high = (100 * end / mean(dense) for end in (between.low, between.high))
        known = len(sparse) > 1
        found["gap_percent"] = 100 * (found["sparse"] / found["dense"] - 1)
        found["gap_interval"] = [low, high] if known else None
    return found


def _by_layer(mass: Mapping[str, float]) -> dict[str, float]:
    prefix = "indexer_recall/"
    layers = sorted((int(key.removeprefix(prefix + "L")), value) for key, value in mass.items() if prefix in key)
    return {f"L{layer}": value for layer, value in layers}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
