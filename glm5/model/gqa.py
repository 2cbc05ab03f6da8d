"""Grouped-query attention as in GLM-4.5: the baseline for MLA (§2.1, Table 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.model.context import ForwardContext
from glm5.model.layers import RMSNorm, linear
from glm5.ops.dense import grouped_attention, max_logits
from glm5.ops.wide import wide


class GroupedProjections(nn.Module):
    """Query, key, value and output projections; `num_attention_heads` queries share `num_key_value_heads` keys.

    Muon treats each matrix as one block, as in GLM-4.5; Muon Split came with MLA.
    """

    def __init__(self, config: GLM5Config, layer: int, *, qk_norm: bool) -> None:
        super().__init__()
        c = config
        self.layer, self.heads, self.groups, self.dim = layer, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = linear(c.hidden_size, self.heads * self.dim, bias=c.attention_bias)
        self.k_proj = linear(c.hidden_size, self.groups * self.dim, bias=c.attention_bias)
        self.v_proj = linear(c.hidden_size, self.groups * self.dim, bias=c.attention_bias)
        self.o_proj = linear(self.heads * self.dim, c.hidden_size)
        self.q_norm = RMSNorm(self.dim, c.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.dim, c.rms_norm_eps) if qk_norm else None

    def project(self, x: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
        """x [M, D] flat -> q [M, N, H], k and v [M, G, H]; q and k normed as configured."""
        q = self.q_proj(x, exact).unflatten(-1, (self.heads, self.dim))
        k = self.k_proj(x, exact).unflatten(-1, (self.groups, self.dim))
        v = self.v_proj(x, exact).unflatten(-1, (self.groups, self.dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def repeat(self, x: Tensor) -> Tensor:
        """One copy per query head: [B, T, G, H] -> [B, T, N, H]."""
        return x.repeat_interleave(self.heads // self.groups, dim=2)


class GQA(GroupedProjections):
    """Softmax attention over cached keys and values, all of them or a sliding window.

    RoPE rotates the first `rotary_dim` elements of a head, in pairs (i, i + rotary_dim / 2).
    """

    def __init__(self, config: GLM5Config, layer: int) -> None:
        super().__init__(config, layer, qk_norm=config.use_qk_norm)
        self.scale, self.theta, self.rope_dim = config.head_dim**-0.5, config.rope_theta, config.rotary_dim
        self.window = config.window(layer)

    def forward(self, x: Tensor, ctx: ForwardContext, indices: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [M, D] flat -> (output [M, D], None, because it has no indices)."""
        q, k, v = self.project(x, ctx.exact)
        cos, sin = ctx.rope(self.rope_dim, self.theta)
        q, k = ctx.rows(rotate_halves(q, cos, sin)), rotate_halves(k, cos, sin)
        stored, _ = ctx.store(self.layer, ctx.rows(torch.cat((k, v), dim=1).flatten(1)), None)
        k, v = ctx.seen(stored).unflatten(-1, (2, self.groups, self.dim)).unbind(2)
        plain = ctx.cache is None and ctx.documents is None and self.window is None
        ranges = None if plain else ctx.key_range(self.window)
        if ctx.max_logits is not None:
            keys = self.repeat(k).transpose(1, 2)
            ctx.note_max_logits(self.layer, max_logits(q.transpose(1, 2), keys, ranges, ctx.present(), self.scale))
        out = grouped_attention(q, k, v, ranges, self.scale)
        return self.o_proj(ctx.flat(out.flatten(2)), ctx.exact), None


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first elements of x [M, N, H] in pairs (i, i + n), cos and sin [M, n]; the rest is unchanged."""
    kind, half = wide(x.dtype), cos.shape[-1]
    cos, sin = cos.to(kind).unsqueeze(1), sin.to(kind).unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in turned), rest), dim=-1)
