"""Quantised matrices in checkpoint files, read back as plain ones: block FP8 as released, compressed-tensors, Ascend.

| on disk | value |
|---|---|
| `X` F8_E4M3, `X_scale_inv` or `X_scale` fp32 [row blocks, column blocks] | X times the scale of its block |
| `X` I8, `X_scale` [rows, 1] | X times the scale of its row |
| `X_packed` I32 [rows, columns / 8], `X_scale` [rows, groups], `X_shape` | 4-bit numbers, offset by 8, times scales |

Despite the name, `scale_inv` is multiplied. FP8 blocks at the lower and right edge may be smaller: 576 rows have five
scales, the last one for 64 rows. The stored types decide what a tensor is, not the lists in config.json: in releases
these name modules that do not exist. Only for Ascend a description decides, because four bits and eight have one stored
type there (`ascend_files`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from glm5.errors import CheckpointError
from glm5.model.ascend_files import OFFSET, W4A8
from glm5.model.tensor_files import Stored, open_tensors, read_tensor, rows_of
from glm5.ops.quantisers import Quantised, Quantiser, unpack_int4, unpack_int4_rows

FP8 = torch.float8_e4m3fn
BLOCK = (128, 128)
PACKED = "_packed"
SUFFIXES = ("_scale_inv", "_scale", PACKED, "_shape", OFFSET)
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


def block_size(quantization: Any, where: str) -> tuple[int, int]:
    """(rows, columns) of an FP8 block from `quantization_config`; (128, 128) by default.

    Raises CheckpointError for any quantisation but block FP8 and the symmetric integers of compressed-tensors.
    """
    if quantization is None:
        return BLOCK
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"{where}: quantization_config must be an object.")
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_blocks(quantization, where)
    for key, value, known in (
        ("quant_method", method, ("fp8", "compressed-tensors")),
        ("fmt", quantization.get("fmt", "e4m3"), ("e4m3",)),
    ):
        if value not in known:
            only = " and ".join(f'"{word}"' for word in known)
            raise CheckpointError(
                f"{where}: quantization_config.{key} is {value!r:.40}, but only {only} can be read; use the release in "
                f"bf16."
            )
    return _block(quantization.get("weight_block_size", list(BLOCK)), f"{where}: quantization_config.weight_block_size")


def _block(block: Any, what: str) -> tuple[int, int]:
    if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and 0 < b < 1 << 20 for b in block):
        raise CheckpointError(f"{what} is {block!r:.40}; it must be two sizes such as [128, 128].")
    return block[0], block[1]


def _compressed_blocks(quantization: Mapping[str, Any], where: str) -> tuple[int, int]:
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{where}: quantization_config of compressed-tensors has no config_groups.")
    block = BLOCK
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        what = f"{where}: config_groups.{name!s:.40}.weights"
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"{what} is missing.")
        kind = (weights.get("type", "int"), weights.get("num_bits"))
        if kind not in (("int", 4), ("int", 8), ("float", 8)) or weights.get("symmetric", True) is not True:
            raise CheckpointError(f"{what}: only symmetric integers of 4 or 8 bits and floats of 8 bits can be read.")
        if weights.get("block_structure") is not None:
            block = _block(weights["block_structure"], f"{what}.block_structure")
    return block


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


@dataclass(frozen=True)
class StoredMatrix:
    """One tensor of the model as the files have it: its numbers, their scales if they are quantised, and the rows and
    columns that share a scale. `offset` [rows, 1] must be zeros; `row_pairs`: a byte has four bits of two rows."""

    values: Stored
    scale: Stored | None
    scale_name: str
    block: tuple[int, int]
    columns: int
    offset: Stored | None = None
    row_pairs: bool = False

    def read(self) -> Quantised | None:
        """The whole matrix as it is stored, if it is one of integers."""
        if self.scale is None or self.values.dtype == FP8:
            return None
        with open_tensors(self.values.file, self.values.stamp) as handle:
            values = self._numbers(handle, 0, self.scale.shape[0])
        if self.offset is not None:
            self._check_offsets(self.offset)
        bits = 4 if self.row_pairs or self.values.dtype == torch.int32 else 8
        group = None if self.block[1] == self.columns else self.block[1]
        return Quantised(values, self._scales(self.scale), Quantiser(bits, group))

    def read_rows(self, handle: BinaryIO, first: int, target: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [first, first + len(target)): in `target` itself if that is possible, otherwise new, computed in
        `dtype`. `handle` is the open file of `values`."""
        count = target.shape[0]
        if self.scale is None:
            return read_tensor(handle, rows_of(self.values, first, count), target)
        # Scales are for blocks of rows, or for single experts of a stack.
        height = self.block[0] if len(self.values.shape) == 2 else 1
        spare, end = first % height, first + count
        raw = self._numbers(handle, first - spare, count + spare)
        blocks = first // height, -(-end // height)
        factors = self._scales(rows_of(self.scale, blocks[0], blocks[1] - blocks[0]))
        if self.offset is not None:
            self._check_offsets(rows_of(self.offset, first, count))
        return dequantise(raw, factors, self.block, dtype)[spare:]

    def _numbers(self, handle: BinaryIO, first: int, count: int) -> Tensor:
        """Rows [first, first + count) without their scales, one number per element."""
        if self.row_pairs:
            pairs = rows_of(self.values, first // 2, -(-(first + count) // 2) - first // 2)
            return unpack_int4_rows(read_tensor(handle, pairs))[first % 2 :][:count]
        raw = read_tensor(handle, rows_of(self.values, first, count))
        return unpack_int4(raw, self.columns) if raw.dtype == torch.int32 else raw

    def _scales(self, scale: Stored) -> Tensor:
        with open_tensors(scale.file, scale.stamp) as handle:
            value = read_tensor(handle, scale)
        check_scale(value, f'{scale.file}: "{self.scale_name}"')
        return value

    def _check_offsets(self, offset: Stored) -> None:
        with open_tensors(offset.file, offset.stamp) as handle:
            if bool(read_tensor(handle, offset).any()):
                name = self.scale_name.removesuffix("_scale") + OFFSET
                raise CheckpointError(f'{offset.file}: "{name}" is not zero; only symmetric integers can be read.')


def stored_matrix(
    path: object, name: str, shape: torch.Size, stored: Mapping[str, Stored], block: tuple[int, int], ascend: str = ""
) -> StoredMatrix:
    """The matrix `name` of this shape from the headers of the files; `ascend` is its type in an Ascend description.
    Raises CheckpointError for types and shapes that do not belong together."""
    packed = name not in stored
    values = stored[name + PACKED if packed else name]
    expected = (*shape[:-1], -(-shape[-1] // 8)) if packed and shape else tuple(shape)
    row_pairs = ascend == W4A8 and len(shape) == 2
    if row_pairs:
        expected = (-(-shape[0] // 2), shape[1])
    if values.shape != expected:
        raise CheckpointError(
            f'{path}: tensor "{name}" has shape {list(values.shape)}, config.json demands {list(expected)}.'
        )
    scale_name = next((name + s for s in ("_scale_inv", "_scale") if name + s in stored), f"{name}_scale_inv")
    scale = stored.get(scale_name)
    kind = {FP8: "FP8", torch.int8: "int8", torch.int32: "packed int4"}.get(values.dtype)
    if kind is None and scale is not None:
        raise CheckpointError(f'{path}: tensor "{name}" has a scale, but is stored as {values.dtype}.')
    if values.dtype in _PLAIN:
        return StoredMatrix(values, None, "", block, 0)
    if kind is None or (values.dtype == torch.int32) != packed or scale is None or len(shape) < 2:
        hint = f', or FP8 matrices with a scale "{name}_scale_inv"' if kind == "FP8" else ""
        hint = f', or {kind} matrices with a scale "{name}_scale"' if kind not in (None, "FP8") else hint
        raise CheckpointError(
            f'{path}: tensor "{name}" is stored as {values.dtype}; expected fp32, bf16 or fp16{hint}.'
        )
    if kind != "FP8":
        block = _row_groups(path, scale_name, shape, scale)
    demanded = scale_shape(shape, block)
    types = (torch.float32,) if scale_name.endswith("_inv") else _SCALES
    if scale.dtype not in types or scale.shape != demanded:
        raise CheckpointError(
            f'{path}: the scale "{scale_name}" is {scale.dtype} of shape {list(scale.shape)}; blocks of {list(block)} '
            f"demand torch.float32 of shape {list(demanded)}."
        )
    offset = stored.get(name + OFFSET) if ascend else None
    return StoredMatrix(values, scale, scale_name, block, shape[-1], offset, row_pairs)


def _row_groups(path: object, scale_name: str, shape: torch.Size, scale: Stored) -> tuple[int, int]:
    """(1, columns of a group), from the shape of the scales."""
    groups = scale.shape[-1] if len(scale.shape) == 2 else 0
    if len(shape) != 2 or groups < 1 or shape[1] % groups:
        raise CheckpointError(
            f'{path}: the scale "{scale_name}" has shape {list(scale.shape)}; {shape[-2]} rows of {shape[-1]} columns '
            f"need one scale per row, or for equal groups of columns."
        )
    return 1, shape[1] // groups
