"""The paper's three filters by a model (§4.2.3), and the paraphrase. Any model will do; tests use scripted ones.

1. A reasoner without tools is right at least once in `tries` tries: the question can be answered from memory.
2. An early agent with the tools is right within `early_turns` steps: it is too easy.
3. A verification agent looks at the answer and at the wrong answers that came up: it must accept the one and none of
   the others, else the question is wrong or not unique.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm5.tasks.search.answers import read_reply, right
from glm5.tasks.search.checks import Checker, Question
from glm5.tasks.search.questions import FORM, read_filtered, read_paraphrases
from glm5.tasks.search.records import leaks, words

TRIES = 8
EARLY_TURNS = 5
MOST_RIVALS = 3
"""Wrong answers that the verification agent looks at."""
CLOSED_BOOK = "Answer from memory, in one line, with the name alone.\n\n{}"
PARAPHRASE = """Write the question below in other words, as one question that sounds natural. Keep every condition, and
exactly every number and every name that is in it; add no other name. Write nothing else.

{}"""
VERIFY = """Somebody claims that the answer to the question below is "{answer}". Check every condition with the tools.
End with a message in which the line "Exact Answer:" has only yes or no: whether all conditions hold for it.

{question}"""


@dataclass(frozen=True)
class Judges:
    """What a model does. `ask` answers a prompt without tools; `play` answers a prompt with the tools within a number
    of turns (0: no limit of its own)."""

    ask: Callable[[str], str]
    play: Callable[[Question, str, int], str]
    tries: int = TRIES
    early_turns: int = EARLY_TURNS


def judge(question: Question, judges: Judges) -> dict[str, Any]:
    """The verdict on a question, as a row of `model.jsonl`; `reason` is None if it stays. What the model does wrong
    raises nothing; what its server does wrong is raised, and the question is tried again by the next run."""
    row: dict[str, Any] = {"id": question.id, "reason": None}
    rivals = list[str]()
    for number in range(judges.tries):
        answer = read_reply(judges.ask(CLOSED_BOOK.format(question.asked))).answer
        if right(answer, question.names):
            return row | {"reason": "answered from memory", "tries": number + 1}
        rivals.append(answer)
    answer = read_reply(judges.play(question, question.asked, judges.early_turns)).answer
    if right(answer, question.names):
        return row | {"reason": "solved by the early agent"}
    rivals = list(dict.fromkeys(text for text in [answer, *rivals] if words(text)))[:MOST_RIVALS]
    if not _accepts(question, question.names[0], judges):
        return row | {"reason": "the verification agent rejects the answer"}
    for rival in rivals:
        if _accepts(question, rival, judges):
            return row | {"reason": "the verification agent accepts another answer", "rival": rival}
    return row | {"rivals": rivals}


def _accepts(question: Question, answer: str, judges: Judges) -> bool:
    text = judges.play(question, VERIFY.format(answer=answer, question=question.asked), 0)
    return words(read_reply(text).answer)[:1] == ["yes"]


def filter_questions(
    out: Path, questions: Sequence[Question], judges: Judges, told: Callable[[str], None] = lambda line: None
) -> dict[str, int]:
    """Judge the questions that `OUT/model.jsonl` does not have yet; the reasons of all."""
    rows = {row["id"]: row for row in read_filtered(out)}
    for number, question in enumerate(questions, 1):
        if question.id not in rows:
            rows[question.id] = row = judge(question, judges)
            with (out / "model.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            told(f"filters: {number} of {len(questions)}: {row['reason'] or 'kept'}")
    return dict(Counter(rows[question.id]["reason"] or "kept" for question in questions))


def paraphrase_questions(
    out: Path, questions: Sequence[Question], ask: Callable[[str], str], checker: Checker
) -> list[Question]:
    """The questions with paraphrases; those that `OUT/paraphrases.jsonl` does not have yet are asked for."""
    key = {"form": FORM, "web": checker.web.digest}
    known, found = {row["id"] for row in read_paraphrases(out, checker.web.digest)}, list[Question]()
    for question in questions:
        if question.id not in known:
            question, reason = paraphrased(question, ask, checker)
            row = {**key, "id": question.id, "paraphrase": question.paraphrase, "reason": reason}
            with (out / "paraphrases.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        found.append(question)
    return found


def paraphrased(question: Question, ask: Callable[[str], str], checker: Checker) -> tuple[Question, str | None]:
    """The question with a paraphrase, or as it was and why the model's text was not taken."""
    text = " ".join(ask(PARAPHRASE.format(question.text)).split())
    if not text or len(text) > 2 * len(question.text) + 100:
        return question, "empty or too long"
    if not all(leaks(name, text) for name in question.constants.values() if len(words(name)) > 0 and len(name) > 1):
        return question, "a name is missing"
    if Counter(_numbers(text)) != Counter(_numbers(question.text)):
        return question, "a number is missing or added"
    changed = replace(question, paraphrase=text)
    reason = checker.reject(changed, reach=False)
    return (changed, None) if reason is None else (question, reason)


def _numbers(text: str) -> list[str]:
    return [found.replace(",", "") for found in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]
