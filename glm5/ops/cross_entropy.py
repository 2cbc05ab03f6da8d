"""Log-probabilities of target tokens straight from hidden states, in chunks over the sequence (§2.4)."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ROWS = 4096


class _TokenLogprobs(torch.autograd.Function):
    """Projects, normalises and differentiates chunk by chunk: no [rows, V] tensor outlives its chunk.

    Backward projects again, which costs one extra matrix product and no memory.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, inverse_temperature):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden, weight, targets)
        ctx.scale = inverse_temperature
        out = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden.dtype))
        entropy = torch.empty_like(out)
        for s in range(0, hidden.shape[0], CHUNK_ROWS):
            rows = slice(s, s + CHUNK_ROWS)
            logp = distribution(hidden[rows], weight, inverse_temperature)
            out[rows] = logp.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1)
            entropy[rows] = -(logp.exp() * logp).sum(-1)
        ctx.mark_non_differentiable(entropy)
        return out, entropy

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for s in range(0, hidden.shape[0], CHUNK_ROWS):
            rows = slice(s, s + CHUNK_ROWS)
            g = grad[rows].unsqueeze(-1)
            grad_logits = distribution(hidden[rows], weight, ctx.scale).exp_().mul_(-g)
            grad_logits.scatter_add_(-1, targets[rows].unsqueeze(-1), g)
            grad_logits = grad_logits.mul_(ctx.scale).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight.addmm_(grad_logits.T, hidden[rows])
        return grad_hidden, grad_weight, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def distribution(hidden: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """log softmax(scale * hidden @ weight^T): [M, D], [V, D] -> [M, V] in fp32 (or wider), for engine and learner."""
    logits = torch.nn.functional.linear(hidden, weight).to(_wide(hidden.dtype))
    return torch.log_softmax(logits * scale if scale != 1.0 else logits, dim=-1)


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight^T / temperature)[targets] and that distribution's entropy (no gradient), in nats.

    hidden [M, D], weight [V, D], targets int64 [M] -> two tensors [M] in fp32 (or wider). For results that do not
    depend on the batch, M must be a multiple of `ROW_TILE`.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, 1.0 / temperature)
