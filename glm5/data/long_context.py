"""Long-context rows (§2.2): interleaved similar documents, documents stretched by hard negatives, recall documents.

Similarity is the cosine between hashed tokens and token bigrams, weighted by their rarity in a window of the shard.
Windows are drawn once from the seed and bound the number of comparisons. Every row is a function of (seed, its index).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from glm5.chat.tokenizer import Tokenizer
from glm5.data.loader import EPOCHS_KEPT, Row, RowLoader, row_order, shuffled
from glm5.data.recall import NEEDLES, VARIANTS, Pieces, recall_text, turns_bytes, turns_text
from glm5.data.shards import Shard
from glm5.errors import DataError
from glm5.seeds import derive_seed

RecallKind = Literal["needle", "turns"]

FEATURES = 512
WINDOW_ROWS = 4
"""A window has at least the tokens of this many rows."""
INTERLEAVED_DOCUMENTS = 1024
STRETCHED_DOCUMENTS = 128
"""Documents in a window, at least, for NegativesLoader: fewer than for interleaving, as every chunk has a vector."""
CHUNKS_PER_ROW = 16
CHUNK_TOKENS = (8, 2048)
"""A meta-chunk is a sixteenth of a row, within these limits."""
SHORTEST_NEEDLE = 32
"""Bytes of the shortest retrieval document."""


def chunk_length(row_length: int) -> int:
    """Tokens of a meta-chunk in rows of this length."""
    return min(max(row_length // CHUNKS_PER_ROW, CHUNK_TOKENS[0]), CHUNK_TOKENS[1])


def chunks(tokens: np.ndarray, length: int) -> list[np.ndarray]:
    """`tokens` cut into pieces of `length`, the last one shorter."""
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]


def interleave(pieces: list[np.ndarray], length: int) -> np.ndarray:
    """All tokens of the pieces, their meta-chunks taking turns: each piece keeps its order and spans the row."""
    cut = [chunks(piece, length) for piece in pieces]
    places = [((j + 0.5) / len(parts), i, j) for i, parts in enumerate(cut) for j in range(len(parts))]
    return np.concatenate([cut[i][j] for _, i, j in sorted(places)])


def stretch(parts: list[np.ndarray], distractors: Callable[[int], Iterator[np.ndarray]], length: int) -> np.ndarray:
    """The parts of a document with text of others between them, at most `length` tokens in all. The gap after part
    number i takes from `distractors(i)` as much as spreads the free tokens evenly over the gaps."""
    found, at = [parts[0]], len(parts[0])
    for number, part in enumerate(parts[1:], 1):
        end = at + (length - at - sum(map(len, parts[number:]))) // (len(parts) - number)
        source = distractors(number - 1)
        while at < end and (piece := next(source, None)) is not None:
            found.append(piece[: end - at])
            at += len(found[-1])
        found.append(part)
        at += len(part)
    return np.concatenate(found)


class Similarity:
    """Unit vectors of token sequences; the rarity weights come from the sequences given to the constructor."""

    def __init__(self, pieces: list[np.ndarray]) -> None:
        counts = _hashed_counts(pieces)
        self._weights = np.log1p(len(pieces) / (1.0 + (counts > 0).sum(0))).astype(np.float32)
        self.vectors = self._unit(counts)

    def of(self, pieces: list[np.ndarray]) -> np.ndarray:
        """Vectors [P, FEATURES] of other sequences."""
        return self._unit(_hashed_counts(pieces))

    def _unit(self, counts: np.ndarray) -> np.ndarray:
        vectors = np.log1p(counts) * self._weights
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _hashed_counts(pieces: list[np.ndarray]) -> np.ndarray:
    """How often each hash of a token or of a token bigram occurs in each piece, [P, FEATURES]."""
    counts = np.zeros((len(pieces), FEATURES), dtype=np.float32)
    for at, piece in enumerate(pieces):
        single = piece.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        both = np.concatenate((single, single[:-1] * np.uint64(0xC2B2AE3D27D4EB4F) + single[1:]))
        mixed = (both ^ (both >> np.uint64(31))) * np.uint64(0xD6E8FEB86659FD93)
        hashed = (mixed >> np.uint64(40)) % np.uint64(FEATURES)
        counts[at] = np.bincount(hashed.astype(np.int64), minlength=FEATURES)
    return counts


def similar_order(vectors: np.ndarray, lengths: np.ndarray, row_length: int, room: int) -> np.ndarray:
    """An order in which documents of one row resemble each other: the next one is closest to the sum of those already
    in the row. The first row has `room` tokens left; the document that overflows a row opens the next one."""
    free = np.ones(len(vectors), dtype=np.bool_)
    order = np.empty(len(vectors), dtype=np.int64)
    centre = np.zeros(vectors.shape[1], dtype=vectors.dtype)
    for at in range(len(vectors)):
        chosen = int(np.argmax(np.where(free, vectors @ centre, -1.0)))
        order[at], free[chosen] = chosen, False
        room -= int(lengths[chosen])
        if room <= 0:
            room, centre = row_length - (-room % row_length), vectors[chosen]
        else:
            centre = centre + vectors[chosen]
    return order


class _Windows:
    """A shard's documents, shuffled once and cut into windows of bounded size: `borders` are places in `order`, and
    `starts` the numbers of tokens before them."""

    def __init__(self, shard: Shard, documents: int, row_length: int, seed: int) -> None:
        self.order = shuffled(np.random.default_rng(derive_seed(seed, "similarity windows")), len(shard))
        ends = shard.lengths(self.order).cumsum()
        borders, start = [0], 0
        while start < len(self.order):
            tokens = (int(ends[start - 1]) if start else 0) + WINDOW_ROWS * row_length
            start = max(start + documents, int(np.searchsorted(ends, tokens)) + 1)
            borders.append(min(start, len(self.order)))
        self.borders = np.array(borders)
        self.starts = np.concatenate(([0], ends[self.borders[1:] - 1]))

    def documents(self, window: int) -> np.ndarray:
        """The documents of one window, in shuffled order."""
        return self.order[self.borders[window] : self.borders[window + 1]]

    def __len__(self) -> int:
        return len(self.borders) - 1


class InterleaveLoader(RowLoader):
    """Rows in which highly similar documents take turns, chunk by chunk, as one document. Related text is far apart,
    which trains the model to use the middle of its context (§2.2).

    The documents of each window come in `similar_order`, all windows make one stream, and rows are cut from it. So
    every token comes once per epoch, except for the end of the stream. Epochs shuffle the rows. A window is ordered
    when one of its rows is first requested.
    """

    def __init__(self, shard: Shard, *, rows: int, row_length: int, seed: int) -> None:
        super().__init__(rows, row_length)
        self.shard = shard
        self.rows_per_epoch = len(shard.tokens) // row_length
        if not self.rows_per_epoch:
            raise DataError(f"The shard has {len(shard.tokens)} tokens, fewer than one row of {row_length}.")
        self._windows = _Windows(shard, INTERLEAVED_DOCUMENTS, row_length, seed)
        self._ordered: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._order = lru_cache(maxsize=EPOCHS_KEPT)(lambda epoch: row_order(seed, epoch, self.rows_per_epoch))

    def fill(self, index: int, row: Row) -> None:
        """Cut one row out of the stream and interleave its documents."""
        epoch, index = divmod(index, self.rows_per_epoch)
        row.put(0, interleave(self.pieces(int(self._order(epoch)[index])), chunk_length(self.row_length)), 0)

    def pieces(self, place: int) -> list[np.ndarray]:
        """The documents, or parts of documents, in row `place` of the stream."""
        at, end = place * self.row_length, (place + 1) * self.row_length
        found = []
        while at < end:
            window = int(np.searchsorted(self._windows.starts, at, side="right")) - 1
            documents, starts = self._window(window)
            number = int(np.searchsorted(starts, at, side="right")) - 1
            offset = at - int(starts[number])
            found.append(self.shard.document(int(documents[number]))[offset : offset + end - at])
            at += len(found[-1])
        return found

    def _window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """A window's documents in their order, and the start of each in the stream."""
        if window not in self._ordered:
            documents, first = self._windows.documents(window), int(self._windows.starts[window])
            lengths = self.shard.lengths(documents)
            vectors = Similarity([self.shard.document(int(i)) for i in documents]).vectors
            order = similar_order(vectors, lengths, self.row_length, self.row_length - first % self.row_length)
            starts = first + np.concatenate(([0], lengths[order].cumsum()[:-1]))
            self._ordered[window] = documents[order], starts
        return self._ordered[window]


class NegativesLoader(RowLoader):
    """Documents stretched over a whole row by distractors: between two meta-chunks of a document come the chunks of
    other documents that are most similar to the first of the two (NExtLong, §2.2).

    Every document with at least two chunks of the smallest size is stretched once per epoch, after a cut to half a row
    if it is longer. The whole row is one document, and all of it is trained on. The end of a row is padding if the
    window has too little other text.
    """

    def __init__(self, shard: Shard, *, rows: int, row_length: int, seed: int) -> None:
        super().__init__(rows, row_length)
        self.shard, self.seed = shard, seed
        self._windows = _Windows(shard, STRETCHED_DOCUMENTS, row_length, seed)
        self.rows_per_epoch = int((shard.lengths() >= 2 * CHUNK_TOKENS[0]).sum())
        if not self.rows_per_epoch or len(shard) < 2 or row_length < 4 * CHUNK_TOKENS[0]:
            raise DataError(
                f"negatives_share needs rows of at least {4 * CHUNK_TOKENS[0]} tokens and two documents, one of them "
                f"with at least {2 * CHUNK_TOKENS[0]}."
            )
        self._epoch = lru_cache(maxsize=EPOCHS_KEPT)(self._shuffle)
        self._pool = lru_cache(maxsize=2)(self._make_pool)

    def fill(self, index: int, row: Row) -> None:
        """Stretch one document."""
        epoch, index = divmod(index, self.rows_per_epoch)
        place = int(self._epoch(epoch)[index])
        owners, pool, similarity = self._pool(int(np.searchsorted(self._windows.borders, place, side="right")) - 1)
        anchor = self.shard.document(int(self._windows.order[place]))[: self.row_length // 2]
        parts = chunks(anchor, min(chunk_length(self.row_length), -(-len(anchor) // 2)))
        free = owners != self._windows.order[place]
        queries = similarity.of(parts[:-1])

        def distractors(number: int) -> Iterator[np.ndarray]:
            scores = np.where(free, similarity.vectors @ queries[number], -1.0)
            while scores[best := int(np.argmax(scores))] >= 0:
                free[best], scores[best] = False, -1.0
                yield pool[best]

        row.put(0, stretch(parts, distractors, self.row_length), 0)

    def _shuffle(self, epoch: int) -> np.ndarray:
        """The documents to stretch, as places in the windows' order; window by window, so each pool is made once."""
        generator = np.random.default_rng(derive_seed(self.seed, "stretched", epoch))
        windows = generator.permutation(len(self._windows))
        return np.concatenate([generator.permutation(self._anchors(int(window))) for window in windows])

    def _anchors(self, window: int) -> np.ndarray:
        """Places in the windows' order of the documents of one window that are long enough."""
        lengths = self.shard.lengths(self._windows.documents(window))
        return (np.flatnonzero(lengths >= 2 * CHUNK_TOKENS[0]) + self._windows.borders[window]).astype(np.uint32)

    def _make_pool(self, window: int) -> tuple[np.ndarray, list[np.ndarray], Similarity]:
        """All chunks of a window: the document of each, its tokens, and the vectors."""
        documents = self._windows.documents(window)
        cut = [chunks(self.shard.document(int(i)), chunk_length(self.row_length)) for i in documents]
        pool = [chunk for parts in cut for chunk in parts]
        return np.repeat(documents, [len(parts) for parts in cut]), pool, Similarity(pool)


class RecallLoader(RowLoader):
    """Rows of recall documents of log-uniform length. Only answers are targets: the rest is random.

    `needle` packs `recall_text` to the end of the row and cuts the last document. `turns` packs whole `turns_text` of
    all variants with 2, 4 or 8 needles and pads the rest of the row.
    """

    sparse_targets = True

    def __init__(self, kind: RecallKind, tokenizer: Tokenizer, *, rows: int, row_length: int, seed: int) -> None:
        super().__init__(rows, row_length)
        self.kind, self.tokenizer, self.seed = kind, tokenizer, seed
        self._bytes_per_token = 1.0
        if kind == "turns":
            sample = turns_text(0, 0, 1000)
            self._bytes_per_token = sum(len(text) for text, _ in sample) / len(encode(sample, tokenizer)[0])
            if row_length * self._bytes_per_token < turns_bytes(NEEDLES[0], 1):
                raise DataError(f"recall_share: a row of {row_length} tokens is too short for a recall document.")

    def fill(self, index: int, row: Row) -> None:
        """Write documents until the row is full."""
        at, number = 0, 0
        while at < self.row_length:
            ids, answers = self._document(index, number, self.row_length - at)
            if not ids:
                break
            end = row.put(at, np.asarray(ids), number)
            row.loss_mask[at:end] = answers
            at, number = end, number + 1

    def _document(self, index: int, number: int, room: int) -> tuple[list[int], list[bool]]:
        """Ids and answer mask of document `number` of a row, at most `room` ids; empty if no document fits."""
        seed = derive_seed(self.seed, "text")
        if self.kind == "needle":
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "needle", index, number))
            target = _log_uniform(float(torch.rand((), generator=generator)), SHORTEST_NEEDLE, 2.0 * self.row_length)
            ids, answers = encode(recall_text(seed, index * 1000 + number, target), self.tokenizer)
            return ids[:room], answers[:room]
        rng = random.Random(derive_seed(self.seed, "turns", index, number))
        largest = room * self._bytes_per_token
        if largest < turns_bytes(NEEDLES[0], 1):
            return [], []
        target = _log_uniform(rng.random(), turns_bytes(NEEDLES[0], 1), largest)
        needles = rng.choice([n for n in NEEDLES if turns_bytes(n, 1) <= target])
        questions = rng.choice([n for n in range(1, needles + 1) if turns_bytes(needles, n) <= target])
        variant, place = rng.choice(VARIANTS), derive_seed(index, "document", number)
        while target >= turns_bytes(needles, questions):
            text = turns_text(seed, place, target, needles=needles, questions=questions, variant=variant)
            ids, answers = encode(text, self.tokenizer)
            if len(ids) <= room:
                return ids, answers
            target = min(target - 1, int(0.95 * target * room / len(ids)))
        return [], []


def _log_uniform(draw: float, low: float, high: float) -> int:
    return int(low * (high / low) ** draw)


def encode(pieces: Pieces, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids of the pieces and, for each, whether it belongs to an answer."""
    ids: list[int] = []
    answers: list[bool] = []
    for (_, is_answer), encoded in zip(pieces, tokenizer.encode_batch([text for text, _ in pieces]), strict=True):
        ids += encoded
        answers += [is_answer] * len(encoded)
    return ids, answers
