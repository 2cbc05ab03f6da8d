"""Bytes on one process of a pipeline (§2.4): whole weights in a step, ZeRO-2's gradients, micro-batches in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from glm5.config.activations import (
    INDEX,
    WIDE,
    again_bytes,
    divergence_bytes,
    gradient_bytes,
    kept_by_heads,
    logits_bytes,
)
from glm5.config.deferred_bytes import deferred_bytes
from glm5.config.pipeline import Span
from glm5.config.pipeline_schedule import rank_schedule, repeating, turns

if TYPE_CHECKING:
    from glm5.config.step_memory import RankStep


GATHERED = "gathered: weights of the stages"


class Flying(NamedTuple):
    """What a rank has while it computes the backward pass of a micro-batch in its `chunk`-th stage (`kind` is that of
    an `Action`; "R" is the last one of a step), by stage."""

    kind: str
    chunk: int
    active: tuple[int, ...]
    """Micro-batches between forward and backward."""
    waiting: tuple[int, ...]
    """Micro-batches whose weight gradients wait."""
    returned: tuple[int, ...]
    """Micro-batches whose gradients of hidden states the rank before may not have yet."""
    summed: tuple[bool, ...]
    """Whether this rank has its part of the gradients' sum (see `glm5.parallel.zero`)."""
    buffers: int
    """Buffers of whole gradients."""
    summing: int
    """The stage whose gradients are being summed over ranks, or -1."""


@dataclass
class _Gradients:
    """The buffers of `StageGradients`, which sums the gradients of a rank's stages."""

    summed: list[bool]
    buffers: int = 0
    summing: int = -1
    _free: int = 0
    _open: bool = False

    def select(self) -> None:
        if self._open:
            return
        if not self._free and self.buffers == 2:
            self._settle()
        if self._free:
            self._free -= 1
        else:
            self.buffers += 1
        self._open = True

    def reduce(self, chunk: int) -> None:
        self._settle()
        self.summing, self._open = chunk, False

    def _settle(self) -> None:
        if self.summing >= 0:
            self.summed[self.summing], self.summing = True, -1
            self._free += 1


@lru_cache(maxsize=1024)
def in_flight(pp: int, stages_per_rank: int, rank: int, parts: int, deferred: int = 0) -> frozenset[Flying]:
    """What is ever alive on a rank during backward (`make_schedule`, `StageGradients`, `StageLinks`)."""
    few = repeating(pp, parts, deferred)
    own, before = (rank_schedule(pp, stages_per_rank, few, r % pp, deferred) for r in (rank, rank - 1))
    turn = turns([before])
    none = (0,) * stages_per_rank
    active, waiting = [*none], [*none]
    returned: list[tuple[int, int]] = []  # stage of this rank, and the turn in which the rank before takes the gradient
    gradients = _Gradients([False] * stages_per_rank)
    found = set()
    for action in own:
        kind, chunk = action.kind, action.stage // pp
        if kind == "R":
            gradients.reduce(chunk)
            continue
        source = action.stage + (-1 if kind == "F" else 1)
        if kind != "W":  # what comes from the rank before
            arrived = turn.get((kind != "F", source, action.micro), -1)
            returned = [one for one in returned if one[1] > arrived]
        if kind == "F":
            active[chunk] += 1
            continue
        gradients.select()
        sent = Counter(one for one, _ in returned)
        micros = tuple(active), tuple(waiting), tuple(sent[one] for one in range(stages_per_rank))
        found.add(Flying(kind, chunk, *micros, tuple(gradients.summed), gradients.buffers, gradients.summing))
        active[chunk] -= kind in "BI"
        waiting[chunk] += {"I": 1, "W": -1}.get(kind, 0)
        if kind in "BI" and action.stage:
            returned.append((chunk, turn[True, action.stage - 1, action.micro]))
    last = gradients.buffers, gradients.summing
    found.add(Flying("R", stages_per_rank - 1, none, none, none, (True,) * stages_per_rank, *last))
    return frozenset(found)


def sent_states(span: Span, depths: int) -> int:
    """Hidden states per token that a stage sends on."""
    return 0 if span.head else 1 + depths if span.mtp else 1


def received_states(span: Span, depths: int) -> int:
    """Hidden states per token that a stage gets, and of which it sends gradients back."""
    return 0 if span.embeds else 1 if span.norm or not span.head else 1 + depths


def transferred(step: RankStep, span: Span) -> int:
    """Bytes of a micro-batch that a stage sends to the next one; the gradients that come back have those of the hidden
    states."""
    c, forward = step.config, step.forward
    indices = min(c.index_topk or 0, forward.length) * INDEX if span.gives_indices else 0
    width = sent_states(span, forward.depths) * c.hidden_size * forward.item
    return forward.tokens * (width + (indices if forward.attention == "sparse" else 0))


def stored_bytes(step: RankStep) -> list[int]:
    """Bytes that a micro-batch keeps on the device until backward, for each stage of a process."""
    last = step.config.num_hidden_layers
    device = [(layer, size) for (_, layer, _), size in zip(step.kept, step.on_device)]
    return [
        sum(size for layer, size in device if layer in span.layers or (span.mtp and layer == last))
        + head_bytes(step, span)
        for span in step.spans
    ]


def head_bytes(step: RankStep, span: Span) -> int:
    """What a micro-batch keeps for the losses. Without the final norm, the hidden states are those that came."""
    if not span.head:
        return 0
    forward = step.forward
    came = 0 if span.norm else 1 if forward.cpu else 2
    return kept_by_heads(step.config, forward) - came * forward.tokens * step.config.hidden_size * forward.item


def state_bytes(step: RankStep) -> list[int]:
    """Bytes of a micro-batch's hidden states that each stage of a process gets and sends."""
    forward = step.forward
    one = forward.tokens * step.config.hidden_size * forward.item
    return [one * (sent_states(x, forward.depths) + received_states(x, forward.depths)) for x in step.spans]


def waiting_bytes(step: RankStep) -> list[int]:
    """Bytes of a micro-batch that a stage of a process keeps from backward until its weight gradients are computed."""
    last, depths = step.config.num_hidden_layers, step.forward.depths
    layers = [[*span.layers, *[last] * (depths if span.mtp else 0)] for span in step.spans]
    return [sum(deferred_bytes(step.config, step.forward, n, step.setting.trains) for n in own) for own in layers]


class _Costs(NamedTuple):
    """Bytes by stage of a process: of a micro-batch's activations and hidden states, of its weight gradients that wait
    and of its returned gradients; of summed gradients and of whole ones. And of a buffer."""

    stored: list[int]
    states: list[int]
    waiting: list[int]
    returned: list[int]
    summed: list[int]
    whole: list[int]
    buffer: int


def _costs(step: RankStep) -> _Costs:
    forward = step.forward
    hidden = forward.tokens * step.config.hidden_size * forward.item
    sizes = [step.stage_sizes([span]) for span in step.spans]
    return _Costs(
        stored_bytes(step),
        state_bytes(step),
        waiting_bytes(step) if step.setting.deferred else [0] * len(sizes),
        [received_states(span, forward.depths) * hidden for span in step.spans],
        [WIDE * sum(size.learned_held for size in parts) for parts in sizes],
        # gloo sums a copy
        [WIDE * sum(s.learned_whole for s in parts) * (forward.cpu and step.setting.ranks > 1) for parts in sizes],
        WIDE * max(sum(size.learned_whole for size in parts) for parts in sizes),
    )


def _dot(counts: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(map(mul, counts, sizes))


def _named(step: RankStep, one: Flying, costs: _Costs) -> dict[str, int]:
    found = {
        "gradients": _dot(one.summed, costs.summed),
        "gradients: buffers of whole stages": one.buffers * costs.buffer,
    }
    if one.summing >= 0 and costs.whole[one.summing]:
        found["gradients on their way"] = costs.whole[one.summing]
    for i, span in enumerate(step.spans):
        found[f"activations: stage {span.stage}, {one.active[i]} in flight"] = one.active[i] * costs.stored[i]
        states = one.active[i] * costs.states[i] + one.returned[i] * costs.returned[i]
        found[f"communication: hidden states of stage {span.stage}"] = states
        if step.setting.deferred:
            name = f"activations: stage {span.stage}, {one.waiting[i]} with weight gradients to come"
            found[name] = one.waiting[i] * costs.waiting[i]
    return found


def most_in_flight(step: RankStep) -> list[tuple[Flying, dict[str, int]]]:
    """Of the states in which a process computes each kind of backward pass of each stage, the one with most bytes, and
    these by name."""
    s, costs = step.setting, _costs(step)
    most: dict[tuple[str, int], tuple[int, Flying, dict[str, int]]] = {}
    for one in in_flight(s.pp, s.stages_per_rank, step.rank, s.parts, s.deferred):
        held = _named(step, one, costs)
        key, found = (one.kind, one.chunk), (sum(held.values()), one, held)
        most[key] = max(most.get(key, found), found, key=lambda each: each[:2])
    return [(one, held) for _, one, held in most.values()]


def pipeline_moments(step: RankStep, fixed: dict[str, int]) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Backward of each layer while as many micro-batches as possible are in flight: the fields of a `Moment`."""
    c, s, forward = step.config, step.setting, step.forward
    fixed = {**fixed, GATHERED: step.total.whole * forward.item}
    frozen = s.trains == "indexers"
    device = [(layer, size) for (_, layer, _), size in zip(step.kept, step.on_device)]
    for one, held in most_in_flight(step):
        span, alive = step.spans[one.chunk], {**fixed, **held}
        if one.kind == "R":
            del alive[GATHERED]
            yield "backward", "the last sum over ranks", alive
            continue
        if one.kind == "W":
            layers = [*span.layers, *[c.num_hidden_layers] * span.mtp]
            widest = max((step.sizes[layer].widest for layer in layers), default=0)
            yield "backward", f"weight gradients of stage {span.stage}", {**alive, "working": widest * forward.item}
            continue
        if span.head and not frozen:
            # The losses of depths come first; they leave gradients of their hidden states, and of the head.
            values = bool(forward.depths) * c.vocab_size + forward.depths * forward.tokens
            logits = logits_bytes(c, forward) + values * c.hidden_size * forward.item
            yield "loss", "output head", {**alive, "logits": logits}
        freed, earlier = head_bytes(step, span), 0
        for layer, size in reversed(device):
            if layer not in span.layers and not (span.mtp and layer == c.num_hidden_layers):
                continue
            entering, at_weights = gradient_bytes(c, forward, layer, s.ep > 1)
            work = max(entering, 0 if frozen else step.sizes[layer].widest * forward.item + at_weights)
            work += divergence_bytes(c, forward)
            more = {"activations: computed again": again_bytes(c, forward, layer), "working": work}
            more |= {"activations: freed": -freed, "gradients: of later depths": earlier}
            yield "backward", f"layer {layer}", {**alive, **more}
            freed += size
            if layer == c.num_hidden_layers and not frozen:  # depths add up before they are in a buffer
                earlier = step.sizes[layer].learned_local * forward.item
            else:
                earlier = 0
