"""Diffs in memory: difflib writes them, and the result must be the text that it compared."""

from __future__ import annotations

import difflib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.data.swe.issues import Issues, without_trailers
from glm5.data.swe.patching import PatchError, applied, parse_diff, spans

LINES = st.lists(st.sampled_from(["a", "b", "c", "", "-d", "+e", " f", "@@ x"]), max_size=30)


def diff(old: str, new: str, before: str = "a/x.c", after: str = "b/x.c") -> str:
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), before, after)
    marked = (line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)
    return "".join(marked)


@given(LINES, LINES, st.booleans(), st.booleans())
def test_a_diff_gives_the_new_text(old: list[str], new: list[str], old_end: bool, new_end: bool) -> None:
    before, after = ("\n".join(lines) + "\n" * (bool(lines) and end) for lines, end in ((old, old_end), (new, new_end)))
    found = parse_diff("Some prose first.\n\n" + diff(before, after))
    if before == after:
        assert found == []
        return
    assert len(found) == 1 and found[0].path == "x.c"
    assert applied(before, found[0]) == after


@given(LINES, st.integers(0, 5))
def test_a_hunk_is_found_at_other_lines(added: list[str], at: int) -> None:
    old = "".join(f"line {n}\n" for n in range(40))
    new = old.replace("line 20\n", "line twenty\n").replace("line 33\n", "")
    lines = old.split("\n")
    moved = "\n".join([*lines[:at], *added, *lines[at:]])
    wanted = moved.replace("line 20\n", "line twenty\n").replace("line 33\n", "")
    assert applied(moved, parse_diff(diff(old, new))[0]) == wanted


def test_paths_in_quotes_and_places_of_hunks() -> None:
    old = "".join(f"line {n}\n" for n in range(40))
    new = old.replace("line 20\n", "").replace("line 33\n", "line 33\nmore\n")
    found = parse_diff(diff(old, new, r'"a/gro\303\237 \"x\".py"', r'"b/gro\303\237 \"x\".py"'))[0]
    assert found.path == 'groß "x".py'
    assert spans(f"first\n{old}", found) == [(18, 25), (32, 38)]


def test_files_come_and_go() -> None:
    made = parse_diff(diff("", "a\nb\n", "/dev/null"))[0]
    assert (made.old, made.new, applied(None, made)) == (None, "x.c", "a\nb\n")
    gone = parse_diff(diff("a\nb\n", "", "a/x.c", "/dev/null"))[0]
    assert (gone.path, applied("a\nb\n", gone)) == ("x.c", None)
    old_style = parse_diff(diff("", "a\n"))[0]  # without /dev/null, as diff -N writes it
    assert applied(None, old_style) == "a\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (diff("a\n", "b\n", "a/../../x.c", "b/../../x.c"), "outside the tree"),
        (diff("a\n", "b\n", "a//etc/passwd", "b//etc/passwd"), "outside the tree"),
        ("--- a/x\n+++ b/x\n@@ -1,5 +1,5 @@\n a\n", "ends early|without a sign"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n?b\n", "without a sign"),
        (f"--- a/x\n+++ b/x\n@@ -{'1' * 5000} +1 @@\n-a\n+b\n", "no file has"),
    ],
)
def test_hostile_diffs_are_refused(text: str, reason: str) -> None:
    with pytest.raises(PatchError, match=reason):
        parse_diff(text)


def test_equal_lines_take_no_quadratic_time() -> None:
    lines = "".join(f"-{line}\n" for line in ["x"] * 32_000 + ["y"])
    hunk = parse_diff(f"--- a/x\n+++ b/x\n@@ -1,32001 +0,0 @@\n{lines}")[0]
    start = time.process_time()
    with pytest.raises(PatchError, match="too many lines"):
        applied("x\n" * 64_000, hunk)
    with pytest.raises(PatchError, match="too many lines"):
        applied("\n" * 400_000, parse_diff("--- a/x\n+++ b/x\n" + "@@ -1,0 +1 @@\n+a\n" * 1000)[0])
    assert Issues().own_words("\n " * 20_000) == (0, 0)
    assert without_trailers("Cc" + "\n" * 20_000) == "Cc"
    assert time.process_time() - start < 3


def test_what_does_not_apply_is_refused() -> None:
    change = parse_diff(diff("a\nb\n", "a\nc\n"))[0]
    for text in ("a\nd\n", None):
        with pytest.raises(PatchError):
            applied(text, change)
    with pytest.raises(PatchError, match="exists already"):
        applied("x\n", parse_diff(diff("", "a\n", "/dev/null"))[0])
