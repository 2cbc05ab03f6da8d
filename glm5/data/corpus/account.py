"""The account of a corpus: what was read, dropped for which reason, and kept.

`corpus.json` has no times, so that two runs of one recipe give the same file.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5.config.corpus import CorpusRecipe
from glm5.data.corpus.plan import source_counts
from glm5.data.corpus.samples import KEPT_BY
from glm5.data.corpus.split import MOVES
from glm5.errors import DataError
from glm5.files import MANIFEST, atomic_write

FILE = "corpus.json"
PACKAGES = ("datatrove", "resiliparse", "fastwarc", "pypdfium2", "pyarrow", "tokenizers", "numpy")
STEPS = ("read", "filter", "exact", "templates", "minhash", "semantic")
"""Steps that drop documents, in their order."""


def write_account(recipe: CorpusRecipe, out: Path) -> dict[str, Any]:
    """Write `out/corpus.json` from the statistics of all parts, and return its content. Raises DataError for a corpus
    without documents, or if a document is lost."""
    logs = out / "work" / "log"
    read, filtered = _steps(logs / "read", recipe.tasks)[:2]
    left = _steps(logs / "tokens", recipe.tasks)
    dropping = {"read": read, "filter": filtered}
    dropping |= dict(zip([name for name in STEPS[2:] if getattr(recipe.dedup, name)], left[1:-1], strict=True))
    steps = {name: _dropped(counts) for name, counts in dropping.items()}
    joined = {"files": int(read["joined"]), "documents": int(read["joined_documents"])}
    account: dict[str, Any] = {
        "name": recipe.name,
        "packages": {name: _version(name) for name in PACKAGES},
        "sources": dict(source_counts(out)),
        "files": int(read["files"]),
        "bytes": int(read["bytes"]),
        "documents": int(read["total"]),
        "joined": joined,
        "formulas": int(read["formulas"]),
        "swe": {key.removeprefix("swe_"): int(n) for key, n in sorted(read.items()) if key.startswith("swe_")},
        "steps": steps,
        "added": {name.partition(":")[2]: int(n) for name, n in sorted(filtered.items()) if name.startswith("added:")},
        "kept": int(left[-1]["total"]),
        "held_out": _held_out(recipe, out, left[-1]),
        "kept_by": {name: _kept_by(name, left[-1]) for name in KEPT_BY},
        "shards": {path.parent.name: _shard(path.parent) for path in sorted((out / "shards").glob("*/shards.json"))},
        "weights": {},
    }
    _check(account)
    account["weights"] = _weights(recipe, account["shards"])
    atomic_write(out / FILE, json.dumps(account, indent=1) + "\n")
    if not account["kept"]:
        raise DataError(f"All {account['documents']:,} documents were dropped; {out / FILE} says why.")
    return account


def _steps(logs: Path, tasks: int) -> list[Counter[str]]:
    """Counts of every step of a stage, summed over its parts."""
    found: list[Counter[str]] = []
    for part in range(tasks):
        steps = json.loads((logs / "stats" / f"{part:05d}.json").read_text(encoding="utf-8"))
        found = found or [Counter() for _ in steps]
        for counts, step in zip(found, steps, strict=True):
            for name, value in step["stats"].items():
                counts[name] += value["total"] if isinstance(value, dict) else value
    return found


def _check(account: Mapping[str, Any]) -> None:
    """Raise DataError unless every document is accounted for: documents in = dropped + joined + kept."""
    left, joined = account["documents"], account["joined"]
    for name, step in [*account["steps"].items(), ("shards", {"documents": account["kept"], "dropped": 0})]:
        if step["documents"] != left:
            raise DataError(
                f"The account does not add up: {left:,} documents were left before the step {name}, which saw "
                f"{step['documents']:,}. Make the corpus again in a new --out; if that does not help, it is a fault of "
                "glm5."
            )
        left -= step["dropped"]
        if name == "read":
            left += joined["documents"] - joined["files"]


def _dropped(counts: Counter[str]) -> dict[str, Any]:
    reasons = {name.removeprefix("dropped_"): int(n) for name, n in counts.items() if name.startswith("dropped_")}
    return {
        "documents": int(counts["total"]),
        "dropped": int(counts["dropped"]),
        "reasons": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    }


def _held_out(recipe: CorpusRecipe, out: Path, counts: Counter[str]) -> dict[str, Any]:
    """How many documents are held out, and how similar to training text the most similar of them is; None for less
    than half of what moves. Empty if the recipe does not compare them."""
    if recipe.dedup.held_out is None:
        return {}
    moves = json.loads((out / "work" / "split" / MOVES).read_text(encoding="utf-8"))
    known = {"documents": int(counts["held_out"]), "moved": len(moves["moved"])}
    return known | {name: moves[name] for name in ("similarity", "most_similar")}


def _kept_by(name: str, counts: Counter[str]) -> dict[str, int]:
    """Kept documents by a property; lengths ascend, the rest is alphabetic."""
    found = {key.partition(":")[2]: int(n) for key, n in counts.items() if key.startswith(f"{name}:")}
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0]) if name == "length" else (0, item[0])))


def _weights(recipe: CorpusRecipe, shards: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """`corpus.weights` of a training stage that sees each bucket as often as it should: tokens times epochs."""
    epochs = {bucket.name: bucket.epochs for bucket in recipe.quality.buckets} if recipe.quality else {}
    return {name: shard["train_tokens"] * epochs.get(name.partition("-")[2], 1.0) for name, shard in shards.items()}


def _shard(folder: Path) -> dict[str, Any]:
    info = json.loads((folder / "shards.json").read_text(encoding="utf-8"))
    files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    counts = {name: info[name] for name in info if name.startswith(("train_", "held_out_"))}
    return counts | {"sha256": {name: file["sha256"] for name, file in files.items()}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
