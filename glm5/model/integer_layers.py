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
        own = {key: weight for key, weight in module.named_parameters(recurse=False) if key != "bias"}
        found = _integers(model, name, {f"{name}.{key}": weight for key, weight in own.items()}, quantised_of)
        if found is None:
            continue
        module.integers = found if isinstance(module, Experts) else found[0]  # type: ignore[assignment]
        for key, weight in own.items():
            setattr(module, key, _without_memory(weight))
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
    quantised_of, found = _moved(quantised_of, device), dict[str, tuple[IntegerWeight, ...]]()
    for name, module in model.named_modules():
        if held_integers(module):
            integers = _integers(model, name, tensors, quantised_of)
            assert integers is not None  # equal forms fit as well as those that are held
            found[name] = integers
    return found


def _integers(
    model: GLM5ForCausalLM, name: str, tensors: Mapping[str, Tensor], quantised_of: QuantisedOf
) -> tuple[IntegerWeight, ...] | None:
    """The integers of a layer whose weights are in `tensors`; None if a matrix has none or does not fit the kernels."""
    if isinstance(model.get_submodule(name), Experts):
        stacks = f"{name}.gate_up_proj", f"{name}.down_proj"
        found = [_stack(model, stack, tensors[stack], quantised_of) for stack in stacks]
    else:
        rows = tensors[f"{name}.weight"]
        found = [_matrix(model, f"{name}.weight", rows, 0, len(rows), quantised_of)]
    known = tuple(weight for weight in found if weight is not None)
    return known if len(known) == len(found) else None


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
