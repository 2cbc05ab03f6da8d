"""The model's filters with scripted models, and paraphrases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from glm5.tasks.search.checks import Checker, Question
from glm5.tasks.search.filters import Judges, filter_questions, judge, paraphrase_questions, paraphrased
from glm5.tasks.search.questions import read_questions


@pytest.fixture
def question(built: Path) -> Question:
    return next(q for q in read_questions(built) if q.kind == "tree")


def verifier(accepted: set[str]):  # type: ignore[no-untyped-def]
    """Plays nothing right, and accepts the answers given."""

    def play(question: Question, prompt: str, turns: int) -> str:
        if prompt == question.asked:
            assert turns == 5
            return "Exact Answer: Oslo"
        claimed = prompt.split('"')[1]
        return f"Explanation: looked.\nExact Answer: {'yes' if claimed in accepted else 'no'}"

    return play


def test_what_is_known_or_easy_falls(question: Question) -> None:
    answers = iter(["Oslo"] * 7 + [question.names[0]])
    known = judge(question, Judges(lambda prompt: next(answers), verifier(set())))
    assert (known["reason"], known["tries"]) == ("answered from memory", 8)
    easy = Judges(lambda prompt: "no idea", lambda q, prompt, turns: q.names[0])
    assert judge(question, easy)["reason"] == "solved by the early agent"


def test_the_verification_agent_looks_both_ways(question: Question) -> None:
    truth = question.names[0]
    good = judge(question, Judges(lambda prompt: "Bergen", verifier({truth})))
    assert good["reason"] is None and good["rivals"] == ["Oslo", "Bergen"]
    assert "rejects the answer" in judge(question, Judges(lambda prompt: "", verifier(set())))["reason"]
    twice = judge(question, Judges(lambda prompt: "Bergen", verifier({truth, "Bergen"})))
    assert "accepts another answer" in twice["reason"] and twice["rival"] == "Bergen"


def test_filtered_questions_are_left_out(built: Path, tmp_path: Path) -> None:
    for name in ("web.sqlite", "questions.jsonl"):
        shutil.copy(built / name, tmp_path / name)
    (tmp_path / "index").symlink_to(built / "index")
    questions = read_questions(tmp_path)
    known = {q.id for q in questions[::2]}
    asked = list[str]()

    def ask(prompt: str) -> str:
        asked.append(prompt)
        return next((q.names[0] for q in questions if q.id in known and q.text in prompt), "?")

    accept = Judges(ask, lambda q, prompt, turns: "?" if prompt == q.asked else "Exact Answer: yes")
    found = filter_questions(tmp_path, questions, accept)
    assert found == {"answered from memory": 20, "kept": 20}
    assert [q.id for q in read_questions(tmp_path)] == [q.id for q in questions if q.id not in known]
    count = len(asked)
    filter_questions(tmp_path, questions, accept)  # nothing is asked twice
    assert len(asked) == count


def test_paraphrases_are_asked_for_once_and_change_no_other_file(built: Path, tmp_path: Path, checker: Checker) -> None:
    for name in ("web.sqlite", "questions.jsonl"):
        shutil.copy(built / name, tmp_path / name)
    (tmp_path / "index").symlink_to(built / "index")
    questions, asked = read_questions(tmp_path), list[str]()
    (tmp_path / "model.jsonl").write_text(json.dumps({"id": questions[0].id, "reason": "answered from memory"}) + "\n")

    def ask(prompt: str) -> str:
        asked.append(prompt)
        if len(asked) == 4:
            raise KeyboardInterrupt
        text = prompt.partition("\n\n")[2]
        return "" if len(asked) == 2 else f"Tell me: {text}"

    with pytest.raises(KeyboardInterrupt):
        paraphrase_questions(tmp_path, read_questions(tmp_path), ask, checker)
    assert [bool(q.paraphrase) for q in read_questions(tmp_path)[:5]] == [True, False, True, False, False]
    found = paraphrase_questions(tmp_path, read_questions(tmp_path), ask, checker)
    assert len(asked) == 1 + len(questions) - 1 and found == read_questions(tmp_path)
    assert found[3].asked == f"Tell me: {found[3].text}" and [q.id for q in found] == [q.id for q in questions[1:]]
    assert (tmp_path / "questions.jsonl").read_bytes() == (built / "questions.jsonl").read_bytes()
    row = json.loads((tmp_path / "paraphrases.jsonl").read_text().splitlines()[0])
    (tmp_path / "paraphrases.jsonl").write_text(json.dumps(row | {"web": "another"}) + "\n")
    assert not any(q.paraphrase for q in read_questions(tmp_path))  # it was checked on another web


def test_a_paraphrase_keeps_names_and_numbers(question: Question, checker: Checker) -> None:
    moved = f"Tell me: {question.text[0].lower()}{question.text[1:]}"
    changed, why = paraphrased(question, lambda prompt: moved, checker)
    assert why is None and changed.asked == moved and changed.id == question.id
    name = next(iter(question.constants.values()))
    for text, reason in (
        ("", "empty or too long"),
        (question.text.replace(name, "it"), "a name is missing"),
        (f"{question.text} 17", "a number is missing or added"),
        (f"{question.text} Is it {question.names[0]}?", "gives a name away"),
    ):
        same, why = paraphrased(question, lambda prompt, text=text: text, checker)  # type: ignore[misc]
        assert (same, why) == (question, reason)
