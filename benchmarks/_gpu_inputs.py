"""Inputs of every kernel for `gpu.py`, at any shape, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from glm5.ops import (
    attention,
    cross_entropy,
    dense,
    elementwise,
    experts,
    indexer,
    indexer_kl,
    integers,
    mlapo,
    rope,
    route,
)
from glm5.ops import sampling as _sampling
from glm5.ops.indexer_8bit import quantise_rows
from glm5.ops.integers import GROUP
from glm5.ops.operators import TORCH_FORMS, TRITON_KERNELS
from glm5.ops.pages import Pages, plain_view
from glm5.ops.quantisers import INT4_GROUP_128, INT8_CHANNEL, Quantiser
from glm5.ops.triton import Shape

MODULES = (
    attention, cross_entropy, dense, elementwise, experts, indexer, indexer_kl, integers, mlapo, rope, route, _sampling,
)  # fmt: skip
"""They define the operators."""

SMALL = dict(queries=48, context=320, topk=64, sequences=3, hidden=768, experts=8, expert_inner=256, vocabulary=5000)
"""What a CPU computes in fp64 within seconds; the widths of heads stay those of the preset."""
PAGE = 64


Make = Callable[["Draw"], tuple[Any, ...]]


@dataclass(frozen=True)
class Draw:
    """Random tensors of one dtype on one device, the same for all devices."""

    shape: Shape
    dtype: torch.dtype
    device: str
    source: torch.Generator

    def normal(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(sizes, generator=self.source, device=self.source.device).to(self.device, dtype or self.dtype)

    def whole(self, low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=self.source, device=self.source.device).to(self.device)

    def picks(self, queries: int) -> Tensor:
        """Ascending keys of each query [1, T, K]: one from each equal part of the context."""
        part = self.shape.context // self.shape.topk
        return torch.arange(self.shape.topk, device=self.device) * part + self.whole(
            0, part, 1, queries, self.shape.topk
        )

    def ranges(self, keys: int, queries: int) -> tuple[Tensor, Tensor]:
        """The last `queries` tokens of a causal row of `keys`."""
        end = torch.arange(keys - queries, keys, device=self.device).unsqueeze(0) + 1
        return torch.zeros_like(end), end


def _attend(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    q, latents = d.normal(1, s.queries, s.heads, s.latent + s.rope), d.normal(1, s.context, s.latent + s.rope)
    return (q, latents, *plain_view(s.context), d.picks(s.queries), s.latent, s.head_dim**-0.5, False)


def _decode(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    per_row, rows = s.context // PAGE, torch.arange(s.sequences, device=d.device)
    order = torch.randperm(s.sequences * per_row, generator=d.source, device=d.source.device).to(d.device)
    pool = d.normal(s.sequences * per_row, PAGE, s.latent + s.rope)
    q = d.normal(1, s.sequences, s.heads, s.latent + s.rope)
    view = Pages(order.view(s.sequences, per_row), rows, PAGE, PAGE.bit_length() - 1).kernel_view()
    return (q, pool, *view, d.picks(s.sequences), s.latent, s.head_dim**-0.5, False)


def _attend_backward(d: Draw) -> tuple[Any, ...]:
    q, latents, *_, indices, value_dim, scale, _ = arguments = _attend(d)
    out, _, lse = TRITON_KERNELS["attend"](*arguments)
    return q, latents, indices, out, lse, d.normal(*q.shape[:3], value_dim), scale


def _index(d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    s = d.shape
    q, k = d.normal(1, s.queries, s.index_heads, s.index_dim), d.normal(1, s.context, s.index_dim)
    return q, k, d.normal(1, s.queries, s.index_heads, dtype=wide(d.dtype))


def _select(d: Draw) -> tuple[Any, ...]:
    """Small whole numbers: sums are exact, and ties are many."""
    s = d.shape
    q, k = d.whole(-2, 3, 1, s.queries, s.index_heads, s.index_dim), d.whole(-2, 3, 1, s.context, s.index_dim)
    w = d.whole(-2, 3, 1, s.queries, s.index_heads).to(wide(d.dtype))
    return (q.to(d.dtype), k.to(d.dtype), *plain_view(s.context), w, *d.ranges(s.context, s.queries), s.topk)


def _select_8bit(d: Draw) -> tuple[Any, ...]:
    q, k, *view, w, start, end, topk = _select(d)
    (q, scale), (k, k_scale) = quantise_rows(q, "fp8"), quantise_rows(k, "fp8")
    # Scales that are powers of two keep sums exact.
    return q, k, k_scale.log2().round().exp2(), *view, w * scale.log2().round().exp2(), start, end, topk


def _indexer_kl(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    q, k = d.normal(1, s.heads, s.queries, s.head_dim), d.normal(1, s.heads, s.context, s.head_dim)
    weight = d.normal(1, s.queries, dtype=wide(d.dtype)).abs()
    return *_index(d), q, k, *d.ranges(s.context, s.queries), s.head_dim**-0.5, weight, True


def _ranges(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    q, k = (d.normal(1, s.heads, s.queries, s.head_dim) for _ in range(2))
    return q, k, d.normal(1, s.heads, s.queries, s.value), *d.ranges(s.queries, s.queries), s.head_dim**-0.5


def _ranges_backward(d: Draw) -> tuple[Any, ...]:
    *tensors, scale = _ranges(d)
    out, lse = TRITON_KERNELS["attend_ranges"](*tensors, scale)
    return *tensors, out, lse, d.normal(*out.shape), scale


def _layout(d: Draw) -> tuple[Tensor, int]:
    """Distinct experts for every token."""
    s = d.shape
    order = torch.rand(s.queries, s.experts, generator=d.source, device=d.source.device).argsort(-1)
    return order[:, : s.experts_per_token].sort(-1).values.to(d.device), s.experts


def _grouped(d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    s = d.shape
    bounds = TORCH_FORMS["expert_layout"](*_layout(d))[2]
    x, weight = d.normal(s.queries * s.experts_per_token, s.hidden), d.normal(s.experts, 2 * s.expert_inner, s.hidden)
    return x, weight, bounds


def _integers(form: Quantiser, few: bool = False) -> Make:
    """Tokens of a prefill chunk, or of a decoding step, times experts in int8 or int4."""

    def make(d: Draw) -> tuple[Any, ...]:
        s = replace(d.shape, queries=d.shape.sequences) if few else d.shape
        bounds = TORCH_FORMS["expert_layout"](*_layout(replace(d, shape=s)))[2]
        rows, groups = s.queries * s.experts_per_token, max(1, s.hidden // (form.group or s.hidden))
        if form.bits == 4:
            weight = d.whole(0, 256, s.experts, 2 * s.expert_inner, -(-s.hidden // GROUP) * (GROUP // 2))
        else:
            weight = d.whole(-127, 128, s.experts, 2 * s.expert_inner, s.hidden)
        weight = weight.to(torch.uint8 if form.bits == 4 else torch.int8)
        scales = d.normal(s.experts, 2 * s.expert_inner, groups, dtype=torch.float32).abs()
        x = TORCH_FORMS["round_rows"](d.normal(rows, s.hidden))
        return (*x, weight, scales, bounds, d.dtype)

    return make


def _grouped_weights(d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bounds = _grouped(d)
    return d.normal(x.shape[0], weight.shape[1]), x, bounds


def _combine(d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    s, slot_of = d.shape, TORCH_FORMS["expert_layout"](*_layout(d))[0]
    weights = d.normal(s.queries, s.experts_per_token, dtype=wide(d.dtype))
    return d.normal(s.queries * s.experts_per_token, s.hidden), slot_of, weights


def _norm(d: Draw) -> tuple[Any, ...]:
    return d.normal(d.shape.queries, d.shape.hidden), d.normal(d.shape.hidden), 1e-5


def _norm_backward(d: Draw) -> tuple[Any, ...]:
    x, weight, eps = _norm(d)
    return x, weight, TORCH_FORMS["rms_norm"](x, weight, eps)[1], d.normal(*x.shape)


def _gate_up(d: Draw) -> Tensor:
    return d.normal(d.shape.queries * d.shape.experts_per_token, 2 * d.shape.expert_inner)


def _turned(d: Draw, width: int) -> tuple[Tensor, Tensor]:
    angle = d.normal(width, d.shape.rope // 2, dtype=torch.float32)
    return angle.cos(), angle.sin()


def _rope(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    return d.normal(s.queries, s.heads, s.head_dim), *_turned(d, s.queries), s.nope, 1.0


def _route(d: Draw) -> tuple[Any, ...]:
    kind = wide(d.dtype)
    return d.normal(d.shape.queries, d.shape.experts, dtype=kind), d.normal(d.shape.experts, dtype=kind), \
        d.shape.experts_per_token, True, 2.5  # fmt: skip


def _route_backward(d: Draw) -> tuple[Any, ...]:
    weights, chosen, scores = TORCH_FORMS["route"](*_route(d))
    return scores, chosen, d.normal(*weights.shape, dtype=scores.dtype), None, True, 2.5


def _logits(d: Draw) -> tuple[Any, ...]:
    rows = min(512, d.shape.queries)
    return d.normal(rows, d.shape.vocabulary, dtype=wide(d.dtype)), d.whole(0, d.shape.vocabulary, rows), 1.0


def _logit_gradient(d: Draw) -> tuple[Any, ...]:
    logits, targets, scale = _logits(d)
    normaliser = TORCH_FORMS["logit_stats"](logits, targets, scale)[2]
    return logits, targets, normaliser, d.normal(len(logits), dtype=logits.dtype), scale, d.dtype


def _distribution(d: Draw) -> tuple[Any, ...]:
    rows = d.shape.sequences
    logits, columns = d.normal(rows, d.shape.vocabulary, dtype=wide(d.dtype)), torch.ones(4, rows, device=d.device)
    scale, min_p, top_k, top_p = columns.mul_(torch.tensor([[1.0], [0.0], [50.0], [2.0]], device=d.device)).unbind()
    return logits, scale, min_p, top_k.long(), top_p


def _absorb(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    q, up = d.normal(s.queries, s.heads, s.head_dim), d.normal(s.heads, s.nope + s.value, s.latent)[:, : s.nope]
    return q, up, d.normal(s.queries, s.index_heads, s.index_dim), *_turned(d, s.queries)


def _latents(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    index = [d.normal(s.queries, s.index_dim), d.normal(s.queries, s.index_heads), *d.normal(2, s.index_dim)]
    places = torch.arange(s.queries, device=d.device).flip(0)
    pools = (torch.zeros(s.queries, w, dtype=d.dtype, device=d.device) for w in (s.latent + s.rope, s.index_dim))
    return (
        *(d.normal(s.queries, s.query_latent), d.normal(s.queries, s.latent + s.rope), index),
        *(d.normal(s.query_latent), d.normal(s.latent), *_turned(d, s.queries), places, *pools, 1e-5, 1e-6),
    )


WORK: Mapping[str, tuple[str, str, Make]] = {
    "attend": ("attend", "sparse_forward", _attend),
    "attend, paged": ("attend", "sparse_decode", _decode),
    "attend_backward": ("attend_backward", "sparse_backward sparse_backward_q", _attend_backward),
    "select": ("select", "index_select", _select),
    "select_8bit": ("select_8bit", "index_select_fp8", _select_8bit),
    "selected": ("selected", "selected_scores", lambda d: (*_index(d), d.picks(d.shape.queries))),
    "selected_backward": (
        "selected_backward",
        "selected_scores_backward",
        lambda d: (
            *_index(d),
            d.picks(d.shape.queries),
            d.normal(1, d.shape.queries, d.shape.topk, dtype=wide(d.dtype)),
        ),
    ),
    "indexer_kl": ("indexer_kl", "", _indexer_kl),
    "attend_ranges": ("attend_ranges", "range_attention", _ranges),
    "attend_ranges_backward": (
        "attend_ranges_backward",
        "range_attention_backward range_backward_kv range_backward_k range_backward_v",
        _ranges_backward,
    ),
    "grouped_rows": ("grouped_rows", "grouped_matmul", _grouped),
    "grouped_rows, decoding": (
        "grouped_rows",
        "grouped_matmul_decode",
        lambda d: _grouped(replace(d, shape=replace(d.shape, queries=d.shape.sequences))),
    ),
    "grouped_weights": ("grouped_weights", "grouped_weights", _grouped_weights),
    "round_rows": ("round_rows", "round_rows", lambda d: (d.normal(d.shape.queries, d.shape.hidden),)),
    "integer_rows": ("integer_rows", "integer_rows", _integers(INT4_GROUP_128)),
    "integer_rows, int8": ("integer_rows", "integer_rows_int8", _integers(INT8_CHANNEL)),
    "integer_rows, decoding": ("integer_rows", "integer_rows_decode", _integers(INT4_GROUP_128, few=True)),
    "integer_rows, int8, decoding": ("integer_rows", "integer_rows_decode_int8", _integers(INT8_CHANNEL, few=True)),
    "mla_latents": ("mla_latents", "mla_latents", _latents),
    "mla_absorb": ("mla_absorb", "mla_absorb", _absorb),
    "rms_norm": ("rms_norm", "rms_norm", _norm),
    "rms_norm_backward": ("rms_norm_backward", "rms_norm_backward", _norm_backward),
    "swiglu": ("swiglu", "swiglu", lambda d: (_gate_up(d),)),
    "swiglu_backward": (
        "swiglu_backward",
        "swiglu_backward",
        lambda d: (_gate_up(d), d.normal(d.shape.queries * d.shape.experts_per_token, d.shape.expert_inner)),
    ),
    "rope": ("rope", "rope", _rope),
    "route": ("route", "route", _route),
    "route_backward": ("route_backward", "route_backward", _route_backward),
    "expert_layout": ("expert_layout", "place_experts", _layout),
    "combine": ("combine", "combine", _combine),
    "combine_backward": (
        "combine_backward",
        "combine_backward",
        lambda d: (*_combine(d), d.normal(d.shape.queries, d.shape.hidden)),
    ),
    "logit_stats": ("logit_stats", "logit_stats", _logits),
    "logit_gradient": ("logit_gradient", "logit_gradient", _logit_gradient),
    "sampling_logprobs": ("sampling_logprobs", "sampling_logprobs", _distribution),
}
"""By name: operator, each `Case` whose FLOPs and bytes are those of a call, as far as the target has it, arguments."""


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
