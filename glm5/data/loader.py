"""Pre-training rows whose content is a function of (seed, step) alone."""

from __future__ import annotations

import numpy as np
import torch

from glm5.data.packing import Batch
from glm5.data.shards import Shard
from glm5.errors import DataError
from glm5.seeds import derive_seed


class StreamLoader:
    """Random-truncation packing: each epoch shuffles the documents into one stream, cuts it into rows, shuffles these.

    The rows are shuffled too because neighbours in the stream come from one long file. Row r of step s is entry
    `s * rows + r` of the endless sequence of rows, so the order does not depend on workers, ranks or on where a run was
    interrupted.
    """

    def __init__(self, shard: Shard, *, rows: int, row_length: int, seed: int) -> None:
        if len(shard.tokens) <= row_length:
            raise DataError(f"The shard holds {len(shard.tokens)} tokens, fewer than one row of {row_length}.")
        self.shard, self.rows, self.row_length, self.seed = shard, rows, row_length, seed
        self.rows_per_epoch = len(shard.tokens) // row_length
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._rows = np.empty(0, dtype=np.int64)
        self._starts = np.empty(0, dtype=np.int64)

    def batch(self, step: int) -> Batch:
        """Batch of optimizer step `step`."""
        ids = torch.zeros(self.rows, self.row_length, dtype=torch.long)
        documents = torch.zeros_like(ids)
        for row in range(self.rows):
            epoch, index = divmod(step * self.rows + row, self.rows_per_epoch)
            self._shuffle(epoch)
            self._fill(ids[row], documents[row], int(self._rows[index]) * self.row_length)
        return Batch(ids, documents, torch.ones_like(ids, dtype=torch.bool))

    def _shuffle(self, epoch: int) -> None:
        if epoch != self._epoch:
            generator = np.random.default_rng(derive_seed(self.seed, "document order", epoch))
            self._order = generator.permutation(len(self.shard))
            self._rows = generator.permutation(self.rows_per_epoch)
            lengths = np.diff(self.shard.borders)[self._order]
            self._starts = np.concatenate(([0], lengths.cumsum()))
            self._epoch = epoch

    def _fill(self, ids: torch.Tensor, documents: torch.Tensor, start: int) -> None:
        """Copy stream[start : start + row_length] and number its documents."""
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        at, number = 0, 0
        while at < self.row_length:
            document = self.shard.document(self._order[index])
            offset = start + at - self._starts[index]
            piece = torch.from_numpy(document[offset : offset + self.row_length - at].astype(np.int64))
            ids[at : at + len(piece)] = piece
            documents[at : at + len(piece)] = number
            at, number, index = at + len(piece), number + 1, index + 1
