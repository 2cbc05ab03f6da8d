"""Quantization of a model in memory, without a checkpoint of its own: `glm5 serve DIR --quantize int8`, and engines of
RL that compute in low precision and get new weights after every update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from glm5.device import choose_device, on_host, put
from glm5.errors import ConfigError
from glm5.model.disk_names import disk_parts, disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.integer_layers import held_integers, hold_integers, integers_of
from glm5.model.rounding import round_activations
from glm5.ops.integers import IntegerWeight
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
    if model.quantised:
        raise ConfigError("the model is quantised already; load its checkpoint again.")
    if scheme.steps or any(form.activation is None for form in scheme.forms.values()):
        raise ConfigError(f'"{name}" cannot be done while loading; run `glm5 quantize`, or choose int8, int4 or fp8.')
    if model.device.type == "meta" or (model.device.type not in WITH_KERNELS and not _is_fp8(scheme)):
        raise ConfigError(f"quantising while loading is for CPUs and CUDA, and the device is {model.device}.")
    scheme.check(model)
    round_activations(model, lambda layer: _activation(scheme, layer, model))
    if _is_fp8(scheme):
        _round_weights(model, scheme)
    else:
        hold_integers(model, partial(_quantised, scheme, model), model.device)
    model.scheme = scheme.name


@dataclass(frozen=True)
class NewWeights:
    """New weights for a model, rounded as its scheme does it: tensors by names of `state_dict`, and the integers that
    layers multiply with by the layers' names."""

    tensors: Mapping[str, Tensor]
    integers: Mapping[str, tuple[IntegerWeight, ...]] = field(default_factory=dict)


@torch.no_grad()
def new_weights(model: GLM5ForCausalLM, tensors: Mapping[str, Tensor]) -> NewWeights:
    """Round weights, by names of `state_dict`, as `quantise_in_place` did those of the model, which does not change.
    Rounded copies are on the model's device."""
    if model.scheme is None:
        return NewWeights(tensors)
    scheme, own = scheme_named(model.scheme), model.state_dict()
    if not _is_fp8(scheme):
        kept = {name: tensor for name, tensor in tensors.items() if not own[name].is_meta}
        quantised = partial(_quantised, scheme, model)
        return NewWeights(kept, integers_of(model, tensors, quantised, model.device))
    rounded = {n: tensors[n].to(own[n], copy=True) for n in own if _is_rounded(scheme, model, n, own[n])}
    _round_weights(model, scheme, rounded)
    return NewWeights({**tensors, **rounded})


@torch.no_grad()
def take_weights(model: GLM5ForCausalLM, new: NewWeights) -> None:
    """Copy `new_weights` into the memory that the model multiplies with."""
    own, modules = model.state_dict(), dict(model.named_modules())
    for name, tensor in new.tensors.items():
        own[name].copy_(tensor, non_blocking=True)
    for name, fresh in new.integers.items():
        for held, other in zip(held_integers(modules[name]), fresh, strict=True):
            for mine, theirs in zip(held.tensors, other.tensors, strict=True):
                mine.copy_(theirs)


def differing(model: GLM5ForCausalLM, new: NewWeights) -> list[str]:
    """Names of what differs in any bit from `new`, after conversion to the model's types. Compares on the model's
    device; the host waits for it once."""
    own, modules = model.state_dict(), dict(model.named_modules())
    pairs = [(name, own[name], tensor) for name, tensor in new.tensors.items() if tensor.numel()]
    for name, fresh in new.integers.items():
        for held, other in zip(held_integers(modules[name]), fresh, strict=True):
            pairs += [(name, mine, theirs) for mine, theirs in zip(held.tensors, other.tensors, strict=True)]
    if not pairs:
        return []
    same = []
    for _, tensor, source in pairs:  # one at a time: no second set of weights
        source = put(source, tensor.device).to(tensor.dtype)
        same.append(_bits(tensor).eq(_bits(source)).all())
    return [name for (name, *_), good in zip(pairs, on_host(torch.stack(same)).tolist(), strict=True) if not good]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _is_rounded(scheme: Scheme, model: GLM5ForCausalLM, name: str, tensor: Tensor) -> bool:
    return any(scheme.form(disk, model.config) for disk in disk_parts(name, model.config, tensor))


def _is_fp8(scheme: Scheme) -> bool:
    return any(form.weight.fp8 for form in scheme.forms.values())


@torch.no_grad()
def _round_weights(model: GLM5ForCausalLM, scheme: Scheme, state: dict[str, Tensor] | None = None) -> None:
    """In place: the weights of the model, or those in `state`, by names of `state_dict`."""
    for disk, view in disk_tensors(model, state).items():
        rounded = _quantised(scheme, model, disk, view)
        if rounded is not None:
            view.copy_(rounded.dequantise(view.dtype))


def _activation(scheme: Scheme, layer: str, model: GLM5ForCausalLM) -> Quantiser | None:
    form = scheme.form(f"{layer}.weight", model.config)
    return None if form is None else form.activation


def _quantised(scheme: Scheme, model: GLM5ForCausalLM, disk: str, weight: Tensor) -> Quantised | None:
    form = scheme.form(disk, model.config)
    return None if form is None or not weight.numel() else quantise(weight, form.weight)
