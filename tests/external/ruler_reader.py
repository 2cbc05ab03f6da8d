"""A scripted model for RULER's tasks in our wording and in lm-eval's: it sees only the last part of the context, and
answers from that part as well as one can."""

from __future__ import annotations

import re
from collections import Counter

PROMPTS = {
    "needle": (
        r"The text below hides secret .*? one or more\.\n\n(.*)\n\nWhat are all the secret \w+ of (.+) that the text",
        r"A special magic \w+ is hidden .*? afterwards\.\n(.*)\nWhat is the special magic \w+ for (.+) mentioned in",
    ),
    "variables": (
        r".*\n\nFollow the assignments [^\n]*\n\n(.*)\n\nQuestion: which variables have the value (\d+) in",
        r".*\n\nMemorize and track [^\n]*\n\n(.*)\nQuestion: Find all variables that are assigned the value (\d+) in",
    ),
    "common": (
        r".*A numbered list of words follows\. [^\n]*\n(.*)\nQuestion: (which ten words) come",
        r"Below is a numbered list of words\. [^\n]*\n(.*)\nQuestion: (What are the 10) most",
    ),
    "frequent": (
        r"The text below is in a code\. [^\n]*\n\n(.*)\n\nQuestion: (which three) coded",
        r"Read the following coded text .*? coded words\. (.*)\nQuestion: (Do not) provide",
    ),
}
"""Per kind, our prompt and lm-eval's. Group 1 is the context; group 2 is what is asked for."""


def read(prompt: str, share: float) -> str:
    """The answer of a reader of the last `share` of the context's characters. A needle cut by that border is lost."""
    for kind, wordings in PROMPTS.items():
        for wording in wordings:
            if found := re.match(wording, prompt, re.DOTALL):
                context = found[1]
                return " ".join(_answers(kind, context[len(context) - round(share * len(context)) :], found[2]))
    raise ValueError(f"a prompt in an unknown wording: {prompt[:80]!r} ... {prompt[-80:]!r}")


def _answers(kind: str, seen: str, asked: str) -> list[str]:
    if kind == "needle":
        held = re.findall(r"(?:A secret \w+ of|One of the special magic \w+ for) (.+?) is: (\S+)\.", seen)
        return [value for key, value in held if key == asked]
    if kind == "variables":
        source = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", seen))

        def value(name: str) -> str:
            return value(source[name]) if name in source else name

        # A variable whose value was not seen may have the one asked for.
        names = dict.fromkeys(name for pair in source.items() for name in pair if name.isalpha())
        return [name for name in names if value(name) == asked or value(name).isalpha()]
    if kind == "common":
        words, most = re.findall(r"\d+\. (.+?)(?= \d+\. |$)", seen), 10
    else:
        words, most = re.findall(r"\b[a-z]{6}\b", seen), 3
    return [word for word, _ in Counter(words).most_common(most)]
