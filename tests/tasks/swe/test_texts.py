"""Texts: instructions that do not give the fix away, hidden tests, sabotaged twins, scrubbed messages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from glm5.tasks.swe.candidate import Candidate
from glm5.tasks.swe.commits import is_fix
from glm5.tasks.swe.test_files import sabotaged, split_id, without_tests
from glm5.tasks.swe.text import instruction, leaks
from glm5.tasks.swe.versions import scrub
from tests.tasks.swe.tiny import CLIP, TESTS, tiny

ID = "tests/test_ranges.py::test_clip_edges"


@pytest.fixture
def candidate(tmp_path: Path) -> Candidate:
    bugged = CLIP.replace("first - second", "first + second")
    return Candidate(tiny(tmp_path), "mutate", {"tiny/ranges.py": bugged}, notes=("change_arithmetic in spread",))


def test_an_instruction_shows_the_failing_statement(candidate: Candidate) -> None:
    text = instruction(candidate, {ID: "# x = 1\nassert clip(x) == 2\n\nAssertionError: assert 1 == 2"}, "/app")
    assert text is not None
    assert "# x = 1\nassert clip(x) == 2\n```" in text and "AssertionError: assert 1 == 2" in text and "`/app`" in text


@pytest.mark.parametrize(
    "said", ["return first - second", "return  first-second", "return first + second", "a mutation",
             "see change_arithmetic", "change arithmetic"]
)  # fmt: skip
def test_leaks(candidate: Candidate, said: str) -> None:
    assert leaks(f"It says {said} there.", candidate)
    assert not leaks("It adds where it should subtract.", candidate)
    assert instruction(candidate, {ID: f"{said}\n\nAssertionError"}, "/app") is None


def test_an_example_that_leaks_is_left_out(candidate: Candidate) -> None:
    other = "tests/test_ranges.py::test_words"
    text = instruction(candidate, {ID: "return first - second\n\nE", other: "assert words\n\nE"}, "/app")
    assert text is not None and "assert words" in text and "second" not in text


def test_the_patch_repairs(candidate: Candidate) -> None:
    assert "-    return first + second\n+    return first - second\n" in candidate.patch()


def test_split_id() -> None:
    assert split_id("a/test_b.py::C::test_d[x::y-1]", "pytest", ["a/test_b.py"]) == ("a/test_b.py", ("C", "test_d"))
    assert split_id("test_b.C.test_d", "unittest", ["a/test_b.py"]) == ("a/test_b.py", ("C", "test_d"))
    with pytest.raises(KeyError):
        split_id("other.C.test_d", "unittest", ["a/test_b.py"])


def test_hidden_tests_are_cut_out_with_their_decorators() -> None:
    text = without_tests(TESTS, {("test_clip",), ("TestSpread", "test_some")})
    assert text is not None
    assert "parametrize" not in text and "test_some" not in text
    assert "def test_clip_edges():\n" in text and "def test_empty(self):\n" in text


def test_a_class_whose_tests_are_all_hidden_stays_a_class() -> None:
    text = without_tests(TESTS, {("TestSpread", "test_empty"), ("TestSpread", "test_some")})
    assert text is not None and "class TestSpread:\n    pass\n" in text


def test_tests_that_are_not_in_the_text_hide_the_file() -> None:
    assert without_tests(TESTS, {("test_inherited",)}) is None
    assert without_tests("def broken(:\n", {("test_x",)}) is None


def test_a_sabotaged_value_is_of_the_same_kind() -> None:
    text = "def test_a():\n    assert f(1) == [1, 'ab']\n\n\ndef test_b():\n    assert f(2) == 3\n"
    found = {sabotaged(text, [("test_a",)], random.Random(seed)) for seed in range(20)}
    assert all(one is not None and one.count("def ") == 2 and "assert f(2) == 3" in one for one in found)
    assert any("[2, 'ab']" in str(one) for one in found)


@pytest.mark.parametrize(
    ("before", "after"),
    [("assert f(x) == y", "assert f(x) != y"), ("assert f(x)", "assert not f(x)"),
     ("assert f(x) or y", "assert not (f(x) or y)"), ("assert not f(x)", "assert f(x)"),
     ("self.assertIn(x, y)", "self.assertNotIn(x, y)"), ("assert x in y", "assert x not in y")],
)  # fmt: skip
def test_an_assertion_without_a_written_value_is_negated(before: str, after: str) -> None:
    assert (
        sabotaged(f"def test_a():\n    {before}\n", [("test_a",)], random.Random(0)) == f"def test_a():\n    {after}\n"
    )


def test_a_sabotaged_word_stands_elsewhere_in_the_file() -> None:
    text = "def test_a():\n    assert f('red apple') == 'green pears'\n\n\ndef test_b():\n    assert f('') == 'plum'\n"
    found = {str(sabotaged(text, [("test_a",)], random.Random(seed))).split("== ")[1] for seed in range(20)}
    assert len(found) > 2
    for changed in found:
        assert set(changed.partition("\n")[0].strip("'").split()) <= {"green", "pears", "red", "apple"}
    alone = {str(sabotaged(text, [("test_b",)], random.Random(seed))) for seed in range(20)}
    assert {one.rsplit("'", 2)[1] for one in alone} <= {"red", "apple", "green", "pears"}
    assert sabotaged("def test_a():\n    assert f(x) == 0xff\n", [("test_a",)], random.Random(0)) == (
        "def test_a():\n    assert f(x) != 0xff\n"
    )


def test_nothing_to_sabotage() -> None:
    assert sabotaged("def test_a():\n    f()\n", [("test_a",)], random.Random(0)) is None
    assert sabotaged('def test_a():\n    assert f(x) == "\\udddf"\n', [("test_a",)], random.Random(0)) is not None


@pytest.mark.parametrize(
    ("message", "fix"),
    [("Fix off-by-one in slices", True), ("Handle empty input", True), ("bugfix: wrong sign", True),
     ("docs: fix typo", False), ("feat: raise errors early", False), ("chore(ci): fix build", False),
     ("Revert \"Fix x\"", False), ("Add a button", False),
     ("refactor: avoid crash", False), ("Bump version to fix release", False), ("test: fix flaky test", False)],
)  # fmt: skip
def test_messages_of_fixes(message: str, fix: bool) -> None:
    assert is_fix(message) is fix


def test_scrub() -> None:
    text = scrub(
        "Fix crash on empty input (#123)\n\nFixes #45, see https://example.org/x/1 and GH-7.\n"
        "Broken since 1a2b3c4d5e6f by @someone.\nSigned-off-by: A <a@b.c>\nCo-authored-by: B <b@b.c>\n"
    )
    for word in ("123", "#45", "http", "GH-7", "1a2b3c4", "someone", "Signed", "Co-auth"):
        assert word not in text
    assert text.startswith("Fix crash on empty input")


def test_an_inherited_test_is_found_in_the_class_that_defines_it() -> None:
    text = "class Base:\n    def test_a(self):\n        assert f() == y\n\n\nclass TestB(Base):\n    pass\n"
    hidden = without_tests(text, {("TestB", "test_a")})
    assert hidden == "class Base:\n    pass\n\n\nclass TestB(Base):\n    pass\n"
    changed = sabotaged(text, [("TestB", "test_a")], random.Random(0))
    assert changed is not None and "assert f() != y" in changed
