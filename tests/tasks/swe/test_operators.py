"""Mutation operators: what each proposes, and that an edit changes nothing but its range."""

from __future__ import annotations

import ast
import random
import textwrap
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import glm5.tasks.swe.operators as module
from glm5.tasks.swe.mutate import Mutations, apply, places, runs_alike, without_body
from glm5.tasks.swe.operators import OPERATORS
from tests.tasks.swe.tiny import tiny

EXAMPLES = {
    "change_comparison": ("return a < b", {"return a <= b", "return a > b"}),
    "change_arithmetic": ("return a - b", {"return a + b"}),
    "change_connective": ("return a and b", {"return a or b"}),
    "drop_operand": ("return a and b", {"return a"}),
    "negate_condition": ("if a:\n    b()", {"if not a:\n    b()"}),
    "swap_branches": ("if a:\n    b()\nelse:\n    c()", {"if a:\n    c()\nelse:\n    b()"}),
    "shift_number": ("return a + 1", {"return a + 2", "return a + 0"}),
    "change_slice": ("return a[b:]", {"return a[b + 1:]", "return a[b - 1:]"}),
    "flip_flag": ("return True", {"return False"}),
    "change_return": ("return a(b)", {"return b"}),
    "remove_statement": ("a.b = c", {"pass"}),
    "remove_guard": ("if a:\n    return b\nreturn c", {"return c"}),
    "remove_branch": ("if a:\n    b()\nelif c:\n    d()", {"if a:\n    b()\nelif a:\n    d()"}),
    "change_exception": (
        "try:\n    a()\nexcept (B, C):\n    d()",
        {"try:\n    a()\nexcept (B,):\n    d()", "try:\n    a()\nexcept (C,):\n    d()"},
    ),
    "swallow_exception": ("raise A(b)", {"pass", "return None"}),
    "swap_arguments": ("return a(b, c)", {"return a(c, b)"}),
    "drop_keyword": ("return a(b, c=d)", {"return a(b)"}),
    "swap_break_continue": ("while a:\n    break", {"while a:\n    continue"}),
    "change_method": ("return a.lstrip()", {"return a.rstrip()"}),
    "drop_call": ("return sorted(a)", {"return a"}),
    "confuse_names": ("return a", {"return b", "return c"}),
    "swap_statements": ("a = b\nc = a", {"c = a\na = b"}),
    "remove_loop": ("while a:\n    a = b(a)", {"if a:\n    a = b(a)"}),
}
WHOLE = {
    "change_default": ('def f(a, b=""):\n    return a', {'def f(a, b=" "):\n    return a'}),
    "remove_decorator": ("@functools.cache\ndef f(a):\n    return a", {"def f(a):\n    return a"}),
    "drop_base": (
        "class A(B, C):\n    def f(self):\n        return 1",
        {"class A(C):\n    def f(self):\n        return 1"},
    ),
}


def made(text: str, operator: str) -> set[str]:
    found = set()
    for seed in range(20):
        for edit in places(text, random.Random(seed)):
            changed = apply(text, [edit])
            if edit.operator == operator and changed is not None:
                found.add(changed)
    return found


def test_every_operator_has_an_example() -> None:
    assert {*EXAMPLES, *WHOLE} == set(OPERATORS)


@pytest.mark.parametrize("operator", EXAMPLES)
def test_an_operator_inside_a_function(operator: str) -> None:
    body, wanted = EXAMPLES[operator]

    def function(text: str) -> str:
        return "def f(a, b, c):\n" + textwrap.indent(text, "    ") + "\n"

    assert made(function(body), operator) == {function(text) for text in wanted}


@pytest.mark.parametrize("operator", WHOLE)
def test_an_operator_on_a_definition(operator: str) -> None:
    text, wanted = WHOLE[operator]
    assert made(text + "\n", operator) == {one + "\n" for one in wanted}


@pytest.mark.long
@pytest.mark.parametrize("path", [module.__file__, random.__file__, textwrap.__file__])
@given(seed=st.integers(0, 2**32))
def test_an_edit_changes_its_range_only(path: str, seed: int) -> None:
    text = Path(path).read_text()
    choice = random.Random(seed)
    edits = list(places(text, choice))
    edit = choice.choice(edits)
    changed = apply(text, [edit])
    if changed is not None:
        raw, new = text.encode(), changed.encode()
        assert new.startswith(raw[: edit.start]) and new.endswith(raw[edit.end :])
        assert new[edit.start : edit.start + len(edit.text)] == edit.text
        assert not runs_alike(text, changed)


@pytest.mark.parametrize(
    "text", ["def f(ä):\n    return 'ö' if ä < 1 else 2\n", "def f(a):\n    return (a  # note\n            < 3)\n",
             "def f(a):\n\n\treturn a == 1\n", "async def f(a):\n    return f'{a + 1}'\n", "x = 1 + 2\n"]
)  # fmt: skip
def test_unusual_text(text: str) -> None:
    for edit in places(text, random.Random(0)):
        changed = apply(text, [edit])
        assert changed is None or ast.parse(changed)


def test_edits_that_overlap_or_change_nothing_are_refused() -> None:
    text = "def f(a):\n    return a < 1\n"
    edits = [edit for edit in places(text, random.Random(0)) if edit.operator == "change_comparison"]
    assert apply(text, [edits[0], edits[0]]) is None
    assert apply(text, [module.Edit(0, 0, b"# note\n", "note")]) is None
    assert apply(text, [module.Edit(0, 3, b"def (", "broken")]) is None


def test_a_function_without_its_body_keeps_its_docstring() -> None:
    text = 'def f(a):\n    """Doc."""\n    b = a\n    c = b\n    return c\n'
    edit = without_body(text, random.Random(0))
    assert edit is not None
    assert apply(text, [edit]) == 'def f(a):\n    """Doc."""\n    raise NotImplementedError("to be written")\n'


def test_mutations_depend_on_the_seed_only_and_do_not_repeat(tmp_path: Path) -> None:
    repository = tiny(tmp_path)
    assert repository.sources == ("tiny/__init__.py", "tiny/ranges.py")
    first, again, other = ([c.id for c in islice(Mutations().candidates(repository, seed), 25)] for seed in (0, 0, 1))
    assert first == again
    assert len(set(first)) == len(first) > 20
    assert first != other


def test_hard_candidates_change_several_functions(tmp_path: Path) -> None:
    hard = [c for c in islice(Mutations().candidates(tiny(tmp_path), 0), 25) if c.tier == "hard"]
    assert hard
    for candidate in hard:
        names = [note.split(" in ")[1] for note in candidate.notes]
        assert 2 <= len(names) <= 4 and len(set(names)) == len(names)
