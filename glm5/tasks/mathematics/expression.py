"""Parses a number or algebraic expression and converts it to an exact normal form. No floats, no `eval`.

It reads plain notation and the LaTeX of final answers: `3/4`, `\\frac{3}{4}`, `2 1/2`, `1,234.5`, `12%`, `2x^2-3`,
`5\\sqrt{2}`. A value is a quotient of two polynomials with rational coefficients. Their symbols are letters and roots
of primes. Products of different roots of primes are linearly independent over the rationals, so values are equal if and
only if their normal forms are. The text may be hostile: size, depth, exponents and total work are bounded. A text
beyond a bound is unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

MOST_CHARS = 400
MOST_DIGITS = 60  # per literal
MOST_DEPTH = 16
MOST_EXPONENT = 40
MOST_TERMS = 100
MOST_BITS = 512  # per numerator or denominator
MOST_WORK = 10_000  # products of two terms in one evaluation
MOST_RADICAND = 1_000_000
MOST_INDEX = 6  # largest index of a root

Monomial = tuple[tuple[str, Fraction], ...]  # (letter or prime, exponent), sorted; primes have exponents in (0, 1)
Polynomial = dict[Monomial, Fraction]


class Unreadable(Exception):
    """The text is not an expression or exceeds a bound. Never leaves this package's checkers."""


@dataclass(frozen=True)
class Node:
    """A syntax tree. Kinds: number, mixed, percent, letter, negate, sum, product, quotient, power, root.

    `value` is the value of a number or the index of a root; `name` is the name of a letter.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""


REPLACED = (
    ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\cdot", "*"), ("\\times", "*"), ("\\div", "/"), ("\\left", ""),
    ("\\right", ""), ("\\displaystyle", ""), ("\\%", "%"), ("\\!", ""), ("\\;", " "), ("\\:", " "), ("\\,", " "),
    ("\\ ", " "), ("**", "^"), ("−", "-"), ("×", "*"), ("·", "*"), ("÷", "/"), ("√", "\\sqrt"), ("²", "^2"),
    ("³", "^3"),
)  # fmt: skip
GROUPED = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|\\ )(?=[0-9]{3}(?![0-9]))")
TOKEN = re.compile(
    r"(?P<mixed>[0-9]+(?: *\\frac *\{ *[0-9]+ *\} *\{ *[0-9]+ *\}| *\\frac *[0-9][0-9]| +[0-9]+ */ *[0-9]+))"
    r"|(?P<number>[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9,])|[0-9]+\.[0-9]+|[0-9]+|\.[0-9]+)"
    r"|(?P<word>\\frac|\\?sqrt)|(?P<letter>[A-Za-z])|(?P<sign>[-+*/^(){}\[\]%])"
)


def clean(text: str) -> str:
    """`text` in plain notation for the tokeniser: without LaTeX spacing, operators in ASCII."""
    text = GROUPED.sub("", text)
    for old, new in REPLACED:
        text = text.replace(old, new)
    return text.strip()


def parse(text: str) -> Node:
    """The syntax tree of an expression. Raises Unreadable for one that cannot be parsed or exceeds a bound."""
    if len(text) > MOST_CHARS:
        raise Unreadable("too long")
    return _Parser(_tokens(clean(text))).whole()


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(text):
        if text[at] == " ":
            at += 1
            continue
        match = TOKEN.match(text, at)
        if match is None or not text.isascii():
            raise Unreadable("a sign without meaning here")
        tokens.append((str(match.lastgroup), match.group()))
        at = match.end()
    return tokens


def _literal(text: str) -> Fraction:
    digits = text.replace(",", "")
    if len(digits) > MOST_DIGITS:
        raise Unreadable("too many digits")
    return Fraction(digits)


class _Parser:
    """Recursive descent over tokens: sum > product > signed power > primary."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0

    def whole(self) -> Node:
        node = self._sum()
        if self._at != len(self._tokens):
            raise Unreadable("something follows the expression")
        return node

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _take(self, wanted: str = "") -> str:
        text = self._peek()
        if not text or (wanted and text != wanted):
            raise Unreadable(f"{wanted or 'more'} expected")
        self._at += 1
        return text

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise Unreadable("nested too deeply")
        terms = [self._term(self._peek() in ("+", "-"))]
        while self._peek() in ("+", "-"):
            terms.append(self._term(True))
        self._depth -= 1
        return terms[0] if len(terms) == 1 else Node("sum", tuple(terms))

    def _term(self, signed: bool) -> Node:
        minus = signed and self._take() == "-"
        node = self._product()
        return Node("negate", (node,)) if minus else node

    def _product(self) -> Node:
        node = self._power()
        while True:
            sign = self._peek()
            if sign in ("*", "/"):
                self._take()
                node = Node("product" if sign == "*" else "quotient", (node, self._signed()))
            elif sign in ("(", "{") or self._kind() in ("letter", "word"):
                node = Node("product", (node, self._power()))
            else:
                return node

    def _signed(self) -> Node:
        if self._peek() in ("+", "-"):
            minus = self._take() == "-"
            return Node("negate", (self._power(),)) if minus else self._power()
        return self._power()

    def _power(self) -> Node:
        base = self._primary()
        if self._peek() == "^":
            self._take()
            self._depth += 1
            if self._depth > MOST_DEPTH:
                raise Unreadable("nested too deeply")
            exponent = Node("negate", (self._power(),)) if self._peek() == "-" and self._take() else self._power()
            self._depth -= 1
            base = Node("power", (base, exponent))
        if self._peek() == "%":
            self._take()
            base = Node("percent", (base,))
        return base

    def _primary(self) -> Node:
        kind, text = self._kind(), self._take()
        if kind == "number":
            return Node("number", value=_literal(text))
        if kind == "mixed":
            return _mixed(text)
        if kind == "letter":
            return Node("letter", name=text)
        if text == "\\frac":
            return Node("quotient", (self._argument(), self._argument()))
        if kind == "word":
            return self._root()
        if text in ("(", "{"):
            node = self._sum()
            self._take(")" if text == "(" else "}")
            return node
        raise Unreadable(f"{text} is out of place")

    def _root(self) -> Node:
        index = Fraction(2)
        if self._peek() == "[":
            self._take()
            index = _literal(self._take()) if self._kind() == "number" else Fraction(0)
            self._take("]")
        if index.denominator != 1 or not 2 <= index <= MOST_INDEX:
            raise Unreadable("an unusual root")
        return Node("root", (self._primary(),), index)

    def _argument(self) -> Node:
        """One argument of `\\frac`: a group, or a single digit of `\\frac12`."""
        kind, text = self._kind(), self._peek()
        if kind == "number" and text.isdigit() and len(text) > 1:
            self._tokens[self._at] = (kind, text[1:])
            return Node("number", value=Fraction(text[0]))
        return self._primary()


def _mixed(text: str) -> Node:
    """`2 1/3`, `2\\frac{1}{3}` or `2\\frac13`; the fraction must be proper."""
    numbers = re.findall("[0-9]+", text)
    if len(numbers) == 2:  # \frac13
        numbers = [numbers[0], *numbers[1]]
    whole, top, bottom = map(_literal, numbers)
    if not top < bottom:
        raise Unreadable("a mixed number with an improper fraction")
    return Node("mixed", value=whole + top / bottom)


# --- normal form


@dataclass(frozen=True)
class Value:
    """top / bottom; `bottom` is {(): 1} if possible."""

    top: Mapping[Monomial, Fraction]
    bottom: Mapping[Monomial, Fraction]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value):
            return NotImplemented
        work = Evaluation()
        try:
            return work.times(self.top, other.bottom) == work.times(other.top, self.bottom)
        except Unreadable:
            return False

    __hash__ = None  # type: ignore[assignment]  # equal values may be written differently


ONE: Polynomial = {(): Fraction(1)}


class Evaluation:
    """Evaluates trees within one budget of work."""

    def __init__(self) -> None:
        self._work = 0

    def value(self, node: Node) -> Value:
        """The normal form of a tree. Raises Unreadable for one that exceeds a bound or has no value, such as 1/0."""
        if node.kind in ("number", "mixed"):
            return _value(_constant(node.value))
        if node.kind == "letter":
            return _value({((node.name, Fraction(1)),): Fraction(1)})
        parts = [self.value(part) for part in node.parts]
        if node.kind == "sum":
            total = parts[0]
            for part in parts[1:]:
                total = self._add(total, part)
            return total
        if node.kind == "negate":
            return _value(self.times(parts[0].top, _constant(Fraction(-1))), parts[0].bottom)
        if node.kind == "percent":
            return _value(self.times(parts[0].top, _constant(Fraction(1, 100))), parts[0].bottom)
        if node.kind == "product":
            return self._multiply(*parts)
        if node.kind == "quotient":
            return self._multiply(parts[0], self._inverse(parts[1]))
        if node.kind == "root":
            return _value(_root(_rational(parts[0]), int(node.value)))
        return self._raise(parts[0], _rational(parts[1]))

    def times(self, a: Mapping[Monomial, Fraction], b: Mapping[Monomial, Fraction]) -> Polynomial:
        """The product of two polynomials."""
        self._work += len(a) * len(b)
        if self._work > MOST_WORK:
            raise Unreadable("too much work")
        product: Polynomial = {}
        for left, x in a.items():
            for right, y in b.items():
                factor, monomial = _join(left, right)
                product[monomial] = product.get(monomial, Fraction(0)) + x * y * factor
        return _checked(product)

    def _add(self, a: Value, b: Value) -> Value:
        left, right = self.times(a.top, b.bottom), self.times(b.top, a.bottom)
        for monomial, coefficient in right.items():
            left[monomial] = left.get(monomial, Fraction(0)) + coefficient
        return _value(_checked(left), self.times(a.bottom, b.bottom))

    def _multiply(self, a: Value, b: Value) -> Value:
        return _value(self.times(a.top, b.top), self.times(a.bottom, b.bottom))

    def _inverse(self, a: Value) -> Value:
        """1 / a. A single term without letters moves up: 1 / (3*2^(1/2)) = 1/6 * 2^(1/2)."""
        if not a.top:
            raise Unreadable("a division by zero")
        if len(a.top) == 1:
            ((monomial, coefficient),) = a.top.items()
            if not any(symbol.isalpha() for symbol, _ in monomial):
                turned = tuple((prime, 1 - exponent) for prime, exponent in monomial)
                for prime, _ in monomial:
                    coefficient *= int(prime)
                return _value(self.times(a.bottom, {turned: 1 / coefficient}))
        return _value(dict(a.bottom), a.top)

    def _raise(self, base: Value, exponent: Fraction) -> Value:
        if exponent.denominator != 1:
            if exponent.denominator > MOST_INDEX:
                raise Unreadable("an unusual root")
            base = _value(_root(_rational(base), exponent.denominator))
        count = exponent.numerator
        if abs(count) > MOST_EXPONENT:
            raise Unreadable("too large an exponent")
        base = self._inverse(base) if count < 0 else base
        result = _value(dict(ONE))
        for _ in range(abs(count)):
            result = self._multiply(result, base)
        return result


def evaluate(node: Node) -> Value:
    """The normal form of a syntax tree. Raises Unreadable (see `Evaluation.value`)."""
    return Evaluation().value(node)


def _constant(number: Fraction) -> Polynomial:
    return {(): number} if number else {}


def _value(top: Mapping[Monomial, Fraction], bottom: Mapping[Monomial, Fraction] = ONE) -> Value:
    if len(bottom) == 1 and () in bottom:
        top, bottom = {monomial: x / bottom[()] for monomial, x in top.items()}, ONE
    return Value(top, bottom)


def _checked(polynomial: Polynomial) -> Polynomial:
    """The polynomial without zero terms. Raises Unreadable for one that is too large."""
    kept = {monomial: x for monomial, x in polynomial.items() if x}
    if len(kept) > MOST_TERMS:
        raise Unreadable("too many terms")
    for monomial, x in kept.items():
        if max(abs(x.numerator).bit_length(), x.denominator.bit_length()) > MOST_BITS:
            raise Unreadable("too large a number")
        if sum(exponent for symbol, exponent in monomial if symbol.isalpha()) > MOST_EXPONENT:
            raise Unreadable("too high a degree")
    return kept


def _join(left: Monomial, right: Monomial) -> tuple[int, Monomial]:
    """The integer factor from the roots (2^(1/2) * 2^(1/2) = 2) and the rest of the product of two monomials."""
    exponents = dict(left)
    factor = 1
    for symbol, exponent in right:
        total = exponents.get(symbol, Fraction(0)) + exponent
        if total >= 1 and not symbol.isalpha():
            factor, total = factor * int(symbol), total - 1
        exponents[symbol] = total
    return factor, tuple(sorted((symbol, exponent) for symbol, exponent in exponents.items() if exponent))


def _rational(value: Value) -> Fraction:
    if value.bottom != ONE or any(monomial for monomial in value.top):
        raise Unreadable("a number was expected")
    return value.top.get((), Fraction(0))


def _root(number: Fraction, index: int) -> Polynomial:
    """The `index`-th root of a number >= 0. The number must be small enough to factor."""
    radicand = number.numerator * number.denominator ** (index - 1)
    if not 0 <= radicand <= MOST_RADICAND:
        raise Unreadable("an unusual radicand")
    if radicand == 0:
        return {}
    outside, roots = Fraction(1, number.denominator), []
    for prime, count in prime_factors(radicand).items():
        outside *= prime ** (count // index)
        if count % index:
            roots.append((str(prime), Fraction(count % index, index)))
    return {tuple(sorted(roots)): outside}


def prime_factors(number: int) -> dict[int, int]:
    """Primes with their multiplicities; by trial division, for small numbers >= 1."""
    found: dict[int, int] = {}
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found[divisor] = found.get(divisor, 0) + 1
            number //= divisor
        divisor += 1
    if number > 1:
        found[number] = found.get(number, 0) + 1
    return found
