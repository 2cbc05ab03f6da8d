"""Grammars that clients write, in Lark's notation or in GBNF: checked before the library sees them.

All scans here take time in proportion to the text, whatever it holds.
"""

from __future__ import annotations

import re

from glm5.errors import EngineError

MAX_GRAMMAR = 64 * 1024
"""Characters of a grammar from outside."""
MAX_QUOTED = 2000
"""Characters of a text, an expression or a comment in it."""
MAX_MARKS = ((":([", 300), ("&~", 16), ("?*+{", 1500))
"""Rules and brackets, conjunctions and negations, and repetitions in a grammar from outside, in this order. The library
follows references on the stack and survives some 1,500 in a row; 200 conjunctions keep it busy for minutes."""
MAX_HIDDEN = 1000
"""Colons and brackets in its texts and expressions too; the library may see these with other eyes than we do."""
MAX_GBNF = 4_000_000
"""Characters times rules in GBNF: the library reads all of them again for each link of a chain of rules."""

_GBNF = re.compile(r"(?m)^[ \t]*root[ \t]*::=")
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*+"|(?://|#)[^\n]*+|/(?:\\.|[^/\\\n])*+/|(["/])')
"""Texts, comments and expressions in Lark's notation, or (group 1) a quote that its line does not close."""


def checked(text: str) -> str:
    """A grammar in Lark's notation. Raises EngineError for one that is malformed or too large."""
    if len(text) > MAX_GRAMMAR:
        raise EngineError(f"The grammar has {len(text):,} characters; at most {MAX_GRAMMAR:,} are allowed.")
    if _GBNF.search(text):
        text = _translated(text)
    bare = _QUOTED.sub(_blank, text)
    limits = [(marks, limit, bare) for marks, limit in MAX_MARKS] + [(":([", MAX_HIDDEN, text)]
    for marks, limit, where in limits:
        if sum(map(where.count, marks)) > limit:
            raise EngineError(f"The grammar has more than {limit} of {' '.join(marks)}, the limit of this server.")
    if odd := re.search(r"%(?!ignore\b)\w*|<[^>\s]*|@\w*", bare):
        raise EngineError(f"The grammar holds {odd[0][:50]!r}; only rules of texts, expressions and %ignore are taken.")
    return text


def _blank(quoted: re.Match[str]) -> str:
    if quoted[1]:
        raise EngineError(f"The grammar has a {quoted[1]} without its partner in the same line.")
    if len(quoted[0]) > MAX_QUOTED:
        raise EngineError(f"A text or an expression of a grammar may have {MAX_QUOTED} characters.")
    return " "


def _translated(text: str) -> str:
    """From GBNF."""
    from llguidance.gbnf_to_lark import gbnf_to_lark  # present wherever a grammar can be enforced at all

    rules = text.count("::=")
    if rules > MAX_MARKS[0][1] or rules * len(text) > MAX_GBNF:
        limits = f"{MAX_MARKS[0][1]} rules or {MAX_GBNF:,} rules times characters"
        raise EngineError(f"The grammar has more than {limits}, the limit of this server for GBNF.")
    try:
        return str(gbnf_to_lark(text)).removeprefix("%llguidance {}")
    except Exception as error:  # it raises what Python has
        raise EngineError(f"The grammar is no GBNF: {str(error)[:200]}.") from None
