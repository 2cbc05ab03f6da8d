"""The Triton kernels as operators `torch.ops.glm5.*` with rules for fake tensors and autograd.

Backward passes add in any order, which is faster, unless `torch.use_deterministic_algorithms(True)` was called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glm5.errors import MissingExtraError
from glm5.ops.pages import Pages
from glm5.ops.triton import takes

__all__ = ["dense_kl", "select_keys", "selected_scores", "sparse_attention", "takes"]


def _kernel(name: str, launcher: str = "") -> Callable[..., Any]:
    """The launcher of a kernel, by default of the same name as its module. Raises MissingExtraError without Triton."""
    try:
        module = importlib.import_module(f"glm5.ops.triton.kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MissingExtraError("triton", "triton") from None
    found: Callable[..., Any] = getattr(module, launcher or name)
    return found


def _operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema[: schema.index("(")]
    operator = torch.library.custom_op(f"glm5::{name}", run, mutates_args=(), schema=schema[len(name) :])
    operator.register_fake(fake)
    return operator


def _attention_shapes(q: Tensor, latents: Tensor, indices: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, value_dim, _scale, want_probs = args
    return (
        q.new_empty(*q.shape[:3], value_dim),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty(indices.shape if want_probs else 0, dtype=torch.float32),
    )


def _sparse_mla_run(
    q: Tensor,
    latents: Tensor,
    indices: Tensor,
    rows: Tensor | None,
    table: Tensor | None,
    per_row: int,
    shift: int,
    size: int,
    value_dim: int,
    scale: float,
    want_probs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if not indices.numel():
        out, lse, target = _attention_shapes(q, latents, indices, value_dim, scale, want_probs)
        return out.zero_(), lse.fill_(float("-inf")), target.zero_()
    view = None if rows is None or table is None else (rows, table, per_row, shift, size)
    if view is None:
        out, lse = _kernel("sparse_forward")(q, latents, indices, value_dim, scale)
    else:
        out, lse = _kernel("sparse_decode")(q, latents, indices, view, value_dim, scale)
    if not want_probs:
        return out, lse, lse.new_empty(0)
    return out, lse, _kernel("attention_target")(q, latents, indices, lse, value_dim, scale, view)


_sparse_mla = _operator(
    "sparse_mla(Tensor q, Tensor latents, Tensor indices, Tensor? rows, Tensor? table, int per_row, int shift, "
    "int size, int value_dim, float scale, bool want_probs) -> (Tensor, Tensor, Tensor)",
    _sparse_mla_run,
    _attention_shapes,
)


def _sparse_mla_backward_run(
    q: Tensor, latents: Tensor, indices: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float, ordered: bool
) -> tuple[Tensor, Tensor]:
    if not indices.numel():
        return torch.zeros_like(q), torch.zeros_like(latents)
    gradients: tuple[Tensor, Tensor] = _kernel("sparse_backward")(q, latents, indices, out, lse, grad, scale, ordered)
    return gradients


_sparse_mla_backward = _operator(
    "sparse_mla_backward(Tensor q, Tensor latents, Tensor indices, Tensor out, Tensor lse, Tensor grad, float scale, "
    "bool ordered) -> (Tensor, Tensor)",
    _sparse_mla_backward_run,
    lambda q, latents, *_: (torch.empty_like(q), torch.empty_like(latents)),
)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, latents, indices, rows, *_, scale, _ = inputs
    if rows is not None and (q.requires_grad or latents.requires_grad):
        raise RuntimeError("attention over pages has no gradient")
    out, lse, target = output
    ctx.save_for_backward(q, latents, indices, out, lse)
    ctx.scale = scale
    ctx.mark_non_differentiable(lse, target)


def _attention_gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    ordered = torch.are_deterministic_algorithms_enabled()
    return *_sparse_mla_backward(*ctx.saved_tensors, grad.contiguous(), ctx.scale, ordered), *(None,) * 9


_sparse_mla.register_autograd(_attention_gradients, setup_context=_keep_attention)


def sparse_attention(
    q: Tensor,
    latents: Tensor,
    indices: Tensor,
    value_dim: int,
    scale: float,
    pages: Pages | None,
    want_probs: bool,
) -> tuple[Tensor, Tensor | None]:
    """`glm5.ops.attention.sparse_attention` by the kernels."""
    q, latents, indices = q.contiguous(), latents.contiguous(), indices.contiguous()
    view = (None, None, 0, 0, 0) if pages is None else pages.kernel_view()
    out, _, target = _sparse_mla(q, latents, indices, *view, value_dim, scale, want_probs)
    return out, target if want_probs else None


def _index_select_run(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    start: Tensor,
    end: Tensor,
    rows: Tensor | None,
    table: Tensor | None,
    per_row: int,
    shift: int,
    size: int,
    topk: int,
) -> Tensor:
    if not start.numel():
        return torch.empty(*start.shape, topk, dtype=torch.long, device=q.device)
    view = None if rows is None or table is None else (rows, table, per_row, shift, size)
    found: Tensor = _kernel("index_select")(q, k, w, start, end, topk, view)
    return found


_index_select = _operator(
    "index_select(Tensor q, Tensor k, Tensor w, Tensor start, Tensor end, Tensor? rows, Tensor? table, int per_row, "
    "int shift, int size, int topk) -> Tensor",
    _index_select_run,
    lambda q, *args: q.new_empty(*q.shape[:2], args[-1], dtype=torch.long),
)


def select_keys(q: Tensor, k: Tensor, w: Tensor, start: Tensor, end: Tensor, topk: int, pages: Pages | None) -> Tensor:
    """`glm5.ops.indexer.select_keys` by the kernel."""
    q, k, w, start, end = (x.contiguous() for x in (q, k, w.float(), start, end))
    view = (None, None, 0, 0, 0) if pages is None else pages.kernel_view()
    found: Tensor = _index_select(q, k, w, start, end, *view, topk)
    return found


def _selected_scores_run(q: Tensor, k: Tensor, w: Tensor, indices: Tensor) -> Tensor:
    if not indices.numel():
        return torch.empty(indices.shape, device=q.device)
    scores: Tensor = _kernel("selected_scores")(q, k, w, indices)
    return scores


_selected_scores = _operator(
    "selected_scores(Tensor q, Tensor k, Tensor w, Tensor indices) -> Tensor",
    _selected_scores_run,
    lambda q, k, w, indices: q.new_empty(indices.shape, dtype=torch.float32),
)


def _selected_scores_backward_run(
    q: Tensor, k: Tensor, w: Tensor, indices: Tensor, grad: Tensor, ordered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not indices.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(w)
    backward = _kernel("selected_scores", "selected_scores_backward")
    gradients: tuple[Tensor, Tensor, Tensor] = backward(q, k, w, indices, grad, ordered)
    return gradients


_selected_scores_backward = _operator(
    "selected_scores_backward(Tensor q, Tensor k, Tensor w, Tensor indices, Tensor grad, bool ordered) -> "
    "(Tensor, Tensor, Tensor)",
    _selected_scores_backward_run,
    lambda q, k, w, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)),
)


def _score_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    ordered = torch.are_deterministic_algorithms_enabled()
    return *_selected_scores_backward(*ctx.saved_tensors, grad.contiguous(), ordered), None


_selected_scores.register_autograd(
    _score_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def selected_scores(q: Tensor, k: Tensor, w: Tensor, indices: Tensor) -> Tensor:
    """`glm5.ops.indexer.selected_scores` by the kernels."""
    scores: Tensor = _selected_scores(*(x.contiguous() for x in (q, k, w, indices)))
    return scores


def _indexer_kl_run(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    q: Tensor,
    k: Tensor,
    start: Tensor,
    end: Tensor,
    scale: float,
    weight: Tensor,
    learning: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args = (index_q, index_k, index_w, q, k, start, end, scale, weight, learning)
    value, *gradients = _kernel("indexer_kl")(*args)
    return (value.sum(), *gradients)


_indexer_kl = _operator(
    "indexer_kl(Tensor index_q, Tensor index_k, Tensor index_w, Tensor q, Tensor k, Tensor start, Tensor end, "
    "float scale, Tensor weight, bool learning) -> (Tensor, Tensor, Tensor, Tensor)",
    _indexer_kl_run,
    lambda index_q, index_k, index_w, *_: (
        index_w.new_empty(()),
        torch.empty_like(index_q),
        torch.empty_like(index_k),
        torch.empty_like(index_w),
    ),
)


def _keep_kl_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Attributes, not saved tensors: a backward pass that recomputes a layer does not compute the KL again.
    ctx.gradients = output[1:]
    ctx.mark_non_differentiable(*output[1:])


def _kl_gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return *((grad * g).to(g.dtype) for g in ctx.gradients), *(None,) * 7


_indexer_kl.register_autograd(_kl_gradients, setup_context=_keep_kl_gradients)


def dense_kl(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    q: Tensor,
    k: Tensor,
    start: Tensor,
    end: Tensor,
    scale: float,
    weight: Tensor,
) -> Tensor:
    """`glm5.ops.indexer_kl.dense_kl` by the kernels."""
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (index_q, index_k, index_w))
    q, k = (x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in (q, k))
    first = (x.contiguous() for x in (index_q, index_k, index_w))
    value: Tensor = _indexer_kl(
        *first, q, k, start.contiguous(), end.contiguous(), scale, weight.contiguous(), learning
    )[0]
    return value
