"""What each layer keeps for backward, chosen by cost (§2.4): all, the expensive part or only its input, on the device
or in host memory.

Every choice has bytes and seconds. Layers start at their fewest bytes; then the upgrade that saves the most seconds per
byte is taken, again and again, while it fits. Dominated choices are left out first, so upgrades of a layer get worse
one after the other: the plan is the best one for the bytes that it uses.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from glm5.config.activations import Recompute, kept_by_layers
from glm5.config.devices import Device
from glm5.config.step_memory import RankStep


class Choice(NamedTuple):
    """`bytes` on the device until backward, and `seconds` more than keeping everything there, per micro-batch."""

    recompute: Recompute
    offload: bool
    bytes: float
    seconds: float


def frontier(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that are best for some price of a byte, from the fewest bytes to the fewest seconds."""
    hull: list[Choice] = []
    for one in sorted(choices, key=lambda c: (c.bytes, c.seconds)):
        if hull and one.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and _gain(hull[-2], one) >= _gain(hull[-2], hull[-1]):
            hull.pop()
        hull.append(one)
    return hull


def _gain(one: Choice, other: Choice) -> float:
    """Seconds saved per byte by the larger choice."""
    return (one.seconds - other.seconds) / max(1e-9, other.bytes - one.bytes)


def choose(layers: Sequence[Sequence[Choice]], budget: float) -> list[Choice] | None:
    """One choice per layer, with at most `budget` bytes in all and few seconds; None if the cheapest need more."""
    fronts = [frontier(choices) for choices in layers]
    at = [0] * len(fronts)
    left = budget - sum(front[0].bytes for front in fronts)
    if left < 0:
        return None
    queue = [(-_gain(front[0], front[1]), i) for i, front in enumerate(fronts) if len(front) > 1]
    heapq.heapify(queue)
    while queue:
        _, i = heapq.heappop(queue)
        now, better = fronts[i][at[i]], fronts[i][at[i] + 1]
        if better.bytes - now.bytes > left:
            continue
        left -= better.bytes - now.bytes
        at[i] += 1
        if at[i] + 1 < len(fronts[i]):
            heapq.heappush(queue, (-_gain(better, fronts[i][at[i] + 1]), i))
    return [front[i] for front, i in zip(fronts, at)]


MODES: tuple[Recompute, ...] = (False, "selective", True)
TOUCHED = 3
"""How often selective recomputation touches a byte that it makes again: it reads, writes, and backward reads."""


def layer_choices(
    step: RankStep,
    kept: dict[Recompute, list[int]],
    index: int,
    layer: int,
    forward: float,
    again: float,
    device: Device,
) -> list[Choice]:
    """The choices of one layer on this process. `kept`: bytes by mode of every layer, `index` is the layer's place in
    it; `forward`: seconds of its forward pass, `again`: seconds of what it would exchange again."""
    found = []
    for mode in MODES:
        size = kept[mode][index]
        if mode is True:
            seconds = forward + again
        elif mode == "selective":
            seconds = TOUCHED * (kept[False][index] - size) / device.bandwidth + again
        else:
            seconds = 0.0
        found.append(Choice(mode, False, size, seconds))
        if mode != "selective":  # its results stay on the device
            copying = size / device.host
            late = max(0.0, copying - forward) + max(0.0, copying - 2 * forward - seconds)
            found.append(Choice(mode, True, 0.0, seconds + late))
    return found


def kept_by_mode(step: RankStep) -> dict[Recompute, list[int]]:
    """Bytes that each layer of the model keeps, in every mode."""
    from dataclasses import replace

    return {mode: kept_by_layers(step.config, replace(step.forward, recompute=mode)) for mode in MODES}
