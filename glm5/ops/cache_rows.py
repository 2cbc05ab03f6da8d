"""Rows of the KV cache in int8: one scale per row, that is per token and layer. The rotary part of a latent stays as it
is.

A row [values | rest] becomes bytes: int8 values, the rest in the dtype of the model, the scale in fp32. The compiled
kernels read and write the same layout (`pack_row` in glm5/ops/native/vectors.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4


def packed_width(values: int, rest: int, dtype: torch.dtype) -> int:
    """Bytes of a row of `values` integers and `rest` elements of `dtype`."""
    return values + rest * dtype.itemsize + SCALE_BYTES


def pack_rows(x: Tensor, values: int) -> Tensor:
    """Rows x [..., width], of which the first `values` are rounded: int8 [..., `packed_width`]. The largest value of a
    row becomes 127 or -127; a row with NaN or infinity among its values becomes NaN."""
    x = x.contiguous()
    wide = x[..., :values].float()
    top = wide.abs().amax(-1, keepdim=True)
    finite = top < float("inf")  # False for NaN
    scale = torch.where(finite, (top / 127.0).clamp_min(1e-30), float("nan"))
    numbers = torch.where(finite, wide / scale, 0.0).round().to(torch.int8)
    parts = [numbers, x[..., values:].contiguous().view(torch.int8), scale.view(torch.int8)]
    return torch.cat(parts, dim=-1)


def unpack_rows(packed: Tensor, values: int, dtype: torch.dtype) -> Tensor:
    """Inverse of `pack_rows` up to rounding: rows [..., width] in `dtype`, that of the model."""
    rest = (packed.shape[-1] - values - SCALE_BYTES) // dtype.itemsize
    end = values + rest * dtype.itemsize
    # A copy begins at an address that every dtype can be read from.
    scale = packed[..., end:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    numbers = (packed[..., :values].float() * scale).to(dtype)
    if not rest:
        return numbers
    plain = packed[..., values:end].clone(memory_format=torch.contiguous_format).view(dtype)
    return torch.cat((numbers, plain), dim=-1)
