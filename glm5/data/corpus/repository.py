"""Source files of a repository as one text, each after the files that it imports (as in DeepSeek-Coder,
arXiv:2401.14196), so that a model sees definitions before their use."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

_PYTHON = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+\(?([\w, \t]+)|import[ \t]+([\w., \t]+))", re.MULTILINE
)
_C = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_SCRIPT = re.compile(r"""(?:from|require\(|import)\s*\(?['"](\.{1,2}/[^'"\n]+)['"]""")
_NAMES = re.compile(r"^[ \t]*(?:use|import|require|require_relative|mod)\b[ \t(]*['\"]?([\w:./\\]+)", re.MULTILINE)
_LIKE_C = ("C", "C++", "CUDA", "Assembly")
_LIKE_JAVASCRIPT = ("JavaScript", "TypeScript")
_COMMENTS = {"Python": "#", "Shell": "#", "Perl": "#", "Ruby": "#", "Makefile": "#", "CMake": "#", "R": "#", "Tcl": "#"}
_MOST_IMPORTS = 1000


def imports(path: str, text: str, code: str) -> Iterator[str]:
    """Paths without suffix that a file may mean by its imports, relative to the repository."""
    folder = PurePosixPath(path).parent
    if code in ("Python", "Cython"):
        for found in list(_PYTHON.finditer(text))[:_MOST_IMPORTS]:
            yield from _python(folder, found)
    elif code in _LIKE_C:
        for name in _C.findall(text)[:_MOST_IMPORTS]:
            yield from (_plain(folder / name), _plain(PurePosixPath(name)))
    elif code in _LIKE_JAVASCRIPT:
        for name in _SCRIPT.findall(text)[:_MOST_IMPORTS]:
            yield from (_normal(folder / name), _plain(folder / name), _normal(folder / name / "index"))
    else:
        for name in _NAMES.findall(text)[:_MOST_IMPORTS]:
            parts = [part for part in re.split(r"::|[./\\]", name) if part and part not in ("crate", "self", "super")]
            yield from (_normal(folder.joinpath(*parts)), "/".join(parts))


def _python(folder: PurePosixPath, found: re.Match[str]) -> Iterator[str]:
    source, names, plain = found.groups()
    if plain is not None:
        yield from (name.split(" as ")[0].strip().replace(".", "/") for name in plain.split(","))
        return
    level = len(source) - len(source.lstrip("."))
    base = folder.joinpath(*[".."] * (level - 1)) if level else PurePosixPath()
    module = base.joinpath(*filter(None, source.lstrip(".").split(".")))
    yield _normal(module)
    yield from (_normal(module / name.split(" as ")[0].strip()) for name in names.split(",") if name.strip())


def _plain(path: PurePosixPath) -> str:
    return _normal(path.with_suffix("")) if path.name else _normal(path)


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def dependency_order(files: Mapping[str, tuple[str, str]]) -> list[str]:
    """Paths of `files` (text and programming language by path), imported ones first, otherwise in the order of paths.
    Files that import each other in a circle stay together, those with the fewest imports first."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in sorted(files):
        plain = _plain(PurePosixPath(path))
        for key in {plain, plain.removesuffix("/__init__"), plain.removesuffix("/mod")}:
            modules[key].append(path)
    needs = {
        path: sorted({other for name in imports(path, text, code) for other in modules.get(name, ()) if other != path})
        for path, (text, code) in sorted(files.items())
    }
    order: list[str] = []
    for circle in _circles(needs):
        inside = set(circle)
        order += sorted(circle, key=lambda path: (len(inside.intersection(needs[path])), path))
    return order


def _circles(needs: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """Strongly connected components, each after those that it needs (Tarjan's algorithm, without recursion)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []
    is_open: set[str] = set()
    for root in needs:
        walk = [] if root in number else [(root, iter(needs[root]))]
        while walk:
            path, rest = walk[-1]
            if path not in number:
                number[path] = low[path] = len(number)
                open_.append(path)
                is_open.add(path)
            for other in rest:
                if other not in number:
                    walk.append((other, iter(needs[other])))
                    break
                if other in is_open:
                    low[path] = min(low[path], number[other])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[path])
                if low[path] == number[path]:
                    at = open_.index(path)
                    yield open_[at:]
                    is_open.difference_update(open_[at:])
                    del open_[at:]


class Paths:
    """Paths of a repository's files, each different: an archive may have several files of one name, and names that are
    not UTF-8 may look the same once they are text."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def unlike(self, path: str) -> str:
        """`path`, or for another file of that name `path~2`, which is no name of source code, and so no file's own."""
        self._seen[path] += 1
        return path if self._seen[path] == 1 else f"{path}~{self._seen[path]}"


def concatenated(files: Mapping[str, tuple[str, str]], limit: int) -> Iterator[tuple[list[str], str]]:
    """Paths and text of successive documents of at most `limit` characters; a longer file is a document of its own. A
    comment before each file names it."""
    paths: list[str] = []
    parts: list[str] = []
    size = 0
    for path in dependency_order(files):
        text, code = files[path]
        part = f"{_COMMENTS.get(code, '//')} {path}\n{text}\n"
        if parts and size + len(part) > limit:
            yield paths, "\n".join(parts)
            paths, parts, size = [], [], 0
        paths.append(path)
        parts.append(part)
        size += len(part) + 1
    if parts:
        yield paths, "\n".join(parts)
