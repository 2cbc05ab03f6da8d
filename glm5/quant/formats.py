"""How quantised matrices are written: as compressed-tensors, or as block FP8 like the releases (see
`model.quantised_files`, which reads both), or for Ascend (`ascend`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError, nearest
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.quantised_files import PACKED
from glm5.ops.quantisers import Quantised, Quantiser, pack_int4
from glm5.quant.ascend import Ascend
from glm5.quant.schemes import KINDS, Form, Scheme

VERSION = "0.12.2"
"""Of compressed-tensors, whose configuration this is."""


class Format(Protocol):
    """A layout of quantised matrices in a checkpoint folder."""

    def check(self, scheme: Scheme, model: GLM5ForCausalLM) -> None:
        """Raises ConfigError for a scheme or a model that the format cannot express."""
        ...

    def encode(self, name: str, matrix: Quantised) -> dict[str, Tensor]:
        """The tensors of a matrix, by their names on disk."""
        ...

    def settings(self, scheme: Scheme, config: GLM5Config) -> dict[str, Any]:
        """More keys for config.json."""
        ...

    def finish(self, folder: Path, scheme: Scheme, config: GLM5Config, names: Iterable[str]) -> None:
        """Write further files, when the tensors of all `names` are in the folder."""
        ...


class CompressedTensors:
    """compressed-tensors for integers, block FP8 as in the releases for the scheme fp8."""

    def check(self, scheme: Scheme, model: GLM5ForCausalLM) -> None:
        """All schemes have this form."""

    def encode(self, name: str, matrix: Quantised) -> dict[str, Tensor]:
        if matrix.form.fp8:
            return {name: matrix.values, f"{name}_scale_inv": matrix.scales}
        if matrix.form.bits == 8:
            return {name: matrix.values, f"{name}_scale": matrix.scales}
        shape = torch.tensor(matrix.values.shape, dtype=torch.int64)
        return {name + PACKED: pack_int4(matrix.values), f"{name}_scale": matrix.scales, f"{name}_shape": shape}

    def settings(self, scheme: Scheme, config: GLM5Config) -> dict[str, Any]:
        return {"quantization_config": quantization_config(scheme, config)}

    def finish(self, folder: Path, scheme: Scheme, config: GLM5Config, names: Iterable[str]) -> None:
        """config.json says everything."""


FORMATS: dict[str, Format] = {"compressed-tensors": CompressedTensors(), "ascend": Ascend()}


def format_named(name: str) -> Format:
    """Raises ConfigError for a name that no format has."""
    if name not in FORMATS:
        raise ConfigError(f'there is no format "{name}"{nearest(name, FORMATS)}; choose one of {", ".join(FORMATS)}.')
    return FORMATS[name]


def quantization_config(scheme: Scheme, config: GLM5Config) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    if all(form.weight.fp8 for form in scheme.forms.values()):
        block = next(iter(scheme.forms.values())).weight
        size = [block.block, block.group]
        found = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": size}
        return found | {"modules_to_not_convert": _kept(config)}
    groups = {}
    by_form: dict[Form, list[str]] = {}
    for kind, form in scheme.forms.items():
        by_form.setdefault(form, []).append(kind)
    for number, (form, kinds) in enumerate(by_form.items()):
        targets = [_pattern(kind) for kind in kinds]
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


def _kept(config: GLM5Config) -> list[str]:
    """Modules whose matrices an FP8 checkpoint has as they are; other readers take all others for FP8. vLLM looks for
    the whole name, SGLang (whose MTP layer is "model.decoder") for any part between dots, transformers for the end.
    Names that a model lacks mean nothing."""
    count, mtp = config.num_hidden_layers, config.num_nextn_predict_layers
    layers = [f"model.layers.{layer}" for layer in range(count + mtp)] + (["model.decoder"] if mtp else [])
    names = ["self_attn.kv_b_proj", "self_attn.indexer.wk", "self_attn.indexer.weights_proj", "mlp.gate", "eh_proj"]
    names += ["self_attn.a_proj", "self_attn.b_proj"] if config.attention_pattern else []
    return ["lm_head", *(f"{layer}.{name}" for layer in layers for name in names)]


def _pattern(kind: str) -> str:
    """The names of the modules of a kind. SGLang looks for gate_proj and up_proj under the name of both."""
    names = KINDS[kind].removesuffix(r"\.weight").replace("gate|up|", "gate|up|gate_up|")
    return f"re:.*{names}$"


def _ignored(scheme: Scheme, config: GLM5Config) -> list[str]:
    """Modules that are not quantised: other readers quantise, or refuse, what no list names."""
    names = ["lm_head", r"re:.*\.mlp\.gate$", "re:.*kv_b_proj$", r"re:.*indexer\.(wk|weights_proj)$", "re:.*eh_proj$"]
    names += [r"re:.*self_attn\.(a|b)_proj$"] if config.attention_pattern else []
    names += [_pattern(kind) for kind in KINDS if kind not in scheme.forms]
    if not scheme.mtp and config.num_nextn_predict_layers:
        # The second is SGLang's name of that layer.
        names += [rf"re:model\.layers\.{config.num_hidden_layers}\..*", r"re:model\.decoder\..*"]
    return names
