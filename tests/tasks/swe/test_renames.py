"""Kind refactor: which candidates only lack another name or place of something, and what their texts say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from glm5.tasks.swe.candidate import Candidate
from glm5.tasks.swe.commits import fixes, open_commit
from glm5.tasks.swe.renames import renamed
from glm5.tasks.swe.text import instruction, leaks
from glm5.tasks.swe.versions import Versions
from tests.tasks.swe.test_sources import commit
from tests.tasks.swe.tiny import CLIP, TESTS, tiny

BOX = """\
class Box:
    side = 1

    def area(self):
        return self.side**2

    def double(self):
        return 2 * self.area()
"""
LOOP = "def count(n):\n    return count(n - 1) + 1 if n else 0\n"
TWO = "def low(x):\n    return min(x)\n\n\ndef ends(x):\n    return low(x), max(x)\n"
F, G = "def f(x):\n    return x\n", "def g(x):\n    return x\n"
A, B = "p/a.py", "p/b.py"


def h(args: str = "", body: str = "pass") -> str:
    return f"\n\ndef h({args}):\n    {body}\n"


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("def f(x):\n    return x + 1\n", "def g(x):\n    return x + 1\n", ["g"]),
        ("def f(x):\n    'Of f.'\n    return x\n", "def g(x: int) -> int:\n    'Of g.'\n    return x\n", ["g"]),
        ("async def f(x):\n    return x\n", "async def g(x):\n    return x\n", ["g"]),
        (LOOP, LOOP.replace("count", "total"), ["total"]),  # it calls itself
        (TWO, TWO.replace("low", "least").replace("ends", "extremes"), ["extremes", "least"]),  # one calls the other
        (BOX, BOX.replace("Box", "Square"), ["Square"]),
        (BOX, BOX.replace("area", "surface"), ["Box.surface"]),
        ("def _f(x):\n    return x + 1\n", "def f(x):\n    return x + 1\n", ["f"]),
        (F, G + "\n\nf = g\n", ["g"]),  # the old name stays
        (F, G + "\n\ndef f(*a):\n    return g(*a)\n", ["g"]),
        (F + "\n\ny = f(1)\n", "import os\n\n\ndef g(x):\n    return x\n\n\ny = g(2)\n", ["g"]),
        (f"if 1:\n    {F[:9]} return x\n", f"try:\n    {G[:9]} return x\nfinally:\n    pass\n", ["g"]),
        (F + h(body="return 1"), G + h(body="return 2"), ["g"]),
        # not only a rename
        ("def f(x):\n    return x + 1\n", "def g(x):\n    return x + 2\n", []),
        ("def f(x):\n    return 1\n", "def g(x):\n    return True\n", []),
        ("def f(x):\n    return min(x)\n", "def g(x):\n    return max(x)\n", []),
        ("def f(a, b):\n    return a - b\n", "def g(a, b):\n    return b - a\n", []),
        (F, "async def g(x):\n    return x\n", []),
        (F, "def g(x, y=0):\n    return x\n", []),
        (F, F + G, []),  # a copy
        ("def f():\n    pass\n", "def f():\n    return 2\n\n\ndef g():\n    pass\n", []),  # f is another function now
        (F, G + h(), []),
        (F + h(), G, []),
        (F, G + "\n\nWIDTH = 3\n", []),
        (F + h("a"), G + h("b"), []),
        ("class C(A):\n    pass\n" + F, "class C(B):\n    pass\n" + G, []),
        (BOX, BOX.replace("area", "surface").replace("side = 1", "width = 1"), []),
        (F, "def _f(x):\n    return x\n", []),  # nothing public is missing
        (F, "def f(x):\n    return x + 1\n", []),
        ("WIDTH = 3\n", "BREADTH = 3\n", []),  # neither a function nor a class
        ("def f(:\n", "def g():\n    pass\n", []),
        ("x = 1\0", "def g():\n    pass\n", []),
        ("x = " + "(" * 150 + ")" * 150, "def g():\n    pass\n", []),
    ],
)  # fmt: skip
def test_names_that_were_only_changed(old: str, new: str, found: list[str]) -> None:
    assert renamed({A: old}, {A: new, "p/other.py": "x = 1\n"}) == tuple((A, name) for name in found)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({A: LOOP, B: ""}, {A: "", B: LOOP}, [(B, "count")]),
        ({A: LOOP, B: None}, {A: None, B: LOOP}, [(B, "count")]),  # the file has another name
        ({A: BOX, B: ""}, {A: "from p.b import Box\n", B: BOX}, [(B, "Box")]),  # and is still found in its old place
        ({A: BOX + LOOP, B: ""}, {A: LOOP, B: BOX}, [(B, "Box")]),
        ({A: LOOP, B: ""}, {A: LOOP, B: LOOP}, []),  # a copy
        ({A: LOOP, B: ""}, {A: "", B: LOOP.replace("1", "2")}, []),
        ({B: ""}, {A: LOOP, B: LOOP}, []),  # the state does not change the file with the counterpart
    ],
)
def test_moves(old: dict[str, str | None], new: dict[str, str | None], found: list[tuple[str, str]]) -> None:
    assert renamed(old, new) == tuple(found)


def test_a_release_that_renames(tmp_path: Path) -> None:
    new = tiny(tmp_path / "new")
    tiny(tmp_path / "old", source=CLIP.replace("def spread", "def gap"))
    (found,) = Versions(tmp_path / "old", "0.9").candidates(new, 0)
    assert (found.kind, found.missing) == ("refactor", (("tiny/ranges.py", "spread"),))
    tiny(tmp_path / "older", source=CLIP[: CLIP.index("def words")])
    (found,) = Versions(tmp_path / "older", "0.8").candidates(new, 0)
    assert (found.kind, found.missing) == ("feature", (("tiny/ranges.py", "words"),))


def test_the_text_of_a_refactor(tmp_path: Path) -> None:
    changes = {"tiny/ranges.py": CLIP.replace("def spread", "def gap")}
    candidate = Candidate(tiny(tmp_path), "versions", changes, "refactor", missing=(("tiny/ranges.py", "spread"),))
    text = instruction(candidate, {}, "/app")
    assert text is not None and not leaks(text, candidate)
    assert "renamed or moved" in text and "Missing: `spread` in `tiny/ranges.py`." in text


@pytest.mark.parametrize(
    ("subject", "source", "found"),
    [
        ("refactor: rename gap to spread", CLIP.replace("def spread", "def gap"), ["refactor"]),
        ("Fix the name of the widest gap", CLIP.replace("def spread", "def gap"), ["refactor"]),
        ("Rename the parts of ranges", CLIP[: CLIP.index("def words")], []),  # it adds a function
        ("refactor: write gaps in another way", CLIP.replace("def spread", "def gap"), []),
    ],
)
def test_commits_that_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subject: str, source: str, found: list[str]
) -> None:
    repo = tmp_path / "project"
    repo.mkdir()
    subprocess.run(["git", "init", "-q", str(repo)], check=True, capture_output=True)
    commit(repo, "Start", {"tiny/ranges.py": source, "tests/test_ranges.py": "def test_x():\n    pass\n"})
    commit(repo, subject, {"tiny/ranges.py": CLIP, "tests/test_ranges.py": TESTS})
    monkeypatch.setattr("glm5.tasks.swe.commits.install", lambda requirements, folder: tmp_path)
    kinds = []
    for one in fixes(repo, 10):
        repository, (made,) = open_commit(repo, one, (), tmp_path / "work", "MIT")
        kinds += [candidate.kind for candidate in made.candidates(repository, 0)]
    assert kinds == found


def test_a_commit_with_a_file_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "project"
    (repo / "tiny").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(repo)], check=True, capture_output=True)
    (repo / "tiny/latin.py").write_bytes(b"# \xe9\n")
    commit(repo, "Start", {"tests/test_ranges.py": "def test_x():\n    pass\n"})
    commit(repo, "Fix the encoding of a file", {"tiny/latin.py": "# e\n", "tests/test_ranges.py": TESTS})
    monkeypatch.setattr("glm5.tasks.swe.commits.install", lambda requirements, folder: tmp_path)
    (one,) = fixes(repo, 10)
    repository, (made,) = open_commit(repo, one, (), tmp_path / "work", "MIT")
    assert not list(made.candidates(repository, 0))
