"""Every quantiser of weights and activations, as pure functions: one rounding rule for training and export (§2.4, §5).

Fake quantization in training, calibration, the writers and readers of checkpoints and the integer kernels all use these
functions. What is trained with quantization is therefore what is served, bit for bit.

Values are symmetric: value = integer * scale, without a zero point. Integers are rounded to nearest even and lie in
[-7, 7] for 4 bits and [-127, 127] for 8, so that a negated matrix has negated integers. FP8 is e4m3 (largest 448).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glm5.ops.wide import wide

LARGEST_FP8 = 448.0
SMALLEST_SCALE = 1e-30
"""Scale of a group of zeros: anything positive will do, because its integers are zeros."""


@dataclass(frozen=True)
class Quantiser:
    """How a matrix [..., rows, columns] is quantised.

    `bits`: 4 or 8. `group`: columns that share a scale; None for a whole row, which is an output channel of a weight or
    a token of an activation. `block`: rows that share a scale, 1 but for FP8 blocks. `fp8`: e4m3 instead of integers.
    `scale_dtype`: scales are rounded to it before values are divided by them. `narrow`: values are rounded to bf16
    first, so that an fp32 weight and its bf16 copy, which training multiplies with, have the same integers.
    """

    bits: int
    group: int | None = None
    block: int = 1
    fp8: bool = False
    scale_dtype: torch.dtype = torch.float32
    narrow: bool = False

    @property
    def largest(self) -> float:
        return LARGEST_FP8 if self.fp8 else float(2 ** (self.bits - 1) - 1)

    def columns(self, width: int) -> int:
        """Columns that share a scale in a matrix of this width. Raises ValueError if groups do not divide it."""
        group = self.group or width
        if width % group and not self.fp8:
            raise ValueError(f"groups of {group} do not divide {width} columns")
        return group


INT4_GROUP_32 = Quantiser(4, 32, scale_dtype=torch.bfloat16, narrow=True)
INT4_GROUP_128 = Quantiser(4, 128, scale_dtype=torch.bfloat16, narrow=True)
INT4_CHANNEL = Quantiser(4, narrow=True)
INT8_CHANNEL = Quantiser(8, narrow=True)
INT8_TOKEN = Quantiser(8)
FP8_BLOCK = Quantiser(8, 128, 128, fp8=True)


@dataclass(frozen=True)
class Quantised:
    """`values` [..., rows, columns], int8 or e4m3; `scales` [..., row blocks, column groups] in the scales' dtype."""

    values: Tensor
    scales: Tensor
    form: Quantiser

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values times scales [..., rows, columns]. The products are rounded once, to `dtype`."""
        wider = wide(dtype)
        full = spread(self.scales.to(wider), self.values.shape, self.form)
        return (self.values.to(wider) * full).to(dtype)


def spread(scales: Tensor, shape: torch.Size, form: Quantiser) -> Tensor:
    """Scales [..., row blocks, column groups] repeated so that they broadcast to a matrix of `shape`."""
    rows, columns = shape[-2:]
    if form.block > 1:
        scales = scales.repeat_interleave(form.block, -2)[..., :rows, :]
    return scales if scales.shape[-1] == 1 else scales.repeat_interleave(form.columns(columns), -1)[..., :columns]


def quantise(x: Tensor, form: Quantiser, scales: Tensor | None = None) -> Quantised:
    """Quantise x [..., rows, columns]; `scales` replace those of the largest magnitudes, in the shape of these."""
    x = _operand(x, form)
    scales = largest_scales(x, form) if scales is None else scales
    ratio = x / spread(scales.to(x.dtype), x.shape, form)
    if form.fp8:
        return Quantised(ratio.clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn), scales, form)
    return Quantised(ratio.round_().clamp_(-form.largest, form.largest).to(torch.int8), scales, form)


def largest_scales(x: Tensor, form: Quantiser) -> Tensor:
    """The scales that map the largest magnitude of each group to the largest value."""
    magnitudes = _largest(_operand(x, form), form)
    # By a tensor: divided by a number, CUDA multiplies with its inverse, and the last bit would differ from a CPU's.
    return safe_scales(magnitudes / torch.full_like(magnitudes, form.largest), form)


def safe_scales(scales: Tensor, form: Quantiser) -> Tensor:
    """Positive scales in the dtype of the form."""
    smallest = max(SMALLEST_SCALE, torch.finfo(form.scale_dtype).tiny)
    return scales.to(form.scale_dtype).clamp_min(smallest)


def _operand(x: Tensor, form: Quantiser) -> Tensor:
    x = x.detach()
    # In fp32 whatever the dtype was, or other numbers would be halfway between two integers.
    return x.to(torch.bfloat16).float() if form.narrow else x.to(wide(x.dtype))


def _largest(x: Tensor, form: Quantiser) -> Tensor:
    """Largest magnitude of each group: [..., row blocks, column groups]."""
    rows, columns = x.shape[-2:]
    group = form.columns(columns)
    magnitude = x.abs()
    if columns % group or rows % form.block:  # only FP8 blocks: those at the edge are smaller
        magnitude = torch.nn.functional.pad(magnitude, (0, -columns % group, 0, -rows % form.block))
    magnitude = magnitude.unflatten(-1, (-1, group)).amax(-1)
    return magnitude if form.block == 1 else magnitude.unflatten(-2, (-1, form.block)).amax(-2)


def least_squares(x: Tensor, form: Quantiser, steps: int = 10, tolerance: float = 1e-10) -> Quantised:
    """Quantise with scales that minimise the squared error (SSZ, §5): round with the current scale, then solve for the
    scale, sum(x q) / sum(q q), and keep the best of each group. Stops when no group improves by more than `tolerance`
    of its squares."""
    if form.block != 1 or form.fp8:
        raise ValueError("least squares scales are for integers with one scale per row or group")
    x = _operand(x, form)
    best = quantise(x, form)
    error = _square_error(x, best)
    size = _by_group(x.square(), form).clamp_min(torch.finfo(x.dtype).tiny)
    values, scales = best.values, best.scales
    current = best
    for _ in range(steps):
        q = current.values.to(x.dtype)
        solved = _by_group(x * q, form) / _by_group(q * q, form).clamp_min(1.0)
        current = quantise(x, form, safe_scales(solved, form))
        fresh = _square_error(x, current)
        better = fresh < error
        gain = ((error - fresh) / size).amax()
        values = torch.where(spread(better, x.shape, form), current.values, values)
        scales = torch.where(better, current.scales, scales)
        error = torch.minimum(error, fresh)
        if float(gain) <= tolerance:
            break
    return replace(best, values=values, scales=scales)


def _by_group(x: Tensor, form: Quantiser) -> Tensor:
    return x.unflatten(-1, (-1, form.columns(x.shape[-1]))).sum(-1)


def _square_error(x: Tensor, quantised: Quantised) -> Tensor:
    return _by_group((quantised.dequantise(x.dtype) - x).square(), quantised.form)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, weight: Tensor, form: Quantiser) -> Tensor:
        return quantise(weight, form).dequantise(weight.dtype)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def fake_quantise(weight: Tensor, form: Quantiser) -> Tensor:
    """The dequantised weight, in its own dtype. Its gradient goes to the weight as if nothing were rounded."""
    return _StraightThrough.apply(weight, form)


def pack_int4(values: Tensor) -> Tensor:
    """int8 values in [-8, 7] [rows, columns] -> int32 words [rows, columns / 8], offset by 8, lowest bits first: the
    layout "pack-quantized" of compressed-tensors. Columns are filled up with zeros."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % 8)).to(torch.int32) + 8
    words = padded.unflatten(-1, (-1, 8))
    out = words[..., 0].clone()
    for place in range(1, 8):
        out |= words[..., place] << (4 * place)
    return out


def unpack_int4(words: Tensor, columns: int) -> Tensor:
    """The reverse of `pack_int4`: int8 [rows, columns]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(-2)[..., :columns].to(torch.int8) - 8


def pack_int4_rows(values: Tensor) -> Tensor:
    """int8 values in [-8, 7] [rows, columns] -> int8 [rows / 2, columns], the even row of a pair in the low half of a
    byte: the layout of Ascend. The number of rows is even."""
    return (values[0::2] & 15) | (values[1::2] << 4)


def unpack_int4_rows(packed: Tensor) -> Tensor:
    """The reverse of `pack_int4_rows`."""
    return torch.stack(((packed << 4) >> 4, packed >> 4), 1).flatten(0, 1)
