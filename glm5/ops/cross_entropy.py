"""Log-probabilities of target tokens, directly from hidden states, in chunks over the sequence (§2.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.ops import ROW_TILE, narrow, small_batch
from glm5.ops.native import kernels
from glm5.ops.operators import operator
from glm5.ops.wide import operand, product, wide

CHUNK_ROWS = 512
"""Rows of logits in memory at a time; results do not depend on it, because it is a multiple of `ROW_TILE`."""


class _TokenLogprobs(torch.autograd.Function):
    """Projects, normalises and differentiates chunk by chunk; a [rows, V] tensor is freed with its chunk.

    Backward projects again: one extra matrix product, no extra memory. Logits are fp32 or wider. For 16-bit inputs the
    gradient of the logits has 16 bits too, rounded once, if such matrices are what is multiplied (see `narrow`).
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, inverse_temperature):  # type: ignore[no-untyped-def]
        form = _forward if hidden.is_cpu else _forward_operator
        out, entropy, normaliser = form(hidden, weight, targets, inverse_temperature)
        ctx.scale = inverse_temperature
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.mark_non_differentiable(entropy)
        return out, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        form = _backward if grad.is_cpu else _backward_operator
        hidden, weight, targets, normaliser = ctx.saved_tensors
        return *form(hidden, weight, targets, normaliser, grad, ctx.scale), None, None


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, stats: Callable[..., Any] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and normalisers [M]. `stats` computes them from a chunk of logits."""
    out = hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype))
    entropy, normaliser = torch.empty_like(out), torch.empty_like(out)
    for rows, logits in _chunks(hidden, weight):
        out[rows], entropy[rows], normaliser[rows] = (stats or _stats)(logits, targets[rows], scale)
    return out, entropy, normaliser


def _backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    grad: Tensor,
    scale: float,
    gradient: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype)  # chunks are summed in fp32
    matrix = narrow.widen(weight)
    for rows, logits in _chunks(hidden, weight):
        view = (logits, targets[rows], normaliser[rows], grad[rows].contiguous(), scale)
        grad_logits = (gradient or _gradient)(*view, matrix.dtype)
        narrow.mm_into(grad_hidden[rows], grad_logits, matrix)
        grad_weight += grad_logits.T @ narrow.widen(hidden[rows])
    return grad_hidden, grad_weight.to(weight.dtype)


@operator(
    "logit_stats(Tensor logits, Tensor targets, float scale) -> (Tensor, Tensor, Tensor)",
    lambda logits, *_: tuple(logits.new_empty(logits.shape[0]) for _ in range(3)),
    triton="token_logits.logit_stats",
)
def _device_stats(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _stats(logits, targets, scale)


@operator(
    "logit_gradient(Tensor logits, Tensor targets, Tensor normaliser, Tensor grad, float scale, ScalarType dtype) "
    "-> Tensor",
    lambda logits, *args: torch.empty_like(logits, dtype=args[-1]),
    triton="token_logits.logit_gradient",
)
def _device_gradient(logits: Tensor, *args: Any) -> Tensor:
    return _gradient(logits.clone(), *args)


@operator(
    "token_logprobs(Tensor hidden, Tensor weight, Tensor targets, float scale) -> (Tensor, Tensor, Tensor)",
    lambda hidden, *_: tuple(hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype)) for _ in range(3)),
)
def _forward_operator(hidden: Tensor, weight: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(hidden, weight, targets, scale, _device_stats)


@operator(
    "token_logprobs_backward(Tensor hidden, Tensor weight, Tensor targets, Tensor normaliser, Tensor grad, float scale)"
    " -> (Tensor, Tensor)",
    lambda hidden, weight, *_: (torch.empty_like(hidden), torch.empty_like(weight)),
)
def _backward_operator(
    hidden: Tensor, weight: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return _backward(hidden, weight, targets, normaliser, grad, scale, _device_gradient)


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Logits of `CHUNK_ROWS` rows at a time, in one reused buffer if the device allows it."""
    turned = operand(weight).T
    buffer = turned.new_empty(min(CHUNK_ROWS, hidden.shape[0]), weight.shape[0])
    for start in range(0, hidden.shape[0], CHUNK_ROWS):
        rows = slice(start, min(start + CHUNK_ROWS, hidden.shape[0]))
        part = operand(hidden[rows])
        whole = part.dtype == wide(part.dtype)
        yield rows, torch.mm(part, turned, out=buffer[: rows.stop - start]) if whole else product(part, turned)


def _normaliser(logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """log sum exp(scale * logits) per row, and the entropy of that distribution."""
    native = kernels(logits)
    if not logits.is_cpu:
        return _normaliser_in_torch(logits, scale)
    if native is None:
        parts = [_normaliser_in_torch(part, scale) for part in logits.split(ROW_TILE)]
        return torch.cat([n for n, _ in parts]), torch.cat([e for _, e in parts])
    normaliser, entropy = torch.empty(2, logits.shape[0]).unbind()
    native.logsumexp(logits, normaliser, entropy, *logits.shape, scale)
    return normaliser, entropy


def _normaliser_in_torch(logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scaled = logits.to(wide(logits.dtype)) * scale
    normaliser = scaled.logsumexp(-1)
    logp = scaled - normaliser.unsqueeze(-1)
    return normaliser, -(logp.exp() * logp.clamp_min(torch.finfo(logp.dtype).min)).sum(-1)  # impossible tokens add 0


def _stats(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, entropies and normalisers [M] of logits [M, V]."""
    normaliser, entropy = _normaliser(logits, scale)
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) * scale - normaliser, entropy, normaliser


def _gradient(
    logits: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """Gradient of sum(grad * log p[targets]) with respect to logits [M, V], computed in their place."""
    native = kernels(logits)
    if native is not None:
        native.nll_backward(logits, normaliser, targets.contiguous(), grad, *logits.shape, scale)
        return logits.to(dtype)
    g = grad.unsqueeze(-1) * scale
    out = logits.mul_(scale).sub_(normaliser.unsqueeze(-1)).exp_().mul_(-g)
    return out.scatter_add_(-1, targets.unsqueeze(-1), g).to(dtype)


def output_logits(hidden: Tensor, weight: Tensor, *, exact: bool = True) -> Tensor:
    """hidden @ weight^T: [M, D], [V, D] -> [M, V] in fp32 (or wider), for engine and learner. No gradient. With
    `exact=False` few rows may take the small-batch kernel."""
    native = None if exact else small_batch.kernels_for(hidden, weight)
    if native is not None:
        return small_batch.wide_linear(native, hidden, weight)
    return product(hidden, operand(weight).T)


def distribution(hidden: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """log softmax(scale * hidden @ weight^T): [M, D], [V, D] -> [M, V] in fp32 (or wider), for engine and learner."""
    return log_distribution(output_logits(hidden, weight), scale)


def log_distribution(logits: Tensor, scale: float = 1.0) -> Tensor:
    """log softmax(scale * logits) of [M, V], in fp32 (or wider); rows are independent of each other. -inf stays."""
    normaliser, _ = _normaliser(logits, scale)
    logits = logits.to(normaliser.dtype)
    return (logits if scale == 1.0 else logits * scale) - normaliser.unsqueeze(-1)


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight^T / temperature)[targets] and that distribution's entropy (no gradient), in nats.

    hidden [M, D], weight [V, D], targets int64 [M] -> two tensors [M] in fp32 (or wider). Results are independent of
    the batch if M is a multiple of `ROW_TILE`.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, 1.0 / temperature)
