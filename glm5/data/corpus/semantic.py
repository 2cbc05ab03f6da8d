"""SemDedup (arXiv:2303.09540): of documents whose embeddings almost agree, such as pages of one template, one stays.

Embeddings are clustered, and compared within each cluster only. Parts embed, assign and compare in parallel; what they
write does not depend on how many work at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from glm5.config.corpus import SemanticConfig
from glm5.data.corpus.clusters import kmeans, leaders, nearest
from glm5.data.corpus.embeddings import Embeddings
from glm5.data.corpus.samples import Keep

_SAMPLE = 256  # vectors per cluster that decide its centre
CENTRES = "centres.npy"


class Embed(PipelineStep):
    """Writes the embeddings of a part's documents, with their numbers in the part and their quality."""

    type = "embed"
    name = "embeddings"

    def __init__(self, folder: Path, config: SemanticConfig) -> None:
        super().__init__()
        self.folder, self.config, self.embeddings = folder, config, Embeddings(config.embeddings)

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:
        vectors, known = [], []
        for number, document in enumerate(data):
            if document.metadata["kind"] in self.config.kinds:
                vectors.append(self.embeddings(document.text))
                best = max(document.metadata.get(score, 0.0) for score in ("quality", "second"))
                known.append((number, round(1e4 * best)))
        self.folder.mkdir(parents=True, exist_ok=True)
        width = len(vectors[0]) if vectors else 0
        np.save(self.folder / f"{rank:05d}.vectors.npy", np.array(vectors, dtype=np.int16).reshape(len(vectors), width))
        np.save(self.folder / f"{rank:05d}.known.npy", np.array(known, dtype=np.int64).reshape(-1, 2))


class Centres(PipelineStep):
    """Writes the centres of clusters, from evenly spaced documents of all parts."""

    type = "dedup"
    name = "centres"

    def __init__(self, folder: Path, config: SemanticConfig, seed: int) -> None:
        super().__init__()
        self.folder, self.config, self.seed = folder, config, seed

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        parts = [vectors for _, vectors in _vectors(self.folder) if len(vectors)]
        total = sum(map(len, parts))
        count = max(1, round(total / self.config.cluster))
        every = max(1, total // (_SAMPLE * count))
        chosen, skip = [], 0
        for vectors in parts:
            chosen.append(np.array(vectors[skip::every]))
            skip = (skip - len(vectors)) % every
        sample = np.concatenate(chosen) if chosen else np.empty((0, 0), np.int16)
        np.save(self.folder / CENTRES, kmeans(sample, count, self.seed))


class Assign(PipelineStep):
    """Writes the cluster of each document of a part."""

    type = "dedup"
    name = "clusters"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        vectors = _load(self.folder / f"{rank:05d}.vectors.npy")
        centres = np.load(self.folder / CENTRES)
        found = nearest(vectors, centres) if len(vectors) else np.empty(0, np.int32)
        np.save(self.folder / f"{rank:05d}.clusters.npy", found)


class Compare(PipelineStep):
    """Writes which documents a part's share of the clusters drops. The first of the best quality stays."""

    type = "dedup"
    name = "similar embeddings"

    def __init__(self, folder: Path, out: Path, config: SemanticConfig) -> None:
        super().__init__()
        self.folder, self.out, self.config = folder, out, config

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        vectors, known, clusters = [], [], []
        for part, found in _vectors(self.folder):
            mine = np.load(self.folder / f"{part:05d}.clusters.npy")
            rows = np.flatnonzero(mine % world_size == rank)
            if len(rows):
                clusters.append(mine[rows])
                vectors.append(found[rows])
                more = np.load(self.folder / f"{part:05d}.known.npy")[rows]
                known.append(np.column_stack([np.full(len(rows), part), more]))
        dropped = []
        if clusters:
            cluster, vector, place = np.concatenate(clusters), np.concatenate(vectors), np.concatenate(known)
            for one in np.unique(cluster).tolist():
                rows = np.flatnonzero(cluster == one)
                rows = rows[np.argsort(-place[rows, 2], kind="stable")]
                found = leaders(vector[rows], self.config.at_least)
                dropped.append(place[rows[found != np.arange(len(rows))], :2])
        self.out.mkdir(parents=True, exist_ok=True)
        np.save(self.out / f"{rank:05d}.npy", np.concatenate([np.empty((0, 2), np.int64), *dropped]))


class SemanticFilter(PipelineStep):
    """Drops what `Compare` says."""

    type = "dedup"
    name = "semantic"

    def __init__(self, folder: Path, keep: Keep | None) -> None:
        super().__init__()
        self.folder, self.keep = folder, keep

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        dropped: set[int] = set()
        for path in sorted(self.folder.glob("*.npy")):
            rows = np.load(path)
            dropped |= set(rows[rows[:, 0] == rank, 1].tolist())
        with ExitStack() as stack:
            keep = None if self.keep is None else stack.enter_context(self.keep)
            for number, document in enumerate(data):
                self.stat_update("total")
                if number not in dropped:
                    self.stat_update("forwarded")
                    yield document
                    continue
                self.stat_update("dropped")
                if keep is not None:
                    keep.write(document, rank)


def _vectors(folder: Path) -> Iterator[tuple[int, np.ndarray]]:
    for path in sorted(folder.glob("*.vectors.npy")):
        yield int(path.name.partition(".")[0]), _load(path)


def _load(path: Path) -> np.ndarray:
    """An array on disk, mapped into memory; an empty one cannot be."""
    found: np.ndarray = np.load(path, mmap_mode="r") if path.stat().st_size > 128 else np.load(path)
    return found
