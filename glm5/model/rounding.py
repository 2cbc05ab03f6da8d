"""Rounded arithmetic on a model with plain weights: what W8A8 and W4A8 compute, and quantization-aware training.

A checkpoint with int8 activations is read with dequantised weights, and its layers round what they read. A product of
these equals the product of the integers times their scales, up to the rounding of its sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from glm5.errors import CheckpointError
from glm5.model.disk_names import disk_name, disk_parts
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.layers import Linear
from glm5.model.moe import Experts
from glm5.ops.quantisers import INT8_TOKEN, Quantiser

MOST_TARGETS = 1000
FormOf = Callable[[str], Quantiser | None]


def round_activations(model: GLM5ForCausalLM, form_of: FormOf) -> None:
    """Let every linear layer and every MoE layer round the rows that it reads, as `form_of` says for the disk name of
    its (first) matrix without ".weight"."""
    for name, module in layers(model):
        module.activation = form_of(name)


def round_weights(model: GLM5ForCausalLM, form_of: FormOf) -> None:
    """Quantization-aware training (§2.4): layers multiply rounded matrices, and gradients go to the matrices that are
    rounded. Layers whose form is None multiply with their weights as they are."""
    for name, module in layers(model):
        module.weight_form = form_of(name)


def layers(model: GLM5ForCausalLM) -> Iterator[tuple[str, Linear | Experts]]:
    """Linear layers and routed experts with the disk name of their first matrix, without ".weight"."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            if module.weight.numel():  # a model without shared experts has empty ones
                first = disk_parts(f"{name}.weight", model.config, module.weight)[0]
                yield first.removesuffix(".weight"), module
        elif isinstance(module, Experts):
            yield f"{disk_name(name, model.config)}.0.down_proj", module


def activations_of(quantization: Any, where: str = "config.json") -> FormOf:
    """The `form_of` of a `quantization_config`: int8 per token for the targets of groups that say so.

    Raises CheckpointError for lists of targets that are none, and for expressions that could take forever.
    """
    groups = quantization.get("config_groups") if isinstance(quantization, Mapping) else None
    targets: list[str] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        seen = group.get("input_activations") if isinstance(group, Mapping) else None
        if seen is not None and _is_int8(seen, where):
            targets += _texts(group.get("targets"), where)
    chosen = [_matcher(target, where) for target in targets]
    left_out = [_matcher(name, where) for name in _texts(quantization.get("ignore"), where)] if targets else []

    def form_of(name: str) -> Quantiser | None:
        found = any(matches(name) for matches in chosen) and not any(matches(name) for matches in left_out)
        return INT8_TOKEN if found else None

    return form_of


def _is_int8(seen: Any, where: str) -> bool:
    """Whether activations are int8, symmetric, with a scale per token; False for FP8, which is read without rounding.
    Raises CheckpointError for anything else."""
    if isinstance(seen, Mapping) and seen.get("type", "int") == "float":
        return False
    wanted = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    missing = {"num_bits": None, "type": "int", "strategy": None, "dynamic": None, "symmetric": True}
    if not isinstance(seen, Mapping) or any(seen.get(key, missing[key]) != value for key, value in wanted.items()):
        raise CheckpointError(
            f"{where}: only activations in int8 can be computed, symmetric and with a dynamic scale per token."
        )
    return True


def _texts(value: Any, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value) or len(value) > MOST_TARGETS:
        raise CheckpointError(
            f"{where}: targets and ignore of quantization_config must be lists of at most {MOST_TARGETS:,} names."
        )
    return value


def _matcher(target: str, where: str) -> Callable[[str], bool]:
    """A target is a name, "re:" and an expression that matches from the start, or "Linear" for all."""
    if not target.startswith("re:"):
        return lambda name: target in (name, "Linear")
    text = target.removeprefix("re:")
    # Many choices of what matches what can take exponential time, and the file may come from anybody.
    plain = text.replace("\\\\", "").replace("\\.", "")
    some = len(re.findall(r"[*+{?]", plain)) > 4 or plain.count("(") > 6 or plain.count("|") > 24
    if len(text) > 300 or some or re.search(r"\)[*+{]|\([^()]*\.", plain):
        raise CheckpointError(
            f"{where}: the target {target!r:.80} of quantization_config is too complex to be trusted."
        )
    try:
        match = re.compile(text).match
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}: the target {target!r:.80} is no regular expression ({error}).") from None
    return lambda name: match(name) is not None
