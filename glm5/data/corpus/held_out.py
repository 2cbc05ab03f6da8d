"""The steps that keep training text out of the held-out split. See `glm5.data.corpus.split`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from glm5.data.corpus.split import HeldOutDocuments, moves, shingles_of, write_shingles
from glm5.data.documents import Document as Named
from glm5.files import atomic_write

_NOTED = 0.5  # pairs of this share of the least similarity are noted: they tell how close what is left comes


def is_held_out(document: Document) -> bool:
    """Whether it belongs to the held-out split: by the name of its repository, else by its own. An SWE row shows files
    of its repository, so all documents of a repository are on one side."""
    repository = document.metadata.get("repository")
    return Named(f"repository {repository}" if repository else document.id, "").held_out


class WriteHeldOut(PipelineStep):
    """Writes the shingles of a part's held-out documents, and the repositories of those that move with them."""

    type = "split"
    name = "held-out documents"

    def __init__(self, folder: Path, words: int) -> None:
        super().__init__()
        self.folder, self.words = folder, words

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:
        repositories: list[tuple[int, str, bool]] = []

        def found() -> Iterator[tuple[int, np.ndarray]]:
            for number, document in enumerate(data):
                if is_held_out(document):
                    if repository := document.metadata.get("repository"):
                        # A README is shown by rows; but its license, which others have too, moves no repository.
                        repositories.append((number, repository, document.metadata["kind"] not in ("code", "swe")))
                    yield number, shingles_of(document.text, self.words)

        write_shingles(self.folder, rank, found())
        atomic_write(self.folder / f"{rank:05d}.repositories", json.dumps(repositories))


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
    """Decides which held-out documents move to training: those similar to training text, those similar to one that
    moves, and those of a repository whose code or SWE rows move."""

    type = "split"
    name = "moves"

    def __init__(self, shingles: Path, pairs: Path, out: Path, least: float) -> None:
        super().__init__()
        self.shingles, self.pairs, self.out, self.least = shingles, pairs, out, least

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        rows = np.concatenate([np.load(path) for path in sorted(self.pairs.glob("*.npy"))])
        found = [
            ((int(path.stem), number), repository, follows)
            for path in sorted(self.shingles.glob("*.repositories"))
            for number, repository, follows in json.loads(path.read_bytes())
        ]
        followers = {place for place, _, follows in found if follows}
        moved = moves(rows[rows[:, 5] >= self.least], {place: name for place, name, _ in found}, followers)
        left = [
            value
            for a, b, c, d, other, value in rows.tolist()
            if (a, b) not in moved and (not other or (c, d) in moved)
        ]
        known = {"similarity": self.least, "most_similar": max(left, default=None), "moved": sorted(moved)}
        atomic_write(self.out, json.dumps(known) + "\n")
