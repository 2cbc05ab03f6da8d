"""How quantised matrices are written: as compressed-tensors, or as block FP8 like the releases (see
`model.quantised_files`, which reads both)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.model.quantised_files import PACKED
from glm5.ops.quantisers import Quantised, Quantiser, pack_int4
from glm5.quant.schemes import KINDS, Form, Scheme

VERSION = "0.12.2"
"""Of compressed-tensors, whose configuration this is."""


def encode(name: str, matrix: Quantised) -> dict[str, Tensor]:
    """The tensors that stand for a matrix, by their names on disk."""
    if matrix.form.fp8:
        return {name: matrix.values, f"{name}_scale_inv": matrix.scales}
    if matrix.form.bits == 8:
        return {name: matrix.values, f"{name}_scale": matrix.scales}
    shape = torch.tensor(matrix.values.shape, dtype=torch.int64)
    return {name + PACKED: pack_int4(matrix.values), f"{name}_scale": matrix.scales, f"{name}_shape": shape}


def quantization_config(scheme: Scheme, config: GLM5Config) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    if all(form.weight.fp8 for form in scheme.forms.values()):
        block = next(iter(scheme.forms.values())).weight
        size = [block.block, block.group]
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": size}
    groups = {}
    by_form: dict[Form, list[str]] = {}
    for kind, form in scheme.forms.items():
        by_form.setdefault(form, []).append(kind)
    for number, (form, kinds) in enumerate(by_form.items()):
        targets = ["re:.*" + KINDS[kind].removesuffix(r"\.weight") + "$" for kind in kinds]
        layout = "pack-quantized" if form.weight.bits == 4 else "int-quantized"
        seen = None if form.activation is None else _arguments(form.activation, "token", dynamic=True)
        strategy = "channel" if form.weight.group is None else "group"
        weights = _arguments(form.weight, strategy, dynamic=False)
        groups[f"group_{number}"] = {
            "targets": targets, "weights": weights, "input_activations": seen, "output_activations": None,
            "format": layout,
        }  # fmt: skip
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "version": VERSION,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": _ignored(scheme, config),
        "config_groups": groups,
    }


def _arguments(form: Quantiser, strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": form.bits, "type": "float" if form.fp8 else "int", "symmetric": True, "strategy": strategy,
        "group_size": form.group, "block_structure": None, "dynamic": dynamic, "actorder": None,
        "observer": None if dynamic else "minmax", "observer_kwargs": {},
    }  # fmt: skip


def _ignored(scheme: Scheme, config: GLM5Config) -> list[str]:
    """Modules that are not quantised, for readers that quantise what no list names."""
    names = ["lm_head", r"re:.*\.mlp\.gate$", "re:.*kv_b_proj$", r"re:.*indexer\.(wk|weights_proj)$", "re:.*eh_proj$"]
    if not scheme.mtp and config.num_nextn_predict_layers:
        names.append(rf"re:model\.layers\.{config.num_hidden_layers}\..*")
    return names
