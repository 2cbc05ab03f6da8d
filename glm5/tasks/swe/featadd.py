"""Source `featadd`: a policy adds a feature to a package, and what it breaks unintentionally is a task. The idea is
BugPilot's (FeatAdd, arXiv 2510.19898); the request and the rules are our own.

The policy is asked for a small feature of one documented function and to keep everything working. The package's modules
as it leaves them are the bug, the modules before are the fix; validation decides. Whatever it writes is hostile.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glm5.files import atomic_write
from glm5.tasks.swe.candidate import Candidate, Repository
from glm5.tasks.swe.commits import is_test
from glm5.tasks.swe.mutate import runs_alike
from glm5.tasks.swe.test_files import functions

MOST_MODULE = 200_000  # bytes
FEATURES = (
    "an optional parameter that callers will find useful",
    "support for one more kind of input",
    "another form of the result that callers can ask for",
    "support for many inputs at once",
)
REQUEST = """\
Add a small, useful feature to `{function}` in `{path}`: {feature}. Decide yourself what helps the users of {package} \
most, write it in the style of the code around it, document it, and adapt what else in the package has to change for \
it. Everything that works now must keep working in the same way. Do not add, remove or rename modules, and leave the \
tests as they are."""


@dataclass(frozen=True)
class Session:
    """What a session of the agent left: changed files by path, None for a removed one, and the paths of changed files
    that cannot be read. `cut_off` is "" if the agent ended by itself, otherwise what ended it."""

    files: Mapping[str, bytes | None]
    left_out: Collection[str] = ()
    cut_off: str = ""


Play = Callable[[Repository, str, Path, Callable[[], bool]], Session | None]
"""Plays a session for a request in a room over a copy of a repository, with its log at a path; a session with a log
goes on. None if the last argument became true. Raises GradingError if the model or the room fails."""


@dataclass
class FeatAdd:
    """Plays `count` sessions for each package and yields a candidate for each that changed code. Logs and results are
    kept in `folder`; what has a result is not played again. `model` names the policy."""

    play: Play
    folder: Path
    count: int = 3
    model: str = ""
    told: Callable[[str], None] = lambda line: None
    stopping: Callable[[], bool] = lambda: False
    name: str = field(default="featadd", init=False)

    def candidates(self, repository: Repository, seed: int) -> Iterator[Candidate]:
        choice = random.Random(f"featadd {seed} {repository.name} {repository.version}")
        known = documented(repository)
        for path, function in choice.sample(known, min(len(known), self.count)):
            changes = self._changes(repository, path, function, choice.choice(FEATURES))
            if changes is None:
                return
            if changes:
                tier = "hard" if len(changes) > 1 else "single"
                notes = (f"feature for {function} of {path}",)
                yield Candidate(repository, self.name, changes, tier=tier, notes=notes)

    def _changes(self, repository: Repository, path: str, function: str, feature: str) -> dict[str, str] | None:
        """What a session changed, played or known; None if the build is stopping."""
        request = REQUEST.format(function=function, path=path, feature=feature, package=repository.name)
        key = hashlib.sha256(json.dumps([repository.origin, request, self.model]).encode()).hexdigest()[:16]
        result = self.folder / f"{repository.name}-{repository.version}-{key}.json"
        if not result.is_file():
            session = self.play(repository, request, result.with_suffix(".jsonl"), self.stopping)
            if session is None:
                return None
            try:
                row: dict[str, object] = {"changes": changes_of(repository, session)}
            except Unusable as reason:
                row = {"changes": {}, "reason": str(reason)}
                self.told(f"{repository.name}: no candidate from a feature for {function}: {reason}")
            atomic_write(result, json.dumps(row) + "\n")
        changes: dict[str, str] = json.loads(result.read_text(encoding="utf-8"))["changes"]
        return changes


class Unusable(Exception):
    """A session gives no candidate; the text says why."""


def documented(repository: Repository) -> list[tuple[str, str]]:
    """(path, name) of the public functions and methods that have a docstring."""
    found = []
    for path in repository.sources:
        try:
            tree = ast.parse(repository.read(path))
        except (OSError, ValueError, SyntaxError):
            continue
        named = (names for names, node in functions(tree) if ast.get_docstring(node))
        found += [(path, ".".join(names)) for names in named if not any(name.startswith("_") for name in names)]
    return found


def changes_of(repository: Repository, session: Session) -> dict[str, str]:
    """The repository's modules that run differently now. Raises Unusable."""
    if session.cut_off:
        raise Unusable(f"the session did not end by itself ({session.cut_off})")
    if session.left_out:
        raise Unusable("a changed file is too large or cannot be read")
    new = (path for path in session.files if path.endswith(".py") and not (repository.root / path).exists())
    modules = {path: session.files[path] for path in repository.sources if path in session.files}
    if None in modules.values() or not all(_of_tests(path, repository) for path in new):
        raise Unusable("modules were added or removed")
    found = {}
    for path, data in sorted(modules.items()):
        if len(data or b"") > MOST_MODULE:
            raise Unusable(f"a module has more than {MOST_MODULE:,} bytes")
        try:
            text = (data or b"").decode()
            if not runs_alike(repository.read(path), text):
                found[path] = text
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            raise Unusable("a module does not compile") from None
    if not found:
        raise Unusable("no code was changed")
    return found


def _of_tests(path: str, repository: Repository) -> bool:
    return is_test(path) or any(path == own or path.startswith(f"{own}/") for own in repository.protected)
