"""Quantization-aware training: a model computes as its quantised copy will, its weights stay as they are (§2.4)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.rounding import layers, round_activations, round_weights
from glm5.ops.quantisers import Quantiser
from glm5.quant.schemes import scheme_named


@contextmanager
def quantization_aware(model: GLM5ForCausalLM, scheme: str | None) -> Iterator[None]:
    """Inside, the model rounds weights and activations by the scheme of this name; None changes nothing.

    Clones made inside round too. Raises ConfigError for a scheme whose groups do not fit the model's matrices.
    """
    if scheme is None:
        yield
        return
    chosen = scheme_named(scheme)
    chosen.check(model)

    def weight(name: str) -> Quantiser | None:
        form = chosen.form(f"{name}.weight", model.config)
        return None if form is None else form.weight

    def activation(name: str) -> Quantiser | None:
        form = chosen.form(f"{name}.weight", model.config)
        return None if form is None else form.activation

    before = {name: module.activation for name, module in layers(model)}
    round_weights(model, weight)
    round_activations(model, activation)
    try:
        yield
    finally:
        round_weights(model, lambda name: None)
        round_activations(model, before.get)
