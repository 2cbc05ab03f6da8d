"""Muon with Muon Split: momentum, orthogonalised per row block; each head then updates at its own scale (§2.1)."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from glm5.optim.blocks import Shape, block_views
from glm5.optim.distributed import CutBlock, Exchange, ShardPlan, local, shard_plan, sum_over_ranks
from glm5.optim.newton_schulz import chunk_length, chunks, iterate, newton_schulz
from glm5.optim.table import GroupRow, block_shapes, describe

__all__ = ["Muon", "newton_schulz"]

FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
Tensors = tuple[Tensor, ...] | list[Tensor]


class Piece(NamedTuple):
    """Equal blocks [n, r, c] of one parameter on this rank: views of its momentum, gradient and weight."""

    parameter: Tensor
    momentum: Tensor
    gradient: Tensor
    weight: Tensor


class Muon(torch.optim.Optimizer):
    """Muon for groups of kind "muon", AdamW for groups of kind "adamw" (see `muon_groups`); one learning rate for both.

    buf = momentum * buf + g; u = g + momentum * buf; W <- W (1 - lr wd) - lr * 0.2 * sqrt(max(r, c)) * NS(u) per row
    block of r x c, which matches AdamW's update RMS of about 0.2. Norms and biases are not decayed.

    Parameters may be DTensors (rows or whole experts sharded, see `glm5.optim.distributed`); their state is sharded the
    same way, and all ranks must have gradients for the same parameters. `ns_dtype` is the dtype of Newton-Schulz and of
    transfers between ranks.

    `bytes_communicated`: bytes that this rank sent in the last step. To measure the updates of a step, set
    `watch_updates` before it; the step resets it, and `update_table()` returns the result.
    """

    # torch hides these from its compiler, and loads the compiler to do so: two seconds in every process that trains.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

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
        self.bytes_communicated = 0
        self.watch_updates = False
        self.group: Any = None  # the ranks that have the same parameters; None: all
        # Sum of squares of the last watched step's update over lr, per parameter and block shape.
        self.update_squares: dict[tuple[int, Shape], Tensor] = {}
        self._plans: dict[tuple[int, ...], tuple[ShardPlan, list[Exchange]]] = {}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure.")
        self.bytes_communicated = 0
        if self.watch_updates:
            self.update_squares = {}
        for group in self.param_groups:
            live = [p for p in group["params"] if p.grad is not None]
            if group.get("kind", "adamw") == "muon":
                self._muon(live, group)
            else:
                self._adamw(live, group)
        if self.watch_updates:
            self._gather_squares()
            self.watch_updates = False

    def update_table(self) -> list[GroupRow]:
        """The optimizer of every kind of parameter, with the effective update RMS of the last watched step."""
        return describe(self)

    def _muon(self, params: list[Tensor], group: dict[str, Any]) -> None:
        plan, exchanges = self._plan(params, group)
        by_shape: dict[tuple[int, int, torch.device], list[Piece]] = defaultdict(list)
        shards: list[Piece] = []
        for p, whole in zip(params, plan.whole):
            assert p.grad is not None
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            shards.append(Piece(p, local(state["momentum"]), local(p.grad).contiguous(), local(p)))
            if whole.heights:
                views = (block_views(t[..., whole.rows, :], whole.heights) for t in shards[-1][1:])
                for piece in zip(*views, strict=True):
                    rows, columns = piece[0].shape[1:]
                    by_shape[(rows, columns, piece[0].device)].append(Piece(p, *piece))

        def fill(cut: CutBlock, first: int, last: int, out: Tensor) -> None:
            rows = plan.local_rows(cut, first, last)
            accumulate([shards[cut.parameter].momentum[rows]], [shards[cut.parameter].gradient[rows]], momentum, [out])

        def apply(cut: CutBlock, first: int, last: int, update: Tensor) -> None:
            shard = shards[cut.parameter]
            weight = shard.weight[plan.local_rows(cut, first, last)]
            self._apply([shard.parameter], [weight], [update], cut.shape, group)

        momentum = group["momentum"]
        for exchange in exchanges:
            exchange.send(fill, shards[0].weight.device)
        for (rows, columns, device), pieces in by_shape.items():  # during the transfer of the split blocks
            self._local((rows, columns), device, pieces, group)
        for exchange in exchanges:
            exchange.finish(apply)
            self.bytes_communicated += exchange.bytes_sent

    def _plan(self, params: list[Tensor], group: dict[str, Any]) -> tuple[ShardPlan, list[Exchange]]:
        """Assignment of these parameters' blocks; computed once, because shapes and shards do not change."""
        key = (int(group.get("split", True)), *map(id, params))
        if key not in self._plans:
            names = {id(p): name for p, name in zip(group["params"], group.get("names", ()))}
            named = [(names.get(id(p), f"matrix {i} of the group"), p) for i, p in enumerate(params)]
            plan = shard_plan(named, group.get("split", True))
            self._plans[key] = plan, [Exchange(cuts, ranks, self.ns_dtype) for ranks, cuts in plan.cuts.items()]
        return self._plans[key]

    def _local(self, shape: Shape, device: torch.device, pieces: list[Piece], group: dict[str, Any]) -> None:
        """Update all blocks of one shape on this rank, batch by batch to bound memory."""
        limit = chunk_length(*shape, device)
        work = torch.empty(min(limit, sum(len(p.weight) for p in pieces)), *shape, dtype=self.ns_dtype, device=device)
        for batch in chunks(((len(piece.weight), piece) for piece in pieces), limit):
            counts = [stop - start for _, start, stop in batch]
            parts = work[: sum(counts)].split(counts)
            momenta, gradients = ([p[i][a:b] for p, a, b in batch] for i in (1, 2))
            accumulate(momenta, gradients, group["momentum"], parts)
            updates = iterate(work[: sum(counts)]).split(counts)
            self._apply([p.parameter for p, _, _ in batch], [p.weight[a:b] for p, a, b in batch], updates, shape, group)

    def _apply(
        self, parameters: Tensors, weights: Tensors, updates: Tensors, shape: Shape, group: dict[str, Any]
    ) -> None:
        """Decay the weights and apply orthogonalised updates of the same shapes, parts of blocks of `shape`."""
        scale = 0.2 * max(shape) ** 0.5
        torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-group["lr"] * scale)
        if self.watch_updates:
            for parameter, update in zip(parameters, updates, strict=True):
                self._watch(parameter, shape, update.float().mul(scale))

    def _watch(self, parameter: Tensor, shape: Shape, update: Tensor) -> None:
        square = update.square().sum().float()
        key = (id(parameter), shape)
        self.update_squares[key] = self.update_squares[key] + square if key in self.update_squares else square

    def _gather_squares(self) -> None:
        """Sum the watched squares over ranks, in an order that is the same on every rank."""
        keys = [
            ((id(p), shape), p)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
            for shape in block_shapes(p, "a matrix", group)
        ]
        if keys:
            empty = torch.zeros((), device=keys[0][1].device)
            sums = sum_over_ranks([(p, self.update_squares.get(key, empty)) for key, p in keys], self.group)
            self.update_squares = {key: value for (key, _), value in zip(keys, sums)}

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        for decayed in (True, False):
            chosen = [p for p in params if (p.ndim >= 2) == decayed]
            held = [p for p in chosen if local(p).numel()]
            for p in chosen:
                if local(p).numel() == 0:  # a rank without rows of p still counts the step
                    self.state[p]["step"] += 1
            if held:
                fused = all(p.device.type in FUSED_DEVICES for p in held)
                adamw(
                    [local(p) for p in held],
                    [local(p.grad).contiguous() for p in held if p.grad is not None],
                    [local(self.state[p]["m"]) for p in held],
                    [local(self.state[p]["v"]) for p in held],
                    [],
                    [self.state[p]["step"] for p in held],
                    fused=fused,
                    # Otherwise torch would read the step back from the device.
                    capturable=not fused and all(not p.is_cpu for p in held),
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"] if decayed else 0.0,
                    eps=group["eps"],
                    maximize=False,
                )
                if fused:  # torch does not count what it writes, and copies of weights go by the count
                    torch.autograd.graph.increment_version([local(p) for p in held])
        if self.watch_updates:
            for p in params:
                self._watch(p, (0, 0), self._adamw_update(p, group))

    def _adamw_update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The last AdamW update of this rank's part of p, divided by lr, from the optimizer state."""
        state, (beta1, beta2) = self.state[p], group["betas"]
        count = float(state["step"])
        scale = (local(state["v"]) / (1 - beta2**count)).sqrt_().add_(group["eps"])
        return local(state["m"]) / (1 - beta1**count) / scale


def accumulate(buffers: Tensors, gradients: Tensors, momentum: float, out: Tensors) -> None:
    """buffer <- momentum * buffer + gradient; out <- gradient + momentum * buffer, cast to the dtype of `out`."""
    if buffers[0].is_cpu:
        for buffer, gradient, part in zip(buffers, gradients, out, strict=True):
            torch.add(gradient, buffer, alpha=momentum, out=buffer)
            torch.add(gradient, buffer, alpha=momentum, out=part)
        return
    # One kernel for all parts, where the memory for it is no cost: on a GPU a launch takes longer than a small part.
    torch._foreach_copy_(buffers, torch._foreach_add(gradients, buffers, alpha=momentum))
    torch._foreach_copy_(out, torch._foreach_add(gradients, buffers, alpha=momentum))
