"""Row blocks: the parts of a matrix that Muon orthogonalises separately, as views without a copy (§2.1)."""

from __future__ import annotations

from torch import Tensor

from glm5.errors import ConfigError

Shape = tuple[int, int]


def block_heights(parameter: Tensor, name: str, split: bool) -> tuple[int, ...]:
    """Heights of the row blocks of a matrix [R, C] or of every matrix of a stack [E, R, C]; they add up to R.

    Raises ConfigError for a matrix that declares no blocks, or blocks that do not fit. A wrapper that makes new
    parameters loses the declaration, and training would go on without any sign of it.
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
    """All row blocks of a matrix [R, C] or a stack [E, R, C], as few views [n, r, C] as possible.

    Heights repeat (the per-head K and V rows of kv_b_proj alternate): each height in the shortest repeating pattern is
    one strided stack. Writing to a view changes the tensor.
    """
    period = shortest_period(heights)
    stack = tensor.view(-1, *tensor.shape[-2:])
    blocks = stack.unflatten(1, (len(heights) // period, sum(heights[:period])))
    if period == 1:
        return [blocks.flatten(0, 1)]
    views, start = [], 0
    for height in heights[:period]:
        part = blocks[:, :, start : start + height]
        # Alternating blocks of a stack have no common stride, so each matrix is its own view.
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
    """Multiplications of one Newton-Schulz iteration on a block; used to balance the owners."""
    short, long = min(shape), max(shape)
    return 2 * short * short * long + short**3
