"""The card of an experiment: what ran, how to repeat it, its results, what they show and do not show, its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5.errors import MissingExtraError
from glm5.files import atomic_write
from glm5.obs.logs import get_logger
from glm5.report.figures import Curve, lines
from glm5.reproduce import verdict
from glm5.reproduce.plan import Experiment, Figure, Sizes

CARD = "card.md"


def write_card(experiment: Experiment, result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `card.md` and the figures that have data; returns their paths. Without matplotlib there are no figures."""
    figures = []
    for figure in experiment.figures:
        curves = figure_curves(experiment, figure, result)
        if not curves:
            continue
        path = folder / f"{figure.file}.svg"
        try:
            lines(path, curves, figure.x, figure.y, figure.title, logx=figure.logx)
        except MissingExtraError as error:
            get_logger(__name__).warning("The card has no figures: %s", error)
            break
        figures.append((path, figure.title))
    atomic_write(folder / CARD, card(experiment, result, [(path.name, title) for path, title in figures]))
    return [folder / CARD, *(path for path, _ in figures)]


def figure_curves(experiment: Experiment, figure: Figure, result: dict[str, Any]) -> list[Curve]:
    """One line per variant: a training curve with the range over seeds, or metrics by x with their intervals."""
    found = []
    for variant in experiment.variants:
        if figure.curve:
            data = result["curves"].get(figure.curve, {}).get(variant.name)
            if data:
                found.append(Curve(variant.title, data["step"], data["mean"], data["low"], data["high"]))
            continue
        places = _places(result["variants"][variant.name], figure.metric)
        if places:
            metrics = [result["variants"][variant.name][f"{figure.metric}@{x}"] for x in places]
            low, high = ([min(m["values"]) for m in metrics], [max(m["values"]) for m in metrics])
            found.append(Curve(variant.title, [float(x) for x in places], [m["mean"] for m in metrics], low, high))
    return found


def _places(metrics: dict[str, Any], name: str) -> list[int]:
    return sorted(int(metric.removeprefix(f"{name}@")) for metric in metrics if metric.startswith(f"{name}@"))


def card(experiment: Experiment, result: dict[str, Any], figures: list[tuple[str, str]]) -> str:
    """The text of `card.md`."""
    parts = [
        f"# {experiment.title}",
        f"Claim ({experiment.section}): {experiment.claim}",
        _headline(result),
        "## Questions",
        f"Differences are left minus right, paired by seed, with Student's {_level(result)} interval over seeds"
        f"{_shared(result)}. **Bold** questions "
        "decide about the claim. How many seeds would decide assumes that difference and spread stay as they are.",
        _questions(experiment, result),
        "## Variants",
        f"Means over {_number(len(result['seeds']), 'seed')}, lowest to highest seed in brackets.",
        _table(experiment, result),
        *(f"![{title}]({file})" for file, title in figures),
        "Bands span the seeds." if figures else "",
        "## What ran",
        _what(experiment, result),
        "## How to repeat it",
        f"```\n{command(result)}\n```",
        "One run is one process with one thread; a seed gives the same numbers again on the same software and machine.",
        "## What it does not show",
        "\n".join(f"- {text}" for text in (_scale(result), *experiment.limits)),
        _prompts(result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _level(result: dict[str, Any]) -> str:
    return f"{100 * verdict.confidence(_looks(result)):.3g} %"


def _looks(result: dict[str, Any]) -> int:
    """How often the result was looked at, with seeds added in between."""
    return 1 + len(result.get("added", []))


def _shared(result: dict[str, Any]) -> str:
    looks = _looks(result)
    return (
        f": seeds were added after a look at the others, and {looks} looks share an error of 5 %" if looks > 1 else ""
    )


def command(result: dict[str, Any]) -> str:
    """The command line that repeats the runs."""
    if result["quick"]:
        return f"glm5 reproduce {result['name']} --quick"
    return f"glm5 reproduce {result['name']} --seeds {max(result['seeds']) + 1} --steps {result['config']['steps']}"


def _headline(result: dict[str, Any]) -> str:
    if result["quick"]:
        return "This was a quick run: it shows that the experiment works, and nothing about the claim."
    return f"Verdict: **{result['verdict']['claim']} at this scale**."


def _questions(experiment: Experiment, result: dict[str, Any]) -> str:
    head = f"| Question | Metric | Left - right | Difference | {_level(result)} interval | Verdict |"
    rows = [head, "|---|---|---|--:|--:|---|"]
    for entry in result["verdict"]["questions"]:
        text = f"**{entry['question']}**" if entry["main"] else entry["question"]
        label = experiment.labels.get(entry["metric"], entry["metric"])
        sides = [
            f"({entry[side]} - {entry[f'{side}_base']})" if f"{side}_base" in entry else entry[side]
            for side in ("left", "right")
        ]
        if other := entry.get("right_metric"):
            sides[1] += f", {experiment.labels[other]}"
        found = entry["difference"]
        ends = "open: one seed" if found["low"] is None else f"{_signed(found['low'])} to {_signed(found['high'])}"
        if entry["expected"] == "equal":
            ends += f" (margin {entry['margin']:.3g})"
        elif entry.get("least"):
            ends += f" (of interest from {entry['least']:.3g})"
        rows.append(
            f"| {text} | {label} | {sides[0]} - {sides[1]} | {_signed(found['mean'])} | {ends} | {_verdict(entry)} |"
        )
    return "\n".join(rows)


def _where(machine: dict[str, Any]) -> str:
    processor: str = machine["processor"]
    return f"{machine['device']}, beside {processor}" if "device" in machine else processor


def _software(software: dict[str, Any]) -> str:
    return f"glm5 {software['glm5']}, torch {software['torch']}, Python {software['python']}"


def _verdict(entry: dict[str, Any]) -> str:
    found: str = entry["verdict"]
    more = verdict.outlook(entry)
    return f"{found}: {entry['note']}" if "note" in entry else f"{found}; {more}" if more else found


def _table(experiment: Experiment, result: dict[str, Any]) -> str:
    rows = [
        "| | " + " | ".join(variant.title for variant in experiment.variants) + " |",
        "|---|" + "--:|" * len(experiment.variants),
    ]
    for metric, label in experiment.labels.items():
        cells = [_cell(result["variants"][variant.name].get(metric)) for variant in experiment.variants]
        if any(cells):
            rows.append(f"| {label} | " + " | ".join(cell or "-" for cell in cells) + " |")
    tokens = " | ".join(f"{result['tokens'][variant.name]:,}" for variant in experiment.variants)
    seconds = [result["seconds"]["runs"][variant.name] for variant in experiment.variants]
    rows.append(f"| tokens trained in this run | {tokens} |")
    rows.append("| seconds per run | " + " | ".join(f"{sum(s) / len(s):,.0f}" for s in seconds) + " |")
    return "\n".join(rows)


def _cell(metric: dict[str, Any] | None) -> str:
    if metric is None:
        return ""
    low, high = min(metric["values"]), max(metric["values"])
    return _short(metric["mean"]) if low == high else f"{_short(metric['mean'])} ({_short(low)} to {_short(high)})"


def _what(experiment: Experiment, result: dict[str, Any]) -> str:
    sizes, corpus = result["config"], result["corpus"]
    software, machine = result["software"], result["machine"]
    model = ", ".join(f"{key} {value}" for key, value in sizes["model"].items())
    variants = "; ".join(
        f"{variant.title}" + (f" (continues {experiment.variant(variant.after).title})" if variant.after else "")
        for variant in experiment.variants
    )
    return "\n".join(
        [
            f"- Variants: {variants}. Seeds {', '.join(map(str, result['seeds']))}; variants with one seed start from "
            "the same random numbers and see the same batches in the same order.",
            f"- Model: preset nano with {model}.",
            f"- Training: {(experiment.training or _on_text)(sizes)} All numbers are under `config` in result.json.",
            f"- Text: {corpus.get('text') or _standard_library(corpus)}, vocabulary {corpus['vocab']}; SHA-256 of all "
            f"texts {corpus['sha256'][:16]}….",
            f"- On: {_where(machine)}, one thread per run; {_software(software)}; "
            f"{result['seconds']['total'] / 60:,.0f} minutes of all runs together.",
            *(
                f"- Seeds that were added after a look at those before: {', '.join(map(str, part['seeds']))}. On: "
                f"{_where(part['machine'])}; {_software(part['software'])}."
                for part in result.get("added", [])
            ),
        ]
    )


def _standard_library(corpus: dict[str, Any]) -> str:
    return (
        f"Python's standard library, {corpus['train_tokens']:,} tokens for training and {corpus['held_out_tokens']:,} "
        f"held out ({corpus['held_out_documents']} files, chosen by the hash of their path)"
    )


def _on_text(sizes: Sizes) -> str:
    return (
        f"{sizes['steps']:,} steps of {sizes['rows']} rows of {sizes['row_length']} tokens, Muon, peak rate "
        f"{sizes['lr']:g} to {sizes['final_lr']:g}, forward and backward in {sizes['dtype']}, Newton-Schulz in float32"
        f"{_variant_steps(sizes)}."
    )


def _variant_steps(sizes: dict[str, Any]) -> str:
    own = sizes.get("variant_steps")
    return f"; steps by variant: {', '.join(f'{variant} {steps:,}' for variant, steps in own.items())}" if own else ""


def _scale(result: dict[str, Any]) -> str:
    what, count = "texts", f"{result['corpus']['held_out_documents']} held-out files"
    if "problems" in result["config"]:
        what, count = "problems", f"{result['config']['problems']} held-out problems"
    return (
        f"Intervals are over {_number(len(result['seeds']), 'seed')} (initialisation and order of the data), not over "
        f"{what}: all variants are measured on the same {count}."
    )


def _prompts(result: dict[str, Any]) -> str:
    prompts = result["details"].get("prompts")
    if not prompts:
        return ""
    places: dict[str, list[int]] = {}
    for prompt in prompts:
        places.setdefault(prompt["path"], []).append(prompt["offset"])
    rows = [f"- {path}: {', '.join(map(str, sorted(offsets)))}" for path, offsets in sorted(places.items())]
    count = result["config"]["prompt_tokens"]
    return f"## Prompts\n\n{count} tokens each from these held-out files, at these offsets in tokens:\n\n" + "\n".join(
        rows
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _signed(value: float) -> str:
    return f"{value:+.3g}"
