"""What each layer keeps for backward, chosen by cost (§2.4): all, the expensive part or only its input, on the device
or in host memory.

Every choice has bytes and seconds. Layers start at their fewest bytes; then the upgrade that saves the most seconds per
byte is taken, again and again, while it fits. Dominated choices are left out first, so upgrades of a layer get worse
one after the other: the plan is the best one for the bytes that it uses.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from glm5.config.activations import Recompute, exchanged_bytes, kept_by_layers
from glm5.config.devices import PRODUCTS, Device
from glm5.config.model import GLM5Config
from glm5.config.pipeline_memory import most_in_flight
from glm5.config.step_memory import Moment, RankStep, Setting
from glm5.config.step_time import Speed, speed_of
from glm5.config.traffic import Traffic


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
    return {mode: kept_by_layers(step.config, replace(step.forward, recompute=mode)) for mode in MODES}


Keep = tuple[Recompute, bool]
"""What a layer keeps: (recompute, offload)."""


def with_keeps(setting: Setting, keeps: Sequence[Keep]) -> Setting:
    """`setting` with a choice for each layer of the trunk and for the MTP layer."""
    forward = replace(setting.forward, recompute=tuple(mode for mode, _ in keeps))
    return replace(setting, forward=forward, offload=tuple(away for _, away in keeps))


def fit(
    config: GLM5Config, setting: Setting, rank: int, usable: float, speed: Speed, offload: bool | None = None
) -> Moment | tuple[Moment, dict[int, Choice]]:
    """The peak of a process and what its layers keep, with at most `usable` bytes; only the peak if nothing fits.
    `offload`: None leaves it to the plan."""
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    least: Keep = (True, offload is not False)
    moments = list(RankStep(config, with_keeps(setting, [least] * layers), rank).moments())
    smallest = max(moments, key=lambda moment: moment.bytes)
    if not offload or smallest.bytes > usable:
        # Keeping all is best if it fits. Of short rows it may even need less than what is alive while a layer is
        # computed again.
        whole: Keep = (False, bool(offload))
        moment = RankStep(config, with_keeps(setting, [whole] * layers), rank).peak()
        if moment.bytes <= usable:
            return moment, _same(_choices(config, setting, rank, speed, offload), whole)
    if smallest.bytes > usable:
        return smallest
    choices = _choices(config, setting, rank, speed, offload)
    # The optimizer's moment has no activations.
    filled = max((moment.bytes for moment in moments if moment.phase != "optimizer"), default=0)
    budget = usable - filled + sum(min(one.bytes for one in options) for options in choices.values())
    for _ in range(6):
        chosen = choose(list(choices.values()), budget)
        if chosen is None:
            break
        found = dict(zip(choices, chosen))
        keeps = [(found[n].recompute, found[n].offload) if n in found else least for n in range(layers)]
        moment = RankStep(config, with_keeps(setting, keeps), rank).peak()
        if moment.bytes <= usable:
            return moment, found
        budget -= moment.bytes - usable
    return smallest, _same(choices, least)


def _choices(
    config: GLM5Config, setting: Setting, rank: int, speed: Speed, offload: bool | None
) -> dict[int, list[Choice]]:
    """Of every layer of a process, with the bytes of all micro-batches that are alive at once."""
    step = RankStep(config, setting, rank)
    kept, flying = kept_by_mode(step), _times_kept(step)
    choices: dict[int, list[Choice]] = {}
    for layer in sorted(set(step.layers)):
        if layer == config.num_hidden_layers and not step.forward.depths:
            continue
        again = _exchanged_again(step, layer, speed.device)
        options = layer_choices(step, kept, layer, layer, speed.forward(step, layer), again, speed.device)
        allowed = [one for one in options if offload is None or one.offload == offload]
        choices[layer] = [one._replace(bytes=one.bytes * flying[layer]) for one in allowed]
    return choices


def _same(choices: dict[int, list[Choice]], keep: Keep) -> dict[int, Choice]:
    """The same choice for all layers."""
    return {layer: next(one for one in options if one[:2] == keep) for layer, options in choices.items()}


def _times_kept(step: RankStep) -> dict[int, int]:
    """How many micro-batches' activations of each layer are alive at once; of the MTP layer, times its depths."""
    counts: Sequence[int] = (1,)
    if step.setting.pp > 1:
        counts = [max(column) for column in zip(*(one.active for one, _ in most_in_flight(step)))]
    found: dict[int, int] = {}
    for span, count in zip(step.spans, counts):
        found |= dict.fromkeys(span.layers, count)
        if span.mtp:
            found[step.config.num_hidden_layers] = count * max(1, step.forward.depths)
    return found


def _exchanged_again(step: RankStep, layer: int, device: Device) -> float:
    """Seconds of transfers that a layer repeats if it is computed again."""
    c, s, forward = step.config, step.setting, step.forward
    seconds = 0.0
    if s.ep > 1 and (layer == c.num_hidden_layers or not c.is_dense_layer(layer)):
        rows = 2 * forward.tokens * c.num_experts_per_tok * c.hidden_size * forward.item
        seconds += Traffic("all-to-all", "rows of experts", rows, s.ep).seconds(device)
    if forward.cp > 1:
        seconds += Traffic("all-to-all", "keys of rows", exchanged_bytes(c, forward), forward.cp).seconds(device)
    return seconds


def recompute_plan(config: GLM5Config, setting: Setting, device: Device) -> tuple[tuple[Recompute, ...], int]:
    """`recompute = "auto"`: a mode for each layer of the trunk and for the MTP layer, and the predicted peak of the
    fullest process. The peak is above `device.usable` if even recomputing all layers needs more."""
    speed = speed_of(config, setting.forward.length, setting.forward.attention == "sparse", device, PRODUCTS)
    modes: list[Recompute] = [True] * (config.num_hidden_layers + config.num_nextn_predict_layers)
    peak = 0
    for rank in range(setting.pp):
        found = fit(config, setting, rank, device.usable, speed, offload=bool(setting.offload))
        moment, choices = found if isinstance(found, tuple) else (found, {})
        peak = max(peak, moment.bytes)
        for layer, choice in choices.items():
            modes[layer] = choice.recompute
    return tuple(modes), peak


def keeps_text(keeps: Sequence[Keep]) -> str:
    """Runs of layers with the same choice: "all of layers 0-2, inputs of layers 3-78 in host memory"."""
    words: dict[Recompute, str] = {False: "all", "selective": "products and attention", True: "inputs"}
    runs: list[tuple[int, int, str]] = []
    for layer, (mode, away) in enumerate(keeps):
        text = f"{words[mode]} of layers {{}}" + (" in host memory" if away else "")
        if runs and runs[-1][2] == text:
            runs[-1] = runs[-1][0], layer, text
        else:
            runs.append((layer, layer, text))
    return ", ".join(text.format(first if first == last else f"{first}-{last}") for first, last, text in runs)
