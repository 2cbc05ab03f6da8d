"""`glm5.ops.attention.sparse_attention` on a GPU: which kernels it takes."""

from __future__ import annotations

from torch import Tensor

from glm5.ops.triton.kernels.attention_target import attention_target
from glm5.ops.triton.kernels.sparse_decode import sparse_decode
from glm5.ops.triton.kernels.sparse_forward import sparse_forward


def attend(
    q: Tensor,
    latents: Tensor,
    rows: Tensor | None,
    table: Tensor | None,
    per_row: int,
    shift: int,
    size: int,
    indices: Tensor,
    value_dim: int,
    scale: float,
    want_probs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results as of the operator: output, probabilities summed over heads, logarithms of the sums."""
    view = None if rows is None or table is None else (rows, table, per_row, shift, size)
    if view is None:
        out, lse = sparse_forward(q, latents, indices, value_dim, scale)
    else:
        out, lse = sparse_decode(q, latents, indices, view, value_dim, scale)
    if not want_probs:
        return out, lse.new_empty(0), lse
    return out, attention_target(q, latents, indices, lse, value_dim, scale, view), lse
