"""How a layer runs in training: its backward recomputes all, the cheap part or nothing of it, and what it saves may go
to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glm5.model.context import AllKeys, ForwardContext, Recompute

SELECTIVE = "selective"

KEPT = {
    # products of matrices, and attention as torch has it
    *("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_grouped_mm", "aten::convolution"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
    # ours: attention, selections of keys and of experts, products
    *("glm5::attend", "glm5::attend_ranges", "glm5::select", "glm5::selected", "glm5::route", "glm5::expert_layout"),
    *("glm5::grouped_rows", "glm5::wide_linear", "glm5::bf16_product"),
}
"""Operators whose results selective recomputation keeps; the others are cheap: norms, SwiGLU, RoPE, casts, copies."""


def call(layer: nn.Module, x: Tensor, ctx: ForwardContext, *rest: Tensor | None) -> Any:
    """`layer(x, ctx, *rest)`; with gradients, as `ctx.recompute` and `ctx.offload` say. A layer that runs again in
    backward records no statistics a second time."""
    if not torch.is_grad_enabled():
        return layer(x, ctx, *rest)
    mode = recompute_of(layer, ctx)
    offload: AbstractContextManager[object] = nullcontext() if ctx.offload is None else ctx.offload.layer(layer)
    with offload:
        if not mode or keeps_by_itself(layer, x, ctx):
            return layer(x, ctx, *rest)
        # Statistics of attention multiply matrices of all keys. These would be kept, and be missing in the second run.
        if mode == SELECTIVE and ctx.max_logits is None:
            return _selectively(layer, x, ctx, rest)
        return _recomputed(layer, x, ctx, rest)


def keeps_by_itself(layer: nn.Module, x: Tensor, ctx: ForwardContext) -> bool:
    """Whether the layer is compiled and does selective recomputation inside."""
    takes = getattr(layer.forward, "takes", None)
    return recompute_of(layer, ctx) == SELECTIVE and takes is not None and takes(x, ctx)


def recompute_of(layer: nn.Module, ctx: ForwardContext) -> Recompute:
    """How this layer is recomputed: `ctx.recompute` may have a setting for each."""
    if not isinstance(ctx.recompute, tuple):
        return ctx.recompute
    attention: Any = getattr(layer, "block", layer).self_attn
    mode: Recompute = ctx.recompute[attention.layer]
    return mode


def _recomputed(layer: nn.Module, x: Tensor, ctx: ForwardContext, rest: Sequence[Tensor | None]) -> Any:
    """Only x and `rest` are saved."""
    computed = False

    def inside(x: Tensor, *rest: Tensor | None) -> Any:
        nonlocal computed
        context, computed = _without_observers(ctx) if computed else ctx, True
        return layer(x, context, *rest)

    return checkpoint(inside, x, *rest, use_reentrant=False, preserve_rng_state=False)


def _selectively(layer: nn.Module, x: Tensor, ctx: ForwardContext, rest: Sequence[Tensor | None]) -> Any:
    """x, `rest` and the results of `KEPT` are saved. Observers are called afterwards: what they multiply is not part of
    the second run, which must be the same sequence of operators."""
    runs: list[NotingContext] = []

    def inside(x: Tensor, *rest: Tensor | None) -> Any:
        observed, routed = ctx.observer is not None, ctx.router_stats is not None
        tables = ctx.positions, ctx.documents, ctx._rope, ctx._ranges
        own = noting(*tables, ctx.attend_dense, observed, routed, ctx.exact)
        runs.append(replace(own, gather_keys=ctx.gather_keys, key_length=ctx.key_length))
        return layer(x, runs[-1], *rest)

    out = checkpoint(inside, x, *rest, use_reentrant=False, preserve_rng_state=False, context_fn=selective_contexts)
    replay(runs[0].notes, layer, ctx)
    return out


def _keeps(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator._schema.name in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


selective_contexts = partial(create_selective_checkpoint_contexts, _keeps)
"""`context_fn` of `torch.utils.checkpoint.checkpoint` that keeps the results of `KEPT`."""


def _without_observers(ctx: ForwardContext) -> ForwardContext:
    """The context for recomputing a layer in backward; the first run has recorded statistics and losses."""
    return replace(
        ctx,
        observer=None if ctx.observer is None else ctx.observer.noop(),
        router_stats=None if ctx.router_stats is None else [],
        max_logits=None,
    )


@dataclass
class Notes:
    """What a layer reports, as tensors: routing scores and experts (see `RouterStats`), the arguments of
    `Observer.selected`, and index_q, index_k, index_w, q and k of `AllKeys`."""

    routing: tuple[Tensor, ...] = ()
    selection: tuple[Tensor | None, ...] = ()
    keys: tuple[Tensor | None, ...] = ()

    def dense(self, layer: int, keys: AllKeys) -> None:
        """See `Observer`."""
        self.keys = keys.index_q, keys.index_k, keys.index_w, keys.q, keys.k

    def selected(self, layer: int, scores: Tensor | None, target: Tensor, valid: Tensor) -> None:
        """See `Observer`."""
        self.selection = scores, target, valid

    def noop(self) -> Notes:
        """See `Observer`."""
        return Notes()


@dataclass
class NotingContext(ForwardContext):
    """The context of one layer, which notes what the layer reports. It does not look at the number of the layer, so
    that `torch.compile` makes one graph for all layers of a kind."""

    notes: Notes = field(default_factory=Notes)

    def note_routing(self, layer: int, scores: Tensor, experts: Tensor) -> None:
        """See `ForwardContext`."""
        real = self.batch * self.length
        self.notes.routing = scores[:real], experts[:real]


Tables = dict[Any, tuple[Tensor, Tensor]]


def noting(
    positions: Tensor,
    documents: Tensor | None,
    rope: Tables,
    ranges: Tables,
    attend_dense: bool,
    observed: bool,
    routed: bool,
    exact: bool = False,
) -> NotingContext:
    """A context of a training step without `max_logits`, with the tables of `ForwardContext.rope` and `.key_range`."""
    notes = Notes()
    return NotingContext(
        positions=positions,
        documents=documents,
        exact=exact,
        attend_dense=attend_dense,
        observer=notes if observed else None,
        router_stats=[] if routed else None,
        _rope=rope,
        _ranges=ranges,
        notes=notes,
    )


def replay(notes: Notes, layer: nn.Module, ctx: ForwardContext) -> None:
    """Tell `ctx` and its observer what the layer reported."""
    attention: Any = getattr(layer, "block", layer).self_attn
    if notes.routing:
        ctx.note_routing(attention.layer, *notes.routing)
    if ctx.observer is not None and notes.keys:
        index_q, index_k, index_w, q, k = notes.keys
        assert q is not None and k is not None
        view = AllKeys(index_q, index_k, index_w, q, k, *ctx.key_range(), attention.scale)
        ctx.observer.dense(attention.layer, view)
    if ctx.observer is not None and notes.selection:
        scores, target, valid = notes.selection
        assert target is not None and valid is not None
        ctx.observer.selected(attention.layer, scores, target, valid)
