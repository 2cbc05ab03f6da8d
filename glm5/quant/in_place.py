"""Quantization of a model in memory, without a checkpoint of its own: `glm5 serve DIR --quantize int8`, and engines of
RL that compute in low precision and get new weights after every update."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from glm5.device import choose_device
from glm5.errors import ConfigError
from glm5.model.disk_names import disk_parts, disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.integer_layers import hold_integers, renew_integers
from glm5.model.rounding import round_activations
from glm5.ops.quantisers import Quantised, Quantiser, quantise
from glm5.quant.schemes import Scheme, scheme_named

SHORT = {"int8": "w8a8", "int4": "w4a8"}
"""Other names of schemes that can be made in memory."""
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
    """Let a model on a CPU or GPU multiply integers from now on, and free the weights that they replace. "fp8" rounds
    weights and activations on any device and computes in the model's dtype: the numbers of FP8, not its speed.

    Raises ConfigError for a scheme with steps before rounding, or without rounded activations, and for a model that
    does not fit it or is on another device.
    """
    scheme = scheme_named(SHORT.get(name, name))
    if scheme.steps or any(form.activation is None for form in scheme.forms.values()):
        raise ConfigError(f'"{name}" cannot be done while loading; run `glm5 quantize`, or choose int8, int4 or fp8.')
    if model.device.type == "meta" or (model.device.type not in WITH_KERNELS and not _is_fp8(scheme)):
        raise ConfigError(f"quantising while loading is for CPUs and CUDA, and the device is {model.device}.")
    scheme.check(model)
    round_activations(model, lambda layer: _activation(scheme, layer, model))
    if _is_fp8(scheme):
        _round_weights(model, scheme)
    else:
        hold_integers(model, lambda disk, weight: _quantised(scheme, disk, weight, model), model.device)
    model.scheme = scheme.name


@torch.no_grad()
def take_weights(model: GLM5ForCausalLM, tensors: Mapping[str, Tensor]) -> None:
    """Copy new weights, by names of `state_dict`, into a model, and round them as `quantise_in_place` did its own. What
    it multiplies with stays in the same memory."""
    for name, own in model.state_dict().items():
        if not own.is_meta:
            own.copy_(tensors[name], non_blocking=True)
    if model.scheme is None:
        return
    scheme = scheme_named(model.scheme)
    if _is_fp8(scheme):
        _round_weights(model, scheme)
    else:
        renew_integers(model, tensors, lambda disk, weight: _quantised(scheme, disk, weight, model), model.device)


def rounded_names(model: GLM5ForCausalLM) -> set[str]:
    """Names in `state_dict` of the weights that the model's scheme rounds."""
    if model.scheme is None:
        return set()
    scheme, config = scheme_named(model.scheme), model.config
    state = model.state_dict()
    return {n for n, t in state.items() if any(scheme.form(disk, config) for disk in disk_parts(n, config, t))}


def _is_fp8(scheme: Scheme) -> bool:
    return any(form.weight.fp8 for form in scheme.forms.values())


@torch.no_grad()
def _round_weights(model: GLM5ForCausalLM, scheme: Scheme) -> None:
    for disk, view in disk_tensors(model).items():
        rounded = _quantised(scheme, disk, view, model)
        if rounded is not None:
            view.copy_(rounded.dequantise(view.dtype))


def _activation(scheme: Scheme, layer: str, model: GLM5ForCausalLM) -> Quantiser | None:
    form = scheme.form(f"{layer}.weight", model.config)
    return None if form is None else form.activation


def _quantised(scheme: Scheme, disk: str, weight: Tensor, model: GLM5ForCausalLM) -> Quantised | None:
    form = scheme.form(disk, model.config)
    return None if form is None else quantise(weight, form.weight)
