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
from glm5.stats import Interval, mean_of_groups, t_quantile

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
    not tell the row; or ROW=PATH,PATH with logs of Inspect AI in JSON, whose tasks are averaged. Raises ConfigError
    for an unknown table or row, DataError for a record that cannot be read.
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
    substitutes = [row["name"] for row in rows if row.get("own")]
    for row in rows:
        own = [cells.get((row["name"], model), "") for model in models]
        own = [f"{cell} \\*" if cell and row["name"] in substitutes else cell for cell in own]
        lines.append(f"| {' | '.join([row['name'], *own, *map(_plain, row['paper'])])} |")
    note = f'Per cent, if no unit is given, with 95 % intervals and numbers of problems. Columns marked "{PAPER}" are '
    note += "copied from arXiv:2602.15763; its settings, prompts and agents can differ from those here."
    if any(row in substitutes for row, _ in cells):
        note += " \\* On problems of our own, not on those of the benchmark: not to be compared with the paper's."
    lines += ["", note, ""]
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
        found = [json.loads(Path(one).read_text(encoding="utf-8")) for one in where.split(",")]
        if all("eval" in log for log in found):
            return [_of_inspect(found, given)]
        return _of_lm_eval(found[0], given, rows)
    except ConfigError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        said = f"{path} is no record of `glm5 eval --out`, no results file of lm-eval and no log of Inspect AI"
        raise DataError(f"{said}: {error!r:.200}.") from None


def _of_suite(folder: Path, given: str, rows: Sequence[Mapping[str, Any]]) -> list[Scored]:
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    score = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    title, told = str(settings["suite"]["title"]), settings["model"]
    model = _text(str(told.get("name") or Path(str(told.get("checkpoint", "model"))).name))
    if given:
        wanted = [row for row in rows if row["name"] == given]
    else:
        suites = {row["suite"] for row in rows if "suite" in row}
        suite = next((suite for suite in suites if _title(suite) == title), None)
        wanted = [row for row in rows if suite is not None and row.get("suite") == suite]
    if not wanted:
        raise ConfigError(f'{folder} is of the suite "{title}", which has no row here; say "ROW={folder}".')
    parts = [(row["name"], part) for row in wanted if (part := _part(score, row)) is not None]
    if not parts:
        raise ConfigError(f"{folder} has no result for {wanted[0]['name']}: that part of the suite was not played.")
    return [Scored(name, model, _amount(part)) for name, part in parts]


def _title(suite: str) -> str:
    return str(tomllib.loads((SUITES / f"{suite}.toml").read_text("utf-8"))["title"])


def _part(score: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    """The scores in a result that a row is about; None if the part was not played."""
    if "value" in row:
        return score.get(row["value"], {}).get(row.get("part", "all"))
    return score.get("cells", {}).get(row["part"]) if "part" in row else score


def _amount(score: Mapping[str, Any]) -> str:
    """The cell of a score, which is a share unless it has a unit."""
    count = int(score["n"])
    if (unit := score.get("unit", "")) != "":
        ends = [f"{unit}{score[key]:,.0f}" for key in ("low", "high") if score[key] is not None]
        spread = f" ({' to '.join(ends)})" if len(ends) == 2 else " (no interval)"
        return _text(f"{unit}{score['score']:,.0f}{spread}, {count}")
    mean, low, high = (100 * float(score[key]) for key in ("score", "low", "high"))
    return _cell(mean, low, high, count)


def _of_inspect(logs: Sequence[Mapping[str, Any]], given: str) -> Scored:
    """The mean accuracy of the tasks of Inspect AI's logs, each counted alike."""
    tasks, models = [], {str(log["eval"]["model"]) for log in logs}
    if not given or len(models) > 1:
        raise ConfigError('Logs of Inspect AI need a row, "ROW=LOG.json,LOG.json", and must be of one model.')
    for log in logs:
        if log["status"] != "success":
            raise ConfigError(f"The log of {log['eval']['task']} is of a run that did not end ({log['status']}).")
        metrics = next(one["metrics"] for one in log["results"]["scores"] if "accuracy" in one["metrics"])
        count, value = int(log["results"]["completed_samples"]), float(metrics["accuracy"]["value"])
        half = t_quantile(0.95, max(1, count - 1)) * float(metrics["stderr"]["value"])
        tasks.append(Interval(value, value - half, value + half, count))
    mean = mean_of_groups(tasks)
    cell = _cell(100 * mean.value, 100 * mean.low, 100 * mean.high, int(mean.n))
    return Scored(given, _text(models.pop().rpartition("/")[2]), cell)


def _of_lm_eval(found: Mapping[str, Any], given: str, rows: Sequence[Mapping[str, Any]]) -> list[Scored]:
    model = _text(str(found.get("model_name") or found["config"]["model"]).rpartition("/")[2])
    scores = []
    for row in rows:
        task, metric, *wanted = row.get("lm_eval", ("", ""))
        if task not in found["results"] or given not in ("", row["name"]):
            continue
        values = found["results"][task]
        keys = {key.partition(",")[2]: key for key in values if key.partition(",")[0] == metric}
        passed = _filter(task, list(keys), wanted)
        key, error = keys[passed], values.get(f"{metric}_stderr,{passed}")
        counts = found.get("n-samples", {}).get(task, {}).get("effective", 0)
        score = 100 * float(values[key])
        half = 100 * float(error) * t_quantile(0.95, max(1, int(counts) - 1)) if isinstance(error, int | float) else 0.0
        scores.append(Scored(row["name"], model, _cell(score, score - half, score + half, int(counts))))
    if not scores:
        raise ConfigError(f"The file of lm-eval has no task of this table: {', '.join(list(found['results'])[:8])}.")
    return scores


def _filter(task: str, found: Sequence[str], wanted: Sequence[str]) -> str:
    """The filter of lm-eval whose score counts: the row's, else "none", else the only one."""
    for name in (*wanted, "none", *(found if len(found) == 1 else ())):
        if name in found:
            return name
    held = f"several filters ({', '.join(found)}); leave one" if found else "no score of the row's metric"
    raise ConfigError(f"The file of lm-eval has {held}: {task:.60}.")


def _cell(score: float, low: float, high: float, n: int) -> str:
    ends = f" ({max(0.0, low):.1f} to {min(100.0, high):.1f})" if high > low else ""
    return f"{score:.1f}{ends}" + (f", {n:,}" if n else "")


def _text(name: str) -> str:
    """A name that cannot break a table."""
    return "".join(c if c.isprintable() and c not in "|`<>" else " " for c in name)[:60].strip() or "model"
