"""Schemes: which matrices of a model get which quantiser, and which steps prepare them (§5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError, nearest
from glm5.model.disk_names import disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops.quantisers import (
    FP8_BLOCK,
    INT4_CHANNEL,
    INT4_GROUP_32,
    INT4_GROUP_128,
    INT8_CHANNEL,
    INT8_TOKEN,
    Quantised,
    Quantiser,
    least_squares,
    quantise,
)

STEPS = ("quarot", "awq", "smooth", "ssz")
"""What prepares weights for rounding, in the order in which it happens. `ssz`: scales of the least squared error."""


@dataclass(frozen=True)
class Form:
    """How the matrices of one kind are stored, and how the activations that they read are rounded (None: not)."""

    weight: Quantiser
    activation: Quantiser | None = None


def round_weight(weight: Tensor, form: Form, *, ssz: bool) -> Quantised:
    """The rounded weight; with `ssz`, scales of 4-bit weights minimise the squared error."""
    return least_squares(weight, form.weight) if ssz and form.weight.bits == 4 else quantise(weight, form.weight)


W8A8 = Form(INT8_CHANNEL, INT8_TOKEN)
W4A8 = Form(INT4_GROUP_128, INT8_TOKEN)
W4A8_CHANNEL = Form(INT4_CHANNEL, INT8_TOKEN)
W4A16 = Form(INT4_GROUP_32)
FP8 = Form(FP8_BLOCK, Quantiser(8, 128, fp8=True))

KINDS: Mapping[str, str] = {
    "experts": r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight",
    "mlp": r"\.mlp\.(shared_experts\.)?(gate|up|down)_proj\.weight",
    "attention": r"\.self_attn\.((q_a|q_b|kv_a|o|q|k|v|g)_proj(_with_mqa)?|indexer\.wq_b)\.weight",
}
"""Kinds of matrices by their names on disk. What none of them matches is never quantised: embedding, output matrix,
norms, routers, kv_b_proj (its halves are folded into queries and values), the indexer's wk and weights_proj, gates of
Gated DeltaNet, and eh_proj."""


@dataclass(frozen=True)
class Scheme:
    """A named scheme: the form of every kind (absent: as it is), the steps before rounding, and whether the MTP layer
    is quantised too."""

    name: str
    forms: Mapping[str, Form]
    steps: tuple[str, ...] = ()
    mtp: bool = True

    def form(self, name: str, config: GLM5Config) -> Form | None:
        """The form of a tensor by its name on disk; None if it stays as it is."""
        if not self.mtp and name.startswith(f"model.layers.{config.num_hidden_layers}."):
            return None
        for kind, form in self.forms.items():
            if re.search(KINDS[kind] + "$", name):
                return form
        return None

    def check(self, model: GLM5ForCausalLM) -> None:
        """Raises ConfigError for a matrix of the model that the scheme does not fit."""
        for name, tensor in disk_tensors(model).items():
            form = self.form(name, model.config)
            try:
                if form is not None and tensor.numel():
                    form.weight.columns(tensor.shape[-1])
            except ValueError as error:
                advice = '; "w4a8-channel" has no groups.' if self.name == "w4a8" else "."
                raise ConfigError(f'scheme "{self.name}" does not fit "{name}": {error}{advice}') from None

    def without(self, *steps: str) -> Scheme:
        """The scheme with fewer steps, for ablations. Raises ConfigError for a step that it does not have."""
        for step in steps:
            if step not in self.steps:
                has = ", ".join(self.steps) or "none"
                raise ConfigError(f'scheme "{self.name}" has no step "{step}"; it has: {has}.')
        return Scheme(self.name, self.forms, tuple(s for s in self.steps if s not in steps), self.mtp)


def _everywhere(form: Form) -> dict[str, Form]:
    return dict.fromkeys(KINDS, form)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("w8a8", _everywhere(W8A8)),
        Scheme("w4a8", _everywhere(W4A8)),
        # As the paper's scheme, without its steps: what vLLM-Ascend serves.
        Scheme("w4a8-channel", {"experts": W4A8_CHANNEL, "mlp": W8A8, "attention": W8A8}),
        Scheme("w4a16", {"experts": W4A16}),
        Scheme("fp8", _everywhere(FP8)),
        # The MTP layer is left alone, as in the recipe of msModelSlim for GLM-5.
        Scheme("paper-w4a8", {"experts": W4A8_CHANNEL, "mlp": W8A8, "attention": W8A8}, STEPS, mtp=False),
    )
}


def scheme_named(name: str) -> Scheme:
    """Raises ConfigError for a name that no scheme has."""
    if name not in SCHEMES:
        raise ConfigError(f'there is no scheme "{name}"{nearest(name, SCHEMES)}; choose one of {", ".join(SCHEMES)}.')
    return SCHEMES[name]
