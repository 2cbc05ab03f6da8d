"""Scores that a language model gave to documents (§2.2): long ones in chunks, one number per document, kept by hash.

`glm5 data score` asks the model and writes a folder of scores. `quality.classifier` of a corpus may name it: a document
is then sorted into buckets by its score, as by that of a classifier.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glm5.chat.tokenizer import Tokenizer
from glm5.data.corpus.logistic import load_classifier
from glm5.data.shards import SPLITS, map_array, open_shard
from glm5.errors import DataError
from glm5.files import atomic_write, verify_manifest, write_manifest

_FACTS, _HASHES, _SCORES = "scores.json", "hashes.u64", "scores.f32"


@dataclass(frozen=True)
class Chunking:
    """How a long document is scored: pieces of about `characters`, at most `most` of them, evenly spread. A piece below
    `floor` decides alone: the document gets its score, if that is less than the mean."""

    characters: int = 6000
    most: int = 12
    floor: float = 0.2

    def pieces(self, text: str) -> list[str]:
        """The pieces in order, cut at line ends if possible."""
        found, at = list[str](), 0
        while at < len(text):
            end = at + self.characters
            if end + self.characters // 4 >= len(text):  # no tiny piece at the end
                end = len(text)
            else:
                line = text.rfind("\n", at + self.characters // 2, end)
                end = line + 1 if line > 0 else end
            found.append(text[at:end])
            at = end
        if len(found) <= self.most:
            return found
        places = np.linspace(0, len(found) - 1, self.most).round().astype(int) if self.most > 1 else [0]
        return [found[place] for place in places]

    def score(self, scores: Sequence[float], lengths: Sequence[int]) -> float:
        """The mean of the pieces' scores, weighted by their lengths; the least one if it is below the floor."""
        mean = sum(score * length for score, length in zip(scores, lengths, strict=True)) / sum(lengths)
        return mean if min(scores) >= self.floor else min(min(scores), mean)


class Scores:
    """Scores from 0 to 1 by the text of a document; nan for one that has none."""

    def __init__(self, hashes: np.ndarray, scores: np.ndarray) -> None:
        self._hashes, self._scores = hashes, scores

    def __call__(self, text: str) -> float:
        key = np.uint64(int(hash_of(text)[:16], 16))
        at = int(np.searchsorted(self._hashes, key))
        return float(self._scores[at]) if at < len(self._hashes) and self._hashes[at] == key else math.nan

    @classmethod
    def load(cls, folder: Path) -> Scores:
        """Raises DataError for a folder without finished scores, or damaged ones."""
        try:
            hashes = map_array(folder / _HASHES, np.dtype("<u8"))
            scores = map_array(folder / _SCORES, np.dtype("<f4"))
        except (OSError, ValueError):
            raise DataError(f"{folder} has no finished scores; make them with `glm5 data score`.") from None
        if len(hashes) != len(scores) or not np.isfinite(scores).all() or (hashes[1:] <= hashes[:-1]).any():
            raise DataError(f"{folder} has damaged scores; run `glm5 data score` again.")
        verify_manifest(folder, DataError, "scores", "Run `glm5 data score` again.")
        return cls(hashes, scores)


def write_scores(folder: Path, found: Mapping[str, float], facts: Mapping[str, Any]) -> None:
    """Write the scores by SHA-256 of the text, and what is known about them."""
    rows = sorted((int(digest[:16], 16), score) for digest, score in found.items())
    (folder / _HASHES).write_bytes(np.array([key for key, _ in rows], dtype="<u8").tobytes())
    (folder / _SCORES).write_bytes(np.array([score for _, score in rows], dtype="<f4").tobytes())
    atomic_write(folder / _FACTS, json.dumps(facts, indent=1) + "\n")
    write_manifest(folder)


def load_scorer(folder: Path) -> Callable[[str], float]:
    """The classifier, or the scores, in a folder. Raises DataError."""
    return Scores.load(folder) if (folder / _FACTS).exists() else load_classifier(folder)


def hash_of(text: str) -> str:
    """SHA-256 of a document's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def corpus_documents(corpus: Path, kinds: Sequence[str], tokenizer: str | None) -> Iterator[tuple[str, str]]:
    """Name and text of the documents of a finished corpus, without copies. Raises DataError if it is not finished, or
    if its texts are not those of its hashes."""
    if not (corpus / "corpus.json").exists():
        raise DataError(f"{corpus} has no finished corpus; make it with `glm5 data run`.")
    codec = Tokenizer.byte_level() if tokenizer is None else Tokenizer.load(tokenizer)
    folders = [path for path in sorted((corpus / "shards").iterdir()) if path.name.partition("-")[0] in kinds]
    if not folders:
        raise DataError(f"{corpus} has no documents of the kinds {', '.join(kinds)}.")
    for folder in folders:
        for split in SPLITS:
            shard = open_shard(folder, split, codec)
            with (folder / f"{split}.documents").open("rb") as lines:
                for index, line in enumerate(lines):
                    known = json.loads(line)
                    text = codec.decode(shard.document(index)[:-1].tolist())
                    if hash_of(text) != known["sha256"]:
                        raise DataError(f"{folder}: the text of {known['name']:.80} is not that of its hash.")
                    yield known["name"], text
