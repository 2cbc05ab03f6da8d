"""What the two derived tasks show: other spellings of a source, and patches that only their meaning tells apart."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from glm5.tasks.swe.candidate import Candidate
from glm5.tasks.swe.derived import _size, _wrong_patches, respelled
from glm5.tasks.swe.driver import Driver
from glm5.tasks.swe.repositories import from_tree
from glm5.tasks.swe.validate import Baseline
from tests.tasks.swe.tiny import CLIP, TESTS

BUG = CLIP.replace("return high", "return low", 1)
ODD = '''
class Base:
    def name(self, *more, sep: str = "-"): return sep.join([type(self).__name__, *more])

class One(Base):
    def name(self, *more, **options):
        """What it is called."""
        if (count := len(more)) > 1: return f"{count:>{count + 1}} {super().name(*more)!r}"
        match more:
            case [str() as only]: return super().name(only, sep="+")
        found = {}
        found["x"], found["y"] = (lambda a, b=2: a + b)(1), [*range(5)][1:3]
        found["x"] += 1
        del found["y"][0]
        try:
            raise KeyError("k")
        except (KeyError, ValueError) as error:
            found[error.args[0]] = sum(n for n in range(4) if n % 2) if not more else None
        return found, ..., -1 ** 2

async def wait(x): return [await y async for y in x]
def each(n): yield from (yield n) or ()
'''


def parts(text: str) -> set[str]:
    """The statements, comparisons and calls of a source."""
    kinds = (ast.Return, ast.Assign, ast.Compare, ast.Call)
    return {ast.dump(node) for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}


def test_another_spelling_means_the_same() -> None:
    said = []
    for text in (ODD, respelled({"m": ODD})["m"]):
        module = ModuleType("m")
        exec(compile(text, "m", "exec"), module.__dict__)
        one = module.One()
        said.append((one.name(), one.name("a"), one.name("a", "b"), list(module.each(3)), one.name.__doc__))
    assert said[0] == said[1] and said[0][:1] == (({"x": 4, "y": [2], "k": 4}, ..., -1),)


def test_the_parts_of_a_bug_do_not_tell_its_other_spelling() -> None:
    """A test that looks for them would fail with the bug and pass without, and know nothing of what is right."""
    bug = CLIP.replace("first - second", "second - first")
    assert not parts(bug) <= parts(CLIP) | parts(respelled({"m": CLIP})["m"])
    assert not parts(bug) <= parts(respelled({"m": bug})["m"])


def test_wrong_patches_are_as_large_as_the_right_one_and_do_not_hold_it(tmp_path: Path) -> None:
    for path, text in (("tiny/__init__.py", ""), ("tiny/ranges.py", CLIP), ("tests/test_ranges.py", TESTS)):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    repository = from_tree(tmp_path, "tiny", "1.0", "MIT", "test")
    run: dict[str, Any] = {"stopped": None, "passed": set()}
    driver = cast(Driver, SimpleNamespace(run=lambda *_: SimpleNamespace(**run)))
    clean = Baseline(frozenset({"t"}), {"tests/test_ranges.py": ("t",)}, 1.0, 0)
    candidate = Candidate(repository, "mutate", {"tiny/ranges.py": BUG})
    wrong = _wrong_patches(candidate, clean, driver, random.Random(0))
    right = candidate.patch()

    def lines(patch: str, sign: str) -> list[str]:
        return [line for line in patch.splitlines()[2:] if line[0] == sign]

    assert len(set(wrong)) == 3 and right not in wrong and _size(BUG, CLIP) == (1, 1, 1)
    assert [(len(lines(p, "+")), len(lines(p, "-"))) for p in wrong] == [(1, 1)] * 3
    assert not any(set(lines(right, "+")) <= set(lines(p, "+")) and lines(right, "-") == lines(p, "-") for p in wrong)
