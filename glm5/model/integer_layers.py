"""Layers that multiply integers instead of plain weights: int8 rows with int8 or int4 matrices (W8A8, W4A8; §5).

For inference on a CPU or an NVIDIA or AMD GPU. The plain weights of such layers have no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from glm5.model.disk_names import disk_rows
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.layers import Linear
from glm5.model.moe import Experts
from glm5.ops.integers import IntegerWeight, fits, integer_weight
from glm5.ops.quantisers import INT8_TOKEN, Quantised

QuantisedOf = Callable[[str, Tensor], Quantised | None]
"""The quantised matrix of a disk name, given the plain one (perhaps without memory); None if there is none."""

READ = ("lm_head", "kv_b_proj", "eh_proj")
"""Layers whose weights others read too: halves of kv_b_proj are folded into queries and values."""


@torch.no_grad()
def hold_integers(model: GLM5ForCausalLM, quantised_of: QuantisedOf, device: torch.device) -> int:
    """Let every layer that rounds its input to int8 hold the integers of its weights on the device, and free the
    weights. Returns how many layers do; those whose groups do not fit the kernels stay as they are."""
    quantised_of, held = _moved(quantised_of, device), 0
    for name, module in model.named_modules():
        if not isinstance(module, Linear | Experts) or module.activation != INT8_TOKEN or name.endswith(READ):
            continue
        if isinstance(module, Linear) and not module.weight.numel():  # the shared expert of a model without one
            continue
        if isinstance(module, Experts):
            up = _stack(model, f"{name}.gate_up_proj", module.gate_up_proj, quantised_of)
            down = _stack(model, f"{name}.down_proj", module.down_proj, quantised_of)
            if up is None or down is None:
                continue
            module.integers = up, down
            module.gate_up_proj = _without_memory(module.gate_up_proj)
            module.down_proj = _without_memory(module.down_proj)
        else:
            weight = _matrix(model, f"{name}.weight", module.weight, 0, len(module.weight), quantised_of)
            if weight is None:
                continue
            module.integers, module.weight = weight, _without_memory(module.weight)
        held += 1
    for part in (model.model, model.mtp):
        if part is not None:
            part.fused_decode.forget()
    return held


@torch.no_grad()
def integers_of(
    model: GLM5ForCausalLM, tensors: Mapping[str, Tensor], quantised_of: QuantisedOf, device: torch.device
) -> dict[str, tuple[IntegerWeight, ...]]:
    """What `held_integers` of every layer would be for other weights, by names of `state_dict`; by the layer's name."""
    quantised_of, found = _moved(quantised_of, device), dict[str, tuple[IntegerWeight | None, ...]]()
    for name, module in model.named_modules():
        if isinstance(module, Experts) and module.integers is not None:
            names = f"{name}.gate_up_proj", f"{name}.down_proj"
            found[name] = tuple(_stack(model, stack, tensors[stack], quantised_of) for stack in names)
        elif isinstance(module, Linear) and module.integers is not None:
            rows = tensors[f"{name}.weight"]
            found[name] = (_matrix(model, f"{name}.weight", rows, 0, len(rows), quantised_of),)
    return {name: tuple(weight for weight in weights if weight is not None) for name, weights in found.items()}


def held_integers(module: nn.Module) -> tuple[IntegerWeight, ...]:
    """The integers that a layer multiplies with."""
    held = getattr(module, "integers", None) or ()
    return held if isinstance(held, tuple) else (held,)


def _moved(quantised_of: QuantisedOf, device: torch.device) -> QuantisedOf:
    def moved(disk: str, weight: Tensor) -> Quantised | None:
        found = quantised_of(disk, weight if weight.is_meta else weight.to(device))
        return found and replace(found, values=found.values.to(device), scales=found.scales.to(device))

    return moved


def _matrix(
    model: GLM5ForCausalLM, name: str, rows: Tensor, first: int, total: int, quantised_of: QuantisedOf
) -> IntegerWeight | None:
    """One matrix, or one of a stack of `total`, in memory; gate and up projections are two on disk."""
    parts = [quantised_of(disk, view) for disk, view, _ in disk_rows(name, model.config, rows, first, total)]
    known = [part for part in parts if part is not None]
    form = known[0].form if known else None
    if form is None or len(known) < len(parts) or any(part.form != form for part in known):
        return None
    values, scales = torch.cat([part.values for part in known]), torch.cat([part.scales for part in known])
    return integer_weight(Quantised(values, scales, form)) if fits(form, values.shape[-1]) else None


def _stack(model: GLM5ForCausalLM, name: str, stack: Tensor, quantised_of: QuantisedOf) -> IntegerWeight | None:
    experts: list[IntegerWeight] = []
    for number in range(len(stack)):
        weight = _matrix(model, name, stack[number : number + 1], number, len(stack), quantised_of)
        if weight is None:
            return None
        experts.append(weight)
    if len({(weight.bits, weight.groups) for weight in experts}) != 1:
        return None
    sums = [weight.sums for weight in experts if weight.sums is not None]
    return IntegerWeight(
        torch.stack([weight.values for weight in experts]),
        torch.stack([weight.scales for weight in experts]),
        torch.stack(sums) if sums else None,
        experts[0].rows,
        experts[0].columns,
    )


def _without_memory(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), requires_grad=False)
