"""Groups of consecutive changes for chained tasks: relatedness, optimal partition, and what becomes of a group's files.

A partition of a linear history into contiguous groups maximises the sum over groups of the scores of all pairs inside,
minus `penalty` per group. A pair's score is its relatedness minus `neutral`: pairs less related than that speak for a
border between them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from glm5.tasks.swe.commits import is_fix
from glm5.tasks.swe.renames import renamed
from glm5.tasks.swe.repositories import NOT_SOURCE

NEUTRAL, PENALTY = 0.6, 0.1
MOST_GROUP = 5
"""Changes of one task."""
_WORD = re.compile(r"[A-Za-z]{3,}")
_TEST = re.compile(r"(.*/)?((?i:tests?)/.*|test_[^/]*\.py|[^/]*_tests?\.py|tests?\.py|conftest\.py)")
_SOURCE = (".py", ".pyi", ".pyx", ".pxd")
Files = Mapping[str, bytes]
Changed = Mapping[str, bytes | None]
"""Files by path as they are after a change; None for one that is gone."""


@dataclass(frozen=True)
class Change:
    """One step of a linear history: the files that it changed, before and after, and its message."""

    before: Changed
    after: Changed
    message: str = ""

    def words(self) -> Counter[str]:
        """Words of the message, and of the lines that were added or removed."""
        found = Counter(word.lower() for word in _WORD.findall(self.message))
        for path, new in self.after.items():
            old = self.before.get(path)
            lines = [set((data or b"").decode("utf-8", "replace").splitlines()) for data in (old, new)]
            for line in lines[0] ^ lines[1]:
                found.update(word.lower() for word in _WORD.findall(line))
        return found


def change(before: Files, after: Files, message: str = "") -> Change:
    """The difference of two states of a tree."""
    paths = [path for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)]
    return Change({p: before.get(p) for p in paths}, {p: after.get(p) for p in paths}, message)


def relatedness(one: Change, other: Change) -> float:
    """0 to 1: half by the files that both change, half by the cosine of their words."""
    files = one.after.keys() & other.after.keys(), one.after.keys() | other.after.keys()
    a, b = one.words(), other.words()
    norm = math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))
    cosine = sum(n * b[word] for word, n in a.items()) / norm if norm else 0.0
    return 0.5 * (len(files[0]) / len(files[1]) if files[1] else 0.0) + 0.5 * cosine


Pairs = Callable[[int, int], float]
"""The score of the pair of changes i < j."""


def partition(count: int, score: Pairs, penalty: float = PENALTY, most: int = MOST_GROUP) -> list[range]:
    """The best partition of `count` changes into groups of at most `most`; of equal ones, that with the later first
    borders."""
    best, start = [0.0], [0]
    for end in range(1, count + 1):
        inside, options = 0.0, list[tuple[float, int]]()
        for begin in range(end - 1, max(-1, end - 1 - most), -1):
            inside += sum(score(begin, later) for later in range(begin + 1, end))
            options.append((best[begin] + inside - penalty, begin))
        value, begin = max(options)
        best.append(value)
        start.append(begin)
    found, end = list[range](), count
    while end:
        found.append(range(start[end], end))
        end = start[end]
    return found[::-1]


def related_pairs(changes: Sequence[Change], neutral: float = NEUTRAL) -> Pairs:
    """Scores by `relatedness`, each computed once."""
    known: dict[tuple[int, int], float] = {}

    def score(i: int, j: int) -> float:
        if (i, j) not in known:
            known[i, j] = relatedness(changes[i], changes[j]) - neutral
        return known[i, j]

    return score


@dataclass(frozen=True)
class Split:
    """A group's files after it: `golden` is what the task asks for, `tests` are hidden, `auto` is laid in before the
    task, for it is neither: documentation, data, configuration, scripts."""

    golden: Changed
    tests: Changed
    auto: Changed


def split(changed: Changed) -> Split:
    """Every changed file belongs to one part: Python files, stubs and Cython outside of the tests to `golden`, those of
    the tests with all that lies in their folders to `tests`."""
    parts: dict[str, dict[str, bytes | None]] = {"golden": {}, "tests": {}, "auto": {}}
    for path, data in changed.items():
        source = path.endswith(_SOURCE) and path != "setup.py" and not NOT_SOURCE & set(path.split("/")[:-1])
        parts["tests" if _TEST.fullmatch(path) else "golden" if source else "auto"][path] = data
    return Split(**parts)


def class_of(group: Change, missing: Sequence[tuple[str, str]]) -> str:
    """feature, bug-fix, refactor, test or config. `missing` are names that only exist after the group."""
    parts = split(group.after)
    if not parts.golden:
        return "test" if parts.tests else "config"
    texts = [{p: None if d is None else d.decode("utf-8", "replace") for p, d in side.items() if p in parts.golden}
             for side in (group.before, group.after)]  # fmt: skip
    if renamed(*texts):
        return "refactor"
    return "feature" if missing and not is_fix(group.message) else "bug-fix"
