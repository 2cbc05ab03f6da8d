"""Quantization while a model is loaded, without a checkpoint of its own: `glm5 serve DIR --quantize int8`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from glm5.device import choose_device
from glm5.errors import ConfigError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.integer_layers import hold_integers
from glm5.model.rounding import round_activations
from glm5.ops.quantisers import Quantised, Quantiser, quantise
from glm5.quant.schemes import Scheme, scheme_named

SHORT = {"int8": "w8a8", "int4": "w4a8"}
"""Other names of schemes that can be made while loading."""
WITH_KERNELS = ("cpu", "cuda")
"""Devices that multiply integers by kernels."""


def load_for_inference(path: Path, dtype: str, device: str, quantize: str | None) -> GLM5ForCausalLM:
    """The checkpoint on a device (see `choose_device`). On a CPU or GPU, matrices with int8 activations stay integers;
    `quantize` names a scheme that makes them so while loading."""
    place = choose_device(device)
    integers = place.type in WITH_KERNELS and quantize is None
    model = GLM5ForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), device=place, integers=integers)
    if quantize is not None:
        quantise_in_place(model, quantize)
    return model


def quantise_in_place(model: GLM5ForCausalLM, name: str) -> None:
    """Let a model on a CPU or GPU multiply integers from now on, and free the weights that they replace.

    Raises ConfigError for a scheme with steps before rounding, or without int8 activations, and for a model that does
    not fit it or is on another device.
    """
    scheme = scheme_named(SHORT.get(name, name))
    if scheme.steps or any(form.activation is None or form.weight.fp8 for form in scheme.forms.values()):
        raise ConfigError(f'"{name}" cannot be done while loading; run `glm5 quantize`, or choose int8 or int4.')
    if model.device.type not in WITH_KERNELS:
        raise ConfigError(f"quantising while loading is for CPUs and CUDA, and the device is {model.device}.")
    scheme.check(model)
    round_activations(model, lambda layer: _activation(scheme, layer, model))
    hold_integers(model, lambda disk, weight: _quantised(scheme, disk, weight, model), model.device)


def _activation(scheme: Scheme, layer: str, model: GLM5ForCausalLM) -> Quantiser | None:
    form = scheme.form(f"{layer}.weight", model.config)
    return None if form is None else form.activation


def _quantised(scheme: Scheme, disk: str, weight: Tensor, model: GLM5ForCausalLM) -> Quantised | None:
    form = scheme.form(disk, model.config)
    return None if form is None else quantise(weight, form.weight)
