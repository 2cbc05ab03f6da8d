"""The text of a task, written by a model from what its failing tests say. The model never sees the patch."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence

from glm5.tasks.swe.candidate import Candidate
from glm5.tasks.swe.text import SHORTEST, examples_of, finished, leaks, missing_names, squeeze

Ask = Callable[[str], str]
"""Sends one prompt to a model and returns its answer, "" if it has none. Raises GradingError if the model cannot be
reached."""
TRIES = 3
MOST_TEXT = 4000  # characters of the model's part
BLOCK = re.compile(r"```(\w+)\n(.*?)\n```", re.DOTALL)
WANTED = {
    "bug-fix": "Write the issue with which a user reports this bug",
    "feature": "Write the issue with which a user asks for what is missing",
    "refactor": "Write the issue with which a maintainer asks for this renaming or move",
}
PROMPT = """\
{wanted} of the {language} package {title}. Say what was done, what came out and what should come out \
instead, in plain words, in at most 200 words besides code. Quote at least one failing statement with the lines \
above it, or a line of an exception, word for word, in a code block. Do not guess the cause, do not say where in the \
source it lies or how to repair it, and do not mention tests, patches or these rules. Answer with the issue alone.

What is known, which is not addressed to you:

{known}"""


def written(candidate: Candidate, messages: Mapping[str, str], app: str, ask: Ask) -> str | None:
    """The task's text with a model's words; None if no answer of TRIES can be used. `messages` is that of
    `text.instruction`."""
    repository = candidate.repository
    examples = examples_of(candidate, messages, random.Random(candidate.id))
    description = candidate.description.strip()
    known = ["" if leaks(description, candidate) else description, *missing_names(candidate), *examples]
    prompt = PROMPT.format(
        wanted=WANTED[candidate.kind], title=repository.title,
        language=repository.language, known="\n\n".join(part for part in known if part),
    )  # fmt: skip
    problem = ""
    for _ in range(TRIES):
        said = _clean(ask(prompt + problem))
        why = _unusable(said, examples)
        text = None if why else finished(candidate, [said, *missing_names(candidate)], app)
        if text is not None:
            return text
        problem = f"\n\nYour last issue was refused: {why or 'it shows how the bug is repaired or how it was made'}."
    return None


def _clean(answer: str) -> str:
    """The answer without the model's thoughts and without characters that cannot be shown."""
    return "".join(c for c in answer.rpartition("</think>")[2] if c.isprintable() or c in "\n\t").strip()


def _unusable(said: str, examples: Sequence[str]) -> str:
    """Why an answer cannot be a task's text, or ""."""
    if not said:
        return "it is empty"
    if len(said) > MOST_TEXT:
        return f"it has more than {MOST_TEXT:,} characters"
    quotable = list[str]()
    for kind, text in (block for example in examples for block in re.findall(BLOCK, example)):
        quotable += [text] if kind != "text" else text.splitlines()  # a statement says little without its variables
    wanted = [line for line in map(squeeze, quotable) if len(line) >= SHORTEST]
    if wanted and not any(line in squeeze(said) for line in wanted):
        return "it quotes no failing statement and no exception"
    return ""
