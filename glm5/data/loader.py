"""Training rows whose content is a function of (seed, step) alone.

A loader is an endless sequence of rows; row r of step s is entry `s * rows + r`. It keeps only caches, so the step is
the whole state in a checkpoint. World size, workers and interruptions cannot change what a step sees. A rank builds
only the rows that it asks for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from glm5.data.packing import Batch, best_fit
from glm5.data.shards import Shard
from glm5.errors import DataError
from glm5.seeds import derive_seed

EPOCHS_KEPT = 2  # a step may cross the border of two epochs
WINDOW = 1 << 16  # pieces that best-fit packing sees at once
MARKED = 64  # the start of one document in this many is kept
BLOCK = 1 << 16  # documents that are read at once, a multiple of MARKED


class Row(NamedTuple):
    """Views of one row's arrays, all [T]; initially 0, -1 (padding) and False."""

    ids: np.ndarray
    documents: np.ndarray
    loss_mask: np.ndarray

    def put(self, at: int, tokens: np.ndarray, document: int) -> int:
        """Write tokens at column `at`, all as targets; returns the next free column."""
        end = at + len(tokens)
        self.ids[at:end], self.documents[at:end], self.loss_mask[at:end] = tokens, document, True
        return end


class RowLoader:
    """Base class of loaders: a subclass defines the content of a row. `rows_per_epoch` rows contain everything once; it
    is 0 for generated rows, which never repeat."""

    rows_per_epoch = 0
    sparse_targets = False

    def __init__(self, rows: int, row_length: int) -> None:
        self.rows, self.row_length = rows, row_length

    def fill(self, index: int, row: Row) -> None:
        """Write entry `index` of the endless sequence of rows."""
        raise NotImplementedError

    def build(self, indices: range) -> Batch:
        """These entries of the sequence as a batch."""
        shape = (len(indices), self.row_length)
        ids, documents = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.bool_)
        for at, index in enumerate(indices):
            self.fill(index, Row(ids[at], documents[at], mask[at]))
        tensors = torch.from_numpy(ids), torch.from_numpy(documents), torch.from_numpy(mask)
        return Batch(*tensors, sparse_targets=self.sparse_targets)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Batch of optimizer step `step`, or only these rows of it: equal to the slice of the whole batch, except that
        `Batch.step` is not set."""
        indices = range(step * self.rows, (step + 1) * self.rows)
        return self.build(indices[rows] if rows is not None else indices)

    def epochs(self, step: int) -> dict[str, float]:
        """Epochs (fractional) of each source before this step, by name."""
        return {"rows": step * self.rows / self.rows_per_epoch} if self.rows_per_epoch else {}


class Documents:
    """A shard as seen in one epoch. Here it is always the same; `fim.FimDocuments` changes some of the documents.
    `total_tokens` is the length of every epoch."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.total_tokens = len(shard.tokens)

    def __len__(self) -> int:
        return len(self.shard)

    def slots(self, documents: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Maximum lengths of these documents over all epochs, int64."""
        return self.shard.lengths(documents)

    def lengths(self, epoch: int, documents: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Tokens of these documents in this epoch, int64."""
        return self.shard.lengths(documents)

    def document(self, epoch: int, index: int) -> np.ndarray:
        """Token ids of one document in this epoch."""
        return self.shard.document(index)


def shuffled(generator: np.random.Generator, count: int) -> np.ndarray:
    """`generator.permutation(count)`, in 4 bytes per number if they suffice."""
    numbers = np.arange(count, dtype=np.uint32 if count <= 1 << 32 else np.int64)
    generator.shuffle(numbers)
    return numbers


def row_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """The order in which an epoch visits its rows."""
    return shuffled(np.random.default_rng(derive_seed(seed, "row order", epoch)), rows)


class _Stream(NamedTuple):
    """One epoch: the order of documents, the order of rows, and the start of every MARKED-th document in the stream."""

    documents: np.ndarray
    rows: np.ndarray
    starts: np.ndarray


class StreamLoader(RowLoader):
    """Random-truncation packing: each epoch shuffles the documents into one stream, cuts it into rows, shuffles these.

    Rows are shuffled too because neighbours in the stream come from one long file. An epoch costs one shuffle, a row
    little more than its own tokens. The tokens left over at the end of the stream are dropped, different ones every
    epoch. Memory is 4 bytes per document and per row of an epoch.
    """

    def __init__(self, source: Shard | Documents, *, rows: int, row_length: int, seed: int) -> None:
        super().__init__(rows, row_length)
        self.source = source if isinstance(source, Documents) else Documents(source)
        if self.source.total_tokens < row_length or not self.source.total_tokens:
            raise DataError(f"The shard has {self.source.total_tokens} tokens, fewer than one row of {row_length}.")
        self.seed = seed
        self.rows_per_epoch = self.source.total_tokens // row_length
        self._epoch = lru_cache(maxsize=EPOCHS_KEPT)(self._shuffle)

    def fill(self, index: int, row: Row) -> None:
        """Copy stream[start : start + row_length] and number its documents."""
        epoch, index = divmod(index, self.rows_per_epoch)
        stream = self._epoch(epoch)
        start = int(stream.rows[index]) * self.row_length
        place, offset = self._locate(epoch, stream, start)
        at, number = 0, 0
        while at < self.row_length:
            document = self.source.document(epoch, int(stream.documents[place]))
            at = row.put(at, document[offset : offset + self.row_length - at], number)
            number, place, offset = number + 1, place + 1, 0

    def _locate(self, epoch: int, stream: _Stream, start: int) -> tuple[int, int]:
        """The document at `start`: its place in the epoch's order, and the offset of `start` in it."""
        mark = int(np.searchsorted(stream.starts, start, side="right")) - 1
        near = stream.documents[mark * MARKED : (mark + 1) * MARKED]
        ends = stream.starts[mark] + self.source.lengths(epoch, near).cumsum()
        past = int(np.searchsorted(ends, start, side="right"))
        begin = ends[past - 1] if past else stream.starts[mark]
        return mark * MARKED + past, start - int(begin)

    def _shuffle(self, epoch: int) -> _Stream:
        generator = np.random.default_rng(derive_seed(self.seed, "document order", epoch))
        order = shuffled(generator, len(self.source))
        rows = shuffled(generator, self.rows_per_epoch)
        starts, total = [], 0
        for first in range(0, len(order), BLOCK):
            lengths = self.source.lengths(epoch, order[first : first + BLOCK])
            sums = np.add.reduceat(lengths, range(0, len(lengths), MARKED))
            starts.append(total + sums.cumsum() - sums)
            total += int(sums.sum())
        return _Stream(order, rows, np.concatenate(starts))


class BestFitLoader(RowLoader):
    """Best-fit packing: documents stay whole; a document longer than a row is cut into full rows and a rest (§2.2).

    Which pieces share a row is decided once, by best-fit decreasing over windows of the shuffled documents. Epochs
    shuffle only the rows: documents of a row do not see each other, so new neighbours would change nothing, and with a
    fixed number of rows any step is found at once. `padding_share` is the share of empty cells. Memory is 8 bytes per
    piece and 12 per row.
    """

    def __init__(
        self, source: Shard | Documents, *, rows: int, row_length: int, seed: int, window: int = WINDOW
    ) -> None:
        super().__init__(rows, row_length)
        self.source = source if isinstance(source, Documents) else Documents(source)
        if not self.source.total_tokens:
            raise DataError("The shard is empty, so there is nothing to pack.")
        self.seed = seed
        # A piece is a document and its number within the document; `_borders` are those of the rows.
        self._documents, self._numbers, self._borders = self._pack(window)
        self.rows_per_epoch = len(self._borders) - 1
        self.padding_share = 1 - self.source.total_tokens / (self.rows_per_epoch * row_length)
        self._order = lru_cache(maxsize=EPOCHS_KEPT)(lambda epoch: row_order(seed, epoch, self.rows_per_epoch))

    def _pack(self, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of all rows, row by row, and the rows' borders. A window is that many pieces."""
        generator = np.random.default_rng(derive_seed(self.seed, "packing windows"))
        order = shuffled(generator, len(self.source))
        slots = self.source.slots(order)
        counts = -(-slots // self.row_length)
        documents = np.repeat(order, counts)
        within = np.arange(len(documents)) - np.repeat(counts.cumsum() - counts, counts)
        sizes = np.minimum(np.repeat(slots, counts) - within * self.row_length, self.row_length)
        numbers = within.astype(np.uint32)
        borders = [np.zeros(1, np.int64)]
        for start in range(0, len(sizes), window):
            span = slice(start, start + window)
            places, opened = best_fit(sizes[span], self.row_length)
            by_row = np.argsort(places, kind="stable")
            documents[span], numbers[span] = documents[span][by_row], numbers[span][by_row]
            borders.append(start + np.bincount(places, minlength=opened).cumsum())
        return documents, numbers, np.concatenate(borders)

    def fill(self, index: int, row: Row) -> None:
        """Write the pieces of one row from its start; the rest stays padding."""
        epoch, index = divmod(index, self.rows_per_epoch)
        place = int(self._order(epoch)[index])
        at = 0
        for number, piece in enumerate(range(self._borders[place], self._borders[place + 1])):
            document, offset = int(self._documents[piece]), int(self._numbers[piece]) * self.row_length
            at = row.put(at, self.source.document(epoch, document)[offset : offset + self.row_length], number)
