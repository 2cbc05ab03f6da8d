"""Dense attention over a range of keys per query: causal, cut at document boundaries, windowed (§2.1)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from glm5.ops import narrow
from glm5.ops.native import kernels
from glm5.ops.operators import DEVICE_QUERIES, TORCH_FORMS, block_length, cpu_form, operator
from glm5.ops.wide import operand, product, wide

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]

SHORT_DOCUMENT = 32
"""Documents shorter than this on average are computed in blocks: one call per document would cost more."""

QUERY_BLOCK = 128
"""Queries per block. Keys that no query of a block may see are skipped; a causal row then costs little over half."""


class _RangeAttention(torch.autograd.Function):
    """`dense_attention` over ranges by operators: no tensor of size T * S is kept."""

    @staticmethod
    def forward(ctx, q, k, v, start, end, scale):  # type: ignore[no-untyped-def]
        out, lse = _attend_ranges(q, k, v, start, end, scale)
        ctx.save_for_backward(q, k, v, start, end, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *_attend_ranges_backward(*ctx.saved_tensors, grad, ctx.scale), None, None, None


def _attended(q: Tensor, _: Tensor, v: Tensor, *__: object) -> tuple[Tensor, Tensor]:
    shape = (2, *q.shape[:3]) if q.is_cpu else q.shape[:3]
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(shape, dtype=wide(q.dtype))


@operator(
    "attend_ranges(Tensor q, Tensor k, Tensor v, Tensor start, Tensor end, float scale) -> (Tensor, Tensor)",
    _attended,
    triton="range_attention",
)
def _attend_ranges(q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs, and log sum exp(scores) of every query [B, N, T]; +infinity for a query without keys. On a CPU the
    latter is [2, B, N, T] (see `_attend_on_cpu`)."""
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide(q.dtype))
    for rows, scores in _score_blocks(q, k, start, end, scale):
        total = scores.logsumexp(-1)
        lse[:, :, rows] = total.masked_fill(total == float("-inf"), float("inf"))
        out[:, :, rows] = product((scores - lse[:, :, rows].unsqueeze(-1)).exp(), operand(v))
    return out, lse


@operator(
    "attend_ranges_backward(Tensor q, Tensor k, Tensor v, Tensor start, Tensor end, Tensor out, Tensor lse, "
    "Tensor grad, float scale) -> (Tensor, Tensor, Tensor)",
    lambda q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
    triton="range_attention_backward",
)
def _attend_ranges_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    scale: float,
) -> Gradients:
    grad_q, grad_k, grad_v = (
        q.new_empty(q.shape),
        k.new_zeros(k.shape, dtype=lse.dtype),
        v.new_zeros(v.shape, dtype=lse.dtype),
    )
    for rows, scores in _score_blocks(q, k, start, end, scale):
        probs, g = (scores - lse[:, :, rows].unsqueeze(-1)).exp(), operand(grad[:, :, rows])
        inner = (out[:, :, rows].to(lse.dtype) * g).sum(-1, keepdim=True)
        grad_scores = probs * (product(g, operand(v).transpose(-1, -2)) - inner) * scale
        grad_v += product(probs.transpose(-1, -2), g)
        grad_k += product(grad_scores.transpose(-1, -2), operand(q[:, :, rows]))
        grad_q[:, :, rows] = product(grad_scores, operand(k))
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


@cpu_form("attend_ranges")
def _attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Few long documents by torch's attention, other ranges by matrix products per block of queries with compiled
    softmax kernels between them, in fp32. Of the second result [2, B, N, T] the kernels fill both parts: the largest
    score, and the log of the sum relative to it; the others the first."""
    out, lse = _attended(q, k, v)
    pieces = _causal_pieces(start, end, k.shape[2])
    if pieces is not None:
        for rows, long in _documents(pieces, k.shape[2]):
            if not long:  # a token that sees only itself
                out[rows] = v[rows]
                continue
            inputs = _one_width(*(narrow.widen(t[rows]) for t in (q, k, v)))
            done, lse[0][rows] = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, True, scale=scale)
            out[rows] = done[..., : v.shape[3]]
    elif kernels(q) is None:
        out, lse[0] = TORCH_FORMS["attend_ranges"](q, k, v, start, end, scale)
    else:
        heads, flat = q.shape[1], out.view(-1, *out.shape[2:])
        (q, k, v), start, end = _stacks(q, k, v), start.contiguous(), end.contiguous()
        native = kernels(q)
        assert native is not None
        for first, last, low, high in _blocks(start, end):
            scores = torch.bmm(q[:, first:last], k[:, low:high].transpose(1, 2))
            sizes = (q.shape[0], heads, *scores.shape[1:], q.shape[1], first, low)
            native.range_softmax(scores, start, end, lse, *sizes, scale)
            flat[:, first:last] = torch.bmm(scores, v[:, low:high])
    return out, lse


@cpu_form("attend_ranges_backward")
def _attend_backward_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    scale: float,
) -> Gradients:
    pieces = _causal_pieces(start, end, k.shape[2])
    if pieces is not None:
        return _pieces_backward(q, k, v, out, lse[0], grad, scale, pieces)
    if kernels(q) is None:
        return TORCH_FORMS["attend_ranges_backward"](q, k, v, start, end, out, lse[0], grad, scale)
    saved, heads = (q, k, v), q.shape[1]
    (q, k, v, grad), start, end = _stacks(q, k, v, grad), start.contiguous(), end.contiguous()
    native = kernels(q)
    assert native is not None
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.zeros(k.shape), torch.zeros(v.shape)
    for first, last, low, high in _blocks(start, end):
        rows, keys = slice(first, last), slice(low, high)
        scores = torch.bmm(q[:, rows], k[:, keys].transpose(1, 2))
        grad_scores = torch.bmm(grad[:, rows], v[:, keys].transpose(1, 2))
        sizes = (q.shape[0], heads, *scores.shape[1:], q.shape[1], first, low)
        native.range_softmax_backward(scores, grad_scores, start, end, lse, *sizes, scale)
        grad_v[:, keys] += torch.bmm(scores.transpose(1, 2), grad[:, rows])
        grad_k[:, keys] += torch.bmm(grad_scores.transpose(1, 2), q[:, rows])
        grad_q[:, rows] = torch.bmm(grad_scores, k[:, keys])
    found = [g.to(x.dtype).unflatten(0, (-1, heads)) for g, x in zip((grad_q, grad_k, grad_v), saved)]
    return found[0], found[1], found[2]


def _pieces_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float, pieces: list[list[int]]
) -> Gradients:
    found = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for rows, long in _documents(pieces, k.shape[2]):
        if not long:
            found[2][rows] = grad[rows]
            continue
        inputs = _one_width(*(narrow.widen(t[rows]) for t in (q, k, v)))
        grad_part, out_part = (pad(narrow.widen(t[rows]), (0, inputs[2].shape[3] - v.shape[3])) for t in (grad, out))
        done = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_part, *inputs, out_part, lse[rows], 0.0, True, scale=scale
        )
        for own, new in zip(found, done):
            own[rows] = new[..., : own.shape[3]]
    return found


def _stacks(*tensors: Tensor) -> list[Tensor]:
    """[B, N, T, H] -> contiguous [B * N, T, H] in fp32."""
    return [t.flatten(0, 1).to(torch.float32).contiguous() for t in tensors]


def _blocks(start: Tensor, end: Tensor) -> list[tuple[int, int, int, int]]:
    """(first query, last query, first key, last key) of every block; last is exclusive."""
    firsts = range(0, start.shape[1], QUERY_BLOCK)
    lows = [int(part.min()) for part in start.split(QUERY_BLOCK, dim=1)]
    highs = [int(part.max()) for part in end.split(QUERY_BLOCK, dim=1)]
    return [(f, min(f + QUERY_BLOCK, start.shape[1]), low, high) for f, low, high in zip(firsts, lows, highs)]


def _score_blocks(q: Tensor, k: Tensor, start: Tensor, end: Tensor, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of queries with their scores [B, N, t, S], -infinity outside of the ranges."""
    step = min(DEVICE_QUERIES, block_length(q.shape[0] * q.shape[1] * k.shape[2]))
    for first in range(0, q.shape[2], step):
        rows = slice(first, first + step)
        seen = range_mask((start[:, rows], end[:, rows]), k.shape[2])
        scores = product(operand(q[:, :, rows]), operand(k).transpose(-1, -2)) * scale
        yield rows, scores.masked_fill(~seen, float("-inf"))


def range_mask(ranges: tuple[Tensor, Tensor], keys: int) -> Tensor:
    """Key ranges [B, T] as a mask: bool [B, 1, T, keys]."""
    start, end = (t[:, None, :, None] for t in ranges)
    slots = torch.arange(keys, device=start.device)
    return (slots >= start) & (slots < end)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, ranges: tuple[Tensor, Tensor] | None, scale: float) -> Tensor:
    """Softmax attention. q [B, N, T, H], k [B, N, S, H], v [B, N, S, Hv] -> [B, N, T, Hv].

    Query t of sequence b attends to keys ranges[0][b, t] .. ranges[1][b, t] - 1 (int64 [B, T]); its output is 0 if it
    has none. `ranges=None` means plain causal attention with T = S. Scores, softmax and sums are fp32 (fp64 for fp64).
    """
    if ranges is None and (not q.numel() or narrow.product_dtype(q.dtype, q.device) == q.dtype):
        return _causal(q, k, v, scale)
    if ranges is None:  # with a gradient of ours, backward keeps no fp32 copies
        end = torch.arange(1, q.shape[2] + 1, device=q.device).expand(q.shape[0], -1)
        ranges = torch.zeros_like(end), end
    return _RangeAttention.apply(q, k, v, *ranges, scale)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Plain causal attention."""
    inputs = _one_width(q, k, v)
    return scaled_dot_product_attention(*inputs, is_causal=True, scale=scale)[..., : v.shape[3]]


def _one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values zero-padded to one width; otherwise torch's attention writes out [T, T]."""
    missing = q.shape[3] - v.shape[3]
    if missing > 0:
        v = pad(v, (0, missing))
    elif missing < 0:
        q, k = pad(q, (0, -missing)), pad(k, (0, -missing))
    return q, k, v


def _causal_pieces(start: Tensor, end: Tensor, keys: int) -> list[list[int]] | None:
    """Document lengths per row, if the ranges [B, T] are those of packed documents (a query sees its document up to
    itself) and the documents are few; else None. n > 1 consecutive one-token documents (padding) count as -n."""
    index = torch.arange(start.shape[1], device=start.device)
    if keys != len(index) or not bool((end == index + 1).all()):
        return None
    own = start == index
    if not bool((own | (start == start.roll(1, 1))).all()):
        return None
    rows = []
    for borders in own:
        begins = borders.nonzero().flatten()
        lengths = begins.diff(append=begins.new_tensor([keys])).tolist()
        row: list[int] = []
        for length in lengths:
            if length == 1 and row and row[-1] <= 1:
                row[-1] = -abs(row[-1]) - 1
            else:
                row.append(length)
        rows.append(row)
    few = sum(map(len, rows)) <= len(rows) * (1 + keys // SHORT_DOCUMENT)
    return rows if few and any(n > 0 for row in rows for n in row) else None


def _documents(pieces: list[list[int]], length: int) -> Iterator[tuple[tuple[slice, ...], bool]]:
    """The part of [B, N, T, ...] that each of `_causal_pieces` covers, and whether it is one document."""
    if all(row == [length] for row in pieces):
        yield (slice(None),), True
        return
    for b, row in enumerate(pieces):
        first = 0
        for n in row:
            yield (slice(b, b + 1), slice(None), slice(first, first + abs(n))), n > 0
            first += abs(n)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, ranges: tuple[Tensor, Tensor] | None, scale: float) -> Tensor:
    """Attention of heads in groups that share keys. q [B, T, N, H], k [B, S, G, H], v [B, S, G, Hv], ranges as in
    `dense_attention` -> [B, T, N, Hv].

    With ranges, the heads of a group are put on the query axis, and the cache is never copied per head. The plain
    causal case copies, because its kernel derives causality from the shape.
    """
    length, groups = q.shape[1], k.shape[2]
    share = q.shape[2] // groups
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if ranges is None:
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        return dense_attention(q.transpose(1, 2), k, v, None, scale).transpose(1, 2)
    heads = q.unflatten(2, (groups, share))
    if q.is_cpu:
        start, end = (t.repeat(1, share) for t in ranges)
        folded = heads.permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = dense_attention(folded, k, v, (start, end), scale)
        return out.unflatten(2, (share, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    # The heads of one token side by side keep the ranges ascending: kernels then read fewer tiles.
    start, end = (t.unsqueeze(2).expand(-1, -1, share).flatten(1) for t in ranges)
    out = dense_attention(heads.transpose(1, 2).flatten(2, 3), k, v, (start, end), scale)
    return out.unflatten(2, (length, share)).transpose(1, 2).flatten(2, 3)


@torch.no_grad()
def max_logits(q: Tensor, k: Tensor, ranges: tuple[Tensor, Tensor] | None, real: Tensor | None, scale: float) -> Tensor:
    """Largest attention logit of every head (monitored in §2.1): arguments as in `dense_attention`; real bool [B, T]
    excludes padding queries -> [N] in fp32."""
    best = torch.full((q.shape[1],), float("-inf"), device=q.device)
    for first in range(0, q.shape[2], QUERY_BLOCK):
        rows = slice(first, first + QUERY_BLOCK)
        scores = product(q[:, :, rows], k.transpose(-1, -2)).float() * scale
        if ranges is None:
            slots = torch.arange(k.shape[2], device=q.device)
            seen = slots <= slots[rows].unsqueeze(1)
        else:
            seen = range_mask((ranges[0][:, rows], ranges[1][:, rows]), k.shape[2])
        if real is not None:
            seen = seen & real[:, None, rows, None]
        best = torch.maximum(best, scores.masked_fill(~seen, float("-inf")).amax(dim=(0, 2, 3)))
    return best
