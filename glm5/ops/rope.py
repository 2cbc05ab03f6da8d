"""Rotary position embedding on interleaved pairs (x0, x1), (x2, x3), …, as GLM-5 uses it for attention and indexer."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each [*positions.shape, dim / 2] in fp32; angle = position * theta^(-2 i / dim)."""
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angle = positions.to(torch.float32).unsqueeze(-1) * frequency.to(torch.float32)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs of the last axis, order kept. x is [..., dim], cos and sin broadcast to [..., dim / 2]."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
