"""The text of a task, from a template over what its failing tests say, and the check that it does not give the fix
away."""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Mapping, Sequence

from glm5.tasks.swe.candidate import Candidate
from glm5.tasks.swe.operators import OPERATORS
from glm5.tasks.swe.test_files import split_id

MOST_EXAMPLES = {"single": 3, "hard": 4}
MOST_LINES, MOST_WIDTH = 14, 200
SHORTEST = 8  # characters of a line whose appearance gives the fix away

OPENINGS = {
    "bug-fix": (
        "{title} gives wrong results.",
        "Since a recent change {package} does not behave as documented.",
        "There is a regression in {title}.",
        "A user reports that {package} misbehaves.",
    ),
    "feature": ("{title} lacks an implementation.", "A part of {package} is not written yet."),
    "refactor": ("A part of {title} is to be renamed or moved.",),
}
EXAMPLES = ("What goes wrong:", "To reproduce:", "Observed:", "These statements fail:")
CLOSINGS = {
    "bug-fix": "Find the cause in the source and repair it there. Everything that works now must keep working.",
    "feature": "Implement it as its documentation and its callers require. What works now must keep working.",
    "refactor": "What is missing exists under another name or in another file; make it available as said here. What "
    "works now must keep working.",
}
RULES = (
    "The repository is in `{app}`. Tests for this issue are not shown and run after you have finished, together with "
    "the existing ones; changes to test files have no effect."
)


def instruction(candidate: Candidate, messages: Mapping[str, str], app: str) -> str | None:
    """The task's text. `messages`: id of a failing test to the failing statement and the exception. None if nothing is
    left to tell without giving the fix away."""
    repository, choice = candidate.repository, random.Random(candidate.id)
    opening = choice.choice(OPENINGS[candidate.kind]).format(package=repository.name, title=repository.title)
    examples = examples_of(candidate, messages, choice)
    description = candidate.description.strip()
    missing = missing_names(candidate)
    if not (examples or missing or description):
        return None
    examples = [choice.choice(EXAMPLES), *examples] if examples else []
    said = "" if leaks(description, candidate) else description
    return finished(candidate, [opening, said, *missing, *examples], app)


def finished(candidate: Candidate, parts: Sequence[str], app: str) -> str | None:
    """A task's text from its parts, with the last two paragraphs of every text; None if it gives the fix away."""
    every = [*parts, CLOSINGS[candidate.kind], RULES.format(app=app)]
    text = "\n\n".join(part for part in every if part) + "\n"
    return None if leaks(text, candidate) else text


def missing_names(candidate: Candidate) -> list[str]:
    """A sentence for each name that the task has to provide."""
    return [f"Missing: `{name}` in `{path}`." for path, name in candidate.missing]


def examples_of(candidate: Candidate, messages: Mapping[str, str], choice: random.Random) -> list[str]:
    """Blocks of a failing statement and its exception, one for each of a few test functions."""
    repository = candidate.repository
    by_function: dict[object, str] = {}
    for test in sorted(messages):
        try:
            by_function.setdefault(split_id(test, repository.framework, repository.test_files), test)
        except KeyError:
            continue
    tests = list(by_function.values())
    found = []
    for test in choice.sample(tests, len(tests)):
        block = _block(messages[test], repository.language)
        if block and not leaks(block, candidate) and block not in found:
            found.append(block)
        if len(found) == MOST_EXAMPLES[candidate.tier]:
            break
    return found


def _block(message: str, language: str) -> str:
    statement, _, exception = message.partition("\n\n")
    if not exception:
        statement, exception = "", message
    clean = [re.sub(r"0x[0-9a-f]{6,}", "0x...", _clip(part)) for part in (_dedent(statement), exception.strip())]
    return "\n\n".join(f"```{kind}\n{part}\n```" for kind, part in zip((language, "text"), clean, strict=True) if part)


def _dedent(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def _clip(text: str) -> str:
    lines = [line if len(line) <= MOST_WIDTH else line[:MOST_WIDTH] + "..." for line in text.splitlines()]
    return "\n".join(lines if len(lines) <= MOST_LINES else [*lines[:MOST_LINES], "..."])


def leaks(text: str, candidate: Candidate) -> bool:
    """Whether the text holds a changed line of the patch or tells how the bug was made."""
    squeezed = squeeze(text)
    lines = [line[1:] for line in candidate.patch().splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    changed: Sequence[str] = [s for s in map(squeeze, lines) if len(s) >= SHORTEST]
    operators = {*OPERATORS, *(note.split(" in ", 1)[0] for note in candidate.notes if "_" in note.split(" in ", 1)[0])}
    words = [name.replace("_", " ") for name in operators] + [*operators, "mutation", "mutant"]
    return any(line in squeezed for line in changed) or any(
        re.search(rf"\b{re.escape(word)}\b", text.lower()) for word in words
    )


def squeeze(text: str) -> str:
    """The text without white space."""
    return re.sub(r"\s+", "", text)
