"""Bytes that one process exchanges with others in a training step, by kind, from a configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glm5.config.activations import WIDE, exchanged_bytes, mode_of
from glm5.config.devices import Device
from glm5.config.parameters import Sizes
from glm5.config.pipeline_memory import received_states, transferred
from glm5.config.pipeline_schedule import sums_of_stages
from glm5.config.step_memory import RankStep


@dataclass(frozen=True)
class Traffic:
    """`kind` of operator, what it moves, and the `bytes` of the whole tensors of this process's calls in a step: of the
    result of an all-gather, of the input of the others. `ranks` take part, neighbours `stride` apart."""

    kind: str
    what: str
    bytes: int
    ranks: int
    stride: int = 1

    def between_nodes(self, device: Device) -> bool:
        return (self.ranks - 1) * self.stride >= device.node

    def received(self) -> float:
        """Bytes that arrive at this process."""
        return self.bytes if self.kind == "send" else self.bytes * (self.ranks - 1) / self.ranks

    def seconds(self, device: Device) -> float:
        """Time on the links at their data sheet's rate. Of an exchange between nodes, the part within a node takes the
        faster link; a ring between nodes carries everything over the slower one, once per node."""
        if not self.between_nodes(device):
            return self.received() / device.within
        local = max(1, device.node // self.stride)
        if self.kind == "send":
            return self.bytes / device.between
        nodes = -(-self.ranks // local)
        far = self.bytes * (nodes - 1) / nodes
        if self.kind != "all-to-all":
            far /= local  # every device of a node brings its share, and they exchange within the node
        near = self.bytes * (local - 1) / local
        return max(far / device.between, near / device.within)


def step_traffic(step: RankStep) -> list[Traffic]:
    """All of a step, without sums of a few numbers (norms, counts)."""
    s = step.setting
    found = list(_pipeline(step) if s.pp > 1 else _fsdp(step)) if s.world > 1 else []
    found += _experts(step)
    found += keys_of_rows(step)
    found += _owners(step)
    return [one for one in found if one.bytes]


@dataclass
class _Sum:
    """Elements of experts, and of all else."""

    experts: int = 0
    rest: int = 0

    def add(self, size: Sizes, times: int = 1) -> None:
        self.experts += times * size.experts
        self.rest += times * (size.whole - size.experts)

    def add_learned(self, size: Sizes, times: int) -> None:
        self.experts += times * size.learned_experts
        self.rest += times * (size.learned_whole - size.learned_experts)


def _parts(step: RankStep, found: _Sum, kind: str, what: str, item: int) -> Iterator[Traffic]:
    """One operator over the processes of a stage, and over those with the same experts if these are divided."""
    s = step.setting
    apart = s.ep > 1
    if s.ranks > 1:
        yield Traffic(kind, what, (found.rest + (0 if apart else found.experts)) * item, s.ranks)
    if apart and s.ranks > s.ep:
        yield Traffic(kind, f"{what} of experts", found.experts * item, s.ranks // s.ep, s.ep)


def _fsdp(step: RankStep) -> Iterator[Traffic]:
    """Blocks are gathered forward and backward, embedding and head once; gradients are summed per step or per
    micro-batch. An MTP layer is gathered for each depth."""
    s, mtp = step.setting, step.config.num_hidden_layers
    times = 1 if s.trains == "indexers" else 2
    gathered, summed = _Sum(), _Sum()
    gathered.add(step.ends, s.parts)
    summed.add_learned(step.ends, 1 if s.reduce_once else s.parts)
    for layer in step.layers:
        uses = step.forward.depths if layer == mtp else 1
        gathered.add(step.sizes[layer], uses * times * s.parts)
        summed.add_learned(step.sizes[layer], min(uses, 1) * (1 if s.reduce_once else s.parts))
    yield from _parts(step, gathered, "all-gather", "weights", step.forward.item)
    yield from _parts(step, summed, "reduce-scatter", "gradients", WIDE)


def _pipeline(step: RankStep) -> Iterator[Traffic]:
    s, gathered, summed = step.setting, _Sum(), _Sum()
    for size in step.stage_sizes(step.spans):
        gathered.add(size)
    times = sums_of_stages(s.pp, s.stages_per_rank, s.parts, step.rank, s.deferred)
    for span in step.spans:
        for size in step.stage_sizes([span]):
            summed.add_learned(size, times[span.stage])
    yield from _parts(step, gathered, "all-gather", "weights", step.forward.item)
    yield from _parts(step, summed, "reduce-scatter", "gradients", WIDE)
    forward = sum(transferred(step, span) for span in step.spans)
    yield Traffic("send", "hidden states of pipeline stages", forward * s.parts, 2, s.ranks)
    if s.trains != "indexers":
        states = sum(received_states(span, step.forward.depths) for span in step.spans)
        back = states * step.forward.tokens * step.config.hidden_size * step.forward.item
        yield Traffic("send", "gradients of pipeline stages", back * s.parts, 2, s.ranks)
        holders = {i % s.pp for i, span in enumerate(step.all_spans) if span.embeds or span.mtp}
        if len(holders) > 1 and step.rank in holders:
            yield Traffic("send", "gradients of the embedding's copy", WIDE * step.embedding.learned_held, 2, s.ranks)


def _experts(step: RankStep) -> Iterator[Traffic]:
    """Rows go to their experts and back, and so do their gradients; a layer that is computed again sends them again."""
    c, s, forward = step.config, step.setting, step.forward
    if s.ep == 1:
        return
    rows = forward.tokens * c.num_experts_per_tok * c.hidden_size * forward.item
    times = 0
    for _, layer, _ in step.kept:
        if layer == c.num_hidden_layers or not c.is_dense_layer(layer):
            passes = 1 if s.trains == "indexers" else 3 if mode_of(forward, layer) else 2
            times += 2 * passes
    yield Traffic("all-to-all", "rows of experts", rows * times * s.parts, s.ep)


def keys_of_rows(step: RankStep) -> Iterator[Traffic]:
    """Keys of the tokens of other processes, and their gradients (context parallelism), at most."""
    forward = step.forward
    if forward.cp == 1:
        return
    passes = sum(1 + (forward.attention != "warmup") + bool(mode_of(forward, layer)) for _, layer, _ in step.kept)
    arriving = exchanged_bytes(step.config, forward) * passes * step.setting.parts
    yield Traffic("all-to-all", "keys of rows", arriving * forward.cp // (forward.cp - 1), forward.cp)


def _owners(step: RankStep) -> Iterator[Traffic]:
    """Rows of matrices that are cut over processes go to the owner of their block and back (Muon); about all of them
    do."""
    s = step.setting
    if s.optimizer == "adamw" or s.trains == "indexers" or s.ranks == 1:
        return
    cut = sum(step.sizes[layer].whole - step.sizes[layer].experts for layer in step.layers) // s.ranks
    yield Traffic("all-to-all", "blocks of matrices for Muon", 2 * cut * s.ns_item, s.ranks)
