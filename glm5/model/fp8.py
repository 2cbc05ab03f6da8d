"""Released FP8 checkpoints: 8-bit matrices with one fp32 scale per block of 128 x 128, read back as plain matrices.

On disk a quantised `X` (type F8_E4M3) comes with `X_scale_inv`. Despite the name, the value is X times the scale.
Blocks at the lower and right edge may be smaller: 576 rows have five scales, the last one for 64 rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glm5.errors import CheckpointError

SCALE = "_scale_inv"
FP8 = torch.float8_e4m3fn
BLOCK = (128, 128)


def block_size(quantization: Any, where: str) -> tuple[int, int]:
    """(rows, columns) of a block from `quantization_config`; (128, 128) by default.

    The list of unquantised modules is ignored: in releases it names a module that does not exist. The stored type of
    each tensor decides. Raises CheckpointError for any quantisation method but block FP8.
    """
    if quantization is None:
        return BLOCK
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"{where}: quantization_config must be an object.")
    for key, expected in (("quant_method", "fp8"), ("fmt", "e4m3")):
        value = quantization.get(key, expected if key == "fmt" else None)
        if value != expected:
            raise CheckpointError(
                f'{where}: quantization_config.{key} is {value!r:.40}, but only "{expected}" can be read; use the '
                f"release in bf16."
            )
    block = quantization.get("weight_block_size", list(BLOCK))
    if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and 0 < b < 1 << 20 for b in block):
        raise CheckpointError(
            f"{where}: quantization_config.weight_block_size is {block!r:.40}; it must be two sizes such as [128, 128]."
        )
    return block[0], block[1]


def scale_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales for a matrix, or a stack of matrices, of `shape`."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def check_scale(scale: Tensor, where: str) -> None:
    """Raises CheckpointError for a scale that is negative or not finite; it would silently corrupt a whole block."""
    if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
        raise CheckpointError(f"{where} holds a scale that is negative or not finite; download or copy the file again.")


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """`weight` [..., rows, columns] times the scale of each block, computed in `dtype` (fp32 or wider)."""
    full = scale.to(dtype).repeat_interleave(block[0], -2)[..., : weight.shape[-2], :]
    return weight.to(dtype).mul_(full.repeat_interleave(block[1], -1)[..., : weight.shape[-1]])
