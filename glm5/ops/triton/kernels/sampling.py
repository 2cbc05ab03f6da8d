"""Filtered distributions and draws, one program per row. The references are in `glm5.ops.sampling`.

Nothing is sorted: kept tokens are those above a log-probability, which bisection over the bits of floats finds in at
most 32 passes per filter, and the first of those that are equal to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, unit_rows
from glm5.ops.triton.kernels.route import ascending

TILE = 8192
"""Tokens that a program reads at a time."""
WARPS = 16
OPTIONS = dict(num_warps=WARPS, enable_fp_fusion=False)
"""A product and a difference fused into one operation round once: the largest log-probability would then not be the
largest logit's minus the normaliser, and with min-p 1 no token at all might remain."""


@triton.jit
def logprobs_at(logits, column, V, scale, level):
    x = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32) * scale
    return x - level


@triton.jit
def around(logits, V, scale, level, limit, TILE: tl.constexpr):
    """How many tokens have a key above `limit`, their probability, and how many have this key."""
    count = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float32)
    alike = tl.zeros([], tl.int32)
    for first in range(0, V, TILE):
        column = first + tl.arange(0, TILE)
        logp = logprobs_at(logits, column, V, scale, level)
        key = ascending(logp)
        hit = (column < V) & (key > limit)
        count += tl.sum(hit.to(tl.int32), 0)
        mass += tl.sum(tl.where(hit, tl.exp(logp), 0.0), 0)
        alike += tl.sum(((column < V) & (key == limit)).to(tl.int32), 0)
    return count, mass, alike


@triton.jit
def middle(low, high):
    """Of two int32, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def probability(key):
    return tl.exp(tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True))


@triton.jit
def sampling_logprobs_kernel(logits, scales, min_p, top_k, top_p, out, V, stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    out += row * V
    scale = tl.load(scales + row)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for first in range(0, V, TILE):
        x = logprobs_at(logits, first + tl.arange(0, TILE), V, scale, 0.0)
        highest = tl.maximum(best, tl.max(x, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(best - base) + tl.sum(tl.exp(x - base), 0)
        best = highest
    level = best + tl.log(total)

    # Keys are log-probabilities as integers in the same order. Kept: keys above `least`, and the first `ties` equal to
    # it. Each filter raises `least` by bisection.
    largest = ascending(best - level)
    least = ascending(tl.full([], float("-inf"), tl.float32))
    floor = tl.load(min_p + row) * probability(largest)
    if floor > 0.0:
        high = largest
        while least < high:
            at = middle(least, high)
            enough = probability(at) >= floor
            high = tl.where(enough, at, high)
            least = tl.where(enough, least, at + 1)
    most = tl.load(top_k + row)
    more, over, ties = around(logits, V, scale, level, least, TILE)
    if most < more + ties:
        high = largest
        while least < high:
            at = middle(least, high)
            more, over, ties = around(logits, V, scale, level, at, TILE)
            high = tl.where(more < most, at, high)
            least = tl.where(more < most, least, at + 1)
        more, over, ties = around(logits, V, scale, level, least, TILE)
        ties = tl.minimum(ties, (most - more).to(tl.int32))
    share = tl.load(top_p + row)
    if share < 1.0:
        wanted = share * (over + ties * probability(least))
        low, high, alike = least, largest, ties
        while low < high:
            at = middle(low, high)
            more, over, alike = around(logits, V, scale, level, at, TILE)
            high = tl.where(over < wanted, at, high)
            low = tl.where(over < wanted, low, at + 1)
        more, over, alike = around(logits, V, scale, level, low, TILE)
        room = tl.ceil((wanted - over) / probability(low))
        room = tl.minimum(tl.maximum(room, 1.0), 1e9).to(tl.int32)  # the likeliest stays, whatever was rounded
        ties = tl.minimum(tl.where(low == least, ties, alike), room)
        least = low

    norm = tl.log(over + ties * probability(least))
    found = tl.zeros([], tl.int32)
    for first in range(0, V, TILE):
        column = first + tl.arange(0, TILE)
        logp = logprobs_at(logits, column, V, scale, level)
        key = ascending(logp)
        same = (key == least) & (column < V)
        kept = (key > least) | (same & (found + tl.cumsum(same.to(tl.int32), 0) <= ties))
        found += tl.sum(same.to(tl.int32), 0)
        value = tl.where(kept, logp - norm, float("-inf"))
        # A row with NaN or infinity, or without a possible token, is NaN as a whole.
        value = tl.where(tl.abs(level) < float("inf"), value, float("nan"))
        tl.store(out + column, value, mask=column < V)


@triton.jit
def draw_tokens_kernel(logprobs, uniforms, greedy, out, V, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logprobs += row * V
    total = tl.zeros([], tl.float32)
    best = tl.full([], float("-inf"), tl.float32)
    likeliest = tl.zeros([], tl.int32)
    for first in range(0, V, TILE):
        column = first + tl.arange(0, TILE)
        logp = tl.load(logprobs + column, mask=column < V, other=float("-inf"))
        total += tl.sum(tl.exp(logp), 0)
        highest, where = tl.max(logp, 0, return_indices=True, return_indices_tie_break_left=True)
        likeliest = tl.where(highest > best, first + where, likeliest)
        best = tl.maximum(best, highest)
    target = tl.load(uniforms + row) * total
    before = tl.zeros([], tl.float32)
    drawn = tl.zeros([], tl.int32)
    for first in range(0, V, TILE):
        column = first + tl.arange(0, TILE)
        probs = tl.exp(tl.load(logprobs + column, mask=column < V, other=float("-inf")))
        passed = (before + tl.cumsum(probs, 0) <= target) & (column < V)
        drawn += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(probs, 0)
    drawn = tl.minimum(drawn, V - 1)
    instead = (tl.load(logprobs + drawn) == float("-inf")) | tl.load(greedy + row)
    tl.store(out + row, tl.where(instead, likeliest, drawn).to(tl.int64))


def sampling_logprobs(logits: Tensor, scale: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Arguments and result as of the operator."""
    logits = unit_rows(logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    sampling_logprobs_kernel[(logits.shape[0],)](
        logits, scale, min_p, top_k, top_p, out, logits.shape[1], logits.stride(0), TILE=TILE, **OPTIONS
    )
    return out


def draw_tokens(logprobs: Tensor, uniforms: Tensor, greedy: Tensor) -> Tensor:
    """Arguments and result as of the operator."""
    out = torch.empty(logprobs.shape[0], dtype=torch.long, device=logprobs.device)
    draw_tokens_kernel[(logprobs.shape[0],)](
        logprobs.contiguous(), uniforms, greedy, out, logprobs.shape[1], TILE=TILE, num_warps=WARPS
    )
    return out


def case(shape: Shape, target: str) -> Case:
    passes = 32 + 4  # one filter
    return Case(
        name="sampling_logprobs",
        function=sampling_logprobs_kernel,
        types={
            **dict(logits="*fp32", scales="*fp32", min_p="*fp32", top_k="*i64", top_p="*fp32", out="*fp32"),
            **dict(V="i32", stride="i32"),
        },
        constants=dict(TILE=TILE),
        options=OPTIONS,
        flops=4 * passes * shape.sequences * shape.vocabulary,
        bytes=8 * shape.sequences * shape.vocabulary,  # further passes find a row in the cache
        tensor_cores=False,
        aligned=("V", "stride"),
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The draw."""
    draw = Case(
        name="draw_tokens",
        function=draw_tokens_kernel,
        types=dict(logprobs="*fp32", uniforms="*fp32", greedy="*i1", out="*i64", V="i32"),
        constants=dict(TILE=TILE),
        options=dict(num_warps=WARPS),
        flops=4 * shape.sequences * shape.vocabulary,
        bytes=4 * shape.sequences * shape.vocabulary,
        tensor_cores=False,
        aligned=("V",),
    )
    return [draw]
