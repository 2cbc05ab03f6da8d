"""Which test files a change can reach, from the calls that the fixed state's tests made and from what they import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from glm5.tasks.swe.candidate import Candidate, Repository
from glm5.tasks.swe.test_files import functions

HIDDEN_IMPORT = re.compile(r"importlib|__import__|runpy|subprocess|os\.system|pytester|testdir")


def reached(candidate: Candidate, calls: Mapping[str, Sequence[str]] | None) -> tuple[str, ...]:
    """The test files to run, in the repository's order: those that call a changed function. If something else is
    changed, or an import calls it, those that import the changed file. Of Java, those that name its class, or a class
    that does. All if nothing is known."""
    repository = candidate.repository
    everything = repository.test_files
    changed = changed_functions(candidate)
    if calls is None and repository.language == "java":
        return _naming(repository, candidate.changes)
    if calls is None:
        return everything
    if changed is None or changed & set(calls.get("", ())):
        changed_files = set(candidate.changes)
        return tuple(file for file in everything if _imports_any(repository, file, changed_files))
    return tuple(file for file in everything if changed & set(calls.get(file, ())))


def _naming(repository: Repository, changed: Iterable[str]) -> tuple[str, ...]:
    """Java: the test files that name the class of a changed file, or a class whose file does, and so on."""
    names = {path: _class_names(repository.root, path) for path in _java_files(repository.root)}
    reached, waiting = set(changed), [Path(path).stem for path in changed]
    while waiting:
        wanted = waiting.pop()
        found = [path for path, named in names.items() if path not in reached and wanted in named]
        reached.update(found)
        waiting += [Path(path).stem for path in found]
    return tuple(file for file in repository.test_files if file in reached)


@lru_cache(maxsize=16)
def _java_files(root: Path) -> tuple[str, ...]:
    return tuple(sorted(path.relative_to(root).as_posix() for path in root.rglob("*.java") if path.is_file()))


@lru_cache(maxsize=8192)
def _class_names(root: Path, path: str) -> frozenset[str]:
    return frozenset(re.findall(r"\b[A-Z]\w*", (root / path).read_text(encoding="utf-8", errors="replace")))


def _imports_any(repository: Repository, test_file: str, wanted: set[str]) -> bool:
    """Whether a test file imports one of the files, itself or through others; True if it may import in a way that its
    syntax tree does not show."""
    if HIDDEN_IMPORT.search(repository.read(test_file)):
        return True
    folders = [str(folder) for folder in Path(test_file).parents]
    waiting = [test_file, *(str(Path(folder, "conftest.py")) for folder in folders)]
    seen: set[str] = set()
    while waiting:
        file = waiting.pop()
        if file in wanted:
            return True
        if file not in seen:
            seen.add(file)
            waiting += _imported(repository.root, file, (*repository.paths, folders[0]))
    return False


@lru_cache(maxsize=8192)
def _imported(root: Path, file: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """The repository's files that a file imports, with the packages around them."""
    try:
        tree = ast.parse((root / file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    found: dict[str, None] = {}
    for start, names in _names(tree, file, paths):
        folder = Path(start)
        for name in names:
            for path in (folder / f"{name}.py", folder / name / "__init__.py"):
                if (root / path).is_file():
                    found[path.as_posix()] = None
            folder /= name
    return tuple(found)


def _names(tree: ast.Module, file: str, paths: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(folder, names below it) of everything that a module may import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted = [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dotted = [(node.level, f"{node.module or ''}.{alias.name}".strip(".")) for alias in node.names]
        else:
            continue
        for level, name in dotted:
            starts = [str(Path(file).parents[min(level, len(Path(file).parents)) - 1])] if level else paths
            if level:
                yield starts[0], ["__init__"]
            for start in starts:
                yield start, name.split(".")


def changed_functions(candidate: Candidate) -> set[str] | None:
    """ "path:Class.function" of what differs between the two states; None if something outside of functions does."""
    found: set[str] = set()
    for path, bugged in candidate.changes.items():
        if bugged is None or not (candidate.repository.root / path).is_file():
            return None
        old, new = (_parts(text) for text in (candidate.repository.read(path), bugged))
        if old is None or new is None or old[0] != new[0] or old[1].keys() != new[1].keys():
            return None
        found |= {f"{path}:{name}" for name in old[1] if old[1][name] != new[1][name]}
    return found


def _parts(text: str) -> tuple[str, dict[str, str]] | None:
    """(the module without the bodies of its functions, body by name); None if a name is defined twice."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    bodies: dict[str, str] = {}
    for names, node in functions(tree):
        name = ".".join(names)
        if name in bodies:
            return None
        bodies[name] = "".join(ast.dump(part) for part in node.body)
        node.body = [ast.Pass()]
    return ast.dump(tree), bodies
