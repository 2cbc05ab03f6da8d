"""Source `versions`: a release's source changes taken back, with the release's own tests.

For two consecutive source distributions, a candidate takes back one hunk, one file, or all source files of the newer
one. In languages that are compiled, where a hunk seldom builds alone, functions, files and all come first, then hunks.
It is a feature if public names are missing then, a refactor (Python only) if they exist under other names. The
description is what the newer changelog adds.
"""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from glm5.tasks.swe.candidate import Candidate, Repository
from glm5.tasks.swe.languages.compiled import LANGUAGES
from glm5.tasks.swe.languages.syntax import Node, Parsed, parse, walk
from glm5.tasks.swe.mutate import runs_alike
from glm5.tasks.swe.renames import renamed

CONTEXT = 3  # lines between two hunks
MOST_DESCRIPTION = 1500  # characters
CHANGELOG = re.compile(r"(change|changes|changelog|history|news|release|releases)(\.\w+)?$", re.IGNORECASE)


class Versions:
    """Yields the candidates of a repository whose previous version's tree is `previous`, called `version`."""

    name = "versions"

    def __init__(self, previous: Path, version: str, most_lines: int | None = None) -> None:
        """`most_lines`, for releases that are far apart: candidates that change more lines are left out, and a
        changelog that is longer than MOST_DESCRIPTION says nothing."""
        self.previous, self.version, self.most_lines = previous, version, most_lines

    def candidates(self, repository: Repository, seed: int) -> Iterator[Candidate]:
        old, new = (
            {p: t for p in repository.sources if (t := _text(root, p)) is not None}
            for root in (self.previous, repository.root)
        )
        changed = {p: (old[p], new[p]) for p in new if p in old and old[p] != new[p]}
        texts: list[dict[str, str | None]] = []
        late: list[dict[str, str | None]] = []  # what is tried after the others
        compiled = repository.language in LANGUAGES
        for path, (before, after) in changed.items():
            parts = list(taken_back(before, after, path, repository.language))
            if compiled:
                late += [{path: text} for text in parts]
                parts = list(bodies_taken_back(before, after, path, repository.language))
            texts += [{path: text} for text in parts]
            if compiled or len(parts) > 1:
                texts.append({path: before})
        if len(changed) > 1:
            texts.append({path: before for path, (before, _) in changed.items()})
        choice = random.Random(f"{seed} {repository.name}")
        choice.shuffle(texts)
        choice.shuffle(late)
        if compiled:  # a function can be a hunk, and a hunk the only one of its file
            texts = list({tuple(changes.items()): changes for changes in (*texts, *late)}.values())
        description = scrub(changelog(self.previous, repository.root, repository.version))
        if self.most_lines is not None and len(description) > MOST_DESCRIPTION:
            description = ""
        origin = {"previous_version": self.version}
        release = Candidate(repository, self.name, {path: before for path, (before, _) in changed.items()})
        whole = release if len(changed) > 1 else None
        files = {p: Candidate(repository, self.name, {p: old}, within=whole) for p, old in release.changes.items()}
        for changes in texts:
            size = sum(len(_changed_lines(new[p], t or "")) for p, t in changes.items())
            if self.most_lines is not None and size > self.most_lines:
                continue
            if any(_differs(new[p], t, p, repository.language) for p, t in changes.items() if t is not None):
                kind, missing = kind_of(changes, new, repository.language)
                tier = "hard" if len(changes) > 1 else "single"
                yield Candidate(
                    repository,
                    self.name,
                    changes,
                    kind,
                    tier,
                    ("release",),
                    description[:MOST_DESCRIPTION],
                    missing,
                    origin,
                    next((one for path in changes for one in (files[path], whole) if _part(changes, one)), None),
                )


def kind_of(
    changes: Mapping[str, str | None], new: Mapping[str, str | None], language: str
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The kind of what takes `changes` back from `new`, and the (path, name) that are missing then."""
    renames = renamed(changes, new) if language == "python" else ()
    missing = renames or _added_names(changes, new, language)
    return "refactor" if renames else "feature" if missing else "bug-fix", missing


def _part(changes: Mapping[str, str | None], wider: Candidate | None) -> bool:
    """Whether `wider` takes back more than `changes`, which are of the same release."""
    return wider is not None and changes != wider.changes and changes.keys() <= wider.changes.keys()


def _text(root: Path, path: str) -> str | None:
    try:
        return (root / path).read_bytes().decode()
    except (OSError, ValueError):
        return None


def taken_back(before: str, after: str, path: str, language: str) -> Iterator[str]:
    """The newer text with one hunk as in the older one, for each hunk that then still compiles."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(CONTEXT):
        _, old_start, _, new_start, _ = group[0]
        old_end, new_end = group[-1][2], group[-1][4]
        text = "".join([*new[:new_start], *old[old_start:old_end], *new[new_end:]])
        if text != after and _tree(text, path, language) is not None:
            yield text


def bodies_taken_back(before: str, after: str, path: str, language: str) -> Iterator[str]:
    """The newer text with one function's body as in the older one, for each function that both have with the same
    head once."""
    old, new = parse(before, path, language), parse(after, path, language)
    if old is None or new is None:
        return
    older, newer = _bodies(old), _bodies(new)
    for head, body in newer.items():
        was = older.get(head)
        if was is not None and body is not None and old.of(was) != new.of(body):
            raw = new.raw[: body.start_byte] + old.of(was) + new.raw[body.end_byte :]
            yield raw.decode()


def _bodies(tree: Parsed) -> dict[bytes, Node | None]:
    """The body of each function by the function's text before it; None if several begin alike."""
    found: dict[bytes, Node | None] = {}
    for node in walk(tree.root):
        body = node.child_by_field_name("body") if node.type in tree.syntax.functions else None
        if body is not None:
            head = b" ".join(tree.raw[node.start_byte : body.start_byte].split())
            found[head] = None if head in found else body
    return found


def _tree(text: str, path: str, language: str) -> ast.Module | Parsed | None:
    """The syntax tree, None if the text does not parse."""
    if language != "python":
        return parse(text, path, language)
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _differs(fixed: str, bugged: str, path: str, language: str) -> bool:
    old, new = (_tree(text, path, language) for text in (bugged, fixed))
    if old is None:
        return False
    if isinstance(old, Parsed) and isinstance(new, Parsed):
        alike = old.errors() > new.errors() or old.tokens() == new.tokens()
    else:
        try:
            alike = language == "python" and runs_alike(fixed, bugged)
        except (SyntaxError, ValueError):  # it parses and does not compile, such as a nonlocal name that is not bound
            return False
    return not alike and any(line.strip() and "version" not in line.lower() for line in _changed_lines(fixed, bugged))


def _changed_lines(old: str, new: str) -> list[str]:
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm=""))[2:]
    return [line[1:] for line in lines if line[0] in "+-"]


def _added_names(
    changes: Mapping[str, str | None], new: Mapping[str, str | None], language: str
) -> tuple[tuple[str, str], ...]:
    """(path, name) of public functions and classes that only the fixed state defines."""
    pairs = (
        (path, public_names(fixed, path, language) - public_names(text, path, language))
        for path, text in changes.items()
        if text is not None and (fixed := new[path]) is not None
    )
    return tuple((path, name) for path, names in pairs for name in sorted(names))


def public_names(text: str, path: str, language: str) -> set[str]:
    """Names of functions, and of Python classes, that do not begin with an underscore."""
    tree = _tree(text, path, language)
    if isinstance(tree, Parsed):
        found = {tree.name(node) for node in walk(tree.root) if node.type in tree.syntax.functions}
    else:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = {node.name for node in ast.walk(tree or ast.Module([], [])) if isinstance(node, kinds)}
    return {name for name in found if name and name[0] != "_"}


def changelog(previous: Path, current: Path, version: str) -> str:
    """What the changelog adds from one version to the next."""
    for path in sorted(current.iterdir()):
        if path.is_file() and CHANGELOG.fullmatch(path.name):
            new = (_text(current, path.name) or "").splitlines()
            old = set((_text(previous, path.name) or "").splitlines())
            added = [line for line in new if line not in old and not re.fullmatch(r"[=\-~^*#\s]*", line)]
            return "\n".join(line for line in added if version not in line)
    return ""


ISSUE = re.compile(
    r"\(?(?:\b(?:fix(?:es|ed)?|close[sd]?|resolve[sd]?|see|gh|issue|pull request|pr)\s*:?\s*)?(?:GH-|#)\d+\)?",
    re.IGNORECASE,
)
LINK = re.compile(r"`?[^`\s]*\s*<?https?://[^\s>)]+[>)]*`?_*")


def scrub(text: str) -> str:
    """A text without issue numbers, commit hashes, links, user names and commit trailers: they point at the fix."""
    kept = []
    for line in text.splitlines():
        if re.match(
            r"\s*(signed-off-by|co-authored-by|reviewed-by|cherry picked|\(cherry picked|change-id)",
            line,
            re.IGNORECASE,
        ):
            continue
        line = LINK.sub("", ISSUE.sub("", line))
        line = re.sub(r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,40}\b", "", line)
        line = re.sub(r"(?:\bby |\bthanks to |\()?@[\w-]+\)?", "", line, flags=re.IGNORECASE)
        kept.append(re.sub(r"\(\s*[,;]*\s*\)", "", line).rstrip())
    return "\n".join(kept).strip()
