"""The paper's tables from result files: scores with their intervals, beside the paper's numbers, which are copied."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError, nearest
from glm5.eval.record import RESULT, SETTINGS
from glm5.eval.suite import SUITES
from glm5.stats import t_quantile

TABLES = Path(__file__).with_name("tables.toml")
PAPER = "paper"


@dataclass(frozen=True)
class Scored:
    """One result: the row that it belongs to, who was measured, and the cell."""

    row: str
    model: str
    cell: str


def table_names() -> list[str]:
    return list(tomllib.loads(TABLES.read_text(encoding="utf-8")))


def table(name: str, records: Sequence[str]) -> str:
    """Table `name` in Markdown: the models of `records`, then the paper's columns, marked.

    A record is a folder of `glm5 eval --out` or a results file of lm-eval, alone or as ROW=PATH, where the suite does
    not tell the row. Raises ConfigError for an unknown table or row, DataError for a record that cannot be read.
    """
    known = tomllib.loads(TABLES.read_text(encoding="utf-8"))
    if name not in known:
        raise ConfigError(f'There is no table "{name}"; there are {", ".join(known)}.')
    rows: list[dict[str, Any]] = known[name]["rows"]
    found = [one for record in records for one in _read(record, rows)]
    models = list(dict.fromkeys(one.model for one in found))
    cells: dict[tuple[str, str], str] = {}
    for one in found:
        if (one.row, one.model) in cells:
            raise ConfigError(f'Two records are "{one.row}" of {one.model}; leave one out.')
        cells[one.row, one.model] = one.cell
    columns = [*models, *(f"{model} ({PAPER})" for model in known[name]["models"])]
    lines = [f"**{known[name]['title']}**", "", f"| | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for row in rows:
        own = [cells.get((row["name"], model), "") for model in models]
        lines.append(f"| {' | '.join([row['name'], *own, *map(_plain, row['paper'])])} |")
    lines += ["", f'Per cent, with 95 % intervals and numbers of problems. Columns marked "{PAPER}" are copied from '
              "arXiv:2602.15763; its settings, prompts and agents can differ from those here.", ""]  # fmt: skip
    return "\n".join(lines)


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1f}"


def _read(record: str, rows: Sequence[Mapping[str, Any]]) -> list[Scored]:
    """The scores of a record, each with its row."""
    given, _, where = record.rpartition("=")
    names = [row["name"] for row in rows]
    if given and given not in names:
        raise ConfigError(f'The table has no row "{given:.60}"{nearest(given, names)}: {", ".join(names)}.')
    path = Path(where)
    try:
        if path.is_dir():
            return _of_suite(path, given, rows)
        return _of_lm_eval(json.loads(path.read_text(encoding="utf-8")), given, rows)
    except ConfigError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        said = f"{path} is no record of `glm5 eval --out` and no results file of lm-eval"
        raise DataError(f"{said}: {error!r:.200}.") from None


def _of_suite(folder: Path, given: str, rows: Sequence[Mapping[str, Any]]) -> list[Scored]:
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    score = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    title, told = str(settings["suite"]["title"]), settings["model"]
    model = _text(str(told.get("name") or Path(str(told.get("checkpoint", "model"))).name))
    suites = dict.fromkeys(row["suite"] for row in rows if "suite" in row)
    titles = {tomllib.loads((SUITES / f"{suite}.toml").read_text("utf-8"))["title"]: suite for suite in suites}
    wanted = [
        row
        for row in rows
        if given in ("", row["name"]) and (given or row.get("suite", "") == titles.get(title, title))
    ]
    if not wanted:
        raise ConfigError(f'{folder} is of the suite "{title}", which has no row here; say "ROW={folder}".')
    found = []
    for row in wanted:
        part = _part(score, row)
        if part is not None:
            mean, low, high = (100 * float(part[key]) for key in ("score", "low", "high"))
            found.append(Scored(row["name"], model, _cell(mean, low, high, int(part["n"]))))
    return found


def _part(score: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    """The scores in a result that a row is about; None if the part was not played."""
    if "value" in row:
        return score.get(row["value"], {}).get(row.get("part", "all"))
    return score.get("cells", {}).get(row["part"]) if "part" in row else score


def _of_lm_eval(found: Mapping[str, Any], given: str, rows: Sequence[Mapping[str, Any]]) -> list[Scored]:
    model = _text(str(found.get("model_name") or found["config"]["model"]).rpartition("/")[2])
    scores = []
    for row in rows:
        task, metric = row.get("lm_eval", ("", ""))
        if task not in found["results"] or given not in ("", row["name"]):
            continue
        values = found["results"][task]
        key = next(key for key in values if key.partition(",")[0] == metric)
        error = values.get(f"{metric}_stderr,{key.partition(',')[2]}")
        counts = found.get("n-samples", {}).get(task, {}).get("effective", 0)
        score = 100 * float(values[key])
        half = 100 * float(error) * t_quantile(0.95, max(1, int(counts) - 1)) if isinstance(error, float) else 0.0
        scores.append(Scored(row["name"], model, _cell(score, score - half, score + half, int(counts))))
    if not scores:
        raise ConfigError(f"The file of lm-eval has no task of this table: {', '.join(list(found['results'])[:8])}.")
    return scores


def _cell(score: float, low: float, high: float, n: int) -> str:
    ends = f" ({max(0.0, low):.1f} to {min(100.0, high):.1f})" if high > low else ""
    return f"{score:.1f}{ends}" + (f", {n:,}" if n else "")


def _text(name: str) -> str:
    """A name that cannot break a table."""
    return "".join(c if c.isprintable() and c not in "|`<>" else " " for c in name)[:60].strip() or "model"
