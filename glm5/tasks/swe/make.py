"""What `glm5 task build swe` does: jobs from the list of packages, the interpreter's library or git repositories."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm5.errors import DataError, UsageError, nearest
from glm5.tasks.swe.build import Build, Job
from glm5.tasks.swe.candidate import Repository, Source
from glm5.tasks.swe.commits import Commit, Commits, fixes, open_commit
from glm5.tasks.swe.debian import Patch
from glm5.tasks.swe.driver import DRIVERS
from glm5.tasks.swe.featadd import FeatAdd
from glm5.tasks.swe.git import clone
from glm5.tasks.swe.languages import imports
from glm5.tasks.swe.languages.mutate import SyntaxMutations
from glm5.tasks.swe.mutate import Mutations
from glm5.tasks.swe.patches import Patches
from glm5.tasks.swe.repositories import CONSTRAINTS, PACKAGES, open_package, packages
from glm5.tasks.swe.stdlib import standard_module
from glm5.tasks.swe.validate import Rules
from glm5.tasks.swe.versions import Versions
from glm5.tasks.swe.written import Ask

SOURCES = ("versions", "patches", "commits", "mutate", "featadd")
DEFAULT = SOURCES[:4]  # `featadd` needs a model
MOST_LINES = 300  # changed lines of a version taken back, for Debian's releases are far apart
MOST_COMMITS = 200
Opened = tuple[Repository, Sequence[Source]]
Opener = Callable[[Any, str], tuple[Repository, tuple[Patch, ...]]]  # of a package and a version, "" for the listed one


def make(
    out: Path,
    *,
    work: Path,
    listed: Path | None = None,
    only: Sequence[str] = (),
    sources: Sequence[str] = DEFAULT,
    modules: Sequence[str] = (),
    repos: Sequence[Path] = (),
    requires: Sequence[str] = (),
    per_package: int = 20,
    count: int | None = None,
    seed: int = 0,
    at_once: int = 2,
    derived: bool = False,
    rules: Rules | None = None,
    language: str = "python",
    manifest: Path | None = None,
    told: Callable[[str], None] = lambda line: None,
    featadd: FeatAdd | None = None,
    ask: Ask | None = None,
    audit: Callable[[Path], dict[str, Any]] | None = None,
    audited: float = 0.0,
) -> dict[str, Any]:
    """Build tasks into `out`; returns the summary. At most half of them are mutations, unless that is the only source.
    With `manifest`, the rows of another build with the same seed, only its tasks are built, and the summary says which
    differ. `featadd` is the source of that name; for `ask`, `audit` and `audited` see `Build`.

    With `modules` (of the interpreter's library) or `repos` (local git repositories, whose tests need the packages
    `requires`), the list of packages `listed` is left out. In other languages than Python the list says how the tests
    of a repository run, in the entry that has the name of its folder, and there are no `modules`. Raises UsageError for
    an unknown name, DataError for a bad list.
    """
    for source in sources:
        if source not in SOURCES:
            raise UsageError(f"unknown source {source}{nearest(source, SOURCES)}; there are {', '.join(SOURCES)}.")
    if language != "python" and (modules or requires):
        raise UsageError("--stdlib and --requires are for Python.")
    if language == "python" and list(sources) == ["commits"] and not repos:
        raise UsageError("--source commits needs --repo in Python.")
    places = _places(repos)
    if "featadd" in sources and (featadd is None or language != "python" or modules or repos):
        raise UsageError("the source featadd needs a model, and packages in Python from the list.")
    rows = _rows(manifest)
    named = None if rows is None else {row["id"]: row["sha256"] for row in rows}
    build = Build(out, work, seed, rules or Rules(), DRIVERS[language], derived, named, told, ask, audit, audited)
    if featadd is not None:
        featadd = replace(featadd, stopping=lambda: build.stopping)
    if language == "python":
        entries, common = packages(listed or PACKAGES)
        if modules or repos:
            jobs = [Job(module, functools.partial(_open_module, module, work)) for module in modules]
            needed = tuple(sorted({*common, *requires}))
            jobs += [job for name, repo in places.items() for job in _python_history(name, repo, needed, work, told)]
            return build.run(jobs, per_package, count, at_once)
        chosen = _chosen(entries, only)
        pinned = CONSTRAINTS if listed is None else None
        opened: Opener = lambda package, version: (open_package(package, common, work, version, pinned), ())  # noqa: E731
    else:
        chosen = _chosen(imports.packages(language, listed), [*only, *places])
        local = {"source": "git", "version": "HEAD", "git": "", "previous": ()}
        chosen = [replace(p, **local, origin=str(places[p.name])) if p.name in places else p for p in chosen]
        opened = lambda package, version: imports.open_package(package, language, work, version)  # noqa: E731
    wanted: dict[str, set[str] | None] = {package.name: None for package in chosen}  # versions, None for all
    if rows is not None:
        wanted = {name: {row["version"] for row in rows if row["package"] == name} for name in wanted}
        chosen = [package for package in chosen if wanted[package.name]]
    jobs = _in_turn(_jobs(package, sources, opened, featadd, wanted[package.name]) for package in chosen)
    if "commits" in sources and language != "python":
        histories = [package.history for package in chosen if package.history]
        jobs += _in_turn(_history(package, language, work, wanted[package.name], told) for package in histories)
    made = build.run(jobs, per_package, count, at_once)["sources"]
    if "mutate" in sources:
        half = 2 * sum(row["tasks"] for source, row in made.items() if source != "mutate")
        if len(sources) == 1 or manifest is not None:  # the other build has kept to the half; this may be a part of it
            most = count
        else:
            most = half if count is None else min(count, half)
        build.run([Job(p.name, functools.partial(_mutated, p, opened)) for p in chosen], per_package, most, at_once)
    return build.summary()


def _rows(manifest: Path | None) -> list[dict[str, str]] | None:
    """Id, digest, package and version of a manifest's tasks. Raises DataError if it is none."""
    if manifest is None:
        return None
    try:
        rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
        return [{key: str(row[key]) for key in ("id", "sha256", "package", "version")} for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{manifest}: not a manifest of tasks: {error!r:.200}") from None


def _in_turn(jobs: Iterable[Sequence[Job]]) -> list[Job]:
    """The jobs of several packages, one of each in turn."""
    return [job for found in itertools.zip_longest(*jobs) for job in found if job is not None]


def _chosen(entries: Sequence[Any], only: Sequence[str]) -> list[Any]:
    names = [package.name for package in entries]
    for name in only:
        if name not in names:
            raise UsageError(f"the list has no package {name}{nearest(name, names)}.")
    return [package for package in entries if not only or package.name in only]


def _mutated(package: Any, opened: Opener) -> Opened:
    repository, _ = opened(package, "")
    return repository, [Mutations() if repository.language == "python" else SyntaxMutations()]


def _jobs(
    package: Any,
    sources: Sequence[str],
    opened: Opener,
    featadd: FeatAdd | None = None,
    wanted: Set[str] | None = None,
) -> list[Job]:
    """The jobs of all sources but `mutate`: each listed version, or those `wanted`, with the one before it; the patches
    of every listed version of a Debian package; features. A version that is a binary package has neither tests nor
    patches."""

    def taken_back(version: str, older: str) -> Opened:
        previous = opened(package, older)[0].root
        repository = opened(package, version)[0]
        return repository, [Versions(previous, older, MOST_LINES)]

    def patched(version: str) -> Opened:
        repository, patches = opened(package, version)
        return repository, [Patches(patches)]

    versions = (package.version, *package.previous)
    tested = [version for version in versions if "=" not in version]
    jobs = []
    if "versions" in sources:
        for place, old in enumerate(versions[1:], 1):
            new = next(version for version in reversed(versions[:place]) if version in tested)
            if wanted is None or new in wanted:
                jobs.append(Job(f"{package.name} {new} from {old}", functools.partial(taken_back, new, old)))
    if "patches" in sources and getattr(package, "source", "") == "debian":
        names = ["", *(f" {version}" for version in tested[1:])]
        jobs += [Job(f"{package.name}{name} patches", functools.partial(patched, name[1:])) for name in names]
    if featadd is not None and "featadd" in sources:
        jobs.append(Job(f"{package.name} features", lambda: (opened(package, "")[0], [featadd])))
    return jobs


def _places(repos: Sequence[Path]) -> dict[str, Path]:
    """The repositories by name. Raises UsageError."""
    places = {repo.resolve().name.removesuffix(".git"): repo.resolve() for repo in repos}
    for repo in repos:
        if not repo.is_dir():
            raise UsageError(f"--repo {repo} is not a folder.")
    if len(places) < len(repos):
        raise UsageError("two folders of --repo have the same name.")
    return places


def _history(
    package: imports.Package, language: str, work: Path, wanted: Set[str] | None, told: Callable[[str], None]
) -> list[Job]:
    """A job for each bug fix in a git repository, or for those of the versions `wanted`."""

    def found() -> Iterator[tuple[Path, Commit]]:
        repo = clone(package.origin, package.name, package.version, work)
        for commit in fixes(repo, MOST_COMMITS, imports.files_of(package, language), package.version):
            if wanted is None or commit.hash[:12] in wanted:
                yield repo, commit

    def fixed(repo: Path, commit: Commit) -> Opened:
        local = replace(package, origin=str(repo))  # the clone is there
        return imports.open_package(local, language, work, commit.hash)[0], [Commits(repo, commit)]

    if wanted is not None and not any(re.fullmatch("[0-9a-f]{12}", version) for version in wanted):
        return []
    return _commit_jobs(package.name, found, fixed, told)


def _python_history(
    name: str, repo: Path, requirements: tuple[str, ...], work: Path, told: Callable[[str], None]
) -> list[Job]:
    """A job for each bug fix or renaming in a git repository."""
    licence = next((f.name for f in sorted(repo.glob("LICEN[SC]E*"))), "unknown")
    return _commit_jobs(
        name,
        lambda: ((repo, commit) for commit in fixes(repo, MOST_COMMITS)),
        lambda place, commit: open_commit(place, commit, requirements, work, licence),
        told,
    )


def _commit_jobs(
    name: str,
    found: Callable[[], Iterable[tuple[Path, Commit]]],
    opened: Callable[[Path, Commit], Opened],
    told: Callable[[str], None],
) -> list[Job]:
    """A job for each commit in a repository. None if it cannot be read, such as without network: `told` says why, and
    the next build tries again."""
    try:
        return [
            Job(f"{name} {commit.hash[:12]}", functools.partial(opened, repo, commit), f"{name} commits")
            for repo, commit in found()
        ]
    except DataError as error:
        told(f"{name}: no commits: {error}")
        return []


def _open_module(name: str, work: Path) -> Opened:
    return standard_module(name, work), [Mutations()]
