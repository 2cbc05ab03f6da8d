"""Makes chained tasks from a linear history of trees: a git repository, or the releases of a package (§6.2, App. B.4).

Consecutive changes are grouped (`chain_groups`). A group becomes a task if tests that pass after it fail without its
golden part; a group without such tests joins the next one. No test of an earlier task may fail later. A chain is

    chain.json         the tasks: statement, class, the paths of their files, which are gone, how many tests
    repo/              the tree before the first task, without its history
    steps/N/golden, steps/N/auto    files after task N by path
    steps/N/tests      as the tests of a SWE task: all tests as they are after task N
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.data.git import open_at
from glm5.errors import DataError
from glm5.files import publish_dir
from glm5.tasks.cc_bench.chain_groups import (
    NEUTRAL,
    Change,
    Changed,
    Files,
    change,
    class_of,
    partition,
    related_pairs,
    split,
)
from glm5.tasks.swe.candidate import Repository
from glm5.tasks.swe.driver import APP, IN_ROOM, RoomDriver, spec_of
from glm5.tasks.swe.folder import SITE, TEST_SH, protected_files
from glm5.tasks.swe.git import log, write_tree
from glm5.tasks.swe.in_room.grade import CONFIGURATION, site_digest
from glm5.tasks.swe.repositories import CONSTRAINTS, download, from_tree, install, metadata, packages, unpack
from glm5.tasks.swe.versions import changelog, public_names, scrub

LENGTHS = (3, 15)
"""Changes of a chain."""
LEAST_TASKS = 2
RUN_S = 120.0
MOST_MESSAGE = 1500
MOST_NAMES = 30
DRIVER = RoomDriver("python")
IGNORED = frozenset((".git", "__pycache__", ".github"))
Told = Callable[[str], None]


@dataclass(frozen=True)
class State:
    """A tree of a history and the message of the change that led to it."""

    label: str
    root: Path
    message: str = ""


@dataclass(frozen=True)
class Origin:
    """Where a history comes from. `site` is a folder with what its tests need."""

    name: str
    licence: str
    site: Path
    requires: tuple[str, ...]
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChainTask:
    """A task of a chain, validated."""

    group: Change
    labels: tuple[str, ...]
    repository: Repository
    passing: frozenset[str]
    collected: tuple[str, ...]
    fail_to_pass: tuple[str, ...]
    wall_s: float


def history_of(repo: Path, work: Path, most: int, end: str = "HEAD") -> list[State]:
    """The last `most` + 1 states of the line of first parents, oldest first; a merge ends it. Raises DataError."""
    git, last = open_at(repo, end)
    found = list[State]()
    for commit, parents, message in log(git, "--first-parent", f"--max-count={most + 1}", last):
        root = write_tree(git, commit, work / "trees" / f"{repo.resolve().name}-{commit[:12]}")
        found.append(State(commit[:12], root, scrub(message)))
        if len(parents) != 1:
            break
    return found[::-1]


def releases_of(name: str, work: Path, most: int) -> tuple[Origin, list[State]]:
    """The newest `most` + 1 releases of a package of the list of SWE packages, oldest first. Raises DataError."""
    entries, common = packages()
    entry = next((one for one in entries if one.name == name), None)
    if entry is None:
        raise DataError(f"chained: {name} is not in the list of packages (glm5/tasks/swe/packages.toml).")
    states = list[State]()
    for version in [*reversed(entry.previous), entry.version][-most - 1 :]:
        archive = download(name, version, work / "sdists")
        root = unpack(archive, work / "trees" / archive.name.removesuffix(".tar.gz"))
        told = scrub(changelog(states[-1].root, root, version))[:MOST_MESSAGE] if states else ""
        states.append(State(version, root, told))
    requires = tuple(sorted({*common, *entry.requires}))
    licence = entry.licence or metadata(states[-1].root)[0]
    return Origin(name, licence, install(requires, work / "bases", CONSTRAINTS), requires, entry.tests), states


def files_of(root: Path) -> dict[str, bytes]:
    """The files of a tree by path; links are left out."""
    found = (path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink())
    named = {path.relative_to(root).as_posix(): path for path in found}
    kept = (name for name in named if not IGNORED & set(name.split("/")) and ".egg-info/" not in name)
    return {name: named[name].read_bytes() for name in kept}


def build_chains(
    origin: Origin, states: Sequence[State], out: Path, neutral: float = NEUTRAL, told: Told = lambda line: None
) -> list[dict[str, Any]]:
    """Write the chains of a history to folders of `out` and return their rows for a manifest. `neutral` is the
    relatedness above which two changes belong together."""
    rows, first = list[dict[str, Any]](), 0
    while len(states) - 1 - first >= LENGTHS[0]:
        part = states[first : first + LENGTHS[1] + 1]
        tasks, used = chain_of(origin, part, neutral, told)
        if len(tasks) >= LEAST_TASKS:
            name = f"{origin.name}-{part[0].label}"
            rows.append(write_chain(out / name, origin, part[0], tasks))
            told(f"{name}: {len(tasks)} tasks")
        first += max(used, LENGTHS[0])
    return rows


def chain_of(
    origin: Origin, states: Sequence[State], neutral: float = NEUTRAL, told: Told = lambda line: None
) -> tuple[list[ChainTask], int]:
    """The tasks of one chain, and how many changes they use."""
    trees = [files_of(state.root) for state in states]
    changes = [change(a, b, state.message) for a, b, state in zip(trees, trees[1:], states[1:])]
    groups = partition(len(changes), related_pairs(changes, neutral))
    tasks, begin, used = list[ChainTask](), 0, 0
    for group in groups:
        whole = change(
            trees[begin],
            trees[group.stop],
            "\n\n".join(filter(None, (states[i + 1].message for i in range(begin, group.stop)))),
        )
        labels = tuple(states[i + 1].label for i in range(begin, group.stop))
        task = _validated(origin, whole, labels, states[group.stop], tasks[-1] if tasks else None)
        if isinstance(task, str):
            told(f"{origin.name} {labels[0]} to {labels[-1]}: {task}")
            continue  # its changes join the next group
        tasks.append(task)
        begin = used = group.stop
    return tasks, used


def _validated(
    origin: Origin, group: Change, labels: tuple[str, ...], state: State, before: ChainTask | None
) -> ChainTask | str:
    """The task, or why the group is none: twice all tests, once without the golden part."""
    parts = split(group.after)
    if not parts.golden or not parts.tests:
        return "it changes no tests, or nothing else"
    try:
        repository = from_tree(
            state.root, origin.name, state.label, origin.licence, "", (str(origin.site),), origin.tests
        )
        old = {p: None if group.before[p] is None else (group.before[p] or b"").decode() for p in parts.golden}
    except (DataError, UnicodeDecodeError) as error:
        return str(error)
    runs = [DRIVER.run(repository, {}, repository.test_files, RUN_S) for _ in range(2)]
    if any(run.stopped for run in runs):
        return f"its tests end early ({runs[0].stopped or runs[1].stopped})"
    stable = frozenset(runs[0].passed & runs[1].passed)
    if sorted(runs[0].collected) != sorted(runs[1].collected) or len(set(runs[0].collected)) < len(runs[0].collected):
        return "its tests have other names each time"
    if before is not None and (lost := before.passing.intersection(runs[0].collected) - stable):
        return f"{len(lost)} tests of the task before fail, such as {min(lost)}"
    without = DRIVER.run(repository, old, repository.test_files, RUN_S)
    failing = stable - without.passed if not without.stopped else stable
    if not failing:
        return "no test fails without it"
    return ChainTask(
        group, labels, repository, stable, tuple(runs[0].collected), tuple(sorted(failing)), runs[0].wall_s
    )


def write_chain(folder: Path, origin: Origin, first: State, tasks: Sequence[ChainTask]) -> dict[str, Any]:
    """Write a chain, complete or not at all; returns its row of the manifest."""
    rows = list[dict[str, Any]]()
    with publish_dir(folder) as aside:
        _lay(aside / "repo", files_of(first.root))
        for number, task in enumerate(tasks, start=1):
            parts, place = split(task.group.after), aside / "steps" / str(number)
            _lay(place / "golden", _there(parts.golden))
            _lay(place / "auto", _there(parts.auto))
            _write_tests(place / "tests", task, origin)
            missing = added_names(task.group)
            rows.append({
                "statement": statement(task, missing), "class": class_of(task.group, missing),
                "changes": list(task.labels),
                "golden": sorted(parts.golden), "gone": sorted(p for p, data in parts.golden.items() if data is None),
                "auto_gone": sorted(p for p, data in parts.auto.items() if data is None),
                "fail_to_pass": len(task.fail_to_pass), "tests": len(task.passing),
            })  # fmt: skip
        paths = list(tasks[-1].repository.paths)
        about = {
            "package": origin.name,
            "licence": origin.licence,
            "requires": list(origin.requires),
            "first": first.label,
        }
        (aside / "chain.json").write_text(
            json.dumps({**about, "paths": paths, "tasks": rows}, indent=1) + "\n", encoding="utf-8"
        )
    told = hashlib.sha256()
    for path, data in files_of(folder).items():
        told.update(f"\0{path}\0{len(data)}\0".encode() + data)
    row = {"name": folder.name, **about, "sha256": told.hexdigest(), "tasks": len(rows)}
    row |= {"classes": [one["class"] for one in rows]}
    return row | {"changes": [one["changes"] for one in rows], "fail_to_pass": [one["fail_to_pass"] for one in rows]}


def _there(changed: Changed) -> Files:
    return {path: data for path, data in changed.items() if data is not None}


def _lay(folder: Path, files: Files) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _write_tests(folder: Path, task: ChainTask, origin: Origin) -> None:
    """The tests of a SWE task with one run: every test that passes after the task must pass."""
    repository = task.repository
    owned = {path for entry in protected_files(repository) for path in _below(repository.root, entry)}
    owned |= {p.relative_to(repository.root).as_posix() for p in repository.root.rglob("*") if p.name in CONFIGURATION}
    _lay(folder / "files", {path: (repository.root / path).read_bytes() for path in sorted(owned)})
    rest = sorted(task.passing - set(task.fail_to_pass))
    files = list(repository.test_files)
    limit = max(60, 8 * int(task.wall_s + 1))
    run = {
        "name": "tests",
        "overlay": "",
        "files": files,
        "collected": sorted(task.collected),
        "select": sorted(task.passing),
    }
    site = any(origin.site.iterdir())
    spec = {
        **spec_of(repository), "version": 1, "task": "repair",
        "FAIL_TO_PASS": list(task.fail_to_pass), "PASS_TO_PASS": rest,
        "protected": list(repository.protected), "canary_folder": files[0].rpartition("/")[0], "timeout_s": limit,
        "runs": [run], "site": [SITE] if site else [],
        "site_sha256": {SITE: site_digest(str(origin.site))} if site else {},
    }  # fmt: skip
    _lay(
        folder,
        {"tests.json": (json.dumps(spec, indent=1, sort_keys=True) + "\n").encode(), "test.sh": TEST_SH.encode()},
    )
    for name in ("grade.py", "runner.py", "confine.py"):
        shutil.copy(IN_ROOM / name, folder / name)


def _below(root: Path, entry: str) -> Iterator[str]:
    place = root / entry
    for path in [place] if place.is_file() else sorted(place.rglob("*")):
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
            yield path.relative_to(root).as_posix()


def added_names(group: Change) -> list[tuple[str, str]]:
    """(path, name) of public functions and classes that only exist after the group and that its tests mention."""
    parts = split(group.after)
    tests = b"\n".join(_there(parts.tests).values()).decode("utf-8", "replace")
    found = list[tuple[str, str]]()
    for path, data in parts.golden.items():
        texts = [(one or b"").decode("utf-8", "replace") for one in (group.before.get(path), data)]
        new = public_names(texts[1], path, "python") - public_names(texts[0], path, "python")
        found += [(path, name) for name in sorted(new) if name in tests]
    return found[:MOST_NAMES]


def statement(task: ChainTask, missing: Sequence[tuple[str, str]]) -> str:
    """What the model reads: the messages of the changes, and the names that the tests use."""
    said = task.group.message.strip()[:MOST_MESSAGE] or "The behaviour changes as the names below say."
    named = "".join(f"\n- `{name}` in `{path}`" for path, name in missing)
    interface = f"\n\nNew public names, which the tests use:{named}" if named else ""
    return f"Make this change to the package in {APP}, as its maintainers put it:\n\n{said}{interface}\n"


def read_chain(folder: Path) -> Mapping[str, Any]:
    """The content of chain.json. Raises DataError if it is no chain."""
    try:
        found: dict[str, Any] = json.loads((folder / "chain.json").read_text(encoding="utf-8"))
        steps = [
            folder / "steps" / str(number) / "tests" / "tests.json" for number in range(1, len(found["tasks"]) + 1)
        ]
        if (
            not steps
            or not all(step.is_file() for step in steps)
            or not all(isinstance(t["statement"], str) for t in found["tasks"])
        ):
            raise ValueError("a task lacks its statement or its tests")
        return found
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{folder} is no chain of tasks (glm5 task build chained makes them): {error!r:.200}."
        ) from None
