"""Pages of the KV cache: each sequence owns fixed-size pages of one pool, listed in a page table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE = 63
"""`Pages.shift` for sequences of one page: every position shifted by it is 0."""


@dataclass(frozen=True)
class Pages:
    """Page table: how to read a pool [pages, size, width] as sequences.

    Query m (in flat order) belongs to sequence rows[m]. Token s of that sequence is in page table[rows[m], s >> shift],
    at offset s modulo the page size. A page has `size` tokens: 1 << shift (a multiple of `KEY_TILE`), or any multiple
    of `KEY_TILE` if every sequence is one page. table int64 [S, P], rows int64 [M], both contiguous.
    """

    table: Tensor
    rows: Tensor
    size: int
    shift: int = WHOLE

    def place(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots in the flat pool [pages * size] of a sequence's tokens; rows and positions have the same shape."""
        pages = self.table[rows, positions >> self.shift]
        return pages * self.size + (positions if self.shift == WHOLE else positions & (self.size - 1))

    def read(self, pool: Tensor, rows: Tensor, length: int) -> Tensor:
        """The first `length` tokens of some sequences, copied out of the pool: [rows, length, width]. Positions past
        the end of a shorter sequence are undefined."""
        positions = torch.arange(length, device=pool.device).expand(len(rows), -1)
        places = self.place(rows.unsqueeze(1).expand_as(positions), positions)
        return pool.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)

    def kernel_view(self) -> tuple[Tensor, Tensor, int, int, int]:
        """Arguments of the compiled kernels: rows, table, pages per sequence, shift, page size."""
        return self.rows, self.table, self.table.shape[1], self.shift, self.size


def plain_view(rows_per_sequence: int) -> tuple[None, None, int, int, int]:
    """`Pages.kernel_view` of keys [B, S, width] in batch order: S tokens per sequence."""
    return None, None, 0, WHOLE, rows_per_sequence
