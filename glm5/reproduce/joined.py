"""A result with more seeds: those of a published result, and those that ran later, perhaps on another machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError
from glm5.reproduce import verdict
from glm5.reproduce.plan import Experiment

SAME = ("quick", "config", "corpus")
"""What both results must share."""
PART = ("seeds", "software", "machine")


def read_result(path: Path) -> dict[str, Any]:
    """A published result. Raises ConfigError if there is none, or it is damaged."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in (*SAME, *PART, "variants", "curves", "tokens", "seconds") if key not in found]
    except FileNotFoundError:
        raise ConfigError(f"--add: there is no {path} to add seeds to; leave --add out.") from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}.") from None
    if missing:
        raise ConfigError(f"{path} is damaged: it has no {missing[0]}.")
    return found


def check_same(earlier: Mapping[str, Any], plan: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError if a plan is not the one of the result that it would add to."""
    named = {"quick": plan["quick"], **plan["sizes"], "corpus": plan["corpus"]}
    before = {"quick": earlier["quick"], **earlier["config"], "corpus": earlier["corpus"]}
    if differs := [key for key in named | before if named.get(key) != before.get(key)]:
        raise ConfigError(
            f"{path} was made with another plan ({', '.join(differs)} differ), so its seeds cannot stay: leave --add "
            "out, or give the options that made it."
        )


def joined(experiment: Experiment, earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The result of all seeds, judged anew. `added` says which came later, and where they ran. Raises ConfigError if
    the two were not measured in the same way."""
    values: dict[str, dict[str, list[float]]] = {}
    for variant in experiment.variants:
        before, now = (result["variants"].get(variant.name, {}) for result in (earlier, later))
        if before.keys() != now.keys():
            raise ConfigError(f'The published result has other measurements of "{variant.title}"; leave --add out.')
        values[variant.name] = {metric: [*before[metric]["values"], *now[metric]["values"]] for metric in now}
    weights = len(earlier["seeds"]), len(later["seeds"])
    runs = {name: [*took, *later["seconds"]["runs"][name]] for name, took in earlier["seconds"]["runs"].items()}
    return {
        **later,
        **verdict.judged(experiment, values),
        "curves": _curves(earlier["curves"], later["curves"], weights),
        "details": earlier["details"],
        "tokens": earlier["tokens"],
        "software": earlier["software"],
        "machine": earlier["machine"],
        "seeds": [*earlier["seeds"], *later["seeds"]],
        "added": [*earlier.get("added", []), {key: later[key] for key in PART}],
        "seconds": {"total": sum(map(sum, runs.values())), "runs": runs},
    }


def _curves(earlier: dict[str, Any], later: dict[str, Any], weights: tuple[int, int]) -> dict[str, Any]:
    """Those that both have, as long as both are: means over all seeds, and the lowest and the highest of them."""
    n, m = weights
    return {
        name: {
            variant: {
                "step": [step for step, _ in zip(a["step"], b["step"])],
                "mean": [(n * x + m * y) / (n + m) for x, y in zip(a["mean"], b["mean"])],
                "low": [*map(min, a["low"], b["low"])],
                "high": [*map(max, a["high"], b["high"])],
            }
            for variant, a in earlier[name].items()
            if (b := later[name].get(variant)) is not None
        }
        for name in earlier.keys() & later.keys()
    }
