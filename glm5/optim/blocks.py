"""Row blocks: which parts of a matrix Muon orthogonalises on their own, as views that need no copy (§2.1)."""

from __future__ import annotations

from torch import Tensor

from glm5.errors import ConfigError

Shape = tuple[int, int]


def block_heights(parameter: Tensor, name: str, split: bool) -> tuple[int, ...]:
    """Heights of the row blocks of a matrix [R, C] or of every matrix of a stack [E, R, C]; they add up to R.

    Raises ConfigError for a matrix that declares none (a wrapper that makes new parameters loses the declaration, and
    the matrix would train without any sign of it) and for a declaration that does not fit.
    """
    rows = parameter.shape[-2]
    if not split:
        return (rows,)
    heights = getattr(parameter, "muon_split", None)
    if heights is None:
        raise ConfigError(
            f"{name} is a matrix without declared Muon Split blocks; call declare_split on it (and restore_splits "
            "after a wrapper that replaces parameters, such as fully_shard)."
        )
    if sum(heights) != rows or min(heights) < 1:
        raise ConfigError(f"{name} declares Muon Split blocks of {sum(heights)} rows in all, but has {rows} rows.")
    return tuple(heights)


def block_views(tensor: Tensor, heights: tuple[int, ...]) -> list[Tensor]:
    """Every row block of a matrix [R, C] or a stack [E, R, C] as few views [n, r, C] as possible.

    Heights repeat (per-head K and V rows of kv_b_proj alternate), so each height of the shortest repeating pattern is
    one strided stack; writing to a view changes the tensor.
    """
    period = shortest_period(heights)
    stack = tensor.view(-1, *tensor.shape[-2:])
    blocks = stack.unflatten(1, (len(heights) // period, sum(heights[:period])))
    if period == 1:
        return [blocks.flatten(0, 1)]
    views, start = [], 0
    for height in heights[:period]:
        part = blocks[:, :, start : start + height]
        # Stacks whose blocks alternate have no common stride, so each matrix is a view of its own.
        views += part.unbind(0)
        start += height
    return views


def shortest_period(heights: tuple[int, ...]) -> int:
    """Length of the shortest repeating pattern of block heights."""
    for period in range(1, len(heights) + 1):
        if len(heights) % period == 0 and heights == heights[:period] * (len(heights) // period):
            return period
    return len(heights)


def newton_schulz_cost(shape: Shape) -> int:
    """Multiplications of one Newton-Schulz iteration on a block; what owners are balanced by."""
    short, long = min(shape), max(shape)
    return 2 * short * short * long + short**3
