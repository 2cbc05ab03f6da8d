"""The steps that keep training text out of the held-out split. See `glm5.data.corpus.split`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from glm5.data.corpus.split import HeldOutDocuments, moves, shingles_of
from glm5.data.documents import Document as Named
from glm5.files import atomic_write

_NOTED = 0.5  # pairs of this share of the least similarity are noted: they tell how close what is left comes


def is_held_out(document: Document) -> bool:
    """Whether its name puts it into the held-out split."""
    return Named(document.id, "").held_out


class WriteHeldOut(PipelineStep):
    """Writes the shingles of a part's held-out documents."""

    type = "split"
    name = "held-out documents"

    def __init__(self, folder: Path, words: int) -> None:
        super().__init__()
        self.folder, self.words = folder, words

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:
        found: list[np.ndarray] = [np.empty(0, np.uint64)]
        documents, end = [], 0
        for number, document in enumerate(data):
            if is_held_out(document):
                found.append(shingles_of(document.text, self.words))
                documents.append((number, end, end + len(found[-1])))
                end += len(found[-1])
        self.folder.mkdir(parents=True, exist_ok=True)
        np.save(self.folder / f"{rank:05d}.shingles.npy", np.concatenate(found))
        np.save(self.folder / f"{rank:05d}.documents.npy", np.array(documents, dtype=np.int64).reshape(-1, 3))


class FindSimilar(PipelineStep):
    """Compares the documents of a part with all held-out ones."""

    type = "split"
    name = "similar to held-out documents"

    def __init__(self, folder: Path, pairs: Path, words: int, least: float) -> None:
        super().__init__()
        self.folder, self.pairs, self.words, self.least = folder, pairs, words, least

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:
        held_out = HeldOutDocuments(self.folder)
        rows: list[list[float]] = []
        for number, document in enumerate(data):
            other = is_held_out(document)
            for owner, value in held_out.similar(shingles_of(document.text, self.words), self.least):
                place = held_out.places[owner]
                if value >= _NOTED * self.least and place != (rank, number):
                    rows.append([*place, rank, number, float(other), value])
        self.pairs.mkdir(parents=True, exist_ok=True)
        np.save(self.pairs / f"{rank:05d}.npy", np.array(rows, dtype=np.float64).reshape(-1, 6))


class Split(PipelineStep):
    """Decides which held-out documents move to training: those similar to training text, and those similar to one that
    moves."""

    type = "split"
    name = "moves"

    def __init__(self, pairs: Path, out: Path, least: float) -> None:
        super().__init__()
        self.pairs, self.out, self.least = pairs, out, least

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        rows = np.concatenate([np.load(path) for path in sorted(self.pairs.glob("*.npy"))])
        moved = moves(rows[rows[:, 5] >= self.least])
        left = [
            value
            for a, b, c, d, other, value in rows.tolist()
            if (a, b) not in moved and (not other or (c, d) in moved)
        ]
        known = {"similarity": self.least, "most_similar": max(left, default=None), "moved": sorted(moved)}
        atomic_write(self.out, json.dumps(known) + "\n")
