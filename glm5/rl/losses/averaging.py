"""Averages over tokens or sequences, and the share of each micro-batch in the average of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Average = Literal["sequence", "token"]


def average_over(values: Tensor, mask: Tensor, average: Average) -> Tensor:
    """Scalar mean of `values` [B, T] over `mask` (bool [B, T]); 0 for an empty mask.

    "token": mean over all masked tokens (Eq. 5). "sequence": mean per sequence, then over non-empty sequences (Eq. 1).
    """
    values = torch.where(mask, values, torch.zeros_like(values))
    if average == "token":
        return values.sum() / mask.sum().clamp_min(1)
    lengths = mask.sum(-1)
    present = (lengths > 0).sum().clamp_min(1)
    return (values.sum(-1) / lengths.clamp_min(1)).sum() / present


@dataclass(frozen=True)
class Counts:
    """Denominators of the two averages: sequences with a sampled token, and sampled tokens."""

    sequences: int
    tokens: int

    @classmethod
    def of(cls, masks: Iterable[Sequence[bool]]) -> Counts:
        """Counts of loss masks, one per sequence."""
        lengths = [sum(mask) for mask in masks]
        return cls(sum(length > 0 for length in lengths), sum(lengths))

    @classmethod
    def of_mask(cls, mask: Tensor) -> Counts:
        """Counts of a mask [B, T]."""
        lengths = mask.sum(-1)
        return cls(int((lengths > 0).sum()), int(lengths.sum()))

    def share_of(self, whole: Counts, average: Average) -> float:
        """The weight of this part's mean in the mean of the whole; 0 for an empty whole."""
        part, total = (self.sequences, whole.sequences) if average == "sequence" else (self.tokens, whole.tokens)
        return part / total if total else 0.0
