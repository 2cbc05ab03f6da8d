"""Runs a suite: problems of its parts, played by a model, recorded one by one (see `record`), and summed up with
intervals. The same command goes on where it stopped; the settings are enough to repeat it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from glm5 import __version__
from glm5.config.load import load_recipe
from glm5.config.suite import Suite, SuitePart
from glm5.errors import ConfigError, DataError, nearest
from glm5.eval.players import Judge, Played, Player, Spot
from glm5.eval.record import NO_VERDICT, RESULT, SETTINGS, Record, judged_before, latest, read_answers
from glm5.eval.summary import Cell, Chosen, cells_of, contamination, difference, summary
from glm5.files import atomic_write, exclusive
from glm5.obs.logs import get_logger
from glm5.seeds import derive_seed
from glm5.tasks import make_family
from glm5.tasks.contract import Problem, held_out_problems
from glm5.tasks.dialogue.user import UserModel, UserProblem
from glm5.tasks.families import FAMILIES
from glm5.tasks.judged import UNJUDGED, graded_by, is_judged

SUITES = Path(__file__).with_name("suites")
SHOWN = 50_000
"""Characters of an episode's text in a record: its end."""

Advance = Callable[[str, int, int], None]
"""Called with what runs, answers done and answers in all."""
_log = get_logger(__name__)


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


def run_suite(
    suite: Suite,
    player: Player,
    *,
    seed: int = 0,
    folder: Path | None = None,
    told: Mapping[str, Any] | None = None,
    against: Path | None = None,
    judge: Judge | None = None,
    user: UserModel | None = None,
    trained_on: Iterable[str] | None = None,
    advance: Advance = lambda what, done, total: None,
) -> dict[str, Any]:
    """Play the suite and return its summary (see `summary`). `told` is what the settings say about the model. `against`
    is the record of an earlier evaluation: `difference` is then the change since, paired by problem.

    `judge` grades answers that no program can; `user` plays the users of dialogues. `trained_on` are the documents of
    the model's training, in which the problems are looked for: the result then has `contamination`.

    Raises DataError for a part without problems or a folder that is no record of this run, ConfigError for answers to
    judge without a judge and dialogues without a user, and what the player raises; answers up to there are kept in the
    folder.
    """
    before = None if against is None else _earlier(against, suite, told or {})

    def result(record: Record) -> dict[str, Any]:
        chosen = {cell.label: _problems(suite, cell, user) for cell in cells_of(suite)}
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


def _earlier(folder: Path, suite: Suite, told: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        written = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        settings = written["suite"]
        others = [role for role in ("judge", "user") if written["model"].get(role) != told.get(role)]
        same = all(settings[key] == suite.model_dump(mode="json")[key] for key in ("title", "measure"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder} is no record of an evaluation (--out writes one): {error}.") from error
    if not same:
        raise DataError(f"{folder} is the record of another suite, so nothing can be compared.")
    if others:
        raise DataError(f"{folder} had another {others[0]}, so nothing can be compared.")
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
            if "graded_by" in row and row["graded_by"] != graded_by(chosen[spot[0]][spot[1]]):
                raise DataError(
                    f"{record.folder}: other answers or tests grade {row['problem']} now than when it was played; put "
                    "the data back, or choose another folder."
                )
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
    """Add verdicts to the answers that have none yet, as further lines of the record. Raises EndpointError for a judge
    that has given none on several."""
    left = [(spot, chosen[spot[0]][spot[1]], row) for spot, row in done.items() if row.get("cause") == UNJUDGED]
    failed, found = 0, None
    for number, (spot, found) in enumerate(judge.judged(left), start=1):
        row = {key: value for key, value in done[spot].items() if key not in ("cause", "error")}
        if isinstance(found, str):
            failed += 1
            row |= {"cause": UNJUDGED, "error": f"{NO_VERDICT}{found}"}
        else:
            row |= found
        record.add(row)
        done[spot] = row
        advance("judge", number, len(left))
    if len(left) > 1 and failed == len(left) and not judged_before(record.rows):
        from glm5.agents.endpoint import EndpointError  # needs an extra

        raise EndpointError(f"The judge gave no verdict on any of {failed} answers; the last: {found}")


def _problems(suite: Suite, cell: Cell, user: UserModel | None) -> list[Problem]:
    options = {**cell.part.options, **cell.point}
    if "max_turns" in inspect.signature(FAMILIES[cell.part.family]).parameters:
        options.setdefault("max_turns", suite.max_turns)
    source = make_family(cell.part.family, **options)
    problems = held_out_problems(source, min(suite.problems, getattr(source, "size", suite.problems)), cell.label)
    if not problems:
        raise DataError(f"{cell.label} has no held-out problem; give it other options.")
    problems[0].prompt  # noqa: B018 - options that do not fit are an error of the command, not of the environment
    if not any(isinstance(problem, UserProblem) for problem in problems):
        return problems
    if user is None:
        raise ConfigError("A model must play the user of these dialogues: give the URL of one with --user.")
    return [p.with_user(user) if isinstance(p, UserProblem) else p for p in problems]


def _row(cell: Cell, place: int, repeat: int, problem: Problem, played: Played) -> dict[str, Any]:
    row: dict[str, Any] = {"cell": cell.label, "place": place, "repeat": repeat, "problem": problem.id}
    row |= {"key": problem.key, "reward": played.reward, "outcome": played.outcome.value}
    if graded := graded_by(problem):
        row["graded_by"] = graded
    if checks := getattr(problem, "checks", ()):
        row["checks"] = dict.fromkeys(checks, "fail") | played.detail.get("checks", {})
        if is_judged(problem):  # a frontend, which an answer that was cut off does not build
            row["built"] = bool(played.detail.get("built"))
    detail = {key: value for key, value in played.detail.items() if key not in row}
    if isinstance(text := detail.get("text"), str):
        detail["text"] = text[-SHOWN:]  # a long prompt can be made again
    return row | detail  # what is too much for a line is left out at its end
