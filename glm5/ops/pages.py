"""Where cached rows lie: sequences own fixed pages of one pool, and a table says which."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE = 63
"""`Pages.shift` where a sequence is one page: no position is large enough to leave it."""


@dataclass(frozen=True)
class Pages:
    """What operations need to read a pool [pages, size, width] as sequences.

    Query m (in flat order) belongs to sequence rows[m]; that sequence's token s lies in page table[rows[m], s >>
    shift], at place s modulo the page. `size` tokens are in a page: 1 << shift of them (a multiple of `KEY_TILE`), or
    any multiple of `KEY_TILE` where every sequence is one page. table int64 [S, P], rows int64 [M], both contiguous.
    """

    table: Tensor
    rows: Tensor
    size: int
    shift: int = WHOLE

    def place(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Index into the flat pool [pages * size] of a sequence's tokens; rows and positions of one shape."""
        pages = self.table[rows, positions >> self.shift]
        return pages * self.size + (positions if self.shift == WHOLE else positions & (self.size - 1))

    def read(self, pool: Tensor, rows: Tensor, length: int) -> Tensor:
        """The first `length` tokens of some sequences, copied out of the pool: [rows, length, width]. Behind the end of
        a shorter one stands anything."""
        positions = torch.arange(length, device=pool.device).expand(len(rows), -1)
        places = self.place(rows.unsqueeze(1).expand_as(positions), positions)
        return pool.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)

    def kernel_view(self) -> tuple[Tensor, Tensor, int, int, int]:
        """The arguments by which the compiled kernels find rows: rows, table, pages per sequence, shift, page size."""
        return self.rows, self.table, self.table.shape[1], self.shift, self.size


def plain_view(rows_per_sequence: int) -> tuple[None, None, int, int, int]:
    """`Pages.kernel_view` of keys [B, S, width] that lie in batch order: S tokens per sequence."""
    return None, None, 0, WHOLE, rows_per_sequence
