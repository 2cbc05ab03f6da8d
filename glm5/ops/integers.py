"""Products in integers: rows rounded to int8, one scale per row, with weights in 8 or 4 bits (W8A8 and W4A8, §5).

Sums of products are exact, so the result equals that of the rounded numbers in exact arithmetic, times the scales in
fp32: within 4 roundings of fp32, and one per group of columns. There is no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.ops.native import kernels
from glm5.ops.quantisers import INT8_TOKEN, Quantised, Quantiser, quantise
from glm5.ops.wide import wide

PAIRED = 128
"""Values of a 4-bit row that share 64 bytes: byte j has value j in its low half and value j + 64 in its high half."""


@dataclass(frozen=True)
class IntegerWeight:
    """A weight [rows, columns], or a stack [experts, rows, columns], for `integer_product`.

    `values` int8 of that shape, or uint8 [..., rows, columns / 2] with two 4-bit values + 8 (see `PAIRED`); `scales`
    fp32 [..., rows, groups]; `sums` int32 [..., rows] of int8 values, else None.
    """

    values: Tensor
    scales: Tensor
    sums: Tensor | None
    columns: int

    @property
    def bits(self) -> int:
        return 8 if self.sums is not None else 4

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.values, self.scales, self.sums) if tensor is not None)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as a plain tensor."""
        values = self.values
        if self.bits == 4:
            pairs = values.unflatten(-1, (-1, PAIRED // 2))
            values = torch.cat((pairs & 15, pairs >> 4), -1).flatten(-2).to(torch.int8) - 8
        groups = values.unflatten(-1, (self.scales.shape[-1], -1)).to(wide(dtype))
        return (groups * self.scales.unsqueeze(-1).to(wide(dtype))).flatten(-2).to(dtype)


def fits(form: Quantiser, columns: int) -> bool:
    """Whether weights of this form and width can be multiplied in integers."""
    group = form.group or columns
    if form.fp8 or columns % group:
        return False
    return group == columns if form.bits == 8 else group % PAIRED == 0


def integer_weight(quantised: Quantised) -> IntegerWeight:
    """The form for multiplying of quantised weights that `fits` allows. Raises ValueError for others."""
    values, columns = quantised.values, quantised.values.shape[-1]
    if not fits(quantised.form, columns):
        raise ValueError(f"no integer products with groups of {quantised.form.group or columns} of {columns} columns")
    scales = quantised.scales.float().contiguous()
    if quantised.form.bits == 8:
        return IntegerWeight(values.contiguous(), scales, values.sum(-1, dtype=torch.int32), columns)
    low, high = ((values + 8).to(torch.uint8).unflatten(-1, (-1, 2, PAIRED // 2))).unbind(-2)
    return IntegerWeight((low | high << 4).flatten(-2), scales, None, columns)


def integer_product(x: Tensor, weight: IntegerWeight, bounds: Tensor | None = None) -> Tensor:
    """x [M, columns] rounded to int8, times the weight transposed -> [M, rows] in the dtype of x.

    With a stack, rows bounds[e] to bounds[e + 1] are multiplied with expert e; the last of the integers bounds [E + 1]
    is M.
    """
    shape = weight.values.shape
    if x.ndim != 2 or x.shape[1] != weight.columns:
        raise ValueError(f"rows of shape {list(x.shape)} do not fit weights with {weight.columns} columns")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("integer products have no gradient; load the checkpoint without integers to train")
    if (bounds is None) != (len(shape) == 2) or (bounds is not None and bounds.shape != (shape[0] + 1,)):
        raise ValueError(f"bounds do not fit weights of shape {list(shape)}")
    native = kernels(x)
    if native is None or not weight.values.is_cpu:
        return _reference(x, weight, bounds)
    x, out = x.contiguous(), x.new_empty(x.shape[0], shape[-2])
    whole = torch.tensor([0, x.shape[0]]) if bounds is None else bounds.long().contiguous()
    if int(whole[-1]) != x.shape[0]:
        raise ValueError(f"bounds end at {int(whole[-1])}, and there are {x.shape[0]} rows")
    native.integer_product(
        x, weight.values, weight.scales, weight.sums, whole, out, x.shape[0], shape[-2], weight.columns, len(whole) - 1,
        weight.scales.shape[-1], weight.bits,
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
