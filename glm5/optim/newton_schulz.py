"""Newton-Schulz orthogonalisation of many equal blocks at once (§2.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from glm5.ops.narrow import widen

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5

_T = TypeVar("_T")


def newton_schulz(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix of each [r, c] in a stack [n, r, c] (singular values ~0.7..1.2).

    Five quintic iterations X <- a X + (b G + c G^2) X on the Frobenius-normalised matrix. G is the Gram matrix of the
    shorter side; a tall block multiplies from the right, which avoids a transpose in memory.
    """
    return iterate(blocks.to(dtype)).to(blocks.dtype)


def iterate(x: Tensor) -> Tensor:
    """`newton_schulz` of x [n, r, c] with a result of its dtype; x is not changed. bf16 on a CPU without it is computed
    in fp32."""
    (a, b, c), kind = COEFFICIENTS, x.dtype
    x = widen(x)
    norm = torch.linalg.vector_norm(x.flatten(1), dim=1).add_(1e-7)
    x = x * norm.reciprocal_()[:, None, None]
    tall = x.shape[1] > x.shape[2]
    short = min(x.shape[1:])
    other = torch.empty_like(x)
    gram, polynomial = (x.new_empty(x.shape[0], short, short) for _ in range(2))
    for _ in range(STEPS):
        torch.bmm(x.mT if tall else x, x if tall else x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        if tall:
            torch.baddbmm(x, x, polynomial, beta=a, out=other)
        else:
            torch.baddbmm(x, polynomial, x, beta=a, out=other)
        x, other = other, x
    return x.to(kind)


def chunk_length(rows: int, columns: int, device: torch.device) -> int:
    """Blocks per batch: on a CPU the iteration should fit in the second-level cache; elsewhere a batch should fill the
    device without doubling the memory of a large model."""
    elements = 1 << 19 if device.type == "cpu" else 1 << 26
    return max(1, elements // (rows * columns))


def chunks(sized: Iterable[tuple[int, _T]], limit: int) -> Iterator[list[tuple[_T, int, int]]]:
    """Cut items of n units each into batches of at most `limit` units: lists of (item, first unit, last unit + 1)."""
    batch: list[tuple[_T, int, int]] = []
    room = limit
    for size, item in sized:
        start = 0
        while start < size:
            take = min(room, size - start)
            batch.append((item, start, start + take))
            start, room = start + take, room - take
            if room == 0:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch
