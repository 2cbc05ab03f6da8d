"""Writes checkpoints for Ascend NPUs ("Ascend v1", as msModelSlim does and vLLM-Ascend reads with `--quantization
ascend`); `model.ascend_files` has the layout and reads it back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError
from glm5.model.ascend_files import BIAS, DESCRIPTION, DOWN_SLICES, FLOAT, VERSION, W4A8, W8A8, matrix_of
from glm5.model.disk_names import disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops.quantisers import INT8_TOKEN, Quantised, pack_int4_rows
from glm5.quant.schemes import Form, Scheme


class Ascend:
    """Integers per output channel, activations int8 per token, and a description of every tensor beside config.json."""

    def check(self, scheme: Scheme, model: GLM5ForCausalLM) -> None:
        """Raises ConfigError for schemes with groups, FP8 or plain activations, and for odd sizes of 4-bit matrices."""
        if not all(_kind(form) for form in scheme.forms.values()):
            raise ConfigError(
                f'scheme "{scheme.name}" has no Ascend form, which needs one scale per output channel and int8 '
                f"activations; choose w8a8, w4a8-channel or paper-w4a8."
            )
        for name, tensor in disk_tensors(model).items():
            form, (rows, columns) = scheme.form(name, model.config), (*tensor.shape, 1)[:2]
            if form is not None and form.weight.bits == 4 and (rows % 2 or columns % _slices(name)):
                raise ConfigError(
                    f'"{name}" is {rows} x {columns}; an Ascend matrix of 4 bits needs an even number of rows, and '
                    f"down_proj a multiple of {DOWN_SLICES} columns."
                )

    def encode(self, name: str, matrix: Quantised) -> dict[str, Tensor]:
        """`scale_bias` is 8 times the sums of dequantised rows: NPUs multiply with int4 + 8, and subtract this."""
        four = matrix.form.bits == 4
        scales = {f"{name}_scale": matrix.scales, f"{name}_offset": torch.zeros_like(matrix.scales)}
        if not four:
            return {name: matrix.values} | scales
        sums = 8 * matrix.dequantise().unflatten(1, (_slices(name), -1)).sum(-1)
        return {name: pack_int4_rows(matrix.values), name.removesuffix(".weight") + BIAS: sums} | scales

    def settings(self, scheme: Scheme, config: GLM5Config) -> dict[str, Any]:
        """None: vLLM would look for its own quantisation methods if config.json had a quantization_config."""
        return {}

    def finish(self, folder: Path, scheme: Scheme, config: GLM5Config, names: Iterable[str]) -> None:
        kinds = {name: _kind(scheme.form(matrix_of(name), config)) for name in sorted(names)}
        if config.num_nextn_predict_layers:
            # vLLM-Ascend asks for these two, although the files have them once, with the trunk.
            layer = f"model.layers.{config.num_hidden_layers}."
            kinds |= {f"{layer}embed_tokens.weight": FLOAT, f"{layer}shared_head.head.weight": FLOAT}
        # Like msModelSlim, which counts 4-bit experts among the layers of 8 bits.
        about = {"version": VERSION, "model_quant_type": W8A8, "group_size": 0, "metadata": {}, "optional": {}}
        text = json.dumps(about | kinds, indent=2) + "\n"
        (folder / DESCRIPTION).write_text(text, encoding="utf-8")


def _kind(form: Form | None) -> str:
    """The type of a tensor in the description; "" for a form that Ascend does not have."""
    if form is None:
        return FLOAT
    if form.weight.fp8 or form.weight.group is not None or form.activation != INT8_TOKEN:
        return ""
    return W4A8 if form.weight.bits == 4 else W8A8


def _slices(name: str) -> int:
    """Groups of columns with sums of their own: tensor parallelism divides the columns of down_proj."""
    return DOWN_SLICES if name.endswith("down_proj.weight") else 1
