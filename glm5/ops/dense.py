"""Dense attention over a range of keys per query: causal, cut at document boundaries, windowed (§2.1)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from glm5.ops.native import kernels
from glm5.ops.operators import DEVICE_QUERIES, block_length, operator
from glm5.ops.wide import operand, product, wide

SHORT_DOCUMENT = 32
"""Documents shorter than this on average are computed in blocks: one call per document would cost more."""

QUERY_BLOCK = 128
"""Queries per block. Keys that no query of a block may see are skipped; a causal row then costs little over half."""


class _BlockAttention(torch.autograd.Function):
    """Matrix products per block of queries, with compiled softmax kernels between them. Backward recomputes the
    probabilities, so no tensor of size T * S is kept. All is computed in fp32; 16-bit inputs are widened."""

    @staticmethod
    def forward(ctx, q, k, v, start, end, scale):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v, start, end)
        ctx.scale, ctx.heads, length = scale, q.shape[1], q.shape[2]
        kind, (q, k, v) = q.dtype, _stacks(q, k, v)
        native = kernels(q)
        assert native is not None
        out = q.new_empty(*q.shape[:2], v.shape[2], dtype=kind)
        ctx.lse = torch.empty(2, *q.shape[:2])
        ctx.blocks = _blocks(start, end)
        for first, last, low, high in ctx.blocks:
            scores = torch.bmm(q[:, first:last], k[:, low:high].transpose(1, 2))
            sizes = (q.shape[0], ctx.heads, *scores.shape[1:], length, first, low)
            native.range_softmax(scores, start, end, ctx.lse, *sizes, scale)
            out[:, first:last] = torch.bmm(scores, v[:, low:high])
        return out.unflatten(0, (-1, ctx.heads))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        *saved, start, end = ctx.saved_tensors
        q, k, v, grad = _stacks(*saved, grad)
        native = kernels(q)
        assert native is not None
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros(k.shape), torch.zeros(v.shape)
        for first, last, low, high in ctx.blocks:
            rows, keys = slice(first, last), slice(low, high)
            scores = torch.bmm(q[:, rows], k[:, keys].transpose(1, 2))
            grad_scores = torch.bmm(grad[:, rows], v[:, keys].transpose(1, 2))
            sizes = (q.shape[0], ctx.heads, *scores.shape[1:], q.shape[1], first, low)
            native.range_softmax_backward(scores, grad_scores, start, end, ctx.lse, *sizes, ctx.scale)
            grad_v[:, keys] += torch.bmm(scores.transpose(1, 2), grad[:, rows])
            grad_k[:, keys] += torch.bmm(grad_scores.transpose(1, 2), q[:, rows])
            grad_q[:, rows] = torch.bmm(grad_scores, k[:, keys])
        grads = (g.to(x.dtype).unflatten(0, (-1, ctx.heads)) for g, x in zip((grad_q, grad_k, grad_v), saved))
        return *grads, None, None, None


def _stacks(*tensors: Tensor) -> list[Tensor]:
    """[B, N, T, H] -> contiguous [B * N, T, H] in fp32."""
    return [t.flatten(0, 1).to(torch.float32).contiguous() for t in tensors]


def _blocks(start: Tensor, end: Tensor) -> list[tuple[int, int, int, int]]:
    """(first query, last query, first key, last key) of every block; last is exclusive."""
    firsts = range(0, start.shape[1], QUERY_BLOCK)
    lows = [int(part.min()) for part in start.split(QUERY_BLOCK, dim=1)]
    highs = [int(part.max()) for part in end.split(QUERY_BLOCK, dim=1)]
    return [(f, min(f + QUERY_BLOCK, start.shape[1]), low, high) for f, low, high in zip(firsts, lows, highs)]


class _OperatorAttention(torch.autograd.Function):
    """`dense_attention` over ranges by operators, with one saved number per query and head."""

    @staticmethod
    def forward(ctx, q, k, v, start, end, scale):  # type: ignore[no-untyped-def]
        out, lse = _attend_ranges(q, k, v, start, end, scale)
        ctx.save_for_backward(q, k, v, start, end, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *_attend_ranges_backward(*ctx.saved_tensors, grad, ctx.scale), None, None, None


@operator(
    "attend_ranges(Tensor q, Tensor k, Tensor v, Tensor start, Tensor end, float scale) -> (Tensor, Tensor)",
    lambda q, _, v, *__: (q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide(q.dtype))),
    triton="range_attention",
)
def _attend_ranges(q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs, and log sum exp(scores) of every query [B, N, T]; +infinity for a query without keys."""
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
) -> tuple[Tensor, Tensor, Tensor]:
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
    if ranges is None:
        return _causal(q, k, v, scale)
    pieces = _causal_pieces(*ranges, k.shape[2]) if q.is_cpu else None
    if pieces is not None:
        return _attend_pieces(q, k, v, pieces, scale)
    if kernels(q) is not None and k.dtype == q.dtype:
        start, end = (t.contiguous() for t in ranges)
        return _BlockAttention.apply(q, k, v, start, end, scale)
    if not q.is_cpu:
        return _OperatorAttention.apply(q, k, v, *ranges, scale)
    return scaled_dot_product_attention(q, k, v, attn_mask=range_mask(ranges, k.shape[2]), scale=scale)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Plain causal attention. Keys and values are zero-padded to one width; otherwise SDPA writes out [T, T]."""
    values, missing = v.shape[-1], q.shape[-1] - v.shape[-1]
    if missing > 0:
        v = pad(v, (0, missing))
    elif missing < 0:
        q, k = pad(q, (0, -missing)), pad(k, (0, -missing))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., :values]


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


def _attend_pieces(q: Tensor, k: Tensor, v: Tensor, pieces: list[list[int]], scale: float) -> Tensor:
    """Causal attention inside each document. The output of a token that sees only itself is its own value."""
    if all(row == [q.shape[2]] for row in pieces):
        return _causal(q, k, v, scale)
    out = []
    for b, row in enumerate(pieces):
        qs, ks, vs = (t[b : b + 1].split([abs(n) for n in row], dim=2) for t in (q, k, v))
        done = [_causal(x, y, z, scale) if n > 0 else z for n, x, y, z in zip(row, qs, ks, vs)]
        out.append(torch.cat(done, dim=2))
    return torch.cat(out)


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
