"""Tensor parallelism for inference: every layer's heads, experts and MLP columns are divided over ranks.

Each rank computes a share of attention and of the feed-forward from the whole residual stream; one sum over the ranks
after each makes the stream whole again (see `SplitSums` for another way). Routers, indexers, norms, latent projections
and the embedding are the same on every rank, so every rank selects the same keys and the same experts. The output
matrix is whole on rank 0 and absent elsewhere: tokens are drawn from whole rows of logits, on rank 0 only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from glm5.config.layout_rules import refuse, tp_problems
from glm5.config.model import GLM5Config
from glm5.errors import ConfigError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.gqa import GQA
from glm5.model.mla import MLA
from glm5.model.moe import Experts, Shared, expert_products
from glm5.model.weight_source import RowPart, WeightSource, replace_tensors
from glm5.ops import ROW_TILE, round_up
from glm5.ops.cache_rows import pack_rows, unpack_rows
from glm5.ops.experts import combine, expert_layout, permute

SumOverRanks = Callable[[Tensor, bool], Tensor]
"""(share of this rank, exact) -> the sum of all ranks' shares. With `exact`, in rank order for every element."""

Dispatch = Callable[[Experts, Tensor, Tensor, Tensor, Shared], Tensor]
"""See `Experts.dispatch`."""

LEAST_TOKENS = 64
"""Tokens of a pass from which `SplitSums` divides them: fewer are a step of decoding, where each collective costs its
latency."""

READ_BYTES = 1 << 26
"""Most bytes of whole rows read at a time, of which a rank keeps some columns."""

_HEADS = re.compile(r"\.self_attn\.(q_b_proj|kv_b_proj|q_proj|k_proj|v_proj)\.(weight|bias)$")
_EXPERTS = re.compile(r"\.mlp\.experts\.\w+$")
_GATE_UP = re.compile(r"\.mlp\.(shared_experts\.)?gate_up_proj\.weight$")
_COLUMNS = re.compile(r"\.(self_attn\.o_proj|mlp\.(shared_experts\.)?down_proj)\.weight$")


@dataclass(frozen=True)
class Cut:
    """What one rank keeps of a tensor: (first, count) ranges of one dimension, one after the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """The kept part of a whole tensor."""
        if not self.ranges:
            return whole.narrow(self.dim, 0, 0)
        return torch.cat([whole.narrow(self.dim, first, count) for first, count in self.ranges], dim=self.dim)


def cut_of(name: str, shape: torch.Size, rank: int, world: int) -> Cut | None:
    """The part of a tensor, by its name in memory, that a rank keeps; None for all of it."""

    def share(total: int, start: int = 0) -> tuple[int, int]:
        return start + rank * (total // world), total // world

    if name == "lm_head.weight":
        return Cut(0, ()) if rank else None
    if _HEADS.search(name) or _EXPERTS.search(name):
        return Cut(0, (share(shape[0]),))
    if _GATE_UP.search(name):
        half = shape[0] // 2
        return Cut(0, (share(half), share(half, half)))
    return Cut(1, (share(shape[1]),)) if _COLUMNS.search(name) else None


@dataclass(frozen=True)
class Division:
    """How a model was divided: its undivided configuration and `state_dict` (on the meta device), and the ranks."""

    config: GLM5Config
    state: Mapping[str, Tensor]
    rank: int
    world: int
    rounds: bool = False  # whether ranks round what they send (see `SplitSums`)

    def cut(self, name: str, shape: torch.Size, rank: int) -> Cut | None:
        """The part of a tensor that `rank` keeps; None for all of it."""
        return cut_of(name, shape, rank, self.world)

    def part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """What `rank` keeps of a whole tensor."""
        cut = self.cut(name, whole.shape, rank)
        return whole if cut is None else cut.of(whole)


class ExpertDivision(Division):
    """Only the routed experts are divided."""

    def cut(self, name: str, shape: torch.Size, rank: int) -> Cut | None:
        return cut_of(name, shape, rank, self.world) if _EXPERTS.search(name) else None


def division_of(model: nn.Module) -> Division | None:
    """How `divide_model` divided a model; None if it is whole."""
    return getattr(model, "division", None)


def whole_state(model: nn.Module) -> Mapping[str, Tensor]:
    """The `state_dict` of the undivided model; of a divided one only shapes and types."""
    division = division_of(model)
    return model.state_dict() if division is None else division.state


def whole_config(model: GLM5ForCausalLM) -> GLM5Config:
    """The configuration of the undivided model."""
    division = division_of(model)
    return model.config if division is None else division.config


def check_divisible(config: GLM5Config, world: int) -> None:
    """Raise ConfigError for a model that cannot be divided over `world` ranks."""
    refuse(tp_problems(config, world))


class Ranks(Protocol):
    """What `SplitSums` needs of the ranks. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def sum(self, x: Tensor, exact: bool) -> Tensor:
        """See `SumOverRanks`."""
        ...

    def sum_parts(self, parts: Tensor) -> Tensor:
        """Reduce-scatter: of `parts` [world, R, D] of every rank this rank's [R, D], summed in rank order."""
        ...

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to gather x [R, W] of all ranks. Returns what waits for all of them, [world * R, W]."""
        ...


class SplitSums:
    """Sums over the ranks in two halves (FlashComm, §5), in passes of at least `LEAST_TOKENS` tokens: a reduce-scatter,
    and later a gather.

    Between the two a rank has only its part of the tokens. It adds them to the residual stream and norms them, which
    every rank would else do for all tokens. For attention with MLA it also multiplies them with the projections that
    are whole on every rank, and gathers these products, if they are narrower than the stream; the first one travels
    while the next ones are computed. With `rounds`, the rows that feed-forwards read travel in int8, with a scale each.

    Sums are in rank order, so elements have the bits of `Ranks.sum` with `exact`.
    """

    def __init__(self, ranks: Ranks, *, rounds: bool = False) -> None:
        self.ranks, self.rounds = ranks, rounds
        self._total = self._own = 0  # tokens of this pass and of a rank's part; 0 while they are not divided

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Make consecutive blocks compute so, whose shares are summed by `sum`. What enters the first block and leaves
        the last is whole."""
        blocks[0].register_forward_pre_hook(self._enter)
        blocks[-1].register_forward_hook(self._leave)
        for block in blocks:
            attention: Any = block.self_attn
            if isinstance(attention, MLA) and attention.products_width < attention.o_proj.weight.shape[0]:
                attention.gather = self._gather
            else:
                attention.register_forward_pre_hook(lambda module, args: (self._gather(args[0])(), *args[1:]))
            feed_forward: Any = block.mlp
            feed_forward.register_forward_pre_hook(lambda module, args: (self._whole(args[0]), *args[1:]))

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, ctx, *rest = args
        self._total = x.shape[0] if x.shape[0] >= LEAST_TOKENS else 0
        if not self._total:
            return args
        self._own = round_up(-(-self._total // self.ranks.world), ROW_TILE if ctx.exact else 1)
        return self._parts(x)[self.ranks.rank], ctx, *rest

    def _leave(self, module: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        whole = self._gather(out[0])()
        self._total = 0
        return whole, out[1]

    def _parts(self, x: Tensor) -> Tensor:
        """[M, D] -> [world, R, D], the last rows zeros."""
        missing = self.ranks.world * self._own - x.shape[0]
        whole = torch.cat((x, x.new_zeros(missing, x.shape[1]))) if missing else x
        return whole.view(self.ranks.world, self._own, x.shape[1])

    def sum(self, x: Tensor, exact: bool) -> Tensor:
        """Of the ranks' shares x [M, D] the sum: this rank's part of its rows, or all if they are not divided."""
        return self.ranks.sum_parts(self._parts(x)) if self._total else self.ranks.sum(x, exact)

    def _gather(self, x: Tensor) -> Callable[[], Tensor]:
        if not self._total:
            return lambda: x
        wait, total = self.ranks.gather(x), self._total
        return lambda: wait()[:total]

    def _whole(self, x: Tensor) -> Tensor:
        if not (self._total and self.rounds):
            return self._gather(x)()
        return unpack_rows(self._gather(pack_rows(x, x.shape[1]))(), x.shape[1], x.dtype)


def divide_model(
    model: GLM5ForCausalLM, rank: int, world: int, reduce: SumOverRanks, split: SplitSums | None = None
) -> None:
    """Narrow a deferred model to this rank's part, in place; `fill_divided` gives it its weights. Call it under
    `torch.no_grad` only. `model.config` then counts this rank's heads, as the cache needs it. With `split`, its `sum`
    takes the place of `reduce`."""
    config = model.config
    check_divisible(config, world)
    _narrow(model, Division(config, dict(model.state_dict()), rank, world, split is not None and split.rounds))
    heads = {"num_attention_heads": config.num_attention_heads // world}
    if config.attention_type == "gqa":
        heads["num_key_value_heads"] = config.num_key_value_heads // world
    model.config = config.replace(**heads)
    for module in model.modules():
        if isinstance(module, MLA | GQA):
            module.heads = config.num_attention_heads // world
        if isinstance(module, GQA):
            module.groups = config.num_key_value_heads // world
        if isinstance(module, Experts):
            module.dispatch = OwnExperts(rank * (config.n_routed_experts // world))
    parts: list[list[Any]] = [[*model.model.layers], *([] if model.mtp is None else [[model.mtp.block]])]
    if split is not None:
        reduce = split.sum
        for blocks in parts:
            split.attach(blocks)
    for block in chain.from_iterable(parts):
        block.self_attn.register_forward_hook(lambda module, args, out: (reduce(out[0], args[1].exact), out[1]))
        block.mlp.register_forward_hook(lambda module, args, out: reduce(out, getattr(args[1], "exact", args[1])))
    _without_fused_decode(model)


def divide_experts_of(model: GLM5ForCausalLM, rank: int, world: int, dispatch: Dispatch) -> None:
    """Narrow the routed experts of a deferred model to this rank's, in place; `fill_divided` gives it its weights.
    `dispatch` takes tokens to the ranks of their experts and back. Raises ConfigError if `world` does not divide them.
    """
    config = model.config
    if config.n_routed_experts % world:
        raise ConfigError(
            f"--expert-parallel over {world} engines does not divide this model: its n_routed_experts is "
            f"{config.n_routed_experts}; choose a divisor of it for --dp."
        )
    _narrow(model, ExpertDivision(config, dict(model.state_dict()), rank, world))
    for module in model.modules():
        if isinstance(module, Experts):
            module.dispatch = dispatch
    _without_fused_decode(model)


def _narrow(model: GLM5ForCausalLM, division: Division) -> None:
    cuts = {id(tensor): division.cut(name, tensor.shape, division.rank) for name, tensor in _tensors(model)}

    def narrowed(tensor: Tensor) -> Tensor:
        cut = cuts[id(tensor)]
        if cut is None:
            return tensor
        shape = list(tensor.shape)
        shape[cut.dim] = sum(count for _, count in cut.ranges)
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    replace_tensors(model, narrowed)
    model.division = division  # type: ignore[assignment]


def _without_fused_decode(model: GLM5ForCausalLM) -> None:
    """It would run whole blocks, without the other ranks."""
    parts: list[Any] = [model.model, *([] if model.mtp is None else [model.mtp])]
    for part in parts:
        part.fused_decode.off = True


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@dataclass(frozen=True)
class OwnExperts:
    """The `dispatch` of a layer whose stacks hold the experts from number `first` on: the weighted sum over those of a
    token's experts that are here. Every rank has every token, so none is sent."""

    first: int

    def __call__(self, module: Experts, x: Tensor, weights: Tensor, experts: Tensor, shared: Shared) -> Tensor:
        """x [M, D], weights and experts [M, K] (global expert ids) -> [M, D]."""
        own = module.gate_up_proj.shape[0]
        local = experts - self.first
        # Choices of other ranks form a last group, which is not multiplied.
        local = torch.where((local >= 0) & (local < own), local, own)
        slot_of, source, bounds, _ = expert_layout(local, own + 1)
        bounds = bounds[: own + 1]
        if x.is_cpu:
            # The first row of the last group stands for all of them: the products leave zeros there.
            end = int(bounds[-1])
            source, slot_of = source[: end + 1], slot_of.clamp_max(end)
        grouped = permute(x, slot_of, source, experts.shape[1])
        grouped = expert_products(module, grouped, bounds)
        if not x.is_cpu:  # the number of rows stays on the device, and so do those without a product, uninitialised
            rows = torch.arange(grouped.shape[0], device=x.device)
            grouped = grouped.masked_fill((rows >= bounds[-1]).unsqueeze(1), 0)
        return combine(grouped, slot_of, weights) + shared()


@torch.no_grad()
def fill_divided(model: GLM5ForCausalLM, device: torch.device) -> None:
    """Give a divided, deferred model its memory on `device`, and read its part of the weights from its source.

    Rows are read without the rest of a tensor. Of matrices divided by columns, blocks of whole rows are read.
    """
    source, division = model.weight_source, division_of(model)
    if source is None or division is None:
        raise ValueError("fill_divided takes a deferred model that divide_model has divided")
    replace_tensors(model, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device) if t.is_meta else t)
    passes: list[dict[str, RowPart]] = [{}, {}]
    columns: dict[str, Cut] = {}
    own = model.state_dict()
    for name, tensor in own.items():
        total = division.state[name].shape
        cut = division.cut(name, total, division.rank)
        if cut is None:
            passes[0][name] = RowPart(tensor, 0, total[0])
        elif cut.dim:
            columns[name] = cut
        else:
            at = 0
            for number, (first, count) in enumerate(cut.ranges):
                passes[number][name] = RowPart(tensor[at : at + count], first, total[0])
                at += count
    for parts in passes:
        source.fill(parts)
    for name, cut in columns.items():
        _fill_columns(source, name, own[name], cut, division.state[name].shape)
    model.weight_source = None


def _fill_columns(source: WeightSource, name: str, target: Tensor, cut: Cut, shape: torch.Size) -> None:
    each = max(1, READ_BYTES // max(1, shape[1] * target.element_size()))
    for first in range(0, shape[0], each):
        count = min(each, shape[0] - first)
        rows = torch.empty(count, shape[1], dtype=target.dtype)
        source.fill({name: RowPart(rows, first, shape[0])})
        target[first : first + count].copy_(cut.of(rows))
