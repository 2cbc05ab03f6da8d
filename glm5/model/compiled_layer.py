"""Layers compiled by `torch.compile` for training, one graph per kind of layer: dense, MoE, MTP.

A graph is a function of tensors only, without breaks. Rows, row lengths and documents may change from step to step. Our
operators are calls in it; norms, SwiGLU, RoPE, casts and copies are fused around them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glm5.model.context import ForwardContext
from glm5.model.dsa import Indexer
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.gqa import GQA
from glm5.model.layer_call import SELECTIVE, Notes, Tables, noting, recompute_of, replay, selective_contexts
from glm5.model.mla import MLA
from glm5.model.moe import Experts
from glm5.obs.logs import get_logger
from glm5.ops import native

_log = get_logger(__name__)


def compile_layers(model: GLM5ForCausalLM, wanted: bool = True, *, backend: str = "inductor") -> None:
    """From now on, the model's layers run compiled in training; not `wanted`: as they are. What is not training or
    takes other forms stays eager: exact mode, a cache, no gradients, steps with `max_logits`, recurrent layers, experts
    divided over ranks, and fp64 on a CPU."""
    layers = [*model.model.layers, *([] if model.mtp is None else [model.mtp])]
    for layer in layers:
        vars(layer).pop("forward", None)
    if not wanted:
        return
    native.available()  # builds them now, not while a graph is traced
    compilers: dict[str, _Compiler] = {}
    for layer in layers:
        if isinstance(_block(layer).self_attn, (MLA, GQA)):
            kind = "MTP" if layer is model.mtp else type(layer.mlp).__name__
            layer.forward = CompiledLayer(layer, compilers.setdefault(kind, _Compiler(kind, backend)))


def _block(layer: nn.Module) -> Any:
    return getattr(layer, "block", layer)


class _Compiler:
    """The compiled form of all layers of a kind."""

    def __init__(self, kind: str, backend: str) -> None:
        from torch._dynamo import exc, maybe_mark_dynamic  # takes seconds
        from torch._functorch import config

        self.kind, self.failed = kind, False
        self.errors = exc.TorchDynamoException, exc.FailOnRecompileLimitHit
        self.may_vary = maybe_mark_dynamic
        # Without it, a backward graph that cannot be compiled would fail in backward, where no layer can run instead.
        self.with_backward = config.patch(force_non_lazy_backward_lowering=True)
        # Code of its own: torch counts graphs per code object, and stops at a number.
        own = FunctionType(_run.__code__.replace(co_name=f"run_{kind}"), _run.__globals__, f"run_{kind}")
        own.__kwdefaults__ = _run.__kwdefaults__
        self.run: Callable[..., tuple[Any, tuple[tuple[Tensor, ...], ...]]] = torch.compile(
            own, fullgraph=True, backend=backend
        )

    def fail(self, error: Exception) -> None:
        """Warn once, and stay eager."""
        self.failed = True
        cause = getattr(error, "inner_exception", error)
        text = next((line for line in str(cause).splitlines() if line.strip()), "")
        _log.warning(
            "compile: the %s layers run uncompiled, because torch.compile failed: %s: %s. Check that a C++ compiler is "
            "installed, or set compile = false.", self.kind, type(cause).__name__, text[:300],
        )  # fmt: skip


class CompiledLayer:
    """The `forward` of a layer: compiled if it `takes` the arguments, otherwise the layer's own."""

    def __init__(self, layer: nn.Module, compiler: _Compiler) -> None:
        self.layer, self.compiler = layer, compiler
        self.eager = type(layer).forward.__get__(layer)
        self.experts = [module for module in layer.modules() if isinstance(module, Experts)]
        self.indexers = [module for module in layer.modules() if isinstance(module, Indexer)]

    def takes(self, x: Tensor, ctx: ForwardContext) -> bool:
        """Whether these arguments are for the compiled form (see `compile_layers`)."""
        if self.compiler.failed or not torch.is_grad_enabled() or not native.by_operator(x):
            return False
        if ctx.exact or ctx.cache is not None or ctx.gather_keys is not None or ctx.max_logits is not None:
            return False
        return all(e.plain for e in self.experts) and not any(i.rule for i in self.indexers)

    def __call__(self, x: Tensor, ctx: ForwardContext, *rest: Tensor | None) -> Any:
        if not self.takes(x, ctx):
            return self.eager(x, ctx, *rest)
        attention = _block(self.layer).self_attn
        rope = {(attention.rope_dim, attention.theta): ctx.rope(attention.rope_dim, attention.theta)}
        ranges = {window: ctx.key_range(window) for window in {None, attention.window}}
        self._vary(1, x, *(table for pair in rope.values() for table in pair))
        self._vary(3, ctx.positions, ctx.documents, *rest, *(edge for pair in ranges.values() for edge in pair))
        selective = recompute_of(self.layer, ctx) == SELECTIVE
        flags = ctx.attend_dense, ctx.observer is not None, ctx.router_stats is not None, selective
        try:
            with self.compiler.with_backward:
                out, notes = self.compiler.run(self.eager, x, rest, ctx.positions, ctx.documents, rope, ranges, flags)
        except self.compiler.errors as error:
            self.compiler.fail(error)
            return self.eager(x, ctx, *rest)
        replay(Notes(*notes), self.layer, ctx)
        return out

    def _vary(self, dimensions: int, *tensors: Tensor | None) -> None:
        """Let the first dimensions differ from call to call without another graph."""
        for tensor in tensors:
            for dimension in range(0 if tensor is None else min(dimensions, tensor.ndim)):
                self.compiler.may_vary(tensor, dimension)


def _run(
    forward: Callable[..., Any],
    x: Tensor,
    rest: tuple[Tensor | None, ...],
    positions: Tensor,
    documents: Tensor | None,
    rope: Tables,
    ranges: Tables,
    flags: tuple[bool, bool, bool, bool],
) -> tuple[Any, tuple[tuple[Tensor, ...], ...]]:
    """What is compiled: the layer's result, and its `Notes`."""
    attend_dense, observed, routed, selective = flags

    def inside(x: Tensor, *rest: Tensor | None) -> Any:
        ctx = noting(positions, documents, rope, ranges, attend_dense, observed, routed)
        out = forward(x, ctx, *rest)
        return out, (ctx.notes.routing, ctx.notes.selection, ctx.notes.keys)

    if not selective:
        return inside(x, *rest)
    options: Any = dict(use_reentrant=False, preserve_rng_state=False, context_fn=selective_contexts)
    return checkpoint(inside, x, *rest, **options)
