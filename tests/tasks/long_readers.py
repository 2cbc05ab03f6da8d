"""Readers of long contexts that see the prompt alone: one that finds every answer, and one that cannot read."""

from __future__ import annotations

import re
from collections import Counter


def perfect(prompt: str) -> str:
    """The answer to any of RULER's questions, by searching the text of the prompt."""
    if asked := re.search(r"secret (?:number|identifier)s of (.+) that the text names", prompt):
        held = re.findall(r"A secret \w+ of (\S+) is: (\S+)\.", prompt)
        names = re.split(r", | and ", asked[1])
        return " ".join(value for name, value in held if name in names)
    if "VAR" in prompt:
        value, text = re.findall(r"have the value (\d+)", prompt)[-1], prompt.rpartition("\n\nFollow")[2]
        where = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))

        def end(name: str) -> str:
            return end(where[name]) if name in where else name

        return " ".join(name for name in where if end(name) == value)
    if "numbered list" in prompt:
        words = re.findall(r"\d+\. (\w+)", prompt.rpartition("numbered list")[2])
        return " ".join(word for word, _ in Counter(words).most_common(10))
    if "coded words" in prompt:
        words = re.findall(r"\b[a-z]{6}\b", prompt.split("\n\n")[1])
        return " ".join(word for word, _ in Counter(words).most_common(3))
    asked_person = re.search(r"for which (.+) worked\?|was (\S+ \S+) born\? Answer", prompt.rpartition("Question:")[2])
    assert asked_person is not None
    if born := asked_person[2]:
        return re.search(rf"{born} was born in (\w+)", prompt)[1]  # type: ignore[index]
    firm = re.search(rf"{asked_person[1]} worked for (.+?) for", prompt)[1]  # type: ignore[index]
    return re.search(rf"{firm} makes \w+\. It was founded in (\w+)", prompt)[1]  # type: ignore[index]


def blind(prompt: str) -> str:
    """An answer that does not depend on the text."""
    return "I cannot tell. 1234567 00000000-0000-0000-0000-000000000000 ABCDE quiet word."
