"""Where the rows of each (token, slot) go when rows are grouped by expert. The reference is
`glm5.ops.experts.expert_layout`.

A stable counting sort: every block of slots counts its experts, one sum over the blocks tells where they begin, and
every block writes its places. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.ops.triton import Case, Shape, power_of_two

BLOCK = 64
"""Slots per program."""


@triton.jit
def count_experts_kernel(experts, counts, number, E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """How often a block of slots names every expert: counts int32 [blocks, E]."""
    block = tl.program_id(0)
    slot, expert = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, EXPERTS)
    own = tl.load(experts + slot, mask=slot < number, other=-1)
    count = tl.sum((own[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + block.to(tl.int64) * E + expert, count, mask=expert < E)


@triton.jit
def place_experts_kernel(
    experts, sums, slot_of, source, bounds, counts, number, blocks, per_token,
    E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`sums` [blocks, E] are the counts added up over the blocks. A slot's row is where its expert begins, and how many
    slots before it name the same expert."""
    block = tl.program_id(0)
    inside, expert = tl.arange(0, BLOCK), tl.arange(0, EXPERTS)
    slot = block * BLOCK + inside
    last = tl.zeros([], tl.int64) + blocks - 1  # Triton makes an argument of 1 a constant, which has no `to`
    total = tl.load(sums + last * E + expert, mask=expert < E, other=0)
    begin = tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(bounds + expert, begin, mask=expert < E)
        tl.store(bounds + E, tl.sum(total, 0))
        tl.store(counts + expert, total, mask=expert < E)
    before = tl.load(sums + (block - 1).to(tl.int64) * E + expert, mask=(expert < E) & (block > 0), other=0)
    own = tl.load(experts + slot, mask=slot < number, other=-1)
    first = tl.sum(tl.where(own[:, None] == expert[None, :], (begin + before)[None, :], 0), 1)
    others = tl.load(experts + block * BLOCK + inside, mask=slot < number, other=-1)
    alike = (own[:, None] == others[None, :]) & (inside[None, :] < inside[:, None])
    row = (first + tl.sum(alike.to(tl.int32), 1)).to(tl.int64)
    tl.store(slot_of + slot, row, mask=slot < number)
    tl.store(source + row, (slot // per_token).to(tl.int64), mask=slot < number)


def expert_layout(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """experts int64 [T, K] -> slot_of int64 [T * K], source int64 [T * K], bounds int32 [E + 1], counts int32 [E]."""
    experts, number = experts.contiguous(), experts.numel()
    blocks = triton.cdiv(number, BLOCK)
    sizes = dict(E=num_experts, EXPERTS=power_of_two(num_experts), BLOCK=BLOCK, num_warps=4)
    counts = experts.new_empty(blocks, num_experts, dtype=torch.int32)
    count_experts_kernel[(blocks,)](experts, counts, number, **sizes)
    slot_of, source = experts.new_empty(number), experts.new_empty(number)
    bounds = experts.new_empty(num_experts + 1, dtype=torch.int32)
    totals = experts.new_empty(num_experts, dtype=torch.int32)
    place_experts_kernel[(blocks,)](
        experts, counts.cumsum(0, dtype=torch.int32), slot_of, source, bounds, totals, number, blocks,
        experts.shape[1], **sizes,
    )  # fmt: skip
    return slot_of, source, bounds, totals


def _sizes(shape: Shape) -> dict[str, int]:
    return dict(E=shape.experts, EXPERTS=power_of_two(shape.experts), BLOCK=BLOCK)


def case(shape: Shape, target: str) -> Case:
    slots = shape.queries * shape.experts_per_token
    return Case(
        name="place_experts",
        function=place_experts_kernel,
        types={
            **dict(experts="*i64", sums="*i32", slot_of="*i64", source="*i64", bounds="*i32", counts="*i32"),
            **dict(number="i32", blocks="i32", per_token="i32"),
        },
        constants=_sizes(shape),
        options=dict(num_warps=4),
        flops=2 * slots * shape.experts,
        bytes=24 * slots + 4 * triton.cdiv(slots, BLOCK) * shape.experts,
        tensor_cores=False,
    )


def helpers(shape: Shape, target: str) -> list[Case]:
    """The kernel that counts."""
    slots = shape.queries * shape.experts_per_token
    count = Case(
        name="count_experts",
        function=count_experts_kernel,
        types=dict(experts="*i64", counts="*i32", number="i32"),
        constants=_sizes(shape),
        options=dict(num_warps=4),
        flops=slots * shape.experts,
        bytes=8 * slots + 4 * triton.cdiv(slots, BLOCK) * shape.experts,
        tensor_cores=False,
    )
    return [count]
