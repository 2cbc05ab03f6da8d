"""Grammars that clients write, in Lark's notation or in GBNF: checked before the library parses them.

All scans in this module take time proportional to the length of the text.
"""

from __future__ import annotations

import re

from glm5.errors import EngineError

MAX_GRAMMAR = 64 * 1024
"""Maximum characters of a client's grammar."""
MAX_QUOTED = 2000
"""Maximum characters of one string, regular expression or comment in a client's grammar."""
MAX_MARKS = ((":([", 300), ("&~", 16), ("?*+{", 1500))
"""Maximum number of rules and brackets, of conjunctions and negations, and of repetitions, in this order. The library
follows references by recursion and fails on a chain of more than about 1,500 references. It needs minutes for 200
conjunctions."""
MAX_HIDDEN = 1000
"""Maximum number of colons and brackets, including those inside strings, comments and regular expressions. The library
and this module may disagree on where a string begins and ends."""
MAX_GBNF = 4_000_000
"""Maximum of (number of characters) * (number of rules) in GBNF. In a chain of rules, the library reads the whole text
again for each reference."""

_GBNF = re.compile(r"(?m)^[ \t]*root[ \t]*::=")
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*+"|(?://|#)[^\n]*+|/(?:\\.|[^/\\\n])*+/|(["/])')
"""Strings, comments and regular expressions in Lark's notation, or (group 1) a quote that is not closed on its line."""


def checked(text: str) -> str:
    """A grammar in Lark's notation. Raises EngineError for a text that is malformed or too large."""
    if len(text) > MAX_GRAMMAR:
        raise EngineError(f"The grammar has {len(text):,} characters; at most {MAX_GRAMMAR:,} are allowed.")
    if _GBNF.search(text):
        text = _translated(text)
    bare = _QUOTED.sub(_blank, text)
    limits = [(marks, limit, bare) for marks, limit in MAX_MARKS] + [(":([", MAX_HIDDEN, text)]
    for marks, limit, where in limits:
        if sum(map(where.count, marks)) > limit:
            raise EngineError(
                f"The grammar has more than {limit} of the characters {' '.join(marks)}; this server allows no more."
            )
    if odd := re.search(r"%(?!ignore\b)\w*|<[^>\s]*|@\w*", bare):
        raise EngineError(
            f"The grammar has {odd[0][:50]!r}; only rules (of strings and regular expressions) and %ignore are allowed."
        )
    return text


def _blank(quoted: re.Match[str]) -> str:
    if quoted[1]:
        raise EngineError(f"The grammar has a {quoted[1]} that is not closed on its line.")
    if len(quoted[0]) > MAX_QUOTED:
        raise EngineError(f"A string or regular expression of a grammar may have at most {MAX_QUOTED} characters.")
    return " "


def _translated(text: str) -> str:
    """Convert GBNF to Lark's notation."""
    from llguidance.gbnf_to_lark import gbnf_to_lark  # part of llguidance

    rules = text.count("::=")
    if rules > MAX_MARKS[0][1] or rules * len(text) > MAX_GBNF:
        raise EngineError(
            f"The grammar is too large: in GBNF, at most {MAX_MARKS[0][1]} rules are allowed, and the number of rules "
            f"times the number of characters may be at most {MAX_GBNF:,}."
        )
    try:
        return str(gbnf_to_lark(text)).removeprefix("%llguidance {}")
    except Exception as error:  # the library raises plain Python errors
        raise EngineError(f"The grammar is not valid GBNF: {str(error)[:200]}.") from None
