"""Packed rows: several documents per row, with borders that attention respects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Packed token rows, all tensors [B, T].

    `documents` numbers each row's documents from 0, -1 is padding. `loss_mask` marks tokens that are targets: token i
    counts in the loss where it is predicted from the tokens before it in the same document. `sparse_targets` says that
    only a few tokens are (answers, assistant turns), which leaves nothing for multi-token prediction to learn from.
    """

    ids: Tensor
    documents: Tensor
    loss_mask: Tensor
    sparse_targets: bool = False

    def targets(self, ahead: int = 1) -> tuple[Tensor, Tensor]:
        """Token `ahead` positions after each position, and whether it is a target of the same document: two [B, T]."""
        ids = torch.zeros_like(self.ids)
        ids[:, :-ahead] = self.ids[:, ahead:]
        valid = torch.zeros_like(self.loss_mask)
        same = self.documents[:, ahead:] == self.documents[:, :-ahead]
        valid[:, :-ahead] = self.loss_mask[:, ahead:] & same & (self.documents[:, ahead:] >= 0)
        return ids, valid


@dataclass(frozen=True)
class Placement:
    """Where a sequence landed: row and first column."""

    row: int
    start: int


def pack(lengths: Sequence[int], row_length: int) -> tuple[list[Placement], int]:
    """First-fit-decreasing packing without splitting; returns one placement per sequence and the number of rows.

    Raises ValueError for a sequence that is longer than a row.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    used: list[int] = []
    placements: dict[int, Placement] = {}
    for i in order:
        if lengths[i] > row_length:
            raise ValueError(f"sequence {i} has {lengths[i]} tokens, a row only {row_length}")
        row = next((r for r, u in enumerate(used) if u + lengths[i] <= row_length), len(used))
        if row == len(used):
            used.append(0)
        placements[i] = Placement(row, used[row])
        used[row] += lengths[i]
    return [placements[i] for i in range(len(lengths))], len(used)


def pack_batch(
    sequences: Sequence[tuple[Sequence[int], Sequence[bool]]], row_length: int
) -> tuple[Batch, list[Placement]]:
    """Pack (ids, loss mask) pairs into as few rows of `row_length` as first-fit-decreasing finds."""
    placements, rows = pack([len(ids) for ids, _ in sequences], row_length)
    ids = torch.zeros(rows, row_length, dtype=torch.long)
    documents = torch.full_like(ids, -1)
    mask = torch.zeros(rows, row_length, dtype=torch.bool)
    count = [0] * rows
    for (tokens, wanted), place in sorted(zip(sequences, placements, strict=True), key=lambda x: x[1].start):
        span = slice(place.start, place.start + len(tokens))
        ids[place.row, span] = torch.tensor(list(tokens))
        mask[place.row, span] = torch.tensor(list(wanted))
        documents[place.row, span] = count[place.row]
        count[place.row] += 1
    return Batch(ids, documents, mask), placements
