"""Edits of Python test files: leaving tests out of what the agent sees, and sabotaged twins."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Collection, Iterator, Sequence

from glm5.tasks.swe.operators import Source

Name = tuple[str, ...]
WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{3,}(?![A-Za-z])")


def split_id(test: str, framework: str, files: Collection[str]) -> tuple[str, Name]:
    """(test file, names of classes and function) of a test id. Raises KeyError if no file fits."""
    if framework == "pytest":
        file, *names = test.split("[", 1)[0].split("::")
        return file, tuple(names)
    if framework != "unittest":
        from glm5.tasks.swe.languages import test_edits

        return test_edits.split_id(test, framework)
    module, *names = test.split(".")
    by_module = {file.rsplit("/", 1)[-1][: -len(".py")]: file for file in files}
    return by_module[module], tuple(names)


def functions(tree: ast.Module) -> Iterator[tuple[Name, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of the module and of its classes, by its names from the outside in."""

    def below(body: list[ast.stmt], names: Name) -> Iterator[tuple[Name, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from below(node.body, (*names, node.name))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (*names, node.name), node

    yield from below(tree.body, ())


def resolve(tree: ast.Module, targets: Collection[Name]) -> dict[Name, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions that the names of tests mean: of that class, else all of that name, for a test may be inherited.
    Targets that no function fits are left out."""
    known = dict(functions(tree))
    found = {}
    for target in targets:
        same = [target] if target in known else [names for names in known if names[-1] == target[-1]]
        found.update({names: known[names] for names in same})
    return found


def without_tests(text: str, hidden: Collection[Name]) -> str | None:
    """The file without the named test functions. None if one of them is not in the text."""
    try:
        source = Source(text)
    except (SyntaxError, ValueError):
        return None
    named = resolve(source.tree, hidden)
    if {names[-1] for names in hidden} != {names[-1] for names in named}:
        return None
    raw, cut = source.raw, []
    for names, node in named.items():
        first = min([node, *node.decorator_list], key=lambda n: n.lineno)
        start = raw.rfind(b"\n", 0, source.span(first)[0]) + 1
        end = raw.find(b"\n", source.span(node)[1]) + 1 or len(raw)
        owner = next((n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef) and node in n.body), None)
        alone = owner is not None and all((*names[:-1], getattr(n, "name", "")) in named for n in owner.body)
        cut.append((start, end, source.indent(node) + b"pass\n" if alone and node is owner.body[0] else b""))  # type: ignore[union-attr]
    for start, end, left in sorted(cut, reverse=True):
        raw = raw[:start] + left + raw[end:]
    try:
        ast.parse(raw)
    except SyntaxError:
        return None
    return raw.decode()


NEGATED = {
    "assertEqual": "assertNotEqual", "assertNotEqual": "assertEqual", "assertTrue": "assertFalse",
    "assertFalse": "assertTrue", "assertIn": "assertNotIn", "assertNotIn": "assertIn", "assertIs": "assertIsNot",
    "assertIsNot": "assertIs", "assertIsNone": "assertIsNotNone", "assertIsNotNone": "assertIsNone",
}  # fmt: skip
FLIPPED = {ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}


def sabotaged(text: str, targets: Collection[Name], choice: random.Random) -> str | None:
    """The file with one assertion changed in each of the target functions that has one, so that code that is right
    fails it. The expected value changes if it is written out, for then code that is wrong fails too; otherwise the
    assertion is negated. None if nothing can be changed."""
    try:
        source = Source(text)
    except (SyntaxError, ValueError):
        return None
    edits = []
    for node in resolve(source.tree, sorted(targets)).values():
        known = [words_of(node), words_of(source.tree)]
        proposals = [edit for inner in ast.walk(node) for edit in _spoiled(source, inner, choice, known)]
        best = [p for p in proposals if p[3]] or proposals
        if best:
            edits.append(choice.choice(best))
    raw = source.raw
    for start, end, new, _ in sorted(edits, key=lambda e: e[0], reverse=True):
        raw = raw[:start] + new + raw[end:]
    try:
        ast.parse(raw)
    except SyntaxError:
        return None
    return raw.decode() if raw != source.raw else None


def words_of(node: ast.AST) -> list[str]:
    """The words in the strings below a node."""
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return sorted({word for text in texts for word in WORD.findall(text)})


def other_word(text: str, known: Sequence[Sequence[str]], choice: random.Random) -> str | None:
    """The text with a word of it replaced by another that stands in the same test, else in the file: a misspelt word,
    which stands nowhere else, would tell a twin. None without such words."""
    for words in known:
        places = [(m, [w for w in words if w.lower() != m[0].lower()]) for m in WORD.finditer(text)]
        if places := [(found, others) for found, others in places if others]:
            found, others = choice.choice(places)
            nearest = min(abs(len(word) - len(found[0])) for word in others)
            new = choice.choice([word for word in others if abs(len(word) - len(found[0])) == nearest])
            return text[: found.start()] + new + text[found.end() :]
    return None


def _spoiled(
    source: Source, node: ast.AST, choice: random.Random, known: Sequence[Sequence[str]]
) -> Iterator[tuple[int, int, bytes, bool]]:
    """(start, end, text, whether an expected value changed) for an assertion. `known` are words to put in the place of
    others, the best first."""
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1:
        sides, op = [node.test.left, node.test.comparators[0]], node.test.ops[0]
        if isinstance(op, ast.Eq):
            yield from _other_value(source, sides, choice, known)
        if type(op) in FLIPPED:
            left, right = (source.of(side) for side in sides)
            yield (*source.span(node.test), b" ".join([left, FLIPPED[type(op)].encode(), right]), False)
    elif isinstance(node, ast.Assert):
        inner = node.test
        negated = inner.operand if isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.Not) else None
        plain = isinstance(inner, ast.Call | ast.Name | ast.Attribute | ast.Subscript)  # parentheses would show it
        text = source.of(inner) if plain else b"(" + source.of(inner) + b")"
        new = source.of(negated) if negated is not None else b"not " + text
        yield (*source.span(inner), new, False)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NEGATED:
        if node.func.attr == "assertEqual" and len(node.args) >= 2:
            yield from _other_value(source, node.args[:2], choice, known)
        end = source.span(node.func)[1]
        yield end - len(node.func.attr), end, NEGATED[node.func.attr].encode(), False


def _other_value(
    source: Source, sides: list[ast.expr], choice: random.Random, known: Sequence[Sequence[str]]
) -> Iterator[tuple[int, int, bytes, bool]]:
    """Another value for a literal inside a side of an equation that holds no call."""
    for side in sides:
        if any(isinstance(n, ast.Call | ast.Name | ast.Attribute | ast.JoinedStr) for n in ast.walk(side)):
            continue
        constants = [n for n in ast.walk(side) if isinstance(n, ast.Constant)]
        for node in choice.sample(constants, min(2, len(constants))):
            value = node.value
            if isinstance(value, bool):
                yield (*source.span(node), str(not value).encode(), True)
            elif type(value) is int and source.of(node) == str(value).encode():  # not 0xff: it would show
                steps = [1, 2, 10, -1, -2, -10] if value > 10 else [1, 2, 10]  # the right one must not be the smallest
                yield (*source.span(node), str(value + choice.choice(steps)).encode(), True)
            elif isinstance(value, str) and value and "\n" not in value:
                at = choice.randrange(len(value))
                other = choice.choice("aeinorst".replace(value[at], ""))
                new = other_word(value, known, choice) or value[:at] + other + value[at + 1 :]
                text = source.of(node)
                plain = text[1:-1] == value.encode(
                    "utf-8", "surrogatepass"
                )  # its quotes stay: others would show the change
                yield (*source.span(node), text[:1] + new.encode() + text[-1:] if plain else repr(new).encode(), True)
