"""Runs a suite: problems of its parts, played by a model, recorded one by one, and summed up with intervals.

A record folder has `settings.json`, `episodes.jsonl` with one line per answer, and `result.json`. The same command goes
on where it stopped; the settings are enough to repeat it.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from glm5.config.load import load_recipe
from glm5.config.suite import Suite, SuitePart
from glm5.errors import ConfigError, DataError, nearest
from glm5.eval.players import Played, Player
from glm5.files import atomic_write, exclusive
from glm5.obs.logs import get_logger
from glm5.records import Outcome
from glm5.seeds import derive_seed
from glm5.stats import Interval, bounded_mean, mean_interval, mean_of_groups
from glm5.tasks import DistinctProblems, make_family
from glm5.tasks.contract import Problem
from glm5.tasks.families import FAMILIES
from glm5.tasks.trajectory_json import jsonable

SUITES = Path(__file__).with_name("suites")
SETTINGS, EPISODES, RESULT = "settings.json", "episodes.jsonl", "result.json"
DEPTHS = 5
"""Bins of the depths of needles."""
MOST_TEXT, SHOWN = 1 << 20, 50_000
"""Characters of a line, and of an episode's text in it: its end."""

Advance = Callable[[str, int, int], None]
"""Called with what runs, answers done and answers in all."""
_log = get_logger(__name__)


@dataclass(frozen=True)
class Cell:
    """One part of a suite at one point of its grid."""

    part: SuitePart
    point: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Unique in the suite."""
        return " ".join([self.part.name, *(f"{name}={value}" for name, value in self.point.items())])


def suite_names() -> list[str]:
    """Suites that come with glm5."""
    return sorted(path.stem for path in SUITES.glob("*.toml"))


def find_suite(name: str, options: Mapping[str, Any], **changes: Any) -> Suite:
    """The suite `name`: one that comes with glm5, a TOML file, or a task family.

    `options` are the family's. In a suite they go to every part; an option of its `grid` may be a list of values.
    `changes` replace fields of the suite, where not None. Raises ConfigError for an unknown suite.
    """
    changes = {key: value for key, value in changes.items() if value is not None}
    path = SUITES / f"{name}.toml"
    if name not in suite_names():
        path = Path(name)
    if path.suffix == ".toml":
        found = load_recipe(path, Suite)
        grid = {key: _listed(options.get(key, values)) for key, values in found.grid.items()}
        more = {key: value for key, value in options.items() if key not in grid}
        parts = [part.model_copy(update={"options": {**part.options, **more}}) for part in found.parts]
        changes = {"grid": grid, "parts": parts, **changes}
    elif name in FAMILIES:
        part = SuitePart(name=name, family=name, options=dict(options))
        found = Suite(title=name, max_tokens=48, max_turns=4, max_context=1024, parts=[part])
    else:
        known = [*suite_names(), *sorted(FAMILIES)]
        raise ConfigError(
            f'There is no suite "{name}"{nearest(name, known)}: it is one of {", ".join(known)}, or the path of a '
            ".toml file."
        )
    return found.model_copy(update=changes)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def with_tokenizer(suite: Suite, tokenizer: Path) -> Suite:
    """The suite, whose families that measure prompts in tokens do so with this tokenizer, unless they have one."""

    def told(part: SuitePart) -> SuitePart:
        takes = "tokenizer" in inspect.signature(FAMILIES[part.family]).parameters
        if not takes or "tokenizer" in part.options:
            return part
        return part.model_copy(update={"options": {**part.options, "tokenizer": str(tokenizer)}})

    return suite.model_copy(update={"parts": [told(part) for part in suite.parts]})


def cells_of(suite: Suite) -> list[Cell]:
    points = [dict(zip(suite.grid, values, strict=True)) for values in itertools.product(*suite.grid.values())]
    return [Cell(part, point) for point in points for part in suite.parts]


@dataclass
class Record:
    """Answers so far, on disk if there is a folder."""

    folder: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any]) -> Record:
        """Raises DataError for a folder with other settings, or with answers that cannot be read."""
        wanted, file = json.dumps(settings, indent=2, sort_keys=True) + "\n", folder / SETTINGS
        if not file.exists():
            if folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
                raise DataError(f"{folder} is no record of an evaluation; choose another folder for --out.")
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(file, wanted)
        elif file.read_text(encoding="utf-8") != wanted:
            raise DataError(f"{folder} has the answers of an evaluation with other settings; choose another folder.")
        rows, whole = read_answers(folder)
        if (episodes := folder / EPISODES).exists():
            with episodes.open("r+b") as handle:
                handle.truncate(whole)
        return cls(folder, rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.folder is not None:
            with (self.folder / EPISODES).open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(jsonable(row, MOST_TEXT)) + "\n")


def read_answers(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The answers of a record, and the bytes of the file that hold them: a last line that was cut off is none. Raises
    DataError for a line that is no answer."""
    rows: list[dict[str, Any]] = []
    whole, episodes = 0, folder / EPISODES
    for line in episodes.read_bytes().splitlines(keepends=True) if episodes.exists() else ():
        try:
            row = json.loads(line)
            kept = {"cell": str(row["cell"]), "problem": str(row["problem"]), "reward": float(row["reward"])}
            numbers = {"place": int(row["place"]), "repeat": int(row["repeat"])}
            rows.append({**row, **kept, **numbers, "outcome": Outcome(row["outcome"]).value})
        except (ValueError, KeyError, TypeError) as error:
            if line.endswith(b"\n"):
                raise DataError(f"{episodes}, line {len(rows) + 1}: not an answer ({error}).") from error
            break
        whole += len(line)
    return rows, whole


def run_suite(
    suite: Suite,
    player: Player,
    *,
    seed: int = 0,
    folder: Path | None = None,
    told: Mapping[str, Any] | None = None,
    against: Path | None = None,
    advance: Advance = lambda what, done, total: None,
) -> dict[str, Any]:
    """Play the suite and return its summary (see `summary`). `told` is what the settings say about the model. `against`
    is the record of an earlier evaluation: `difference` is then the change since, paired by problem.

    Raises DataError for a part without problems or a folder that is no record of this run, and what the player raises;
    answers up to there are kept in the folder.
    """
    before = None if against is None else _earlier(against, suite)
    if folder is None:
        return _run(suite, player, seed, Record(), advance, before)
    settings = {"suite": suite.model_dump(mode="json"), "seed": seed, "model": dict(told or {})}
    with exclusive(folder.with_name(f".{folder.name}.lock"), f"Another process writes {folder}; wait for it."):
        found = _run(suite, player, seed, Record.open(folder, settings), advance, before)
        atomic_write(folder / RESULT, json.dumps(found, indent=2) + "\n")
    return found


def _earlier(folder: Path, suite: Suite) -> list[dict[str, Any]]:
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["suite"]
        same = all(settings[key] == suite.model_dump(mode="json")[key] for key in ("title", "measure"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder} is no record of an evaluation (--out writes one): {error}.") from error
    if not same:
        raise DataError(f"{folder} is the record of another suite, so nothing can be compared.")
    return read_answers(folder)[0]


def _run(
    suite: Suite,
    player: Player,
    seed: int,
    record: Record,
    advance: Advance,
    before: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    cells = cells_of(suite)
    done = {(row["cell"], row["place"], row["repeat"]) for row in record.rows}
    chosen = {cell.label: _problems(suite, cell) for cell in cells}
    total = sum(map(len, chosen.values())) * suite.repeats
    for cell in cells:
        problems = chosen[cell.label]
        advance(cell.label, len(record.rows), total)
        for repeat in range(suite.repeats):
            left = [place for place in range(len(problems)) if (cell.label, place, repeat) not in done]
            drawn = derive_seed(seed, "suite", cell.label, repeat)
            for number, played in player.play([problems[place] for place in left], suite, cell.part, drawn):
                record.add(_row(cell, left[number], repeat, problems[left[number]].id, played))
                advance(cell.label, len(record.rows), total)
    found = summary(suite, record.rows)
    return found if before is None else {**found, "difference": difference(suite, record.rows, before)}


def _problems(suite: Suite, cell: Cell) -> list[Problem]:
    source = make_family(cell.part.family, **{**cell.part.options, **cell.point})
    found = DistinctProblems(source, "heldout").indices(suite.problems)
    if len(found) < suite.problems:
        _log.warning("%s has only %d distinct held-out problems, not %d.", cell.label, len(found), suite.problems)
    if not found:
        raise DataError(f"{cell.label} has no held-out problem; give it other options.")
    problems = [source.problem("heldout", index) for index in found]
    problems[0].prompt  # noqa: B018 - options that do not fit are an error of the command, not of the environment
    return problems


def _row(cell: Cell, place: int, repeat: int, problem: str, played: Played) -> dict[str, Any]:
    row: dict[str, Any] = {"cell": cell.label, "place": place, "repeat": repeat, "problem": problem}
    row |= {"reward": played.reward, "outcome": played.outcome.value}
    detail = {key: value for key, value in played.detail.items() if key not in row}
    if isinstance(text := detail.get("text"), str):
        detail["text"] = text[-SHOWN:]  # a long prompt can be made again
    return row | detail  # what is too much for a line is left out at its end


def summary(suite: Suite, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """score, low, high and n of the suite; the same per cell, per value of the grid, and by depth of needles.

    The repeats of a problem are averaged first, so n counts problems. The mean over cells counts each alike. `errors`
    counts failures of environments, `too_long` what did not fit into the context; both score 0. `needle_recall` by cell
    is the share of the needles' tokens that the indexers select, if it was measured.
    """
    scores: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    by_depth: dict[int, dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    selected: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        value = _score(suite, row)
        scores[row["cell"]][row["place"]].append(value)
        if isinstance(depth := row.get("depth"), float):
            by_depth[min(DEPTHS - 1, int(depth * DEPTHS))][row["cell"], row["place"]].append(value)
        if isinstance(share := row.get("needle_recall"), float):
            selected[row["cell"]].append(share)
    cells = cells_of(suite)
    means = {cell.label: _mean(scores[cell.label].values(), suite.repeats) for cell in cells}
    found: dict[str, Any] = _plain_interval(mean_of_groups(list(means.values())))
    if len(cells) > 1:
        found["cells"] = {label: _plain_interval(interval) for label, interval in means.items()}
    for name, values in suite.grid.items():
        if len(values) > 1:
            found[f"by_{name}"] = {
                str(value): _plain_interval(mean_of_groups([means[c.label] for c in cells if c.point[name] == value]))
                for value in values
            }
    if by_depth:
        found["by_depth"] = {
            f"{bin_ / DEPTHS:g} to {(bin_ + 1) / DEPTHS:g}": _plain_interval(_mean(groups.values(), suite.repeats))
            for bin_, groups in sorted(by_depth.items())
        }
    if selected:
        found["needle_recall"] = {label: fmean(shares) for label, shares in selected.items()}
    if errors := sum(row["outcome"] == Outcome.ENV_ERROR for row in rows):
        found["errors"] = errors
    if too_long := sum(row.get("cut") == "context" for row in rows):
        found["too_long"] = too_long
    if suite.note:
        found["note"] = suite.note
    return found


def difference(suite: Suite, now: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Change of the score from `before` to `now`, paired by problem, with its 95 % interval; n counts the problems that
    both have. Raises DataError if there are none."""
    ours, theirs = (
        {key: fmean(answers) for key, answers in _by_problem(suite, rows).items()} for rows in (now, before)
    )
    cells: dict[str, list[float]] = defaultdict(list)
    for key in sorted(ours.keys() & theirs.keys()):
        cells[key[0]].append(ours[key] - theirs[key])
    if not cells:
        raise DataError("The two evaluations have no problem in common.")
    return _plain_interval(mean_of_groups([mean_interval(values, bounds=(-1.0, 1.0)) for values in cells.values()]))


def _by_problem(suite: Suite, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """Scores of the answers by cell and problem."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        found[row["cell"], row["problem"]].append(_score(suite, row))
    return found


def _score(suite: Suite, row: Mapping[str, Any]) -> float:
    return float(row["outcome"] == Outcome.SOLVED) if suite.measure == "solved" else min(1.0, max(0.0, row["reward"]))


def _mean(problems: Any, repeats: int) -> Interval:
    values = [fmean(answers) for answers in problems]
    return bounded_mean(values, most=len(values) * repeats) if repeats > 1 else bounded_mean(values)


def _plain_interval(interval: Interval) -> dict[str, float]:
    return {"score": interval.value, "low": interval.low, "high": interval.high, "n": int(interval.n)}
