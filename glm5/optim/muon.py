"""Muon with Muon Split: momentum, orthogonalised per declared row block, so heads move at their own scale (§2.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


def newton_schulz(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix of each [r, c] in a stack [n, r, c] (singular values ~0.7..1.2).

    Five quintic iterations on the Frobenius-normalised matrix; wide orientation first, because it is cheaper.
    """
    a, b, c = NS_COEFFICIENTS
    x = blocks.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        gram = torch.bmm(x, x.transpose(-1, -2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(-1, -2) if tall else x).to(blocks.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for groups of kind "muon", AdamW for groups of kind "adamw" (see `muon_groups`); one learning rate for both.

    buf = momentum * buf + g; u = g + momentum * buf; W <- W (1 - lr wd) - lr * 0.2 * sqrt(max(r, c)) * NS(u) per row
    block of r x c, which matches AdamW's update RMS of about 0.2. Norms and biases are not decayed.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        ns_dtype: torch.dtype = torch.float32,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        self.ns_dtype = ns_dtype
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure.")
        for group in self.param_groups:
            live = [p for p in group["params"] if p.grad is not None]
            if group.get("kind", "adamw") == "muon":
                self._muon(live, group)
            else:
                self._adamw(live, group)

    def _muon(self, params: list[Tensor], group: dict[str, Any]) -> None:
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for p in params:
            assert p.grad is not None
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            buffer = state["momentum"].mul_(group["momentum"]).add_(p.grad)
            update = p.grad.add(buffer, alpha=group["momentum"])
            p.mul_(1.0 - group["lr"] * group["weight_decay"])
            for block, target in row_blocks(update, p, group.get("split", True)):
                by_shape[(block.shape[-2], block.shape[-1])].append((block, target))
        for (rows, columns), pairs in by_shape.items():
            scale = group["lr"] * 0.2 * max(rows, columns) ** 0.5
            orthogonal = newton_schulz(torch.cat([block for block, _ in pairs]), self.ns_dtype)
            for (_, target), part in zip(pairs, orthogonal.split([len(b) for b, _ in pairs]), strict=True):
                target.sub_(part.view(target.shape), alpha=scale)

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        for p in params:
            assert p.grad is not None
            state = self.state[p]
            if not state:
                state["step"], state["m"], state["v"] = torch.zeros(()), torch.zeros_like(p), torch.zeros_like(p)
            state["step"] += 1
            count = float(state["step"])
            m = state["m"].lerp_(p.grad, 1 - beta1)
            v = state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            if p.ndim >= 2:
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
            denominator = (v / (1 - beta2**count)).sqrt_().add_(group["eps"])
            p.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**count))


def row_blocks(update: Tensor, parameter: Tensor, split: bool) -> list[tuple[Tensor, Tensor]]:
    """Pairs (blocks of the update [n, r, c], view of the parameter that they change), one per block height in a period.

    Heights repeat (per-head K and V rows of kv_b_proj alternate), so each kind of block is one strided stack; the
    parameter's side stays a [stack, repeats, r, c] view, because writing to a copy would change nothing.
    """
    heights = parameter.muon_split if split else (parameter.shape[-2],)  # type: ignore[attr-defined]
    period = _period(heights)
    shape = (len(heights) // period, sum(heights[:period]))
    update4, target4 = (t.view(-1, *t.shape[-2:]).unflatten(1, shape) for t in (update, parameter.data))
    pairs, start = [], 0
    for height in heights[:period]:
        rows = slice(start, start + height)
        pairs.append((update4[:, :, rows].flatten(0, 1), target4[:, :, rows]))
        start += height
    return pairs


def _period(heights: tuple[int, ...]) -> int:
    """Length of the shortest repeating pattern of block heights."""
    for period in range(1, len(heights) + 1):
        if len(heights) % period == 0 and heights == heights[:period] * (len(heights) // period):
            return period
    return len(heights)
