"""Runs a suite: problems of its parts, played by a model, recorded one by one (see `record`), and summed up with
intervals. The same command goes on where it stopped; the settings are enough to repeat it.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from glm5 import __version__
from glm5.config.load import load_recipe
from glm5.config.suite import Suite, SuitePart
from glm5.errors import ConfigError, DataError, nearest
from glm5.eval.contamination import CLEAN, SEEN, Overlap
from glm5.eval.players import Judge, Played, Player, Spot
from glm5.eval.record import RESULT, SETTINGS, Record, latest, read_answers
from glm5.files import atomic_write, exclusive
from glm5.obs.logs import get_logger
from glm5.records import Outcome
from glm5.seeds import derive_seed
from glm5.stats import Interval, bounded_mean, clustered_share, mean_of_groups, paired_rewards
from glm5.tasks import make_family
from glm5.tasks.contract import Problem, held_out_problems
from glm5.tasks.families import FAMILIES
from glm5.tasks.questions import UNJUDGED, is_judged

SUITES = Path(__file__).with_name("suites")
DEPTHS = 5
"""Bins of the depths of needles."""
SHOWN = 50_000
"""Characters of an episode's text in a record: its end."""

Chosen = Mapping[str, Sequence[Problem]]
"""The problems of each cell, by its label."""
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


def find_suite(name: str, options: Mapping[str, Any], only: Sequence[str] = (), **changes: Any) -> Suite:
    """The suite `name`: one that comes with glm5, a TOML file, or a task family.

    `options` are the family's. In a suite they go to every part; an option of its `grid` may be a list of values.
    `only` chooses parts by name. `changes` replace fields of the suite, where not None; `max_tokens` also those of the
    parts. Raises ConfigError for an unknown suite or part, an option that parts set themselves, and what does not fit.
    """
    changes = {key: value for key, value in changes.items() if value is not None}
    path = SUITES / f"{name}.toml"
    if name not in suite_names():
        path = Path(name)
    if path.suffix == ".toml":
        found = load_recipe(path, Suite)
        grid = {key: _listed(options.get(key, values)) for key, values in found.grid.items()}
        more = {key: value for key, value in options.items() if key not in grid}
        for part in found.parts:
            if own := sorted(more.keys() & part.options.keys()):
                raise ConfigError(f'{name}: the part "{part.name}" sets {own[0]} itself; choose parts with --part.')
        parts = [part.model_copy(update={"options": {**part.options, **more}}) for part in found.parts]
        changes = {"grid": grid, **changes}
    elif name in FAMILIES:
        parts = [SuitePart(name=name, family=name, options=dict(options))]
        found = Suite(title=name, max_tokens=48, max_turns=4, max_context=1024, parts=parts)
    else:
        known = [*dict.fromkeys((*suite_names(), *sorted(FAMILIES)))]
        raise ConfigError(
            f'There is no suite "{name}"{nearest(name, known)}: it is one of {", ".join(known)}, or the path of a '
            ".toml file."
        )
    if unknown := sorted(set(only) - {part.name for part in parts}):
        raise ConfigError(f'{name}: no part "{unknown[0]}"; there are {", ".join(part.name for part in parts)}.')
    parts = [part for part in parts if not only or part.name in only]
    if "max_tokens" in changes:
        parts = [part.model_copy(update={"max_tokens": None}) for part in parts]
    try:
        return Suite.model_validate(found.model_dump() | {"parts": [part.model_dump() for part in parts]} | changes)
    except ValidationError as error:
        first = error.errors()[0]
        said = [".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")]
        raise ConfigError(f"{name}: {': '.join(filter(None, said))}.") from None


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


def fingerprint(checkpoint: Path) -> str:
    """A hash of a checkpoint's configuration and of the names, sizes and times of its weights."""
    files = sorted((*checkpoint.glob("*.safetensors"), checkpoint / "config.json", checkpoint / "tokenizer.json"))
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16]


def cells_of(suite: Suite) -> list[Cell]:
    points = [dict(zip(suite.grid, values, strict=True)) for values in itertools.product(*suite.grid.values())]
    return [Cell(part, point) for point in points for part in suite.parts]


def run_suite(
    suite: Suite,
    player: Player,
    *,
    seed: int = 0,
    folder: Path | None = None,
    told: Mapping[str, Any] | None = None,
    against: Path | None = None,
    judge: Judge | None = None,
    trained_on: Iterable[str] | None = None,
    advance: Advance = lambda what, done, total: None,
) -> dict[str, Any]:
    """Play the suite and return its summary (see `summary`). `told` is what the settings say about the model. `against`
    is the record of an earlier evaluation: `difference` is then the change since, paired by problem.

    `judge` grades answers of the grader "judge". `trained_on` are the documents of the model's training, in which the
    problems are looked for: the result then has `contamination`.

    Raises DataError for a part without problems or a folder that is no record of this run, ConfigError for answers to
    judge without a judge, and what the player raises; answers up to there are kept in the folder.
    """
    before = None if against is None else _earlier(against, suite, (told or {}).get("judge"))

    def result(record: Record) -> dict[str, Any]:
        chosen = {cell.label: _problems(suite, cell) for cell in cells_of(suite)}
        rows = _play(suite, chosen, player, seed, record, judge, advance)
        found = summary(suite, rows)
        if trained_on is not None:
            found["contamination"] = contamination(suite, chosen, rows, trained_on)
        return found if before is None else {**found, "difference": difference(suite, rows, before)}

    if folder is None:
        return result(Record())
    made = {"glm5": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    settings = {"suite": suite.model_dump(mode="json"), "seed": seed, "model": dict(told or {}), "made with": made}
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder.parent / f".{folder.name}.lock", f"Another process writes {folder}; wait for it."):
            found = result(Record.open(folder, settings))
            atomic_write(folder / RESULT, json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return found


def _earlier(folder: Path, suite: Suite, judge: Any) -> list[dict[str, Any]]:
    try:
        written = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        settings, graded_by = written["suite"], written["model"].get("judge")
        same = all(settings[key] == suite.model_dump(mode="json")[key] for key in ("title", "measure"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder} is no record of an evaluation (--out writes one): {error}.") from error
    if not same:
        raise DataError(f"{folder} is the record of another suite, so nothing can be compared.")
    if graded_by != judge:
        raise DataError(f"{folder} was graded by another judge, so nothing can be compared.")
    return latest(read_answers(folder)[0])


def _play(
    suite: Suite, chosen: Chosen, player: Player, seed: int, record: Record, judge: Judge | None, advance: Advance
) -> list[dict[str, Any]]:
    """Play what the record lacks; returns the answers of the suite's problems."""
    cells = cells_of(suite)
    if judge is None and any(is_judged(problem) for problems in chosen.values() for problem in problems):
        raise ConfigError("A model must say whether these answers are right: give the URL of one with --judge.")
    wanted = {(cell, place): p.key for cell, problems in chosen.items() for place, p in enumerate(problems)}
    done: dict[Spot, dict[str, Any]] = {}
    for row in latest(record.rows):
        spot = row["cell"], row["place"]
        if spot in wanted and 0 <= row["repeat"] < suite.repeats:
            if row["key"] != wanted[spot]:
                raise DataError(f"{record.folder}: {row['problem']} is another problem now; choose another folder.")
            done[*spot, row["repeat"]] = row
    total = len(wanted) * suite.repeats
    for cell in cells:
        problems = list(enumerate(chosen[cell.label]))
        advance(cell.label, len(done), total)
        for repeat in range(suite.repeats):
            left = [(place, problem) for place, problem in problems if (cell.label, place, repeat) not in done]
            drawn = derive_seed(seed, "suite", cell.label, repeat)
            for place, played in player.play(left, suite, cell.part, drawn):
                row = _row(cell, place, repeat, problems[place][1], played)
                record.add(row)
                done[cell.label, place, repeat] = row
                advance(cell.label, len(done), total)
    if judge is not None:
        _judge(judge, chosen, done, record, advance)
    return list(done.values())


def _judge(
    judge: Judge,
    chosen: Chosen,
    done: dict[Spot, dict[str, Any]],
    record: Record,
    advance: Advance,
) -> None:
    """Add verdicts to the answers that have none yet, as further lines of the record."""
    left = [(spot, chosen[spot[0]][spot[1]], row) for spot, row in done.items() if row.get("cause") == UNJUDGED]
    for number, (spot, found) in enumerate(judge.judged(left), start=1):
        row = {key: value for key, value in done[spot].items() if key not in ("cause", "error")}
        if isinstance(found, str):
            row |= {"cause": UNJUDGED, "error": f"the judge gave no verdict: {found}"}
        else:
            row |= found
        record.add(row)
        done[spot] = row
        advance("judge", number, len(left))


def _problems(suite: Suite, cell: Cell) -> list[Problem]:
    options = {**cell.part.options, **cell.point}
    if "max_turns" in inspect.signature(FAMILIES[cell.part.family]).parameters:
        options.setdefault("max_turns", suite.max_turns)
    source = make_family(cell.part.family, **options)
    problems = held_out_problems(source, min(suite.problems, getattr(source, "size", suite.problems)), cell.label)
    if not problems:
        raise DataError(f"{cell.label} has no held-out problem; give it other options.")
    problems[0].prompt  # noqa: B018 - options that do not fit are an error of the command, not of the environment
    return problems


def _row(cell: Cell, place: int, repeat: int, problem: Problem, played: Played) -> dict[str, Any]:
    row: dict[str, Any] = {"cell": cell.label, "place": place, "repeat": repeat, "problem": problem.id}
    row |= {"key": problem.key, "reward": played.reward, "outcome": played.outcome.value}
    if checks := getattr(problem, "checks", ()):
        row["checks"] = dict.fromkeys(checks, "fail") | played.detail.get("checks", {})
        if is_judged(problem):  # a frontend, which an answer that was cut off does not build
            row["built"] = bool(played.detail.get("built"))
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
        if isinstance(depth := row.get("depth"), float) and 0.0 <= depth <= 1.0:
            by_depth[min(DEPTHS - 1, int(depth * DEPTHS))][row["cell"], row["place"]].append(value)
        if isinstance(share := row.get("needle_recall"), float) and 0.0 <= share <= 1.0:
            selected[row["cell"]].append(share)
    cells = cells_of(suite)
    means = {cell.label: _mean(scores[cell.label].values(), suite.repeats) for cell in cells}
    found: dict[str, Any] = mean_of_groups(list(means.values())).plain()
    checked = any("checks" in row for row in rows)
    if len(cells) > 1 or checked:
        found["cells"] = {label: interval.plain() for label, interval in means.items()}
    if checked:
        found |= _checks(rows)
    for name, values in suite.grid.items():
        if len(values) > 1:
            found[f"by_{name}"] = {
                str(value): mean_of_groups([means[c.label] for c in cells if c.point[name] == value]).plain()
                for value in values
            }
    if by_depth:
        found["by_depth"] = {
            f"{bin_ / DEPTHS:g} to {(bin_ + 1) / DEPTHS:g}": _mean(groups.values(), suite.repeats).plain()
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


def _checks(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of problems with several checks: the share of `checks` that passed, whose interval knows that those of a problem
    go together, by cell too, and of frontends the share that was `built`. `n` counts checks, and problems if built.
    A check without a verdict did not pass."""
    found: dict[str, Any] = {"checks": {}, "built": {}}
    for label in ["", *dict.fromkeys(row["cell"] for row in rows)]:
        mine = [row for row in rows if label in ("", row["cell"]) and "checks" in row]
        problems: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
        for row in mine:
            problems[row["cell"], row["place"]].append(row)
        passed, totals = (
            [sum(count(row["checks"]) for row in group) for group in problems.values()]
            for count in (lambda checks: sum(one == "pass" for one in checks.values()), len)
        )
        found["checks"][label or "all"] = clustered_share(passed, totals).plain()
        if any("built" in row for row in mine):
            built = [fmean(bool(row.get("built")) for row in group) for group in problems.values()]
            found["built"][label or "all"] = bounded_mean(built).plain()
    unjudged = sum(one == "error" for row in rows for one in row.get("checks", {}).values())
    return {key: value for key, value in found.items() if value} | ({"unjudged": unjudged} if unjudged else {})


def contamination(
    suite: Suite, chosen: Chosen, rows: Sequence[Mapping[str, Any]], documents: Iterable[str]
) -> dict[str, Any]:
    """How many problems were seen in `documents`, and the scores of those that were and were not (see
    `glm5.eval.contamination`)."""
    texts = {
        f"{label}/{place}": getattr(problem, "text", "") or problem.prompt
        for label, problems in chosen.items()
        for place, problem in enumerate(problems)
    }
    overlap = Overlap(texts)
    overlap.read(documents)
    shares = overlap.shares()
    found: dict[str, Any] = {"documents": overlap.documents, "too_short": sum(v is None for v in shares.values())}
    for name, wanted in (("new", lambda share: share < CLEAN), ("seen", lambda share: share >= SEEN)):
        groups: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            share = shares[f"{row['cell']}/{row['place']}"]
            if share is not None and wanted(share):
                groups[f"{row['cell']}/{row['place']}"].append(_score(suite, row))
        found[name] = _mean(groups.values(), suite.repeats).plain() if groups else {"n": 0}
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
    return mean_of_groups([paired_rewards(values) for values in cells.values()]).plain()


def _by_problem(suite: Suite, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """Scores of the answers by cell and content of the problem."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        found[row["cell"], row["key"]].append(_score(suite, row))
    return found


def _score(suite: Suite, row: Mapping[str, Any]) -> float:
    return float(row["outcome"] == Outcome.SOLVED) if suite.measure == "solved" else min(1.0, max(0.0, row["reward"]))


def _mean(problems: Any, repeats: int) -> Interval:
    values = [fmean(answers) for answers in problems]
    return bounded_mean(values, most=len(values) * repeats if repeats > 1 else math.inf)
