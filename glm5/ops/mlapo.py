"""The small operations before attention as two operators, for inference on an accelerator (MLAPO, §5).

    x         -> q_a, kv_a, wk, weights_proj    four products
    mla_latents                                 norms, RoPE of keys, weights of index heads; writes latents, index keys
    q latent  -> q_b, wq_b                      two products
    mla_absorb                                  queries into latent space, RoPE of queries and index queries

The four products of x stay four: for one product their weights would have to lie in one piece of memory, but training,
checkpoints and weight updates handle them by name. The operators take rows with any stride, so a product over stacked
weights could feed them too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.ops.elementwise import rms_norm
from glm5.ops.operators import operator
from glm5.ops.rope import rope
from glm5.ops.wide import wide


def _latent_shapes(q: Tensor, kv: Tensor, index: Sequence[Tensor], *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(index[1].shape if index else 0, dtype=wide(q.dtype))


@operator(
    "mla_latents(Tensor q, Tensor kv, Tensor[] index, Tensor q_norm, Tensor kv_norm, Tensor cos, Tensor sin, "
    "Tensor? places, Tensor(a!) latents, Tensor(b!)? index_keys, float eps, float index_eps) -> (Tensor, Tensor)",
    _latent_shapes,
    triton="mla_latents",
)
def mla_latents(
    q: Tensor,
    kv: Tensor,
    index: Sequence[Tensor],
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    places: Tensor | None,
    latents: Tensor,
    index_keys: Tensor | None,
    eps: float,
    index_eps: float,
) -> tuple[Tensor, Tensor]:
    """From products of M tokens: q [M, L] (q_a_proj), kv [M, C + R] (kv_a_proj) and, with an indexer, `index`: wk's
    [M, d], weights_proj's [M, J], and weight and bias of the LayerNorm [d]; else it is empty.

    Writes the latent of token m, [RMSNorm of c_KV | RoPE of k_R], into row places[m] of latents [..., C + R], and its
    index key, LayerNorm then RoPE of the first R dimensions, into the same row of index_keys [..., d]. Without `places`
    token m has row m. M may be larger than the number of places or rows: what follows is padding, and not written.
    cos and sin are [M, R / 2] in fp32. Returns RMSNorm of q [M, L], and the weights of the index heads [M, J] scaled by
    J^-1/2, in fp32 or wider (no elements without an indexer).
    """
    latent = kv_norm.shape[0]
    k_rope = rope(kv[:, None, latent:], cos, sin).squeeze(1)
    _write(torch.cat((rms_norm(kv[:, :latent], kv_norm, eps), k_rope), dim=-1), places, latents)
    weights = q.new_empty(0, dtype=wide(q.dtype))
    if index:
        assert index_keys is not None
        key, weight, norm, bias = index
        key = torch.nn.functional.layer_norm(key, norm.shape, norm, bias, index_eps)
        _write(rope(key.unsqueeze(1), cos, sin).squeeze(1), places, index_keys)
        weights = weight.to(wide(weight.dtype)) * weight.shape[1] ** -0.5
    return rms_norm(q, q_norm, eps), weights


def _write(rows: Tensor, places: Tensor | None, pool: Tensor) -> None:
    pool = pool.view(-1, pool.shape[-1])
    if places is None:
        pool.copy_(rows[: pool.shape[0]])
    else:
        pool.index_copy_(0, places, rows[: places.shape[0]])


def _absorbed_shapes(q: Tensor, up: Tensor, index_q: Tensor | None, *_: Tensor) -> tuple[Tensor, Tensor]:
    width = up.shape[2] + q.shape[2] - up.shape[1]
    return q.new_empty(*q.shape[:2], width), q.new_empty(0 if index_q is None else index_q.shape)


@operator(
    "mla_absorb(Tensor q, Tensor up, Tensor? index_q, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    _absorbed_shapes,
    triton="mla_absorb",
)
def mla_absorb(q: Tensor, up: Tensor, index_q: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries q [M, N, nope + R] times up [N, nope, C] (W_UK) in latent space, with RoPE: [M, N, C + R]; and index
    queries [M, J, d] with RoPE of the first R dimensions (no elements for None). cos and sin are [M, R / 2] in fp32."""
    nope = up.shape[1]
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), up).transpose(0, 1)
    turned = q.new_empty(0) if index_q is None else rope(index_q, cos, sin)
    return torch.cat((absorbed, rope(q[..., nope:], cos, sin)), dim=-1), turned
