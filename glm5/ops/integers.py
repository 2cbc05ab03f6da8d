"""Products in integers: rows rounded to int8, one scale per row, with weights in 8 or 4 bits (W8A8 and W4A8, §5).

Sums of products are exact, so the result equals that of the rounded numbers in exact arithmetic, times the scales in
fp32: within 4 roundings of fp32, and one per group of columns. There is no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.ops.experts import grouped_matmul
from glm5.ops.native import kernels
from glm5.ops.operators import operator
from glm5.ops.quantisers import INT8_TOKEN, Quantised, Quantiser, quantise
from glm5.ops.wide import wide

GROUP = 128
"""Scales of 4-bit weights are for multiples of so many columns, or for all columns."""

MOST_COLUMNS = 1 << 17
"""Sums of so many products of int8 numbers stay below 2^31."""


@dataclass(frozen=True)
class IntegerWeight:
    """A weight [rows, columns], or a stack [experts, rows, columns], in the form that the kernels multiply with.

    On a CPU (`IntegerMatrix` of native/integers.h) rows are padded with zeros to a multiple of 16, columns to one of 4:
    `values` int8 [..., rows / 16, columns / 4, 16, 4], or uint8 [..., rows / 16, columns / 8, 16, 4] with two 4-bit
    values + 8 per byte, those of the first four of 8 columns in the low halves; `scales` fp32 [..., rows / 16, groups,
    16]; `sums` int32 [..., rows] of int8 values, else None.

    On other devices `values` are int8 [..., rows, columns], or uint8 [..., rows, blocks * 64] for blocks of `GROUP`
    columns, padded with zeros: byte j of a block has columns j (low half) and j + 64, each + 8. `scales` are fp32 [...,
    rows, groups]; no `sums`.
    """

    values: Tensor
    scales: Tensor
    sums: Tensor | None
    rows: int
    columns: int

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def interleaved(self) -> bool:
        """Whether it has the form for a CPU."""
        return self.values.ndim > 3

    @property
    def experts(self) -> int | None:
        """Matrices of a stack; None for one matrix."""
        return self.values.shape[0] if self.values.ndim % 2 else None

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.scales.shape[-2 if self.interleaved else -1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values, self.scales) if self.sums is None else (self.values, self.scales, self.sums)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as a plain tensor [..., rows, columns]."""
        values = self.values
        if not self.interleaved:
            if self.bits == 4:
                halves = values.unflatten(-1, (-1, GROUP // 2))
                values = torch.stack((halves & 15, halves >> 4), -2).flatten(-3).to(torch.int8) - 8
            groups = values[..., : self.columns].unflatten(-1, (self.groups, -1)).to(wide(dtype))
            return (groups * self.scales.unsqueeze(-1).to(wide(dtype))).flatten(-2).to(dtype)
        if self.bits == 4:
            values = torch.stack((values & 15, values >> 4), -3).flatten(-4, -3).to(torch.int8) - 8
        values = values.movedim(-2, -3).flatten(-2)[..., : self.columns]
        groups = values.unflatten(-1, (self.groups, -1)).to(wide(dtype))
        scales = self.scales.transpose(-1, -2).unsqueeze(-1).to(wide(dtype))
        return (groups * scales).flatten(-2).flatten(-3, -2)[..., : self.rows, :].to(dtype)


def fits(form: Quantiser, columns: int) -> bool:
    """Whether weights of this form and width can be multiplied in integers."""
    group = form.group or columns
    if form.fp8 or columns > MOST_COLUMNS or columns % group:
        return False
    if form.bits == 8:
        return group == columns
    return group % GROUP == 0 or (group == columns and columns % 8 == 0)


def integer_weight(quantised: Quantised, interleaved: bool | None = None) -> IntegerWeight:
    """The form for multiplying of quantised weights that `fits` allows, for their device unless `interleaved` says
    which. Raises ValueError for others."""
    values, (rows, columns) = quantised.values, quantised.values.shape[-2:]
    bits = quantised.form.bits
    if not fits(quantised.form, columns):
        raise ValueError(f"no integer products with groups of {quantised.form.group or columns} of {columns} columns")
    if not (values.is_cpu if interleaved is None else interleaved):
        if bits == 4:
            padded = F.pad(values + 8, (0, -columns % GROUP), value=8).to(torch.uint8)
            low, high = padded.unflatten(-1, (-1, 2, GROUP // 2)).unbind(-2)
            values = (low | high << 4).flatten(-2)
        return IntegerWeight(values.contiguous(), quantised.scales.float().contiguous(), None, rows, columns)
    scales = F.pad(quantised.scales.float(), (0, 0, 0, -rows % 16)).unflatten(-2, (-1, 16)).transpose(-1, -2)
    values = F.pad(values, (0, -columns % 4, 0, -rows % 16))
    sums = values.sum(-1, dtype=torch.int32) if bits == 8 else None
    values = values.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 16)).movedim(-2, -3)
    if bits == 4:
        low, high = (values + 8).to(torch.uint8).unflatten(-3, (-1, 2)).unbind(-3)
        values = low | high << 4
    return IntegerWeight(values.contiguous(), scales.contiguous(), sums, rows, columns)


def integer_product(x: Tensor, weight: IntegerWeight, bounds: Tensor | None = None) -> Tensor:
    """x [M, columns] rounded to int8, times the weight transposed -> [M, rows] in the dtype of x.

    With a stack, rows bounds[e] to bounds[e + 1] are multiplied with expert e; the last of the integers bounds [E + 1]
    is M.
    """
    experts = weight.experts
    if x.ndim != 2 or x.shape[1] != weight.columns:
        raise ValueError(f"rows of shape {list(x.shape)} do not fit weights with {weight.columns} columns")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("integer products have no gradient; load the checkpoint without integers to train")
    if (bounds is None) != (experts is None) or (experts is not None and bounds.shape != (experts + 1,)):  # type: ignore[union-attr]
        raise ValueError(f"bounds do not fit {'one matrix' if experts is None else f'{experts} experts'}")
    if not weight.interleaved:
        return _rows_on_accelerator(x, weight, bounds)
    native = kernels(x)
    if native is None or not weight.values.is_cpu:
        return _reference(x, weight, bounds)
    x, out = x.contiguous(), x.new_empty(x.shape[0], weight.rows)
    whole = torch.tensor([0, x.shape[0]]) if bounds is None else bounds.long().contiguous()
    if int(whole[0]) or int(whole[-1]) != x.shape[0] or bool((whole.diff() < 0).any()):
        raise ValueError(f"bounds must rise from 0 to {x.shape[0]} rows, not from {int(whole[0])} to {int(whole[-1])}")
    native.integer_product(
        x, weight.values, weight.scales, weight.sums, whole, out, x.shape[0], weight.rows, weight.columns,
        len(whole) - 1, weight.groups, weight.bits, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _reference(x: Tensor, weight: IntegerWeight, bounds: Tensor | None) -> Tensor:
    """The same with rounded rows and dequantised weights."""
    rounded, matrix = quantise(x, INT8_TOKEN).dequantise(), weight.dequantise()
    if bounds is None:
        return (rounded @ matrix.T).to(x.dtype)
    edges = bounds.tolist()
    parts = [rounded[a:b] @ own.T for a, b, own in zip(edges, edges[1:], matrix)]
    return torch.cat(parts).to(x.dtype)


def _rows_on_accelerator(x: Tensor, weight: IntegerWeight, bounds: Tensor | None) -> Tensor:
    """`bounds` stay on the device, so they are not checked."""
    if not len(x):
        return x.new_empty(0, weight.rows)
    values, scales = weight.values, weight.scales
    if bounds is None:
        values, scales = values.unsqueeze(0), scales.unsqueeze(0)
        bounds = torch.arange(0, len(x) + 1, len(x), dtype=torch.int32, device=x.device)
    product: Tensor = _integer_rows(*_round_rows(x), values, scales, bounds, x.dtype)
    return product


@operator(
    "round_rows(Tensor x) -> (Tensor, Tensor)",
    lambda x: (torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0], 1, dtype=torch.float32)),
    triton="integer_rows.round_rows",
)
def _round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, I] -> int8 [M, I] and scales fp32 [M, 1]."""
    rounded = quantise(x, INT8_TOKEN)
    return rounded.values, rounded.scales


@operator(
    "integer_rows(Tensor x, Tensor x_scales, Tensor weight, Tensor scales, Tensor bounds, ScalarType dtype) -> Tensor",
    lambda x, _, weight, __, ___, dtype: x.new_empty(x.shape[0], weight.shape[1], dtype=dtype),
    triton="integer_rows.integer_rows",
)
def _integer_rows(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bounds: Tensor, dtype: torch.dtype
) -> Tensor:
    """Rows bounds[e] to bounds[e + 1] of x int8 [M, I] times their scales, times expert e: `weight` [E, O, bytes]
    and `scales` [E, O, groups] as in `IntegerWeight` -> [M, O]."""
    kind = torch.promote_types(dtype, scales.dtype)
    matrices = IntegerWeight(weight, scales, None, weight.shape[1], x.shape[1]).dequantise(kind)
    return grouped_matmul(x.to(kind) * x_scales.to(kind), matrices, bounds).to(dtype)
