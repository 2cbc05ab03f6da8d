"""Edits of test files by syntax tree: leaving tests out of what the agent sees, and sabotaged twins. The counterpart of
`swe.test_files` for the languages of the table."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterator, Sequence

from glm5.tasks.swe.languages.compiled import PROGRAM, STUB
from glm5.tasks.swe.languages.syntax import Node, Parsed, parse, walk
from glm5.tasks.swe.test_files import WORD, Name, other_word

LETTERS = "aeinorst"
ESCAPE = re.compile(r"[\\%#$][A-Za-z{]")
NEGATIONS = {
    "javascript": ((r"\.not\.(?=to)", "."), (r"\.(?=to[A-Z])", ".not."),
                   (r"\b(?:t|assert)\.(?:equal|same|deepEqual|strictEqual|deepStrictEqual|is|ok)\b", None)),
    "php": ((r"\bassertNot(?=[A-Z])", "assert"), (r"\bassertTrue\b", "assertFalse"), (r"\bassertFalse\b", "assertTrue"),
            (r"\bassert(?=(Same|Equals|Null|Empty|Contains|Instance|Count)\b)", "assertNot")),
    "ruby": ((r"\.(not_to|to_not)\b", ".to"), (r"\.to\b", ".not_to"), (r"\bassert_equal\b", "refute_equal"),
             (r"\bassert\b(?!_)", "refute"), (r"\bmust_equal\b", "wont_equal")),
    "go": (),
}  # fmt: skip
OPPOSITES = {
    "equal": "notEqual", "same": "notSame", "deepEqual": "notDeepEqual", "strictEqual": "notStrictEqual",
    "deepStrictEqual": "notDeepStrictEqual", "is": "not", "ok": "ifError",
}  # fmt: skip


def split_id(test: str, framework: str) -> tuple[str, Name]:
    """(test file, the test's own title) of an id of `in_room/suite.py`. Tests of one title in a file are one."""
    file, _, title = test.partition("::")
    title = re.sub(r" \(\d+\)$", "", title)
    if framework == "go":
        return file, (title.split("/", 1)[0],)
    if framework == "phpunit":
        return file, (title.split(" with data set ", 1)[0],)
    last = title.rsplit(" > ", 1)[-1]
    if framework == "junit":
        last = re.sub(r"[(\[{].*", "", last)
    if framework in ("minitest", "test-unit"):
        last = re.sub(r"^test_\d{4}_|^test: ", "", last)
    return file, (last,)


def tests(source: Parsed) -> Iterator[tuple[str, Node]]:
    """(title, node) of every test in the file: a named function, or a call with a title and a body."""
    if source.syntax.macros:
        yield PROGRAM, source.root
    for node in walk(source.root):
        if node.type in source.syntax.functions and (name := source.name(node)):
            yield name, node
        elif node.type in source.syntax.calls and (arguments := node.child_by_field_name("arguments")) is not None:
            first = next(iter(arguments.named_children), None)
            if first is not None and first.type in source.syntax.strings and _has_body(node, arguments):
                yield _content(source, first), node


def _has_body(node: Node, arguments: Node) -> bool:
    own = [*arguments.named_children, *([b] if (b := node.child_by_field_name("block")) is not None else [])]
    return any(child.type.endswith(("function", "function_expression", "block", "func_literal")) for child in own)


def _content(source: Parsed, string: Node) -> str:
    text = source.of(string)[1:-1].decode(errors="replace")
    return re.sub(r"\\(['\"`\\])", r"\1", text)


def without_tests(text: str, path: str, language: str, hidden: Collection[Name]) -> str | None:
    """The file without the named tests. None if one of them is not in the text or the rest does not parse."""
    source = parse(text, path, language)
    if source is None:
        return None
    if source.syntax.macros:
        return without_functions(source, {name for (name,) in hidden} - {PROGRAM}) or STUB
    found = [(title, node) for title, node in tests(source) if (title,) in hidden]
    if {(title,) for title, _ in found} != set(hidden):
        return None
    cut = []
    for _, node in found:
        owner = node.parent if node.parent is not None and node.parent.type == "expression_statement" else node
        while (before := owner.prev_named_sibling) is not None and before.type == "attribute_item":
            cut.append(source.whole_line(before) or (before.start_byte, before.end_byte))
            owner = before
        owner, comment = node if owner.type == "attribute_item" else owner, owner.prev_named_sibling
        span = source.whole_line(owner) or (owner.start_byte, owner.end_byte)
        if comment is not None and comment.type == "comment" and comment.end_point[0] == owner.start_point[0] - 1:
            lines = source.whole_line(comment)
            span = (lines[0], span[1]) if lines is not None else span
        cut.append(span)
    raw, kept = source.raw, len(source.raw)
    for start, end in sorted(cut, reverse=True):
        if end <= kept:  # a test inside another one that is left out goes with it
            raw, kept = raw[:start] + raw[end:], start
        elif start < kept:
            return None
    changed = parse(raw.decode(errors="replace"), path, language)
    return None if changed is None else raw.decode()


def without_functions(source: Parsed, hidden: Collection[str]) -> str | None:
    """A C or C++ file without the named functions and the statements that name them, such as `RUN_TEST(name);`. None if
    no function is hidden, or one is not in the text."""
    cut: list[tuple[int, int]] = []
    found = set()
    for node in walk(source.root):
        if node.type in source.syntax.functions and source.name(node) in hidden:
            found.add(source.name(node))
            cut.append(source.whole_line(node) or (node.start_byte, node.end_byte))
        elif node.type == "expression_statement" and any(
            child.type == "identifier" and source.of(child).decode(errors="replace") in hidden for child in walk(node)
        ):
            cut.append(source.whole_line(node) or (node.start_byte, node.end_byte))
    if not hidden or found != set(hidden):
        return None
    raw, kept = source.raw, len(source.raw)
    for start, end in sorted(cut, reverse=True):
        if end <= kept:
            raw, kept = raw[:start] + raw[end:], start
    return raw.decode(errors="replace")


def sabotaged(text: str, path: str, language: str, targets: Collection[Name], choice: random.Random) -> str | None:
    """The file with one assertion changed in each of the target tests that has one, so that code that is right fails
    it: an expected value, or if none is written out, the assertion is negated. None if nothing can be changed."""
    source = parse(text, path, language)
    if source is None:
        return None
    if source.syntax.macros:  # a test without a function of its own is a part of the program
        known = {title for title, _ in tests(source)}
        targets = {name if name[0] in known else (PROGRAM,) for name in targets}
    edits: dict[int, tuple[int, bytes]] = {}
    for title, node in tests(source):
        if (title,) in targets:
            values = list(_values(source, node, choice)) or list(_negated(source, node, language))
            if source.syntax.macros:
                values += [*_negated_calls(source, node), *_negated_ifs(source, node)]
            if values:
                start, end, new = choice.choice(values)
                edits[start] = (end, new)
    raw, kept = source.raw, len(source.raw)
    for start, (end, new) in sorted(edits.items(), reverse=True):
        if end <= kept:
            raw, kept = raw[:start] + new + raw[end:], start
    try:
        changed = raw.decode()
    except UnicodeDecodeError:
        return None
    return changed if changed != text and parse(changed, path, language) is not None else None


def _assertions(source: Parsed, test: Node) -> Iterator[tuple[Node, str]]:
    """Calls inside a test that look like assertions, with the text of what is called."""
    for node in walk(test):
        if node.type == "macro_invocation" and re.search(source.syntax.assertion, name := _macro(source, node)):
            yield node, name
        elif node != test and node.type in source.syntax.calls and node.child_by_field_name("arguments") is not None:
            called = source.raw[node.start_byte : node.child_by_field_name("arguments").start_byte]
            text = called.decode(errors="replace")
            if re.search(source.syntax.assertion, text):
                yield node, text


def _negated_calls(source: Parsed, test: Node) -> Iterator[tuple[int, int, bytes]]:
    """Assertions of C and C++ the other way round: the macro that means the opposite, or the one argument negated."""
    for node, called in _assertions(source, test):
        name, arguments = called.strip(), node.child_by_field_name("arguments").named_children
        for pattern, new in OPPOSITE_MACROS:
            if re.search(pattern, name):
                yield node.start_byte, node.start_byte + len(name.encode()), re.sub(pattern, new, name).encode()
                break
        else:
            if len(arguments) == 1 and arguments[0].type not in source.syntax.strings:
                yield arguments[0].start_byte, arguments[0].end_byte, b"!(" + source.of(arguments[0]) + b")"


def _negated_ifs(source: Parsed, test: Node) -> Iterator[tuple[int, int, bytes]]:
    """Conditions of C and C++ the other way round, of `if (condition) fail("...");`."""
    for node in walk(test):
        then = node.child_by_field_name("consequence") if node.type in source.syntax.ifs else None
        if then is not None and FAILURE.match(source.of(then)):
            condition = node.child_by_field_name("condition")
            yield condition.start_byte, condition.end_byte, b"(!" + source.of(condition) + b")"


FAILURE = re.compile(rb"[{\s]*(?:\w*fail\w*|abort|exit|die)\s*\(", re.IGNORECASE)
OPPOSITE_MACROS = (
    (r"_NOT_NULL", "_NULL"), (r"_NULL", "_NOT_NULL"), (r"_TRUE", "_FALSE"), (r"_FALSE", "_TRUE"),
    (r"_(?:EQ|EQUAL)$", "_NE"), (r"_NE$", "_EQ"),
)  # fmt: skip


def _values(source: Parsed, test: Node, choice: random.Random) -> Iterator[tuple[int, int, bytes]]:
    """Other values for the literals of assertions; of Go tests, for those of tables and comparisons."""
    seen: set[int] = set()
    if source.syntax.assertion == ".":
        owners = [n for n in walk(test) if n.type in ("literal_value", "binary_expression")]
    else:
        owners = [a for node, _ in _assertions(source, test) for a in _first_two(node)]
    known = [_words(source, test), _words(source, source.root)] if owners else []
    for owner in owners:
        for node in walk(owner):
            literal = node.type in source.syntax.numbers | source.syntax.strings | source.syntax.truths
            if literal and node.start_byte not in seen and (new := _other(source, node, choice, known)) is not None:
                seen.add(node.start_byte)
                yield node.start_byte, node.end_byte, new


def _macro(source: Parsed, node: Node) -> str:
    name = node.child_by_field_name("macro")
    return source.of(name).decode(errors="replace") if name is not None else ""


def _first_two(call: Node) -> list[Node]:
    if call.type == "macro_invocation":
        return list(call.named_children[-1].named_children)
    if "MESSAGE" in call.text.decode(errors="replace").split("(")[0]:
        return list(call.child_by_field_name("arguments").named_children[:-1])
    found = call.child_by_field_name("arguments").named_children[:2]
    return [node for node in found if not _has_body(call, node.parent) or node.type.endswith("argument")]


def _words(source: Parsed, node: Node) -> list[str]:
    """The words in the strings below a node."""
    found = (source.of(n).decode(errors="replace") for n in walk(node) if n.type in source.syntax.strings)
    return sorted({word for text in found if not ESCAPE.search(text) for word in WORD.findall(text)})


def _other(source: Parsed, node: Node, choice: random.Random, known: Sequence[Sequence[str]]) -> bytes | None:
    text = source.of(node)
    if node.type in source.syntax.numbers:
        return str(int(text) + choice.choice([1, 2, 10])).encode() if text.isdigit() and len(text) < 7 else None
    if node.type in source.syntax.truths:
        return {b"true": b"false", b"false": b"true"}.get(text.lower())
    places = [m.start() for m in re.finditer(rb"[a-z]", text) if 0 < m.start() < len(text) - 1]
    places = [
        at for at in places if text[at : at + 1].isalpha() and text[at - 1 : at] not in (b"\\", b"%", b"#", b"$", b"{")
    ]
    if not places or b"\n" in text or b"{" in text:
        return None
    plain = text.decode(errors="replace")
    if not ESCAPE.search(plain) and (changed := other_word(plain, known, choice)) is not None:
        return changed.encode()
    at = choice.choice(places)
    other = choice.choice(LETTERS.replace(chr(text[at]), "")).encode()
    return text[:at] + other + text[at + 1 :]


def _negated(source: Parsed, test: Node, language: str) -> Iterator[tuple[int, int, bytes]]:
    """Assertions the other way round."""
    if language == "go":
        for node in walk(test):
            if node.type == "if_statement" and re.search(rb"\.(Error|Fatal|Fail)", source.of(node)):
                condition = node.child_by_field_name("condition")
                yield condition.start_byte, condition.end_byte, b"!(" + source.of(condition) + b")"
        return
    for node, called in _assertions(source, test):
        for pattern, new in NEGATIONS.get("javascript" if language == "typescript" else language, ()):
            found = re.search(pattern, called)
            if found is None:
                continue
            start = node.start_byte + len(called[: found.start()].encode())
            end = node.start_byte + len(called[: found.end()].encode())
            old = found[0]
            if new is None:
                stem, _, word = old.rpartition(".")
                new = f"{stem}.{OPPOSITES[word]}"
            yield start, end, new.encode()
            break
