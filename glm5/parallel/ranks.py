"""What a training loop asks of its process group; the base class is the answer of a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5ForCausalLM

T = TypeVar("T")


class Ranks:
    """One process on its own. A step's rows are shared out over `world` ranks; rank 0 writes what is written once."""

    rank = 0
    world = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, rows: int) -> tuple[int, int]:
        """First and last (exclusive) row of a step that this rank computes; behind the last row lies padding."""
        each = -(-rows // self.world)
        return self.rank * each, (self.rank + 1) * each

    def shard(self, model: GLM5ForCausalLM, dtype: torch.dtype, trainable: Callable[[str], bool]) -> GLM5ForCausalLM:
        """Spread the model's parameters over the ranks, in place; forward then computes in `dtype`."""
        return model

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in their order."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.gather(flag))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        return tensor
