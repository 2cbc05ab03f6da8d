"""The gated delta rule of linear attention (§2.1.2), in parallel chunks and token by token, and its short convolution.

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t

The memory S [Dk, Dv] maps keys to values. Decay a_t in (0, 1] lets it fade. Strength b_t is how much of the old value
of k_t is replaced by v_t. Let u_t be the correction that token t writes: S_t is a decayed sum of k_j u_j^T. The
corrections in a chunk solve a unit lower triangular system, so only the chunks are sequential.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch
from torch import Tensor
from torch.nn.functional import pad

from glm5.ops.wide import wide

CHUNK = 64
"""Tokens per chunk: a larger chunk means quadratically more work inside it and fewer sequential steps."""

FORGET = -30.0
"""A log-decay that leaves 1e-13 of the memory, below the rounding of fp32."""

STEPWISE = 8
"""Without gradients, rows of at most this many tokens run token by token: a chunk would be mostly padding."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and final memory, by the form that suits the length.

    q and k [B, T, H, Dk] (b_t has its meaning only if they have length 1), v [B, T, H, Dv], log_decay = log a and beta
    [B, T, H]. The memory starts from zero at each change of `segments` [B, T] along a row; `state` [B, H, Dk, Dv] is
    the initial memory of the first segment. A token with log_decay = beta = 0 does not change the memory. Returns
    [B, T, H, Dv] in the dtype of v, and the memory after the last token in fp32 (fp64 for fp64 inputs).
    """
    if q.shape[1] <= STEPWISE and not torch.is_grad_enabled():
        return delta_rule_stepwise(q, k, v, log_decay, beta, segments, state)
    if v.is_cuda and v.dtype.itemsize == 2 and k.shape[3] <= 256 and _fla_is_installed():  # all that it takes
        return _by_fla(q, k, v, log_decay, beta, segments, state)
    return delta_rule_chunked(q, k, v, log_decay, beta, segments, state)


@functools.cache
def _fla_is_installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def _by_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segments: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`delta_rule` by the package flash-linear-attention. Its own boundaries of sequences would have to be read back
    from the device, so the memory of the segment before fades to nothing instead."""
    if segments is not None:
        runs = _runs(segments)
        starts = pad(runs[:, 1:] != runs[:, :-1], (1, 0)).unsqueeze(-1)
        log_decay = torch.where(starts, FORGET, log_decay)
    fla = importlib.import_module("fla.ops.gated_delta_rule")
    q, k, beta = (x.to(v.dtype) for x in (q, k, beta))
    out, memory = fla.chunk_gated_delta_rule(
        q, k, v, log_decay.float(), beta, scale=1.0, output_final_state=True,
        initial_state=None if state is None else state.float(),
    )  # fmt: skip
    return out, memory


def delta_rule_stepwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`delta_rule` by its definition, token by token."""
    kind = v.dtype
    q, k, v, log_decay, beta, memory = _prepare(q, k, v, log_decay, beta, state)
    decay = log_decay.exp()
    if segments is not None:
        runs = _runs(segments)
        decay = decay * pad(runs[:, 1:] == runs[:, :-1], (1, 0), value=True).unsqueeze(-1)
    out = []
    for t in range(q.shape[1]):
        memory = memory * decay[:, t, :, None, None]
        recalled = torch.einsum("bhd,bhde->bhe", k[:, t], memory)
        written = beta[:, t].unsqueeze(-1) * (v[:, t] - recalled)
        memory = memory + k[:, t].unsqueeze(-1) * written.unsqueeze(-2)
        out.append(torch.einsum("bhd,bhde->bhe", q[:, t], memory))
    return torch.stack(out, dim=1).to(kind), memory


def delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """`delta_rule` as matrix products over chunks, for training and prefill; differentiable."""
    kind, length = v.dtype, q.shape[1]
    q, k, v, log_decay, beta, memory = _prepare(q, k, v, log_decay, beta, state)
    runs = torch.zeros_like(q[..., 0, 0], dtype=torch.long) if segments is None else _runs(segments)
    q, k, v, log_decay, beta = (_chunks(x, chunk) for x in (q, k, v, log_decay, beta))
    runs = _chunks(runs.unsqueeze(-1), chunk, repeat_last=True)  # [n, B, 1, C]; the others are [n, B, H, C, …]

    # Decay of token j's correction at token i: the decays of j + 1 … i are summed directly. The difference of two
    # running totals would lose digits if a strong decay comes before both.
    since = log_decay.unsqueeze(-1).expand(*log_decay.shape, chunk).tril(-1).cumsum(-2)
    together = (runs.unsqueeze(-1) == runs.unsqueeze(-2)).tril()
    pair = since.exp() * together
    before = torch.cat((runs[:1, ..., :1], runs[:-1, ..., -1:]))
    # The same for the memory at the start of the chunk.
    carried = log_decay.cumsum(-1).exp() * (runs == before)
    strength = beta.unsqueeze(-1)
    system = (strength * k) @ k.transpose(-1, -2) * pair
    right = torch.cat((strength * v, strength * carried.unsqueeze(-1) * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_values, from_memory = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    seen = q @ k.transpose(-1, -2) * pair
    reading, leaving = q * carried.unsqueeze(-1), k * pair[..., -1, :].unsqueeze(-1)

    out = []
    for i in range(q.shape[0]):
        written = from_values[i] - from_memory[i] @ memory
        out.append(reading[i] @ memory + seen[i] @ written)
        memory = carried[i, ..., -1, None, None] * memory + leaving[i].transpose(-1, -2) @ written
    return torch.cat(out, dim=2).transpose(1, 2)[:, :length].to(kind), memory


def short_convolution(
    x: Tensor, weight: Tensor, segments: Tensor | None = None, history: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal convolution per channel: y_t = sum_j weight[:, K - 1 - j] * x_{t - j}.

    x [B, T, C], weight [C, K]; `history` [B, K - 1, C] contains the inputs before the row (None: zeros) and belongs to
    its first segment. Taps do not cross a change of `segments` [B, T]. Returns [B, T, C], and history and x
    concatenated [B, K - 1 + T, C]; the last real entries of that are the next history.
    """
    taps, length = weight.shape[1], x.shape[1]
    earlier = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if history is None else history.to(x.dtype)
    whole = torch.cat((earlier, x), dim=1)
    runs = None if segments is None else _runs(segments)
    out = torch.zeros_like(x, dtype=wide(x.dtype))
    for back in range(taps):
        shifted = whole[:, taps - 1 - back : taps - 1 - back + length]
        if runs is not None:
            shifted = shifted * (pad(runs, (back, 0))[:, :length] == runs).unsqueeze(-1)
        out = out + shifted.to(out.dtype) * weight[:, taps - 1 - back]
    return out.to(x.dtype), whole


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All inputs in fp32 or wider, and the initial memory."""
    kind = wide(v.dtype)
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    return q.to(kind), k.to(kind), v.to(kind), log_decay.to(kind), beta.to(kind), state.to(kind)


def _runs(segments: Tensor) -> Tensor:
    """[B, T] -> 0, 1, … in order of appearance; a number that occurs again later counts as new."""
    return pad((segments[:, 1:] != segments[:, :-1]).long().cumsum(1), (1, 0))


def _chunks(x: Tensor, size: int, repeat_last: bool = False) -> Tensor:
    """[B, T, H, …] -> [n, B, H, size, …]; the last chunk is padded with zeros or with the last token."""
    missing = -x.shape[1] % size
    if missing:
        last = x[:, -1:].expand(-1, missing, *x.shape[2:])
        x = torch.cat((x, last if repeat_last else torch.zeros_like(last)), dim=1)
    return x.unflatten(1, (-1, size)).transpose(0, 1).transpose(2, 3)
