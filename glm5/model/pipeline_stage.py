"""The forward pass of one pipeline stage: a contiguous part of the model (`glm5.config.pipeline.Span`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from glm5.config.pipeline import Span
from glm5.model.context import ForwardContext
from glm5.model.layer_call import call

if TYPE_CHECKING:
    from glm5.model.glm5 import GLM5ForCausalLM

IdsAhead = Callable[[int], Tensor]
"""Token ids [B, T] that are so many tokens ahead of the batch's."""


class Receive(Protocol):
    """The next tensor from the stage before, of this shape and dtype."""

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


def keep_stages(model: GLM5ForCausalLM, spans: list[Span]) -> None:
    """Remove from a model, in place, what none of these stages computes. Names of parameters do not change."""
    model.staged = True
    layers = {layer for span in spans for layer in span.layers}
    for layer in range(model.config.num_hidden_layers):
        if layer not in layers:
            delattr(model.model.layers, str(layer))
    mtp = any(span.mtp for span in spans)
    if not mtp:
        model.mtp = None
    if not mtp and not any(span.embeds for span in spans):
        del model.model.embed_tokens
    if not any(span.norm for span in spans):
        del model.model.norm
    if not any(span.head for span in spans):
        del model.lm_head


def stage_modules(model: GLM5ForCausalLM, span: Span) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model that a stage uses, with their names. The embedding belongs to two stages if MTP has one of
    its own."""
    if span.embeds or span.mtp:
        yield "model.embed_tokens", model.model.embed_tokens
    for layer in span.layers:
        yield f"model.layers.{layer}", model.model.layers.get_submodule(str(layer))
    if span.norm:
        yield "model.norm", model.model.norm
    if span.mtp and model.mtp is not None:
        yield "mtp", model.mtp
    if span.head:
        yield "lm_head", model.lm_head


class StagePass:
    """One micro-batch in one stage. After `hidden_states`, `sent` has what the next stage needs: hidden states [M, D],
    and `indices` [B, T, K] if its first layer has no indexer. `received` are the hidden states that came.

    `routers` and `indexers` count the uses of routers and of selected keys in all stages. Losses that are means over
    layers divide by these.
    """

    def __init__(self, span: Span, receive: Receive, differentiable: bool) -> None:
        self.span, self._receive, self._differentiable = span, receive, differentiable
        self.received: list[Tensor] = []
        self.sent: list[Tensor] = []
        self.indices: Tensor | None = None
        self.routers = self.indexers = 0

    def hidden_states(
        self, model: GLM5ForCausalLM, ids_ahead: IdsAhead, depths: int, ctx: ForwardContext
    ) -> list[Tensor]:
        """On the stage with the output head, the hidden states after the final norm of the trunk and of `depths` MTP
        depths, [M, D] each; on the others, nothing."""
        config, span = model.config, self.span
        layers = range(config.num_hidden_layers)
        self.routers = sum(not config.is_dense_layer(i) for i in layers) + depths
        self.indexers = len(layers) + depths  # a layer that shares an indexer has a part in its loss
        states: list[Tensor] = []
        indices: Tensor | None = None
        if span.embeds:
            x = ctx.flat(model.model.embed_tokens(ids_ahead(0)))
        else:
            carried = 1 + depths if not span.norm and span.head else 1
            states = [self._hidden(model, ids_ahead(0).numel()) for _ in range(carried)]
            x = states[0]
            if span.takes_indices and not ctx.attend_dense:
                width = min(config.index_topk or 0, ctx.key_length or ctx.length)
                indices = self._receive((ctx.batch, ctx.length, width), torch.int64)
        x, indices = run_layers(model, span, x, ctx, indices)
        if span.norm:
            states = [model.model.norm(x)]
        if span.mtp:
            for depth in range(1, depths + 1):
                states.append(model.mtp_hidden(ids_ahead(depth), states[-1], ctx))
        if span.head:
            return states
        self.sent = states if span.norm else [x]
        self.indices = indices if span.gives_indices else None
        return []

    def _hidden(self, model: GLM5ForCausalLM, rows: int) -> Tensor:
        x = self._receive((rows, model.config.hidden_size), model.dtype)
        self.received.append(x.requires_grad_(self._differentiable))
        return x


def run_layers(
    model: GLM5ForCausalLM, span: Span, x: Tensor, ctx: ForwardContext, indices: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The trunk layers of a stage."""
    for number in span.layers:
        x, indices = call(model.model.layers.get_submodule(str(number)), x, ctx, indices)
    return x, indices
