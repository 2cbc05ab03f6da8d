"""What `glm5 plan` says about layouts: the best few, why others lose, and every tensor of the best."""

from __future__ import annotations

from collections import Counter
from typing import Any

from glm5.config.devices import PRODUCTS, RESERVED, Device
from glm5.config.keep_plan import keeps_text, with_keeps
from glm5.config.model import GLM5Config
from glm5.config.parameters import ENDS, learns, parameters
from glm5.config.recipe import GradientStage
from glm5.config.step_memory import RankStep, Setting
from glm5.config.step_time import OVERLAPPED
from glm5.launch.layouts import (
    Candidate,
    Found,
    Plan,
    base_setting,
    search,
    setting_of,
)

Report = dict[str, Any]

ASSUMED = (
    f"{RESERVED:.0%} of the memory is kept free; links reach their data sheet's rate; gathers, sums and pipeline sends "
    "overlap with products, rows of experts and keys of rows do not; loads of experts and of rows are even. Tensor "
    "parallelism does not exist in training, so no layout has it"
)


def plan_layouts(
    config: GLM5Config,
    stage: GradientStage,
    gpus: int,
    device: Device,
    mfu: float = PRODUCTS,
    price: float | None = None,
    wanted: int = 3,
) -> Report:
    """The report of `search`. `price`: of one device and hour."""
    found, rows, base = search(config, stage, gpus, device, mfu, wanted), stage.rows, base_setting(config, stage, gpus)
    return {
        "gpus": gpus,
        "rows": rows,
        "row_length": base.forward.length,
        "assumed": {"products": mfu, "reserved": RESERVED, "text": ASSUMED},
        "legal": found.legal,
        "best": [_entry(config, base, plan, gpus, rows, device, price) for plan in found.best],
        "faster_but_too_large": [
            {"layout": vars(plan.candidate), "name": plan.candidate.name, "seconds_at_least": plan.seconds}
            | {"problem": plan.problem}
            for plan in found.faster[:wanted]
        ],
        "slower": [
            {"layout": vars(one), "name": one.name, "seconds_at_least": seconds}
            for one, seconds in found.slower[:wanted]
        ],
        "too_large": _refused(found),
    }


def _refused(found: Found) -> list[Report]:
    """Of layouts that never fit: how many ways to divide the weights each tensor rules out, and the nearest one."""
    names = Counter(_tensor(plan) for plan in found.refused)
    nearest = {}
    for plan in sorted(found.refused, key=lambda plan: plan.moment.bytes, reverse=True):
        nearest[_tensor(plan)] = plan
    return [
        {"tensor": name, "ways": ways, "nearest": nearest[name].candidate.name, "problem": nearest[name].problem}
        for name, ways in names.most_common()
    ]


def _tensor(plan: Plan) -> str:
    return plan.problem.partition(" (")[0]


def _entry(
    config: GLM5Config, base: Setting, plan: Plan, gpus: int, rows: int, device: Device, price: float | None
) -> Report:
    tokens = rows * base.forward.length
    setting = with_keeps(setting_of(base, plan.candidate, gpus), plan.keeps)
    step = RankStep(config, setting, plan.rank)
    assert plan.time is not None
    cost = {} if price is None else {"cost_per_million_tokens": gpus * price * plan.seconds / 3600 / (tokens / 1e6)}
    return {
        "layout": vars(plan.candidate),
        "name": plan.candidate.name,
        "seconds_per_step": plan.seconds,
        "tokens_per_second": tokens / plan.seconds,
        "bubble": plan.bubble,
        "computing": plan.time.computing,
        "waiting": plan.time.waiting,
        "hidden": plan.time.hidden,
        **cost,
        "keeps": [{"layer": i, "recompute": mode, "offload": away} for i, (mode, away) in enumerate(plan.keeps)],
        "peak_bytes": plan.moment.bytes,
        "peak_at": f"{plan.moment.phase}, {plan.moment.where}",
        "stage": plan.rank,
        "held": plan.moment.held,
        "tensors": tensors(step),
        "traffic": [
            {"kind": t.kind, "what": t.what, "bytes": t.bytes, "ranks": t.ranks, "seconds": t.seconds(device)}
            | {"link": "between nodes" if t.between_nodes(device) else "within a node"}
            | {"overlapped": t.what in OVERLAPPED or t.kind == "send"}
            for t in plan.traffic
        ],
    }


def tensors(step: RankStep) -> dict[str, dict[str, int]]:
    """Bytes of every tensor that a process holds through the step, and of what each layer keeps for backward."""
    s = step.setting
    ends = {"embed": ("embeds", "mtp"), "norm": ("norm",), "lm_head": ("head",)}
    found: dict[str, dict[str, int]] = {"weights": {}, "gradients": {}, "optimizer": {}}
    for p in parameters(step.config):
        if p.layer == ENDS:
            part = next(fields for name, fields in ends.items() if name in p.name)
            here = any(getattr(span, name) for span in step.spans for name in part)
        else:
            here = p.layer in step.layers
        if not here:
            continue
        size = 4 * p.held(s.ranks, s.ep)
        found["weights"][p.name] = size
        if learns(p, s.trains):
            adam = s.optimizer == "adamw" or p.layer == ENDS or len(p.shape) < 2
            found["gradients"][p.name] = size
            found["optimizer"][p.name] = size * (1 + adam)
    found["activations of a micro-batch"] = {
        name: size for (name, _, _), size in zip(step.kept, step.on_device, strict=True)
    }
    return found


def layout_table(report: Report, assumed: bool = True) -> str:
    """The report as text, with or without what is assumed."""
    said = f" Assumed: products reach {report['assumed']['products']:.0%} of the peak rate; {ASSUMED}."
    lines = [
        f"Layouts of {report['rows']:,} rows of {report['row_length']:,} tokens on {report['gpus']} devices, "
        f"predicted, not measured.{said if assumed else ''}",
        f"{'':<46}{'s/step':>8}{'tokens/s':>11}{'peak GB':>9}{'bubble':>8}{'compute':>9}{'waiting':>9}{'hidden':>8}",
    ]
    for entry in report["best"]:
        lines.append(
            f"{entry['name']:<46}{entry['seconds_per_step']:>8,.1f}{entry['tokens_per_second']:>11,.0f}"
            f"{entry['peak_bytes'] / 1e9:>9,.1f}{entry['bubble']:>8.1%}{entry['computing']:>9,.1f}"
            f"{entry['waiting']:>9,.1f}{entry['hidden']:>8,.1f}"
        )
        lines.append(f"  keeps: {keeps_text([(one['recompute'], one['offload']) for one in entry['keeps']])}")
        if "cost_per_million_tokens" in entry:
            lines.append(f"  cost: {entry['cost_per_million_tokens']:,.2f} per million tokens")
    if not report["best"]:
        lines.append(f"None of the {report['legal']:,} legal layouts fits.")
    else:
        lines += _largest(report["best"][0])
    for entry in report["faster_but_too_large"]:
        lines.append(f"{entry['name']:<46}{entry['seconds_at_least']:>8,.1f} or more; {entry['problem']}")
    for entry in report["slower"]:
        lines.append(f"{entry['name']:<46}{entry['seconds_at_least']:>8,.1f} or more: slower")
    for entry in report["too_large"]:
        ways = "way" if entry["ways"] == 1 else "ways"
        lines.append(
            f"{entry['ways']} {ways} to divide the weights never fit; nearest {entry['nearest']}: {entry['problem']}"
        )
    return "\n".join(lines)


def _largest(entry: Report) -> list[str]:
    """Memory by tensor group and traffic of the best layout."""
    held = sorted(entry["held"].items(), key=lambda item: -item[1])
    memory = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in held if size >= 5e7)
    traffic = ", ".join(
        f"{t['what']} {t['bytes'] / 1e9:,.0f} GB {t['link']}, {t['seconds']:,.1f} s" for t in entry["traffic"]
    )
    return [f"The first, GB at its peak ({entry['peak_at']}): {memory}.", f"Its transfers per step: {traffic}."]


__all__ = ["Candidate", "layout_table", "plan_layouts", "tensors"]
