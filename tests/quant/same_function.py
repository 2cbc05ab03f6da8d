"""What a change of weights that keeps a model's function must not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from glm5.model.dsa import Indexer
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.rounding import round_activations
from glm5.quant import convert
from glm5.quant.schemes import SCHEMES, Scheme

LENGTH = 96


@torch.no_grad()
def lively(model: GLM5ForCausalLM) -> GLM5ForCausalLM:
    """Norms with gains and routers with biases, as trained models have; a new model has ones and zeros."""
    generator = torch.Generator().manual_seed(11)
    for name, tensor in model.state_dict().items():
        if "norm" in name and name.endswith("weight"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
        elif name.endswith("bias"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model


def without_rounding(
    source: Path, out: Path, steps: tuple[str, ...], ids: Tensor
) -> tuple[GLM5ForCausalLM, dict[str, Any]]:
    """The model after some steps of the paper's scheme, in float64, with the form of every matrix taken away after the
    search. Also the report."""
    scheme = Scheme("paper", SCHEMES["paper-w4a8"].forms, steps, mtp=False)
    with (
        patch.object(convert.Conversion, "_rounded_form", lambda self, name: None),
        patch.multiple(convert, WORKING=torch.float64, stored_dtype=lambda source: torch.float64),
    ):
        report = convert.quantise_checkpoint(source, out, scheme, ids)
    model = GLM5ForCausalLM.from_pretrained(out, dtype=torch.float64)
    round_activations(model, lambda name: None)  # config.json says int8
    return model, report


@torch.no_grad()
def function(model: GLM5ForCausalLM, ids: Tensor | None = None) -> dict[str, Tensor]:
    """Logits of the trunk and of two MTP depths, chosen experts and selected keys of every layer, by name."""
    if ids is None:
        ids = torch.randint(0, model.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    found: dict[str, Tensor] = {}
    selected = Indexer.select

    def noted(indexer: Indexer, state: object, ctx: object) -> Tensor:
        keys = selected(indexer, state, ctx)  # type: ignore[arg-type]
        found[f"keys {len(found)}"] = keys
        return keys

    Indexer.select = noted  # type: ignore[method-assign, assignment]
    try:
        ctx = model.context(ids)
        ctx.router_stats = []
        hidden = model.model(ids, ctx)
        found["logits"] = model.lm_head(hidden)
        if model.mtp is not None:
            for depth in (1, 2):
                hidden = model.mtp_hidden(ids.roll(-depth, 1), hidden, ctx)
                found[f"logits of MTP depth {depth}"] = model.lm_head(hidden)
    finally:
        Indexer.select = selected  # type: ignore[method-assign]
    for number, note in enumerate(ctx.router_stats):
        found[f"experts {number}"] = note.experts
    return found


def same_function(one: GLM5ForCausalLM, other: GLM5ForCausalLM, ids: Tensor | None = None) -> list[str]:
    """Names of what differs: integers at all, numbers by more than 1e-9 of the largest."""
    before, after = function(one, ids), function(other, ids)
    assert before.keys() == after.keys()
    close = {
        name: torch.allclose(after[name], value, rtol=0, atol=1e-9 * float(value.abs().max()))
        if value.is_floating_point()
        else torch.equal(after[name], value)
        for name, value in before.items()
    }
    return [name for name, same in close.items() if not same]
