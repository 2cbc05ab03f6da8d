"""Curves of the stages that train by gradients on text: loss, held-out bits, optimizer, experts, attention, speed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from glm5.report.figures import STEPS, TOKENS, Axis, Panel, Series, curves, layered
from glm5.report.results import Run, finite
from glm5.report.wording import number

DEPTHS = range(1, 6)
MOST = 1e18
"""Maximum token count: more are an error in the file, and could not be drawn."""
HEAD_PANELS = 8
"""Number of layers with a panel of their heads: those with the largest logits."""
_HEAD = re.compile(r"max_logit/L(\d{1,4})/H(\d{1,4})")

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Group:
    """Panels under one heading with one explanation; `folded` ones are shown on demand."""

    title: str
    text: str
    panels: list[Panel]
    folded_title: str = ""
    folded: list[Panel] = field(default_factory=list)


@dataclass(frozen=True)
class StageCurves:
    """All numbers of a stage as (step, tokens so far, value); drawn over tokens by default, if those are counted."""

    name: str
    axis: Axis
    length: tuple[float, float]
    columns: dict[str, list[tuple[float, float, float]]]
    skipped: list[tuple[float, float]]
    """Steps without an update because loss or gradient were not finite."""

    def get(self, key: str, axis: Axis | None = None) -> Points:
        """(x, value) of one number."""
        by_tokens = (axis or self.axis) == TOKENS
        return [(tokens if by_tokens else step, value) for step, tokens, value in self.columns.get(key, [])]

    def layers(self, key: str) -> dict[int, Points]:
        """Points of `key/L{layer}`, by layer."""
        found = {int(m[1]): k for k in self.columns if (m := re.fullmatch(rf"{key}/L(\d{{1,4}})", k))}
        return {layer: self.get(found[layer]) for layer in sorted(found)}

    def heads(self) -> dict[int, dict[int, Points]]:
        """The largest attention logits by layer and head."""
        found: dict[int, dict[int, Points]] = {}
        for layer, head, key in sorted((int(m[1]), int(m[2]), k) for k in self.columns if (m := _HEAD.fullmatch(k))):
            found.setdefault(layer, {})[head] = self.get(key)
        return found


def stage_curves(run: Run, name: str) -> StageCurves:
    """The metrics of one stage in columns. `tokens` of a line are those of its step."""
    columns: dict[str, list[tuple[float, float, float]]] = {}
    skipped: list[tuple[float, float]] = []
    step = tokens = before = 0.0
    for row in run.metrics.get(name, []):
        step = finite(row["step"]) or 0.0
        tokens = min(tokens + max(finite(row.get("tokens")) or 0.0, 0.0), MOST)
        for key, value in row.items():
            if key not in ("stage", "step", "time") and (number := finite(value)) is not None:
                columns.setdefault(key, []).append((step, tokens, number))
        now = finite(row.get("skipped")) or 0.0
        if now > before:
            skipped.append((step, tokens))
        before = now
    return StageCurves(name, TOKENS if tokens else STEPS, (step, tokens), columns, skipped)


def training_groups(run: Run) -> list[Group]:
    """The groups that have a panel."""
    stages = [stage_curves(run, stage.name) for stage in run.results.stages]
    groups = [
        _loss(stages),
        _bits(run, stages),
        _optimizer(stages),
        _mtp(stages),
        _experts(stages),
        _attention(stages),
        _indexers(stages),
        _speed(stages),
    ]
    return [group for group in groups if group.panels]


def _loss(stages: Sequence[StageCurves]) -> Group:
    panels = []
    for stage in stages:
        if stage.get("reward"):
            continue  # the loss of a policy gradient does not measure progress
        series = [Series("training", stage.get("loss")), Series("held out", stage.get("held_out_loss"), dots=True)]
        panels.append(curves(stage.name, series, "", stage.axis))
    text = "Loss in nats per token, for the next token. Each panel has its own scale."
    return Group("Language modelling", text, _made(panels))


def _bits(run: Run, stages: Sequence[StageCurves]) -> Group:
    known = run.results.reference_bits_per_byte
    for stage in run.results.stages:
        known = stage.numbers.get("reference_bits_per_byte") if known is None else known
    reference = None if known is None else (f"xz: {known:.3f}", known)
    panels = [
        _over_run(
            stages, "held_out_bits_per_byte", "Held-out text", "fewer are better", dots=True, reference=reference
        ),
        _over_run(stages, "bits_per_byte_train", "Training text", "as it was read"),
    ]
    text = (
        "Bits that the model needs per byte of text, whatever its tokenizer. Held-out documents were never trained on."
    )
    if reference:
        text += " The dashed line is what the general compressor xz needs for the same held-out text."
    return Group("Bits per byte", text, _made(panels))


def _optimizer(stages: Sequence[StageCurves]) -> Group:
    marks = [x for stage in stages for x in stage.skipped]
    text = "The stages one after the other. The gradient norm is that before clipping."
    if marks:
        text += f" {len(marks):,} {'step' if len(marks) == 1 else 'steps'} with a loss or gradient that was not finite "
        text += "left the weights as they were."
    panels = [
        _over_run(stages, "lr", "Learning rate", "", dots=False, smooth=False),
        _over_run(stages, "grad_norm", "Gradient norm", "", log=True, marked=True),
    ]
    return Group("Optimizer", text, _made(panels))


def _mtp(stages: Sequence[StageCurves]) -> Group:
    panels = []
    for stage in stages:
        lines = [Series(f"token {depth + 1}", stage.get(f"mtp{depth}_loss")) for depth in DEPTHS]
        panels.append(curves(f"Loss in {stage.name}", lines, "", stage.axis))
        lines = [Series(f"token {depth + 1}", stage.get(f"mtp{depth}_accuracy"), dots=True) for depth in DEPTHS]
        panels.append(curves(f"Accuracy in {stage.name}", lines, "share predicted right", stage.axis))
    text = (
        "The MTP layer drafts the tokens after the next one, several deep with shared weights. Later ones are harder; "
        "what it gets right here is what speeds up generation."
    )
    return Group("Multi-token prediction (MTP)", text, _made(panels))


def _experts(stages: Sequence[StageCurves]) -> Group:
    panels: list[Panel | None] = []
    plain = [stage for stage in stages if not stage.layers("load_max")]
    for stage in stages:
        for key, title in (("load_max", "Busiest expert"), ("load_min", "Least used expert")):
            panels.append(_by_layer(stage, key, title, "1 = balanced", level=1.0))
    panels.append(_together(plain, "load_max", "Busiest expert"))
    text = (
        "Tokens of the busiest and of the least used expert over the mean of all experts. 1 is balance; 0 is an expert "
        "that no token chose."
    )
    return Group("Expert load", text, _made(panels))


def _attention(stages: Sequence[StageCurves]) -> Group:
    panels: list[Panel | None] = []
    folded: list[Panel | None] = []
    for stage in stages:
        heads = stage.heads()
        tops = {layer: _largest(list(of.values())) for layer, of in heads.items()} or stage.layers("max_logit")
        series = [Series(f"layer {layer}", points) for layer, points in tops.items()]
        if not series:
            series = [Series("largest", stage.get("max_logit"))]
        panels.append(layered(f"Largest logit in {stage.name}", series, "by layer", stage.axis))
        peaks = {layer: max(value for _, value in tops[layer]) for layer in heads}
        worst = sorted(sorted(heads, key=lambda layer: -peaks[layer])[:HEAD_PANELS])
        for layer in worst:
            lines = [Series(f"head {head}", points) for head, points in heads[layer].items()]
            folded.append(layered(f"{stage.name}, layer {layer}", lines, "by head", stage.axis))
    text = (
        "The largest attention logit before the softmax, over the tokens of monitored steps. Logits that grow without "
        "end make training unstable; Muon Split is meant to keep them level without clipping (§2.1)."
    )
    most = max((len(stage.heads()) for stage in stages), default=0)
    title = "The same by head" + (f", in the {HEAD_PANELS} layers with the largest" if most > HEAD_PANELS else "")
    return Group("Attention logits", text, _made(panels), title, _made(folded))


def _indexers(stages: Sequence[StageCurves]) -> Group:
    panels = [_together(stages, "indexer_kl", "Indexer KL (nats)")]
    panels.append(_together(stages, "indexer_recall", "Indexer recall"))
    for stage in stages:
        for key, title in (("indexer_recall", "Recall"), ("indexer_kl", "KL")):
            panels.append(_by_layer(stage, key, title, "by layer"))
    text = (
        "How well the indexers learn where attention looks. KL is the distance from their distribution to that of "
        "attention. Recall is the share of attention that falls on the tokens they pick; 1 would lose nothing."
    )
    return Group("Sparse attention (DSA)", text, _made(panels))


def _speed(stages: Sequence[StageCurves]) -> Group:
    shares = []
    for stage in stages:
        whole = {step: value for step, _, value in stage.columns.get("step_seconds", [])}
        part = stage.columns.get("optimizer_seconds", [])
        share = [(step, tokens, value / whole[step]) for step, tokens, value in part if whole.get(step, 0.0) > 0]
        shares.append(replace(stage, columns={"share": share}))
    panels = [
        _over_run(stages, "tokens_per_second", "Tokens per second", "all devices together"),
        _over_run(shares, "share", "Optimizer", "share of a step's time"),
    ]
    return Group("Throughput", "Time of whole steps: reading, forward, backward, optimizer.", _made(panels))


def _over_run(
    stages: Sequence[StageCurves],
    key: str,
    title: str,
    note: str,
    *,
    dots: bool = False,
    smooth: bool = True,
    log: bool = False,
    marked: bool = False,
    reference: tuple[str, float] | None = None,
) -> Panel | None:
    """One panel with the stages one after the other, each in its own colour."""
    shown = [stage for stage in stages if stage.get(key)]
    axis = _common(shown)
    column = 1 if axis == TOKENS else 0
    series, marks, start = [], [], 0.0
    for stage in shown:
        points = [(x + start, value) for x, value in stage.get(key, axis) if value > 0 or not log]
        series.append(Series(stage.name, points, dots=dots, smooth=smooth))
        marks += [place[column] + start for place in stage.skipped if marked]
        start += stage.length[column]
    return curves(title, series, note, axis, reference=reference, marks=marks, log=log)


def _together(stages: Sequence[StageCurves], key: str, title: str) -> Panel | None:
    """One panel with one line per stage, all from 0."""
    shown = [stage for stage in stages if stage.get(key)]
    axis = _common(shown)
    return curves(title, [Series(stage.name, stage.get(key, axis)) for stage in shown], "", axis)


def _by_layer(stage: StageCurves, key: str, title: str, note: str, level: float | None = None) -> Panel | None:
    series = [Series(f"layer {layer}", points) for layer, points in stage.layers(key).items()]
    return layered(f"{title} in {stage.name}", series, note, stage.axis, level)


def _common(stages: Sequence[StageCurves]) -> Axis:
    """Tokens if all of the stages count them, otherwise steps."""
    return TOKENS if all(stage.axis == TOKENS for stage in stages) else STEPS


def _made(panels: Sequence[Panel | None]) -> list[Panel]:
    return [panel for panel in panels if panel is not None]


def _largest(lines: Sequence[Points]) -> Points:
    """Maximum of several curves at every x of any of them."""
    best: dict[float, float] = {}
    for x, value in (point for line in lines for point in line):
        best[x] = max(value, best.get(x, value))
    return sorted(best.items())


def standing(run: Run) -> str:
    """Current position of an unfinished run."""
    said = (
        "This run has not finished: there is no results.json yet, so this page is built from metrics.jsonl and "
        "recipe.toml as they are now."
    )
    for name, rows in reversed(run.metrics.items()):
        if name in run.steps or not run.steps:
            of = f" of {run.steps[name]:,}" if name in run.steps else ""
            place = list(run.steps).index(name) + 1 if name in run.steps else 0
            which = f" ({place} of {len(run.steps)} trained stages)" if len(run.steps) > 1 and place else ""
            return f"{said} It stands at step {rows[-1]['step']:,}{of} of {name}{which}."
    return said


def training_sentence(run: Run) -> str:
    """How much text the stages read."""
    stages = [stage_curves(run, stage.name) for stage in run.results.stages]
    counted = [stage for stage in stages if stage.axis == TOKENS]
    if not counted:
        return ""
    steps, tokens = sum(stage.length[0] for stage in counted), sum(stage.length[1] for stage in counted)
    return f"It was trained on {tokens:,.0f} tokens in {steps:,.0f} steps."


def training_tiles(run: Run) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the most wanted numbers of a training run: the last ones of the last stage that has
    them. Empty for stages that count no tokens."""
    stages = [stage_curves(run, stage.name) for stage in run.results.stages]
    if all(stage.axis != TOKENS for stage in stages):
        return []
    tiles = []
    wanted = (
        ("held_out_bits_per_byte", "held-out bits per byte", 1, "fewer are better"),
        ("loss", "loss", 50, "training, last {} steps"),
        ("tokens_per_second", "tokens per second", 50, "last {} steps"),
    )
    for key, label, count, remark in wanted:
        for stage in reversed(stages):
            if stage.get("reward"):
                continue
            if last := [value for _, value in stage.get(key)[-count:]]:
                tiles.append((label, number(sum(last) / len(last), 4), remark.format(len(last))))
                break
    if skipped := sum(len(stage.skipped) for stage in stages):
        tiles.append(("skipped steps", f"{skipped:,}", "not finite"))
    if jumps := sum(len(stage.get("loss_spike")) for stage in stages):
        tiles.append(("loss spikes", f"{jumps:,}", "see the log"))
    return tiles
