"""Distributions that tokens are drawn from, and draws, on an accelerator: nothing is read back.

`glm5.engine.sampler` has the same rules for a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.ops.operators import operator


@operator(
    "sampling_logprobs(Tensor logits, Tensor scale, Tensor min_p, Tensor top_k, Tensor top_p) -> Tensor",
    lambda logits, *_: torch.empty_like(logits, dtype=torch.float32),
    triton="sampling.sampling_logprobs",
)
def sampling_logprobs(logits: Tensor, scale: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """log softmax(scale * logits) [n, V] in fp32 after the filters of each row, renormalised; -inf for other tokens.

    scale, min_p and top_p fp32 [n], top_k int64 [n]; min_p 0, top_k V and top_p infinity filter nothing. min-p keeps
    tokens with at least min_p times the highest probability, top-k the k likeliest of them, top-p the smallest number
    of likeliest tokens that have the share p of the remaining mass. Of equally likely tokens, the lower id comes first.
    """
    logprobs = torch.log_softmax(logits.float() * scale.unsqueeze(1), -1)
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    probs, ranks = values.exp(), torch.arange(logits.shape[1], device=logits.device)
    first = ranks == 0  # is always kept: products may round to 0, and NaN fails every comparison
    keep = ((probs >= min_p.unsqueeze(1) * probs[:, :1]) & (ranks < top_k.unsqueeze(1))) | first
    mass = probs.where(keep, 0.0).cumsum(-1)
    keep = keep & ((mass - probs < top_p.unsqueeze(1) * mass[:, -1:]) | first)
    kept = torch.log_softmax(values.masked_fill(~keep, float("-inf")), dim=-1)
    return torch.empty_like(logprobs).scatter_(-1, ids, kept)


@operator(
    "draw_tokens(Tensor logprobs, Tensor uniforms, Tensor greedy) -> Tensor",
    lambda logprobs, *_: logprobs.new_empty(logprobs.shape[0], dtype=torch.long),
    triton="sampling.draw_tokens",
)
def draw_tokens(logprobs: Tensor, uniforms: Tensor, greedy: Tensor) -> Tensor:
    """One token per row of log-probabilities [n, V]: the first whose cumulative probability exceeds the row's number in
    `uniforms` (fp32 [n], from 0 to 1) times the whole; the likeliest where `greedy` (bool [n]), or where rounding would
    choose an impossible one. A row of NaN gets token 0."""
    cumulative = logprobs.exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniforms.unsqueeze(1) * cumulative[:, -1:], right=True)
    drawn = drawn.clamp_max_(logprobs.shape[1] - 1)
    instead = ~(logprobs.gather(-1, drawn).squeeze(1) > float("-inf")) | greedy
    return torch.where(instead, logprobs.argmax(-1), drawn.squeeze(1))
