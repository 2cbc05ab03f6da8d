"""Which candidates are tasks. The order of the runs is fixed: the fixed state three times (tests that do not pass each
time are left out, ids pinned), the bug twice, the same test files once without it, then the written task: its solution
scores 1, no change scores 0.

A test fails if it failed, ended in an error or is missing although the fixed state collects it.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.errors import DataError
from glm5.sandbox.environment import NamespaceEnvironment
from glm5.tasks.swe.attacks import QUICK, passing_cheats
from glm5.tasks.swe.candidate import Candidate, Repository
from glm5.tasks.swe.copies import fix_is_elsewhere
from glm5.tasks.swe.driver import APP, Driver, TestRun, open_room, spec_of
from glm5.tasks.swe.folder import read_tests, write_folder
from glm5.tasks.swe.grading import grade
from glm5.tasks.swe.impact import reached
from glm5.tasks.swe.languages import test_edits
from glm5.tasks.swe.languages.canaries import canary
from glm5.tasks.swe.test_files import Name, sabotaged, split_id, without_tests
from glm5.tasks.swe.text import instruction
from glm5.tasks.swe.written import Ask, written

REASONS = (
    "fix elsewhere", "timeout", "crash", "no failing test", "too many failing tests", "flaky with the bug",
    "no passing test", "no text without a leak", "solution fails", "no change passes", "attack passes", "no twin",
    "same failing tests",
)  # fmt: skip


OTHER_FILES = 2
"""Test files of a task in which no test fails. Every run of a task loads all of its files."""

DRAWS = 3
"""How often twins are drawn until one fails: a changed literal may leave a test passing."""


class Rejected(Exception):
    """A candidate is no task; the text is one of REASONS."""


@dataclass(frozen=True)
class Rules:
    """Limits of validation. `most_failing` is a share of the passing tests; `suite_s` the longest run of a package's
    tests; `tests_s` the time of the tests that are kept, the slowest are left out; `most_p2p` the number of
    PASS_TO_PASS tests kept; `twins` the number of sabotaged runs."""

    most_failing: float = 0.5
    suite_s: float = 120.0
    tests_s: float = 5.0
    most_p2p: int = 50
    twins: int = 2
    clean_runs: int = 3
    bug_runs: int = 2


@dataclass(frozen=True)
class Baseline:
    """The fixed state's tests: `stable` pass in every run, `pinned` is what is collected per test file, `calls` the
    functions that each test file calls ("" for what an import calls), None if unknown. `alone`: which tests of a
    choice of test files pass without the others; some need what another file's tests leave behind."""

    stable: frozenset[str]
    pinned: Mapping[str, tuple[str, ...]]
    wall_s: float
    flaky: int
    calls: Mapping[str, Sequence[str]] | None = None
    alone: dict[tuple[str, ...], set[str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "alone"}
        return {**kept, "stable": sorted(self.stable)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Baseline:
        return cls(
            frozenset(data["stable"]),
            {k: tuple(v) for k, v in data["pinned"].items()},
            data["wall_s"],
            data["flaky"],
            data["calls"],
        )


def baseline(repository: Repository, driver: Driver, rules: Rules) -> Baseline:
    """Run the fixed state's tests. Raises DataError if they are too slow or none is stable."""
    runs: list[TestRun] = []
    fast: set[str] | None = None
    for _ in range(rules.clean_runs):
        runs.append(driver.run(repository, {}, repository.test_files, rules.suite_s, fast))
        if runs[-1].stopped:
            said = next(iter(runs[-1].messages.values()), runs[-1].log)[-300:]
            raise DataError(f"{repository.name}: the tests ended early ({runs[-1].stopped}) {said}")
        fast = fast or _fastest(runs[0], rules.tests_s)
    files = [_by_file(run, repository) for run in runs]
    broken = {name for run in runs for name, how in run.outcomes.items() if how == "error"}  # files that end early
    pinned = {f: i for f, i in files[0].items() if f not in broken and all(other.get(f) == i for other in files)}
    known = {name for ids in pinned.values() for name in ids}
    stable = frozenset.intersection(*(frozenset(run.passed & known) for run in runs))
    if not stable:
        said = next(iter(runs[0].messages.values()), runs[0].log)[-300:]
        raise DataError(f"{repository.name}: no test passes each time: {said}")
    ever = set().union(*(run.passed for run in runs))
    calls = driver.calls(repository, 4 * rules.suite_s, fast)
    return Baseline(stable, pinned, runs[-1].wall_s, len(ever.intersection(fast or ()) - stable), calls)


def _fastest(run: TestRun, most_s: float) -> set[str]:
    """The tests that together take `most_s`, fastest first, at least one."""
    kept: set[str] = set()
    total = 0.0
    for name, seconds in sorted(run.seconds.items(), key=lambda item: (item[1], item[0])):
        total += seconds
        if kept and total > most_s:
            break
        kept.add(name)
    return kept


def _by_file(run: TestRun, repository: Repository) -> dict[str, tuple[str, ...]]:
    """Collected ids per file; files with ids that stand twice are left out."""
    found: dict[str, list[str]] = {}
    for name in run.collected:
        try:
            found.setdefault(split_id(name, repository.framework, repository.test_files)[0], []).append(name)
        except KeyError:
            continue
    return {file: tuple(sorted(ids)) for file, ids in found.items() if len(set(ids)) == len(ids)}


def validate(
    candidate: Candidate,
    clean: Baseline,
    driver: Driver,
    rules: Rules,
    folder: Path,
    others: Collection[str] = (),
    ask: Ask | None = None,
) -> dict[str, Any]:
    """Write the task to `folder` and return its row of the manifest. `others` are the values of "failing" in the rows
    of tasks that this one must differ from in its failing tests; `ask` is a model that writes the text. Raises
    Rejected, leaving no folder."""
    repository = candidate.repository
    if fix_is_elsewhere(candidate):
        raise Rejected("fix elsewhere")
    failing, passing, first = _bug_runs(candidate, clean, driver, rules, others)
    digest = _digest(failing)
    if digest in others:
        raise Rejected("same failing tests")
    messages = {name: first.messages[name] for name in failing if name in first.messages}
    text = instruction(candidate, messages, APP)
    if text is None:
        raise Rejected("no text without a leak")
    choice = random.Random(candidate.id)
    keep = _sample(passing, failing, repository, rules.most_p2p, choice)
    limit, state = _time_limit(clean.wall_s), choice.getstate()
    chosen = _chosen(repository, clean, failing, keep)
    made, kept, lost = _failing_twins(repository, driver, failing, rules.twins, limit, chosen, choice)
    if lost or not rules.twins:  # some need tests left out; those that do not pass in the twins' runs either
        alone = driver.run(repository, {}, chosen["files"], rules.suite_s, failing | keep).passed
        if not keep <= alone:
            keep &= alone
            chosen = _chosen(repository, clean, failing, keep)
            choice.setstate(state)
            made, kept, _ = _failing_twins(repository, driver, failing, rules.twins, limit, chosen, choice)
    if rules.twins and not made:
        raise Rejected("no twin")
    files = chosen["files"]
    spec = {
        **spec_of(repository),
        "version": 1,
        "task": "repair",
        "FAIL_TO_PASS": sorted(failing),
        "PASS_TO_PASS": sorted(keep),
        "protected": list(repository.protected),
        "canary_folder": files[0].rpartition("/")[0],
        "timeout_s": limit,
    }
    if repository.language != "python":
        spec["canary"] = canary(repository, files[0])
    spec["runs"] = [{"name": "tests", "overlay": "", **chosen}, *made]
    hidden = _hidden(repository, failing)
    told = None if ask is None else written(candidate, messages, APP, ask)
    write_folder(folder, candidate, told or text, spec, hidden, kept)
    try:
        check(candidate, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return {
        "fail_to_pass": len(failing), "pass_to_pass": len(keep), "passing": len(passing), "twins": len(made),
        "failing": digest, "suite_s": round(first.wall_s, 2), "text": "model" if told else "template",
    }  # fmt: skip


def _chosen(repository: Repository, clean: Baseline, failing: set[str], keep: set[str]) -> dict[str, list[str]]:
    """The test files of a task, what is collected in them, and which of it is run."""
    files = sorted({split_id(name, repository.framework, repository.test_files)[0] for name in [*failing, *keep]})
    pinned = sorted(name for file in files for name in clean.pinned[file])
    return {"files": files, "collected": pinned, "select": sorted([*failing, *keep])}


def _failing_twins(
    repository: Repository,
    driver: Driver,
    failing: set[str],
    count: int,
    limit: int,
    chosen: Mapping[str, list[str]],
    choice: random.Random,
) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]], set[str]]:
    """(the runs of the twins that a right solution fails, their files, the tests besides `failing` that fail in a
    twin, although no twin is made of them)."""
    made, kept, lost = [], {}, set[str]()
    for _ in range(DRAWS):
        for overlay, changed in _twins(repository, failing, count, choice).items():
            run = driver.run(repository, changed, chosen["files"], limit, chosen["select"])
            known = {
                "must_fail": _with(run, chosen["select"], "failed", "error"),
                "must_pass": _with(run, chosen["select"], "passed"),
            }
            lost |= set(chosen["select"]) - failing - run.passed
            whole = sorted(run.collected) == chosen["collected"]  # a twin that ends its program early would not count
            if not run.stopped and whole and failing & set(known["must_fail"]):
                made.append({"name": overlay, "overlay": overlay, **chosen, **known})
                kept[overlay] = changed
        if made:
            break
    return made, kept, lost


def _time_limit(wall_s: float) -> int:
    """Seconds for a run: 60, doubled until it is 8 times what the tests took. Coarse, so that machines of one kind
    write the same task."""
    limit = 60
    while limit < 8 * wall_s:
        limit *= 2
    return limit


def _digest(tests: set[str]) -> str:
    return hashlib.sha256("\0".join(sorted(tests)).encode()).hexdigest()[:16]


def _bug_runs(
    candidate: Candidate, clean: Baseline, driver: Driver, rules: Rules, others: Collection[str]
) -> tuple[set[str], set[str], TestRun]:
    """(tests that fail each time, tests that pass each time, the first run); tests that the bug cannot reach pass."""
    repository = candidate.repository
    budget = max(20.0, 3 * clean.wall_s)
    files = reached(candidate, clean.calls)
    if not files:
        raise Rejected("no failing test")
    affected = _tests(clean, files) & clean.stable
    runs: list[TestRun] = []
    always, ever = set(affected), set[str]()
    for number in range(rules.bug_runs):
        run = driver.run(repository, candidate.changes, files, budget, affected)
        if run.stopped:
            raise Rejected("timeout" if run.stopped in ("wall", "cpu") else "crash")
        if number == 0 and affected - run.passed:
            affected &= _alone(repository, clean, driver, files, budget, affected)
        failing = affected - run.passed
        if number == 0 and not failing:
            raise Rejected("no failing test")
        if number == 0 and len(failing) > max(3, rules.most_failing * len(clean.stable)):
            raise Rejected("too many failing tests")
        if number == 0 and _digest(failing) in others:  # already known; or it fails another time, and is flaky
            raise Rejected("same failing tests")
        runs.append(run)
        always, ever = always & failing, ever | failing
        if not always:
            raise Rejected("flaky with the bug")
        files = tuple(file for file in files if failing & set(clean.pinned.get(file, ())))  # for the runs after it
        affected &= _tests(clean, files)
    never = set(clean.stable - ever)
    if not never:
        raise Rejected("no passing test")
    return always, never, runs[0]


def _alone(
    repository: Repository, clean: Baseline, driver: Driver, files: tuple[str, ...], budget: float, tests: set[str]
) -> set[str]:
    """The tests of `files` that pass without the others; see `Baseline.alone`."""
    if files not in clean.alone:
        clean.alone[files] = driver.run(repository, {}, files, budget, tests).passed
    return clean.alone[files]


def no_test_fails(candidate: Candidate, clean: Baseline, driver: Driver) -> bool:
    """Whether all tests that the change can reach pass, in one run."""
    budget, files = max(20.0, 3 * clean.wall_s), reached(candidate, clean.calls)
    affected = _tests(clean, files) & clean.stable
    if not affected:
        return True
    run = driver.run(candidate.repository, candidate.changes, files, budget, affected)
    if run.stopped:
        return False
    failing = affected - run.passed
    return not failing or not failing & _alone(candidate.repository, clean, driver, files, budget, affected)


def _tests(clean: Baseline, files: Sequence[str]) -> set[str]:
    return {name for file in files for name in clean.pinned.get(file, ())}


def _sample(passing: set[str], failing: set[str], repository: Repository, most: int, choice: random.Random) -> set[str]:
    """PASS_TO_PASS tests: half from the files of the failing tests if they have so many, the others from those and
    `OTHER_FILES` more files."""

    def file_of(name: str) -> str:
        return split_id(name, repository.framework, repository.test_files)[0]

    near_files = {file_of(name) for name in failing}
    near = [name for name in sorted(passing) if file_of(name) in near_files]
    kept = set(choice.sample(near, min(len(near), most // 2)))
    far_files = sorted({file_of(name) for name in passing} - near_files)
    files = near_files | set(choice.sample(far_files, min(len(far_files), OTHER_FILES)))
    rest = [name for name in sorted(passing - kept) if file_of(name) in files]
    return kept | set(choice.sample(rest, min(len(rest), most - len(kept))))


def _twins(repository: Repository, failing: set[str], count: int, choice: random.Random) -> dict[str, dict[str, str]]:
    """Overlay folder to its sabotaged test files. About half of the functions of the failing tests are changed, at
    least one, and no other: the agent has seen those, and its code could tell a twin by them."""
    functions = dict.fromkeys(split_id(n, repository.framework, repository.test_files) for n in sorted(failing))
    made: dict[str, dict[str, str]] = {}
    for number in range(count):
        chosen = choice.sample(list(functions), max(1, len(functions) // 2))
        files: dict[str, str] = {}
        for file in sorted({file for file, _ in chosen}):
            text = _sabotaged(repository, file, [names for f, names in chosen if f == file], choice)
            if text is not None:
                files[file] = text
        if files:
            made[f"twins/{number}"] = files
    return made


def _with(run: TestRun, select: Sequence[str], *results: str) -> list[str]:
    """The selected tests with one of the outcomes."""
    return sorted(name for name in select if run.outcomes.get(name) in results)


def _hidden(repository: Repository, failing: set[str]) -> dict[str, str | None]:
    """The test files as the agent sees them: without the failing tests."""
    by_file: dict[str, set[Name]] = {}
    for name in failing:
        file, names = split_id(name, repository.framework, repository.test_files)
        by_file.setdefault(file, set()).add(names)
    return {file: _without_tests(repository, file, names) for file, names in by_file.items()}


def _without_tests(repository: Repository, file: str, names: set[Name]) -> str | None:
    text = repository.read(file)
    if repository.language == "python":
        return without_tests(text, names)
    return test_edits.without_tests(text, file, repository.language, names)


def _sabotaged(repository: Repository, file: str, names: Sequence[Name], choice: random.Random) -> str | None:
    text = repository.read(file)
    if repository.language == "python":
        return sabotaged(text, names, choice)
    return test_edits.sabotaged(text, file, repository.language, names, choice)


def check(candidate: Candidate, folder: Path) -> None:
    """The written task: its solution scores 1, no change scores 0, so does the cheat of QUICK. Raises Rejected."""
    tests, site = read_tests(folder), candidate.repository.site

    def graded(room: NamespaceEnvironment, twins_first: bool = False) -> dict[str, Any]:
        return grade(room, tests, site, shuffled=False, twins_first=twins_first)

    with open_room(folder / "environment/repo", site) as room:
        unsolved = room.snapshot()
        solve(folder, room)
        if graded(room)["reward"] != 1.0:
            raise Rejected("solution fails")
        room.restore(unsolved)
        if graded(room)["reward"] != 0.0:
            raise Rejected("no change passes")
        if passing_cheats(folder, room, lambda room: graded(room, twins_first=True), QUICK)[1]:
            raise Rejected("attack passes")


def solve(folder: Path, room: NamespaceEnvironment) -> None:
    """Apply a task's solution."""
    room.upload_tree(folder / "solution", "/solution")
    room.exec(["/bin/bash", "/solution/solve.sh"], cwd=APP)
