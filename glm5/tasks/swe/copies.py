"""Whether the fix stands elsewhere in the repository: in a bundle, a second build of the sources, a vendored copy; or
among the test dependencies, one of which may need the package itself. An agent that searches for the broken lines would
find the right ones beside them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from pathlib import Path

from glm5.tasks.swe.candidate import Candidate

SHORTEST = 40
"""Characters of a changed place and the lines around it, without spaces, that are no coincidence in another file."""
MOST_BYTES = 4_000_000  # of a file that is searched


def fix_is_elsewhere(candidate: Candidate) -> str | None:
    """The first file that holds a changed place of the fixed state with the line before and after it, or with so many
    lines that it has SHORTEST characters. Not searched: the changed files, places that are in the bugged state too, and
    test dependencies with another suffix than the changed files."""
    repository = candidate.repository
    bugged = [_squeezed(text) for text in candidate.changes.values() if text]
    places = [
        place
        for path, text in candidate.changes.items()
        if (repository.root / path).exists()
        for place in _places(text or "", repository.read(path))
        if not any(place in other for other in bugged)
    ]
    if not places:
        return None
    suffixes = frozenset(Path(path).suffix for path in candidate.changes)
    for path, text in _texts(repository.root):
        if path not in candidate.changes and any(place in text for place in places):
            return path
    for folder in repository.site:
        for path, text in _texts(Path(folder), suffixes):
            if any(place in text for place in places):
                return f"{folder}/{path}"
    return None


def _places(bugged: str, fixed: str) -> Iterator[str]:
    old, new = bugged.splitlines(), fixed.splitlines()
    for tag, _, _, start, end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            for around in range(1, len(new) + 1):
                place = _squeezed("\n".join(new[max(0, start - around) : end + around]))
                if len(place) >= SHORTEST:
                    yield place
                    break


def _squeezed(text: str) -> str:
    return "".join(text.split())


@functools.lru_cache(4)
def _texts(root: Path, suffixes: frozenset[str] = frozenset()) -> tuple[tuple[str, str], ...]:
    """(path, text without spaces) of every file of a repository, which does not change while it is open, or of those
    with one of some suffixes."""
    files = (path for path in sorted(root.rglob("*")) if not suffixes or path.suffix in suffixes)
    files = (path for path in files if path.is_file() and not path.is_symlink())
    return tuple(
        (path.relative_to(root).as_posix(), _squeezed(path.read_text(encoding="utf-8", errors="replace")))
        for path in files
        if path.stat().st_size <= MOST_BYTES
    )
