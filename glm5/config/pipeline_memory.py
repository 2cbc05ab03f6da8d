"""Bytes on one process of a pipeline (§2.4): whole weights in a step, ZeRO-2's gradients, micro-batches in flight."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from glm5.config.activations import INDEX, WIDE, again_bytes, gradient_bytes, kept_by_heads, logits_bytes
from glm5.config.deferred_bytes import deferred_bytes
from glm5.config.pipeline import Span
from glm5.config.pipeline_schedule import rank_actions, repeating

if TYPE_CHECKING:
    from glm5.config.step_memory import RankStep


class Flying(NamedTuple):
    """Micro-batches of each stage of a rank: between forward and backward, and those whose weight gradients wait."""

    active: tuple[int, ...]
    waiting: tuple[int, ...]


@lru_cache(maxsize=1024)
def in_flight(pp: int, stages_per_rank: int, rank: int, parts: int, deferred: int = 0) -> frozenset[Flying]:
    """What is ever alive on a rank (`make_schedule`)."""
    active, waiting = [0] * stages_per_rank, [0] * stages_per_rank
    found = set()
    for action in rank_actions(pp, stages_per_rank, repeating(pp, parts, deferred), rank, deferred):
        stage = action.stage // pp
        active[stage] += {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
        waiting[stage] += {"I": 1, "W": -1}.get(action.kind, 0)
        found.add(Flying(tuple(active), tuple(waiting)))
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
    heads = kept_by_heads(step.config, step.forward)
    device = [(layer, size) for (_, layer, _), size in zip(step.kept, step.on_device)]
    return [
        sum(size for layer, size in device if layer in span.layers or (span.mtp and layer == last)) + heads * span.head
        for span in step.spans
    ]


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


def most_in_flight(step: RankStep) -> Flying:
    """The micro-batches of a process when they keep the most bytes together."""
    s, sizes = step.setting, [sum(pair) for pair in zip(stored_bytes(step), state_bytes(step))]
    found = in_flight(s.pp, s.stages_per_rank, step.rank, s.parts, s.deferred)
    sizes += waiting_bytes(step) if s.deferred else [0] * len(sizes)
    return max(sorted(found), key=lambda one: sum(n * size for n, size in zip((*one.active, *one.waiting), sizes)))


def pipeline_moments(step: RankStep, fixed: dict[str, int]) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Backward of each layer while as many micro-batches as possible are in flight: the fields of a `Moment`."""
    c, s, forward, spans = step.config, step.setting, step.forward, step.spans
    alive = {**fixed, "gathered: weights of the stages": step.total.whole * forward.item}
    frozen = s.trains == "indexers"
    largest = max(sum(size.learned_whole for size in step.stage_sizes([span])) for span in spans)
    buffers = 2 if s.stages_per_rank > 1 else 1
    alive["gradients"] = step.gradient
    alive["gradients: buffers of whole stages"] = buffers * largest * WIDE
    most = most_in_flight(step)
    for span, stored, states, count in zip(spans, stored_bytes(step), state_bytes(step), most.active):
        alive[f"activations: stage {span.stage}, {count} in flight"] = count * stored
        alive[f"communication: hidden states of stage {span.stage}"] = count * states
    for span, waiting, count in zip(spans, waiting_bytes(step), most.waiting) if s.deferred else ():
        alive[f"activations: stage {span.stage}, {count} with weight gradients to come"] = count * waiting
    if any(span.head for span in spans) and not frozen:
        yield "loss", "output head", {**alive, "logits": logits_bytes(c, forward)}
    for layer in dict.fromkeys(layer for _, layer, _ in step.kept):
        entering, at_weights = gradient_bytes(c, forward, layer, s.ep > 1)
        again = again_bytes(c, forward, layer)
        work = max(entering, 0 if frozen else step.sizes[layer].widest * forward.item + at_weights)
        yield "backward", f"layer {layer}", {**alive, "activations: computed again": again, "working": work}
