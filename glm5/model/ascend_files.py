"""Checkpoints for Ascend NPUs, read back: `quant_model_description.json` names the type of every tensor.

| type | tensors of a matrix [rows, columns] |
|---|---|
| FLOAT | `X.weight` bf16, fp16 or fp32 |
| W8A8_DYNAMIC | `X.weight` I8, `X.weight_scale` fp32 [rows, 1], `X.weight_offset` fp32 [rows, 1], all zeros |
| W4A8_DYNAMIC | the same, but `X.weight` I8 [rows / 2, columns], and `X.scale_bias` fp32 [rows, 1 or 16] |

A byte of four-bit rows has row 2i in its low half and row 2i + 1 in its high half. Activations are rounded to int8 per
token in both types. `scale_bias` follows from the rest, so it is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm5.errors import CheckpointError
from glm5.model.disk_names import disk_parts
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.tensor_files import Stored, read_json
from glm5.ops.quantisers import INT8_TOKEN, Quantiser

DESCRIPTION = "quant_model_description.json"
VERSION = "1.0.0"
FLOAT, W8A8, W4A8 = "FLOAT", "W8A8_DYNAMIC", "W4A8_DYNAMIC"
TYPES = (FLOAT, W8A8, W4A8)
OFFSET, BIAS = "_offset", ".scale_bias"
DOWN_SLICES = 16
_ABOUT = ("version", "model_quant_type", "group_size", "metadata", "optional")
_LIMIT = 64 << 20


def matrix_of(name: str) -> str:
    """The matrix that a stored tensor belongs to: itself, or that of a scale, an offset or sums of rows."""
    if name.endswith(BIAS):
        return name.removesuffix(BIAS) + ".weight"
    return name.removesuffix("_scale").removesuffix(OFFSET)


@dataclass(frozen=True)
class Description:
    """Types by names of tensors; empty for a checkpoint that is not in the Ascend format."""

    types: Mapping[str, str] = field(default_factory=dict)

    def activation(self, name: str) -> Quantiser | None:
        """How the layer of this disk name, without ".weight", rounds what it reads."""
        return INT8_TOKEN if self.types.get(f"{name}.weight", FLOAT) != FLOAT else None

    def check(self, path: Path, model: GLM5ForCausalLM) -> None:
        """Raises CheckpointError if matrices that are computed as one differ in type."""
        first: dict[str, tuple[str, str]] = {}
        for name, tensor in model.state_dict(keep_vars=False).items() if self.types else ():
            module = name.partition(".experts.")[0]  # experts of a layer are one module, with two stacks
            for part in disk_parts(name, model.config, tensor) if tensor.ndim > 1 else ():
                kind = self.types.get(part, FLOAT)
                other, one = first.setdefault(module, (kind, part))
                if kind != other:
                    raise CheckpointError(
                        f'{path / DESCRIPTION}: "{part}" is {kind} and "{one}" {other}, but they are one matrix in '
                        f"memory and need one type."
                    )


def read_description(path: Path, stored: Mapping[str, Stored], quantization: Any) -> Description:
    """The description in a checkpoint folder, checked against the headers of its files; empty without one.

    `quantization` is the `quantization_config` of config.json, which wins. Raises CheckpointError for types that cannot
    be read, for tensors that are not listed and for listed ones that are missing or stored as something else.
    """
    file = path / DESCRIPTION
    if quantization is not None:
        return Description()
    if not file.exists():
        offset = next((name for name in stored if name.endswith((".weight" + OFFSET, BIAS))), None)
        if offset is None:
            return Description()
        raise CheckpointError(f'{file} is missing, but "{offset}" is of the Ascend format; copy the description too.')
    raw = read_json(file, _LIMIT, "a description of quantised tensors")
    if raw.get("group_size", 0) != 0:
        raise CheckpointError(f"{file}: group_size is {raw['group_size']!r:.40}; only scales per channel can be read.")
    types = {name: kind for name, kind in raw.items() if name not in _ABOUT}
    for name, kind in types.items():
        if kind not in TYPES:
            raise CheckpointError(
                f'{file}: "{_short(name)}" has the type {kind!r:.40}; only {", ".join(TYPES)} can be read.'
            )
        if kind != FLOAT and name not in stored:
            raise CheckpointError(f'{file} lists "{_short(name)}" as {kind}, but no weight file holds it.')
    for name, item in stored.items():
        _check(file, name, item, types, stored)
    return Description(types)


def _check(file: Path, name: str, item: Stored, types: Mapping[str, str], stored: Mapping[str, Stored]) -> None:
    """One stored tensor against its entry."""
    kind = types.get(name)
    if kind is None:
        raise CheckpointError(f'{file} does not list "{_short(name)}", which the weight files hold; get both again.')
    matrix = matrix_of(name)
    plain = item.dtype.is_floating_point and item.dtype.itemsize > 1
    if (matrix == name and plain != (kind == FLOAT)) or (matrix != name and (not plain or kind == FLOAT)):
        raise CheckpointError(f'{file} lists "{_short(name)}" as {kind}, but it is stored as {item.dtype}.')
    if kind == FLOAT:
        return
    if matrix == name:
        if not name.endswith(".weight"):
            raise CheckpointError(f'{file}: "{_short(name)}" is {kind}; only a matrix "….weight" can be.')
        wanted = [f"{name}_scale", name + OFFSET, name.removesuffix(".weight") + BIAS][: 3 if kind == W4A8 else 2]
        missing = next((other for other in wanted if types.get(other) != kind), None)
        if missing is not None:
            raise CheckpointError(f'{file}: "{_short(name)}" is {kind}, but "{_short(missing)}" is not.')
        return
    whole = stored.get(matrix)
    rows = whole.shape[0] * (2 if kind == W4A8 else 1) if whole is not None and whole.shape else -1
    slices = (1, DOWN_SLICES) if name.endswith(BIAS) else (1,)
    if item.dtype != torch.float32 or item.shape not in [(rows, width) for width in slices]:
        raise CheckpointError(
            f'{file}: "{_short(name)}" is {item.dtype} of shape {list(item.shape)}; its matrix needs torch.float32 of '
            f"shape {[max(rows, 0), slices[-1]]}."
        )


def _short(name: str) -> str:
    return ascii(name[:120])[1:-1]
