"""Benchmarks in JSONL files: how rows are read, and which replies are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.errors import ConfigError, DataError
from glm5.records import Message, Outcome
from glm5.tasks import make_family
from glm5.tasks.questions import GRADERS, LETTERS, is_choice

Write = Callable[..., str]


@pytest.fixture
def file(tmp_path: Path) -> Write:
    def write(*rows: Any) -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return str(tmp_path / "rows.jsonl")

    return write


@pytest.mark.parametrize(
    "grader, answers, right, wrong",
    [
        ("math", ["204"], ["\\boxed{204}", "so the answer is 204.", "\\boxed{204.0}", "x \\boxed{1} \\boxed{$204$}",
          "\\boxed{x = 204}", "\\boxed{204^\\circ}", "\\boxed{\\text{204}}"],
         ["\\boxed{205}", "\\boxed{200+4}", "204 or 205", "", "\\boxed{}", "not \\boxed{204}, but \\boxed{3}",
          "\\boxed{-204}"]),
        ("math", ["\\frac{3}{4}"], ["\\boxed{3/4}", "\\boxed{0.75}", "Answer: \\dfrac34"], ["\\boxed{0.74}"]),
        ("math", ["2\\sqrt{3}"], ["\\boxed{2\\sqrt3}", "\\boxed{\\sqrt{12}}", "\\boxed{6/\\sqrt3}"], ["\\boxed{3.46}"]),
        ("math", ["(1, 2)"], ["\\boxed{(1,2)}", "Answer: (2/2, 2)"], ["\\boxed{(2,1)}", "\\boxed{1,2}"]),
        ("math", ["\\{1, 2\\}"], ["\\boxed{\\{2, 1\\}}", "\\boxed{1, 2}"], ["\\boxed{\\{1\\}}", "\\boxed{-1,2}"]),
        ("math", ["-1, 2"], ["\\boxed{2, -1}", "\\boxed{-1 and 2}"], ["\\boxed{1,2}", "\\boxed{-1}"]),
        ("math", ["x^2+2x+1"], ["\\boxed{1+2x+x^2}", "\\boxed{(x+1)^2}"], ["\\boxed{x^2+2x}"]),
        ("math", ["all primes p"], ["\\boxed{All primes $p$}", "Answer: all primes p."], ["\\boxed{primes}"]),
        ("math", ["n \\ge -1"], ["\\boxed{n\\ge -1}"], ["\\boxed{n \\ge 1}", "\\boxed{}", ""]),
        ("math", ["f(n)=n"], ["\\boxed{f(n) = n}"], ["\\boxed{f(n)=-n}", "\\boxed{n}"]),
        ("math", ["x<5"], ["$\\boxed{x < 5}$"], ["\\boxed{x>5}"]),
        ("math", ["(-1,1]"], ["\\boxed{(-1, 1]}"], ["\\boxed{[-1,1)}"]),
        ("math", ["Yes"], ["\\boxed{\\text{Yes}}", "Answer: yes"], ["\\boxed{no}"]),
        ("choice", ["B"],
         ["B", "**B**", "(b)", "Answer: B", "The answer is (B).", "A? no. answer: $\\boxed{\\text{B}}$", "[B]", "`B`",
          "\\boxed{B}", "Answer: A\nno: Answer: B", "answer is **B**) because C is not", "\\(B\\)", "\\boxed{B) foo}",
          "Answer: b", "Answer: \\textbf{B}", "The answer is option B.", "\\boxed{x} hence Answer: B"],
         ["A", "", "Because", "Answer: Bob", "B or C", "Answer: B\nAnswer: C", "The answer is a B", "\\boxed{C} B",
          "The answer is a combination of both"]),
        ("exact", ["Marie Curie", "Curie"], ["Answer: the Marie Curie.", "marie curie", "x\nAnswer: CURIE"],
         ["Pierre Curie", "Answer: Curie and Bohr", ""]),
        ("exact", ["-1"], ["Answer: −1", "-1."], ["Answer: 1", "Answer: +1", ""]),
        ("exact", ["3.5"], ["Answer: 3.5."], ["Answer: 35", "Answer: 3 5"]),
        ("exact", ["C++"], ["Answer: c++"], ["Answer: C", "C#"]),
        ("exact", ["A"], ["Answer: a", "A."], ["", "Answer: the"]),
        ("contains", ["42"], ["It is 42, I think.", "42", "(42)"], ["It is 420.", "4 2", "", "It is -42."]),
    ],
)  # fmt: skip
def test_replies(grader: str, answers: list[str], right: list[str], wrong: list[str], file: Write) -> None:
    choices = {"choices": ["one", "two", "three"]} if grader == "choice" else {}
    row = {"question": "Q?", "answer": answers[0] if grader == "choice" else answers, **choices}
    source = make_family("questions", file=file(row), grader=grader, shuffle=False)
    for replies, reward in ((right, 1.0), (wrong, 0.0)):
        for reply in replies:
            env = source.problem("heldout", 0).env()
            env.start()
            result = env.step(Message("assistant", reply))
            assert (result.reward, result.done) == (reward, True), reply
            assert result.outcome is (Outcome.SOLVED if reward else Outcome.FAILED)


@given(st.text(max_size=300), st.sampled_from(sorted(GRADERS)), st.text(min_size=1, max_size=30))
def test_any_reply_and_any_answer_can_be_graded(reply: str, grader: str, answer: str) -> None:
    assert GRADERS[grader](reply, (answer,)) in (True, False)
    assert GRADERS[grader](reply * 2000, (answer,)) in (True, False)  # and soon


def test_choices_are_shuffled_by_the_question_and_the_letter_goes_with_them(file: Write) -> None:
    rows = [{"question": f"Q{i}", "choices": ["red", "green", "blue", "grey"], "answer": a}
            for i, a in enumerate(["C", 2, "blue", "2"] * 10)]  # fmt: skip
    letters = set()
    for seed in (0, 1):
        source = make_family("questions", seed, file=file(*rows), grader="choice")
        for index in range(40):
            problem = source.problem("heldout", index)
            assert f"{problem.answers[0]}) blue" in problem.prompt and problem.prompt.count(") ") == 4
            letters.add(problem.answers[0])
    assert letters == set("ABCD")


def test_labels_of_choices(file: Write) -> None:
    table = {"text": ["w", "x", "y", "z"], "label": ["4", "3", "2", "1"]}
    source = make_family("questions", file=file({"question": "Q", "answer": "1", "choices": table}), grader="choice")
    problem = source.problem("heldout", 0)
    assert f"{problem.answers[0]}) z" in problem.prompt and source.size == 1  # type: ignore[attr-defined]


def test_fields_templates_and_contexts(file: Write) -> None:
    rows = file(
        {"q": {"text": "What {context}?"}, "gold": [3, 4.5], "doc": "Long {question} text"},
        "",
        {"q": {"text": "B"}, "gold": "x", "doc": "y"},
    )
    source = make_family(
        "questions", file=rows, question="q.text", answer="gold", context="doc", prompt="<{context}|{question}>"
    )
    first, third = source.problem("heldout", 0), source.problem("heldout", 1)
    assert first.prompt == "<Long {question} text\n\n|What {context}?>" and first.answers == ("3", "4.5")
    assert third.id.endswith("/3") and source.problem("heldout", 2) == first and first.thinking
    columns = {"question": "Q", "a": "yes", "b": "no", "answer": "B"}
    listed = make_family("questions", file=file(columns), grader="choice", choices=["a", "b"], shuffle=False)
    assert "A) yes\nB) no" in listed.problem("heldout", 0).prompt


@pytest.mark.parametrize(
    "row, options, said",
    [
        ('{"question": ', {}, "line 1: not JSON"),
        ("[1, 2]", {}, "line 1: no JSON object"),
        ({"question": "Q"}, {}, 'no field "answer"'),
        ({"question": 3, "answer": "x"}, {}, 'the field "question" is no text'),
        ({"question": "Q", "answer": None}, {}, "neither a text nor a number"),
        ({"question": "Q", "answer": []}, {}, "there is no answer"),
        ({"question": "Q", "answer": " "}, {}, "there is no answer"),
        ({"question": "Q", "answer": "E", "choices": ["a", "b"]}, {"grader": "choice"}, "none of the choices"),
        ({"question": "Q", "answer": 7, "choices": ["a", "b"]}, {"grader": "choice"}, "none of the choices"),
        ({"question": "Q", "answer": 3, "choices": ["2", "3", "4", "5"]}, {"grader": "choice"}, "more than one"),
        (
            {"question": "Q", "answer": "x", "choices": {"text": ["a", "b"], "label": ["1", "2"]}},
            {"grader": "choice"},
            "none of the labels",
        ),
        (
            {"question": "Q", "answer": "1", "choices": {"text": ["a", "b"], "label": ["1", "1"]}},
            {"grader": "choice"},
            "1 different labels",
        ),
        ({"question": "Q", "answer": "..."}, {}, "there is no answer"),
        ({"question": "Q", "answer": "A", "choices": ["a", "a"]}, {"grader": "choice"}, "1 different choices of 2"),
        ({"question": "Q", "answer": "A", "choices": 5}, {"grader": "choice"}, "line 1"),
        ("", {}, "has no rows"),
    ],
)
def test_rows_that_do_not_fit(row: Any, options: dict[str, Any], said: str, file: Write) -> None:
    with pytest.raises(DataError, match=said):
        make_family("questions", file=file(row), **options).problem("heldout", 0)


def test_options_that_are_refused(file: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="grader is one of"):
        make_family("questions", file=file({}), grader="vibes")
    with pytest.raises(ConfigError, match="set the option file"):
        make_family("questions")
    with pytest.raises(DataError, match="cannot be read"):
        make_family("questions", file=str(tmp_path / "none.jsonl"))
    source = make_family("questions", file=file({"question": "Q", "answer": "A"}))
    for split in ("train", "rl"):
        with pytest.raises(DataError, match="no problems to train on"):
            source.problem(split, 0)
    with pytest.raises(DataError, match="no demonstration"):
        source.problem("heldout", 0).demonstration(0)


def test_every_letter_is_read() -> None:
    assert all(is_choice(f"So the answer is {letter}.", (letter,)) for letter in LETTERS)


def test_tables_with_a_header(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffquestion,answer\n"Which, of two?\nThe second.",B\n\nLast?,C\n', encoding="utf-8")
    family = make_family("questions", file=str(path), grader="exact")
    asked = [family.problem("heldout", index) for index in range(2)]
    assert asked[0].prompt.startswith("Which, of two?\nThe second.") and [one.answers for one in asked] == [
        ("B",),
        ("C",),
    ]
    for text, said in (
        ('question,answer\n"open', "not a CSV file"),
        ("question\nx\n", "line 2"),
        ("question,answer\n", "no rows"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            make_family("questions", file=str(path), grader="exact").problem("heldout", 0)
