"""Questions of a file with known answers, such as a published benchmark: the family `questions` (§6, App. B).

A row has a question, an answer (or several accepted ones), and, where wanted, choices and a context. Rows are for
evaluation: "heldout" has all of them, the other splits none.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError
from glm5.records import Env, Message, StepResult
from glm5.tasks.contract import EvaluationProblem, Family, SingleTurnEnv, ToolSpec
from glm5.tasks.judged import Material, unjudged
from glm5.tasks.mathematics.answer import Answer, check_answer, final_answer

MOST_ROW_BYTES = 64 << 20
LETTERS = string.ascii_uppercase
PROMPTS = {
    "math": "{question}\n\nPut the final answer in \\boxed{}.",
    "choice": '{context}{question}\n\n{choices}\n\nEnd with "Answer: " and the letter of the right choice.',
    "exact": '{context}{question}\n\nEnd with "Answer: " and the answer alone.',
    "contains": "{context}{question}",
    "judge": "{context}{question}",
}
JUDGED = "judge"
"""The grader whose verdict is a model's, after the answer (`glm5.eval.answer_judge`)."""
_AROUND = r"[\s*_$(\[`]*(?:\\[a-z]+\{|\\\()?[\s*_$(\[`]*"  # what may surround a letter: emphasis, LaTeX, brackets
_CHOSEN = re.compile(
    rf"(?:(?i:answer|choice|option)(?: is|:)*|\\boxed\{{){_AROUND}(?:(?i:option|choice) )?"
    r"(?:([A-Z])(?![A-Za-z])|([a-z])(?=[\s*_$).:}\]`]*(?:\n|$)))"
)
_LONE = re.compile(rf"{_AROUND}([A-Za-z])[\s*_$).:}}\]`]*(?:\\\))?[\s.]*")
_SIGNS = str.maketrans({"−": "-", "–": "-", "“": '"', "”": '"', "‘": "'", "’": "'"})


@dataclass(frozen=True)
class QuestionProblem(EvaluationProblem):
    """One question. `answers` are accepted; with choices it is the letter of the right one."""

    id: str
    key: str
    prompt: str
    answers: tuple[str, ...]
    grader: str
    thinking: bool
    domain: str = "questions"
    tools: Sequence[ToolSpec] = ()
    text: str = ""
    """The question alone, as its file has it."""

    @property
    def material(self) -> Material | None:
        """What a judge reads, if one grades the answers."""
        return Material("answer", (("QUESTION", self.prompt),), self.answers) if self.grader == JUDGED else None

    @property
    def grading(self) -> Any:
        """What grades the answers."""
        return self.grader, self.answers

    def env(self) -> Env:
        if self.grader == JUDGED:
            return JudgedEnv(self, lambda message: 0.0)
        return SingleTurnEnv(self, lambda message: float(GRADERS[self.grader](message.content, self.answers)))


class JudgedEnv(SingleTurnEnv):
    """Keeps the reply for the judge; until there is a verdict, that is an error of the evaluation."""

    def step(self, message: Message | None) -> StepResult:
        if message is None:
            return super().step(None)
        return unjudged(message.content)


class QuestionsFamily(Family):
    """The rows of `file` (JSONL or CSV), asked and graded one way.

    Args:
        grader: "math": the last box or line, compared as mathematics. "choice": a letter. "exact": the text after
            "Answer:", compared without case, articles and punctuation. "contains": whether the reply has it. "judge":
            a model says whether the reply means it (`glm5 eval --judge`).
        question, answer, choices, context: fields of a row; a path of keys has dots. An answer may be a list of
            accepted ones. For "choice" it is a letter, a number from 0, or the text of a choice; `choices` is a list,
            or a table with lists `text` and `label`, or the names of fields with one choice each, in a list.
        shuffle: put choices in an order that depends on the seed and the question.
        prompt: text with {question}, {context} and {choices}; "" takes `PROMPTS`.
    """

    name = domain = "questions"

    def __init__(
        self,
        seed: int = 0,
        *,
        file: str = "",
        grader: str = "exact",
        question: str = "question",
        answer: str = "answer",
        choices: str | Sequence[str] = "choices",
        context: str = "",
        shuffle: bool = True,
        prompt: str = "",
        thinking: bool = True,
    ) -> None:
        if grader not in PROMPTS:
            raise ConfigError(f"questions: the grader is one of {', '.join(PROMPTS)}, not {grader!r:.40}.")
        if not isinstance(file, str) or not file:
            raise ConfigError(
                'questions: set the option file to the JSONL file of the benchmark, e.g. file="aime.jsonl".'
            )
        self.seed, self.grader, self.thinking, self.shuffle = seed, grader, bool(thinking), bool(shuffle)
        self.fields = {"question": question, "answer": answer, "choices": choices, "context": context}
        self.template = prompt or PROMPTS[grader]
        self.path = Path(file)
        self.rows = table_rows(self.path)

    @property
    def size(self) -> int:
        """How many problems there are."""
        return len(self.rows)

    def problem(self, split: str, index: int) -> QuestionProblem:
        """Raises DataError for a row that does not fit, and for a split to train on."""
        if split != "heldout":
            raise DataError(f"questions: {self.path.name} is for evaluation; it has no problems to train on.")
        line, row = self.rows[index % len(self.rows)]
        try:
            return self._made(line, row)
        except (LookupError, TypeError, ValueError) as error:
            raise DataError(f"{self.path}, line {line}: {_reason(error)}. Name the fields by options.") from None

    def _made(self, line: int, row: Any) -> QuestionProblem:
        question = _text(row, str(self.fields["question"]))
        context = f"{_text(row, str(self.fields['context']))}\n\n" if self.fields["context"] else ""
        found = _value(row, str(self.fields["answer"]))
        answers = tuple(_plain(one) for one in (found if isinstance(found, list) else [found]))
        choices, labels = self._choices(row) if self.grader == "choice" else ([], [])
        if choices:
            right = choices[_place(found, choices, labels)]
            if self.shuffle:
                random.Random(f"questions {self.seed} {question}").shuffle(choices)
            answers = (LETTERS[choices.index(right)],)
        written = _written if self.grader == "math" else plain_text
        if not answers or not all(answer.strip() if self.grader == JUDGED else written(answer) for answer in answers):
            raise ValueError("there is no answer")
        listed = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
        asked = {"{question}": question, "{context}": context, "{choices}": listed}
        prompt = re.sub("|".join(map(re.escape, asked)), lambda match: asked[match[0]], self.template)
        key = f"questions {hashlib.sha256(prompt.encode('utf-8', 'replace')).hexdigest()}"
        name = f"questions/{self.path.name}/{line}"
        return QuestionProblem(name, key, prompt, answers, self.grader, self.thinking, text=question)

    def _choices(self, row: Any) -> tuple[list[str], list[str]]:
        """Choices, and the labels that the row gives them, or none."""
        where, labels = self.fields["choices"], list[str]()
        found = _value(row, where) if isinstance(where, str) else [_value(row, field) for field in where]
        if isinstance(found, Mapping):  # as {"text": [...], "label": [...]}
            labels = [_plain(label) for label in found.get("label", ())]
            found = found["text"]
        choices = [_plain(choice) for choice in found]
        if not 2 <= len(choices) <= len(LETTERS) or len(set(choices)) < len(choices):
            raise ValueError(f"there are {len(set(choices))} different choices of {len(choices)}")
        if labels and len(set(labels)) != len(choices):
            raise ValueError(f"there are {len(set(labels))} different labels of {len(choices)} choices")
        return choices, labels


def table_rows(path: Path) -> list[tuple[int, Any]]:
    """(line, row) of a file of JSON objects, one a line, or of a CSV file with a header; blank lines are none. Raises
    DataError."""
    return _rows(path, _stamp(path))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    return state.st_mtime_ns, state.st_size


@functools.lru_cache(maxsize=8)
def _rows(path: Path, stamp: tuple[int, int]) -> list[tuple[int, Any]]:
    found, number = list[tuple[int, Any]](), 1
    try:
        if path.suffix == ".csv":
            csv.field_size_limit(MOST_ROW_BYTES)
            with path.open(encoding="utf-8-sig", newline="") as table:
                found = list(enumerate(csv.DictReader(table, strict=True), 2))
        else:
            with path.open("rb") as lines:
                for number, line in enumerate(iter(lambda: lines.readline(MOST_ROW_BYTES), b""), 1):
                    if line.strip():
                        row = json.loads(line)
                        if not isinstance(row, dict):
                            raise DataError(f"{path}, line {number}: no JSON object; the file has one a line.")
                        found.append((number, row))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a CSV file: {error}.") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path}, line {number}: not JSON; the file has one JSON object a line.") from None
    if not found:
        raise DataError(f"{path} has no rows.")
    return found


def _value(row: Any, field: str) -> Any:
    for key in field.split("."):
        if not isinstance(row, Mapping) or key not in row:
            raise LookupError(f'there is no field "{field}"')
        row = row[key]
    return row


def _text(row: Any, field: str) -> str:
    found = _value(row, field)
    if not isinstance(found, str) or not found.strip():
        raise ValueError(f'the field "{field}" is no text')
    return found.strip()


def _plain(value: Any) -> str:
    """A number or a text as text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r:.60} is neither a text nor a number")
    return str(value).strip()


def _place(answer: Any, choices: Sequence[str], labels: Sequence[str]) -> int:
    """Which choice the answer names: by its label, or by its letter, its number from 0, or its text. Raises ValueError
    for none, or if letter or number and text name different ones."""
    said, found = _plain(answer), set[int]()
    if labels:
        if said not in labels:
            raise ValueError(f"the answer {said!r:.60} is none of the labels")
        return labels.index(said)
    if said in choices:
        found.add(choices.index(said))
    if len(said) == 1 and said.upper() in LETTERS[: len(choices)]:
        found.add(LETTERS.index(said.upper()))
    if said.isdecimal() and len(said) < 3 and int(said) < len(choices):
        found.add(int(said))
    if len(found) != 1:
        raise ValueError(f"the answer {said!r:.60} is {'more than one' if found else 'none'} of the choices")
    return found.pop()


def _reason(error: Exception) -> str:
    return str(error.args[0]) if error.args else type(error).__name__


def is_mathematically(reply: str, answers: Sequence[str]) -> bool:
    """Whether the final answer has the value of an accepted one: a number, an expression, a tuple or a set. Where that
    is a number the reply has to be one, not a sum that makes it. What is no mathematics is compared as it is written.
    """
    said = _bare(final_answer(reply))
    return bool(said) and any(
        check_answer(f"\\boxed{{{said}}}", wanted)
        if (wanted := _mathematical(answer))
        else _written(said) == _written(answer)
        for answer in answers
    )


@functools.lru_cache(maxsize=4096)
def _mathematical(answer: str) -> Answer | None:
    """The form of an answer that is mathematics. Words would be products of letters."""
    bare = _bare(answer)
    if re.search(r"(?<![\\A-Za-z])(?!sqrt)[A-Za-z]{3,}", bare):
        return None
    inner = bare.replace("\\{", "{").replace("\\}", "}")
    single = [Answer((bare,), form=form) for form in ("number", "value")]
    several = []
    for kind, opening, closing in (("tuple", "(", ")"), ("set", "{", "}"), ("set", "", "")):
        if inner.startswith(opening) and inner.endswith(closing) and "," in inner:
            members = inner[len(opening) : len(inner) - len(closing)].split(",")
            several.append(Answer(tuple(member.strip() for member in members), kind, "value"))
    return next((form for form in (*single, *several) if check_answer(f"\\boxed{{{bare}}}", form)), None)


def _bare(text: str) -> str:
    """An answer without dollar signs, the wrapping of words, degrees, a full stop, and a name before it: `x = 3`."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text.translate(_SIGNS))
    text = re.sub(r"\^?\{?\\circ\}?|°", "", text).replace("$", "").strip().removesuffix(".").strip()
    return re.sub(r"^[A-Za-z] *= *(?=[^=]*$)", "", text)


def _written(text: str) -> str:
    """An answer that is no mathematics, without spaces and case."""
    return re.sub(r"\s+|\\left|\\right|\\,|\\ ", "", _bare(text)).lower()


def is_choice(reply: str, answers: Sequence[str]) -> bool:
    """Whether the right letter is what the reply consists of, or the last that it calls its answer or puts in a box."""
    tail = reply[-4000:]
    said = [match[1] or match[2] for match in _CHOSEN.finditer(tail)]
    lone = _LONE.fullmatch(tail)
    letter = lone[1] if lone else said[-1] if said else ""
    return letter.upper() in answers


def is_exact(reply: str, answers: Sequence[str]) -> bool:
    """Whether the text after the last "Answer:", or a reply of one line, is an accepted answer."""
    said = plain_text(final_answer(reply))
    return any(said == plain_text(answer) for answer in answers)


def contains(reply: str, answers: Sequence[str]) -> bool:
    """Whether an accepted answer stands in the reply, as whole words."""
    said = f" {plain_text(reply)} "
    return any(f" {plain_text(answer)} " in said for answer in answers)


def plain_text(text: str) -> str:
    """Words in lower case with single spaces, without the punctuation and quotes around them, and without an article in
    front of other words."""
    stripped = (word.strip(".,;:!?\"'()[]{}*_`$") for word in text.translate(_SIGNS).lower().split())
    words = [word for word in stripped if word]
    return " ".join(words[1:] if len(words) > 1 and words[0] in ("a", "an", "the") else words)


GRADERS: Mapping[str, Callable[[str, Sequence[str]], bool]] = {
    "math": is_mathematically,
    "choice": is_choice,
    "exact": is_exact,
    "contains": contains,
}
