"""Grades mathematical answers exactly: finds the final answer in a text, parses it and compares it with the wanted one.

An equal value is not always enough: `37+15` has the value of the answer to `37+15=`, and `(x+1)(x-2)` that of its own
expansion. So a task also names the form of the answer. Grading is quick for any text and raises nothing; an unreadable
answer gives False.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from glm5.errors import ConfigError
from glm5.tasks.mathematics.expression import MOST_CHARS, Node, Unreadable, Value, clean, evaluate, parse, prime_factors

KINDS = ("one", "tuple", "set")
MOST_MEMBERS = 50
TAIL = 4000  # characters at the end of a text that are searched for the final answer
SAID = re.compile(r"\b(?:final answer|answer)(?: is|:)(?: is|:)? *", re.IGNORECASE)
WRAPPING = (("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("$", "$"), ("**", "**"), ("`", "`"))


@dataclass(frozen=True)
class Answer:
    """The wanted answer: `values` as written expressions, several for a tuple (ordered) or a set (unordered).

    `form` is one of `FORMS`. `units` are words that may follow a value, or signs such as `$` and `%` around it. `name`
    is a letter that may precede it, as in `x = 3`.
    """

    values: tuple[str, ...]
    kind: str = "one"
    form: str = "number"
    units: tuple[str, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.form not in FORMS or (self.kind == "one" and len(self.values) != 1):
            raise ConfigError(
                f"answer {self.values}: kind={self.kind!r} is one of {', '.join(KINDS)}, form={self.form!r} one of "
                f"{', '.join(FORMS)}; the kind one has one value."
            )


def check_answer(text: str, wanted: Answer) -> bool:
    """Whether the final answer of `text` is the wanted one, in value and form."""
    try:
        return _compare(final_answer(text), wanted)
    except Unreadable:
        return False


def final_answer(text: str) -> str:
    """The last `\\boxed{...}` of a text, else the text after its last `answer:` or `answer is`, else the whole text if
    it is one line, else empty. Only the end of a long text is searched."""
    text = text[-TAIL:].strip()
    at = text.rfind("\\boxed{")
    if at >= 0:
        return _group(text[at + len("\\boxed{") :])
    ends = [said.end() for said in SAID.finditer(text)]
    if ends:
        return text[ends[-1] :].split("\n")[0].strip(" *")
    return "" if "\n" in text else text


def _group(text: str) -> str:
    """The text up to the brace that closes an open one; empty without such a brace."""
    depth = 1
    for at, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return text[:at]
    return ""


def _compare(text: str, wanted: Answer) -> bool:
    if not text or len(text) > MOST_CHARS:
        return False
    text = _unwrap(text)
    members = [text] if wanted.kind == "one" else _members(text, wanted.kind)
    given = [_read(member, wanted) for member in members]
    right = [evaluate(parse(value)) for value in wanted.values]
    if wanted.kind == "set":
        distinct = _distinct(given)
        return len(distinct) == len(right) and all(value in right for value in distinct)
    return len(given) == len(right) and all(a == b for a, b in zip(given, right, strict=True))


def _distinct(values: Sequence[Value]) -> list[Value]:
    found: list[Value] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _unwrap(text: str) -> str:
    """An answer without full stop, dollar signs and emphasis around it."""
    text = text.strip().removesuffix(".").strip()
    for opening, closing in WRAPPING:
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening + closing):
            text = text[len(opening) : len(text) - len(closing)].strip()
    return text.removesuffix(".").strip()


def _members(text: str, kind: str) -> list[str]:
    """The members of `(1, 2)`, `{1, 2}` or `1 and 2`; a tuple needs its brackets. A comma always separates."""
    text = clean(text).replace("\\{", "{").replace("\\}", "}")
    opening, closing = ("(", ")") if kind == "tuple" else ("{", "}")
    if text.startswith(opening) and text.endswith(closing):
        text = text[1:-1]
    elif kind == "tuple":
        raise Unreadable("a tuple has brackets")
    if kind == "set":
        text = re.sub(r",? +(?:and|or) +", ",", text)
    members, depth = [""], 0
    for letter in text:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            members.append("")
        else:
            members[-1] += letter
    if len(members) > MOST_MEMBERS:
        raise Unreadable("too many members")
    return members


def _read(text: str, wanted: Answer) -> Value:
    """One value in the wanted form. Raises Unreadable for any other form."""
    text = _without_units(text.strip(), wanted.units)
    if wanted.name:
        text = re.sub(rf"^{re.escape(wanted.name)} *= *", "", text)
    node = parse(text)
    value = evaluate(node)
    if not FORMS[wanted.form](node, value):
        raise Unreadable(f"not in the form {wanted.form}")
    return value


def _without_units(text: str, units: Sequence[str]) -> str:
    """Drop one unit after the value (bare or in \\text{}), and a sign such as `$` before it."""
    text = re.sub(r"\\(?:text|mathrm) *\{([^{}]*)\}", r" \1", text)
    text = text.replace("\\%", "%").replace("\\$", "$").strip()
    for unit in sorted(units, key=len, reverse=True):
        if not unit[0].isalpha() and text.startswith(unit):
            return text[len(unit) :].strip()
        if text.endswith(unit) and (not unit[0].isalpha() or not text[: -len(unit)][-1:].isalpha()):
            return text[: -len(unit)].strip()
    return text


# --- forms


def _bare(node: Node) -> Node:
    """The node without leading signs."""
    while node.kind == "negate":
        node = node.parts[0]
    return node


def _is_integer(node: Node) -> bool:
    return node.kind == "number" and node.value.denominator == 1


def _is_number(node: Node) -> bool:
    """A literal: 12, -0.5, 3/4, 2 1/2, 40%. Nothing is left to compute."""
    node = _bare(node)
    if node.kind == "percent":
        return _is_number(node.parts[0])
    if node.kind == "quotient":
        return _is_integer(_bare(node.parts[0])) and _is_integer(_bare(node.parts[1]))
    return node.kind in ("number", "mixed")


def _terms(node: Node) -> list[Node]:
    if node.kind == "sum":
        return [term for part in node.parts for term in _terms(part)]
    if node.kind == "negate" and _bare(node).kind != "sum":
        return [_bare(node)]
    return [node]


def _factors(node: Node) -> list[Node]:
    """Operands of nested products; a quotient by a literal counts as a product with one."""
    node = _bare(node)
    if node.kind == "product" or (node.kind == "quotient" and _is_number(node.parts[1])):
        return [factor for part in node.parts for factor in _factors(part)]
    return [node]


def _is_letter_power(node: Node) -> bool:
    if node.kind == "power":
        return node.parts[0].kind == "letter" and _is_integer(node.parts[1])
    return node.kind == "letter"


def _is_expanded(node: Node, value: Value) -> bool:
    """A sum of monomials with all like terms collected."""
    terms = _terms(node)
    for term in terms:
        factors = _factors(term)
        letters = [factor for factor in factors if _is_letter_power(factor)]
        if not all(_is_letter_power(factor) or _is_number(factor) for factor in factors):
            return False
        if len(factors) - len(letters) > 2 or len({str(factor) for factor in letters}) < len(letters):
            return False
    return len(terms) == len(value.top)


def _degree(node: Node) -> int:
    """The degree of a factor without its exponent; a power of a constant has degree 0."""
    base = node.parts[0] if node.kind == "power" and _is_integer(node.parts[1]) else node
    top = evaluate(base).top
    return max((int(sum(e for s, e in monomial if s.isalpha())) for monomial in top), default=0)


def _is_factored(node: Node, value: Value) -> bool:
    """A product of numbers, letters and linear factors, or of powers of these."""
    factors = _factors(node)
    return all(_is_number(factor) if _degree(factor) == 0 else _degree(factor) == 1 for factor in factors)


def _is_radical(node: Node, value: Value) -> bool:
    """Terms of integers and fractions with at most one square root each; every root is fully simplified."""
    terms = _terms(node)
    for term in terms:
        roots = [factor for factor in _factors(term) if factor.kind == "root"]
        rest = [factor for factor in _factors(term) if factor.kind != "root"]
        if len(roots) > 1 or len(rest) > 2 or not all(_is_number(factor) for factor in rest):
            return False
        for root in roots:
            inside = root.parts[0]
            if not _is_integer(inside) or root.value != 2 or inside.value < 2:
                return False
            if any(count > 1 for count in prime_factors(int(inside.value)).values()):
                return False
    return len(terms) == max(1, len(value.top))


FORMS: Mapping[str, Callable[[Node, Value], bool]] = {
    "value": lambda node, value: True,
    "integer": lambda node, value: _is_integer(_bare(node)),
    "number": lambda node, value: _is_number(node),
    "radical": _is_radical,
    "expanded": _is_expanded,
    "factored": _is_factored,
}
"""The check of each form, in addition to the value."""
