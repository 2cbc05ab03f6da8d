"""Task texts that a model writes: what it is told, which answers are refused, what the manifest notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glm5.errors import GradingError
from glm5.tasks.swe.candidate import Candidate
from glm5.tasks.swe.driver import TestRun
from glm5.tasks.swe.text import CLOSINGS, RULES
from glm5.tasks.swe.validate import Baseline, Rules, validate
from glm5.tasks.swe.written import MOST_TEXT, TRIES, written
from tests.tasks.swe.tiny import CLIP, tiny

ID = "tests/test_ranges.py::TestSpread::test_some"
MESSAGES = {ID: "assert spread([3, 9, 4]) == 6\n\nAssertionError: assert 12 == 6"}
GOOD = "The difference is too large.\n\n```python\nassert spread([3, 9, 4]) == 6\n```\n\nIt comes out as 12."


@dataclass
class Model:
    """Answers one after the other, the last one for ever."""

    answers: list[str]
    prompts: list[str] = field(default_factory=list)

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self.answers[min(len(self.prompts), len(self.answers)) - 1]


@pytest.fixture
def candidate(tmp_path: Path) -> Candidate:
    bugged = CLIP.replace("first - second", "first + second")
    notes = ("change_arithmetic in spread",)
    return Candidate(
        tiny(tmp_path / "tiny"), "mutate", {"tiny/ranges.py": bugged}, notes=notes, description="Sizes are right."
    )


def test_the_text_is_the_models(candidate: Candidate) -> None:
    model = Model([GOOD])
    text = written(candidate, MESSAGES, "/app", model)
    assert text == f"{GOOD}\n\n{CLOSINGS['bug-fix']}\n\n{RULES.format(app='/app')}\n"
    (prompt,) = model.prompts
    assert "assert spread([3, 9, 4]) == 6" in prompt and "assert 12 == 6" in prompt and "Sizes are right." in prompt
    for hidden in ("first + second", "first - second", "change_arithmetic", "ranges.py", ID):
        assert hidden not in prompt


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "empty"),
        ("\x00\x1b\ud800\n ", "empty"),
        ("<think>assert spread([3, 9, 4]) == 6 fails", "quotes no"),
        ("<think>It is the sum.</think>\n", "empty"),
        ("Something is broken.", "quotes no"),
        (GOOD + " " * MOST_TEXT + ".", "more than"),
        ("x" * 3_000_000, "more than"),
        (GOOD + "\nIt must `return first - second`.", "how the bug"),
        (GOOD + "\nIt does `return first+second`.", "how the bug"),
        (GOOD + "\nIt looks like a mutation.", "how the bug"),
    ],
)
def test_answers_that_are_refused(candidate: Candidate, answer: str, why: str) -> None:
    if answer.startswith("<think>assert"):
        answer = answer.replace("assert", "the assertion of")
    model = Model([answer])
    assert written(candidate, MESSAGES, "/app", model) is None
    assert len(model.prompts) == TRIES and why in model.prompts[-1] and why not in model.prompts[0]
    assert len(model.prompts[-1]) < len(model.prompts[0]) + 200  # the answer is not in it
    assert written(candidate, MESSAGES, "/app", Model([answer, GOOD])) is not None


@pytest.mark.parametrize(
    ("quoted", "accepted"),
    [("assert spread(x) == 6", False), ("# x = [3, 9]\nassert spread(x) == 6", True), ("E: assert 12 == 6", True)],
)
def test_what_has_to_be_quoted(candidate: Candidate, quoted: str, accepted: bool) -> None:
    messages = {ID: "# x = [3, 9]\nassert spread(x) == 6\n\nE: assert 12 == 6\n  more"}
    assert (written(candidate, messages, "/app", Model([f"It is wrong: {quoted}"])) is not None) == accepted


def test_thoughts_and_what_cannot_be_shown_are_cut(candidate: Candidate) -> None:
    text = written(candidate, MESSAGES, "/app", Model([f"<think>return first - second</think>\n\x1b[1m{GOOD}\ud800"]))
    assert text is not None and text.startswith(f"[1m{GOOD}\n\n")


def test_names_that_are_needed_stay_in_the_text(tmp_path: Path) -> None:
    changes = {"tiny/ranges.py": CLIP.replace("def spread", "def gap")}
    candidate = Candidate(tiny(tmp_path), "versions", changes, "refactor", missing=(("tiny/ranges.py", "spread"),))
    model = Model(["`gap` should have the name `spread`."])
    text = written(candidate, {}, "/app", model)
    assert text is not None and "Missing: `spread` in `tiny/ranges.py`." in text and "maintainer" in model.prompts[0]


def test_the_manifest_notes_who_wrote_the_text(
    candidate: Candidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "tests/test_ranges.py::test_words"

    def run(_: Any, changes: Any, *rest: Any) -> TestRun:
        outcomes = {ID: "failed" if changes else "passed", other: "passed"}
        return TestRun((ID, other), outcomes, MESSAGES if changes else {}, {}, 0.1, None)

    clean = Baseline(frozenset((ID, other)), {"tests/test_ranges.py": (ID, other)}, 0.1, 0)
    driver: Any = SimpleNamespace(run=run)
    monkeypatch.setattr("glm5.tasks.swe.validate.check", lambda *_: None)

    def made(name: str, ask: Any) -> tuple[str, str]:
        row = validate(candidate, clean, driver, Rules(), tmp_path / name, (), ask)
        return row["text"], (tmp_path / name / "instruction.md").read_text()

    assert made("a", Model([GOOD])) == ("model", written(candidate, MESSAGES, "/app", Model([GOOD])))
    by_template = made("b", None)
    assert by_template[0] == "template" and made("c", Model(["no"])) == by_template

    def down(prompt: str) -> str:
        raise GradingError("http://127.0.0.1:9 does not answer.")

    with pytest.raises(GradingError, match="does not answer"):
        made("d", down)
    assert not list(tmp_path.glob("d*"))
