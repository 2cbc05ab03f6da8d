"""Bytes of device memory that a training step needs on one process, tensor by tensor, from a configuration alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from glm5.config.activations import (
    WIDE,
    Forward,
    again_bytes,
    divergence_bytes,
    exchanged_bytes,
    gradient_bytes,
    kept_by_heads,
    kept_by_layers,
    logits_bytes,
)
from glm5.config.model import GLM5Config
from glm5.config.parameters import ENDS, Sizes, layer_sizes, parameters, sizes_of
from glm5.config.pipeline import Span, divide
from glm5.config.pipeline_memory import pipeline_moments

ORTHOGONALISED, ORTHOGONALISED_ON_CPU = 1 << 26, 1 << 19
"""Elements that Newton-Schulz takes at a time (`chunk_length` of `glm5/optim/newton_schulz.py`)."""


@dataclass(frozen=True)
class Setting:
    """How a step runs: its forward pass on this process, `parts` (micro-batches), `world` processes of which `ep`
    divide the experts and `pp` groups have different stages of the model, `stages_per_rank` each; the optimizer, and
    what is trained. Processes that divide rows (`Forward.cp`) count in `world`."""

    forward: Forward
    parts: int = 1
    world: int = 1
    ep: int = 1
    pp: int = 1
    stages_per_rank: int = 1
    pp_layers: tuple[int, ...] = ()
    deferred: int = 0
    """Micro-batches whose weight gradients may wait (`Layout.pp_deferred`)."""
    optimizer: str = "muon"
    ns_item: int = 4
    reduce_once: bool = True
    offload: bool | tuple[bool, ...] = False
    """Of all layers, or of each layer of the trunk and of the MTP layer."""
    trains: str = "all"
    """"all", "backbone" (without the indexers) or "indexers"."""
    low_precision_copy: bool = True
    """Whether the compute dtype has a copy of the weights beside the fp32 ones; with several processes it never has."""

    @property
    def ranks(self) -> int:
        """Processes of a pipeline stage."""
        return self.world // self.pp

    def offloads(self, layer: int) -> bool:
        return self.offload if isinstance(self.offload, bool) else self.offload[layer]


@dataclass(frozen=True)
class Moment:
    """Tensors alive at one time of a step, as groups: bytes by name. `phase`: "loss", "backward" or "optimizer"."""

    phase: str
    where: str
    held: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.held.values())


@lru_cache(maxsize=512)
def _ends(config: GLM5Config, parts: tuple[bool, bool, bool], ranks: int, trains: str) -> Sizes:
    """Of embedding, final norm and output head, those that are there."""
    found = [p for p in parameters(config) if p.layer == ENDS]
    return sizes_of([p for p, there in zip(found, parts) if there], ranks, 1, trains)


_kept = lru_cache(maxsize=512)(kept_by_layers)


@lru_cache(maxsize=256)
def spans_of(config: GLM5Config, stages: int, layers: tuple[int, ...] = ()) -> list[Span]:
    """`divide`, computed once."""
    return divide(config, stages, layers)


@dataclass
class RankStep:
    """One process's step. `rank` is its place among the `pp` groups."""

    config: GLM5Config
    setting: Setting
    rank: int = 0
    spans: Sequence[Span] = field(init=False)
    forward: Forward = field(init=False)

    def __post_init__(self) -> None:
        s = self.setting
        self.forward = replace(s.forward, ep=s.ep)
        self.spans = self.all_spans[self.rank :: s.pp]

    @property
    def all_spans(self) -> list[Span]:
        """The stages of all processes."""
        s = self.setting
        return spans_of(self.config, s.pp * s.stages_per_rank, s.pp_layers)

    @cached_property
    def layers(self) -> list[int]:
        """Layers of this process; the MTP layer is the last number."""
        found = [layer for span in self.spans for layer in span.layers]
        return found + [self.config.num_hidden_layers] * any(span.mtp for span in self.spans)

    def stage_sizes(self, spans: Sequence[Span]) -> list[Sizes]:
        """Of every layer that these stages use, and of their part of the ends."""
        s, last = self.setting, self.config.num_hidden_layers
        found = [self.sizes[layer] for span in spans for layer in span.layers]
        found += [self.sizes[last] for span in spans if span.mtp]
        parts = any(x.embeds or x.mtp for x in spans), any(x.norm for x in spans), any(x.head for x in spans)
        return [*found, _ends(self.config, parts, s.ranks, s.trains)]

    @cached_property
    def sizes(self) -> dict[int, Sizes]:
        """Of every layer; of ENDS, what this process has."""
        s = self.setting
        found = layer_sizes(self.config, s.ranks, s.ep, s.trains, s.optimizer)
        return {**found, ENDS: Sizes()}

    @cached_property
    def ends(self) -> Sizes:
        return self.stage_sizes(self.spans)[-1]

    @property
    def embedding(self) -> Sizes:
        return _ends(self.config, (True, False, False), self.setting.ranks, self.setting.trains)

    @cached_property
    def total(self) -> Sizes:
        """Of this process."""
        parts = [vars(part) for part in self.stage_sizes(self.spans)]
        return Sizes(**{name: sum(part[name] for part in parts) for name in parts[0]})

    @property
    def weights(self) -> int:
        return WIDE * self.total.held

    @property
    def optimizer(self) -> int:
        return WIDE * self.total.states

    @property
    def gradient(self) -> int:
        """Bytes of the gradients that the optimizer gets."""
        return WIDE * self.total.learned_held

    @cached_property
    def kept(self) -> list[tuple[str, int, int]]:
        """(name, layer, bytes) of what a micro-batch keeps on this process, in the order of the forward pass."""
        c, forward = self.config, self.forward
        if isinstance(forward.recompute, tuple):
            by_mode = {mode: _kept(c, replace(forward, recompute=mode)) for mode in set(forward.recompute)}
            modes = [*forward.recompute, *[forward.recompute[-1]] * forward.depths]
            whole = [by_mode[mode][i] for i, mode in enumerate(modes[: len(by_mode[modes[0]])])]
        else:
            whole = _kept(c, forward)
        found = [(f"layer {n}", n, whole[n]) for n in self.layers if n < c.num_hidden_layers]
        if c.num_hidden_layers in self.layers:
            depths = enumerate(whole[c.num_hidden_layers :], start=1)
            found += [(f"MTP depth {k}", c.num_hidden_layers, size) for k, size in depths]
        return found

    @cached_property
    def on_device(self) -> list[int]:
        """`kept` without what is in host memory; of offloaded layers, two are on the device at a time."""
        away = [i for i, (_, layer, _) in enumerate(self.kept) if self.setting.offloads(layer)]
        staying = sorted(away, key=lambda i: self.kept[i][2])[-2:]
        return [0 if i in away and i not in staying else size for i, (_, _, size) in enumerate(self.kept)]

    @property
    def copied(self) -> bool:
        s = self.setting
        return s.low_precision_copy and s.world == 1 and s.forward.item < WIDE

    def peak(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments(), key=lambda moment: moment.bytes)

    def moments(self) -> Iterator[Moment]:
        """The moments of a step at which the most bytes may be alive."""
        fixed = {"weights": self.weights, "optimizer": self.optimizer}
        if self.copied:
            fixed["low_precision_copy"] = self.forward.item * self.total.whole
        if self.setting.pp > 1:
            yield from (Moment(*moment) for moment in pipeline_moments(self, fixed))
        else:
            yield from self._backward(fixed)
        work = optimizer_work(self)
        if self.setting.world == 1:  # embedding and head, handed over
            work = max(work, self.ends.learned_whole * (WIDE + self.setting.forward.item))
        yield Moment("optimizer", "update", {**fixed, "gradients": self.gradient, "working": work})

    def _before(self) -> int:
        """Gradients of earlier micro-batches; whole ones if processes sum them once per step."""
        s = self.setting
        if s.parts == 1:
            return 0
        if s.world == 1 or not s.reduce_once or s.trains == "indexers":
            return self.gradient
        return WIDE * self.total.learned_local

    def _backward(self, fixed: dict[str, int]) -> Iterator[Moment]:
        """Loss and backward as FSDP runs them. Layers are walked backward: gradients grow while what the forward pass
        kept is freed. The losses of MTP and its layer come before the trunk's loss."""
        c, s, forward = self.config, self.setting, self.forward
        item, sharded, frozen, before = forward.item, s.world > 1, s.trains == "indexers", self._before()
        ends = 0 if frozen else self.ends.learned_whole * item  # their gradients, in the compute dtype
        head = ends // 2
        kept, heads = self.on_device, kept_by_heads(c, forward)
        at_once = sharded and not frozen and s.parts > 1 and s.reduce_once  # sums after the last micro-batch
        fixed = dict(fixed)
        if sharded:
            fixed["gathered: embedding and head"] = self.ends.whole * item
            if frozen:  # no gradient tells FSDP when to gather a block again
                fixed["gathered: blocks"] = sum(self.sizes[n].whole for n in self.layers) * item
        summed, shared, grown = 0, 0, 0  # gradients: on their way, of the ends, of layers
        for i in reversed(range(len(self.kept))):
            name, layer, _ = self.kept[i]
            size = self.sizes[layer]
            depth = layer == c.num_hidden_layers
            last, first = i == len(self.kept) - 1, not (i and self.kept[i - 1][1] == layer)
            if depth or last or self.kept[i + 1][1] == c.num_hidden_layers:  # the loss of its output
                alive = {**fixed, "activations": sum(kept[: i + 1]), "activations: heads": heads}
                alive |= {"gradients": before + grown + shared, "logits": logits_bytes(c, forward)}
                if at_once and forward.cpu and forward.item < WIDE and not forward.widens:
                    alive["logits"] += c.vocab_size * c.hidden_size * WIDE  # added to earlier ones in fp32
                if sharded and not frozen:
                    alive["gathered: blocks"] = (
                        size.whole - (size.experts if s.ep > 1 else 0)
                    ) * item  # the first group
                if frozen:  # the last layer is copied out of what was gathered, and its indexer has a loss
                    alive["working"] = divergence_bytes(c, forward) + sharded * size.whole * item
                if summed:
                    alive["gradients on their way"] = summed
                yield Moment("loss", f"output after {name}", alive)
                shared = ends if depth else max(shared, head)
            entering, at_weights = gradient_bytes(c, forward, layer, s.ep > 1)
            local = size.learned_local * item
            earlier = local if depth and not last else 0  # of a later depth of the same layer
            alive = {**fixed, "activations": sum(kept[: i + 1])}
            if exchanged := exchanged_bytes(c, forward):  # keys from other processes, and their gradients
                alive["communication: keys"] = 2 * exchanged
            if again := again_bytes(c, forward, layer):
                alive["activations: computed again"] = again
            if i == 0 or depth:
                alive["activations: heads"] = 0 if i == 0 else heads
            alive["gradients"] = before + grown + shared + earlier
            following = self.kept[i - 1][1] if i else layer
            ahead = 0 if following == layer else self.sizes[following].whole * item
            if s.ep > 1:  # experts are a group of their own, gathered one after the other
                ahead -= 0 if following == layer else self.sizes[following].experts * item
            if sharded and not frozen:
                alive["gathered: blocks"] = size.whole * item + (0 if s.ep > 1 else ahead)
            if summed:
                alive["gradients on their way"] = summed
            yield Moment("backward", name, {**alive, "working": entering})
            if "gathered: blocks" in alive:
                alive["gathered: blocks"] = size.whole * item + ahead
            feed = size.feed_forward * item
            if not frozen:
                yield Moment("backward", f"{name}, weights", {**alive, "working": feed + at_weights})
            if frozen or not first:
                continue
            own = WIDE * size.learned_held
            if at_once:
                summed = size.learned_whole * WIDE
                before -= size.learned_local * WIDE
                alive["gradients"] -= size.learned_local * WIDE
                alive["gradients on their way"] = summed
                yield Moment("backward", f"{name}, sum over ranks", {**alive, "working": own})
            elif sharded:  # experts on several processes are a group of their own, summed before the rest
                if s.ep > 1 and (experts := size.learned_experts):
                    alive["gradients on their way"] = experts * WIDE
                    alive["gathered: blocks"] -= size.experts * item
                    summing = {**alive, "working": size.learned_local_experts * item + at_weights + own}
                    yield Moment("backward", f"{name}, sum of experts over ranks", summing)
                summed = (size.learned_whole - (size.learned_experts if s.ep > 1 else 0)) * WIDE
                alive["gathered: blocks"] = ahead
                alive["gradients on their way"] = summed
                alive["activations"] -= kept[i]
                alive.pop("activations: computed again", None)
                rest = 2 * forward.tokens * c.hidden_size * item
                left = local - (size.learned_local_experts * item if s.ep > 1 else 0)
                summing = {**alive, "working": left + own + rest}
                yield Moment("backward", f"{name}, sum over ranks", summing)
            if sharded or s.parts == 1:
                grown += own


PHASES = ("loss", "backward", "optimizer")


def step_memory(config: GLM5Config, setting: Setting, rank: int = 0) -> dict[str, int]:
    """Bytes by purpose, and `peak`: the most at one moment, which is less than their sum. `peak_phase` indexes PHASES.
    `rank` is the place among the `pp` groups."""
    step = RankStep(config, setting, rank)
    most: dict[str, int] = {}
    for moment in step.moments():
        sums: dict[str, int] = {}
        for name, size in moment.held.items():
            group = "communication" if name.startswith(("gathered", "gradients on")) else name.partition(":")[0]
            sums[group] = sums.get(group, 0) + size
        most = {name: max(most.get(name, 0), sums.get(name, 0)) for name in {**most, **sums}}
    peak = step.peak()
    groups = ("weights", "low_precision_copy", "optimizer", "gradients", "activations", "logits", "working")
    found = {name: most.get(name, 0) for name in (*groups, "communication")}
    found["gradients"] = max(step.gradient, step._before())
    return {**found, "peak": peak.bytes, "peak_phase": PHASES.index(peak.phase)}


def optimizer_work(step: RankStep) -> int:
    """Newton-Schulz over the largest batch of equal blocks, or the measured update of embedding or head (first
    step)."""
    c, s = step.config, step.setting
    watched = 3 * WIDE * c.vocab_size * c.hidden_size // s.ranks
    if s.optimizer == "adamw" or s.trains == "indexers":
        return watched
    limit = ORTHOGONALISED_ON_CPU if s.forward.cpu else ORTHOGONALISED
    layers = step.layers
    dense = sum(c.is_dense_layer(n) for n in layers if n < c.num_hidden_layers)
    experts = (len(layers) - dense) * c.n_routed_experts
    blocks = [
        (c.moe_intermediate_size, c.hidden_size, 2 * experts // s.ranks),
        (c.hidden_size, c.moe_intermediate_size, experts // s.ranks),
        (c.intermediate_size, c.hidden_size, 2 * dense),
        (c.hidden_size, c.num_attention_heads * (c.v_head_dim or c.head_dim), len(layers)),
    ]
    work = 0
    for rows, columns, number in blocks:
        together = min(number, max(1, limit // max(1, rows * columns)))
        work = max(work, together * (3 * rows * columns + 2 * min(rows, columns) ** 2) * s.ns_item)
    split = sum(step.sizes[n].whole - step.sizes[n].experts for n in layers)
    return max(watched, work + (2 * s.ns_item * split // s.ranks if s.ranks > 1 else 0))
