"""Issues and pull requests from JSONL in GitHub's form, and what their text is worth.

One object a line: `number`, `title`, `body`, `user` (or `author`) with `login`; of a pull request also `pull_request`.
This is what GitHub's REST API and `gh issue list --json number,title,body,author` give. Comments are not used: many
were written after the change, and quote it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from glm5.data.dedup import plain_words
from glm5.data.readers import limited_lines
from glm5.data.swe.change import Report
from glm5.errors import DataError

BOT = re.compile(
    r"\[bot\]|^(dependabot|renovate|pre-commit-ci|github-actions|greenkeeper|pyup-?bot|snyk-bot|weblate|transifex"
    r"|allcontributors|imgbot|codecov|mergify|bors)\b",
    re.IGNORECASE,
)
BOT_TITLE = re.compile(
    r"^\W*(bump|update|upgrade)\b.{1,80}\bfrom\b.{1,40}\bto\b|^\[pre-commit\.ci\]|^(build|chore)\(deps", re.IGNORECASE
)
LINKED = re.compile(
    r"\b(?:fix(?:e[sd])?|close[sd]?|resolve[sd]?)\b[:\s]+(?:(?:issue|bug)\s+)?(?:[\w.-]+/([\w.-]+))?#(\d{1,9})\b"
    r"|:issue:`(\d{1,9})`",
    re.IGNORECASE,
)
_TRAILER = re.compile(
    r"^(Signed-off-by|Co-authored-by|Reviewed-by|Acked-by|Tested-by|Reported-by|Cc|Change-Id|git-svn-id|Author|From)"
    r"[ \t]*:.*$",
    re.IGNORECASE | re.MULTILINE,
)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_FORM = re.compile(r"^[^\S\n]*(#{1,6}\s.*|\*\*[^*\n]+\*\*:?|[-*] \[[ xX]\].*|[-=_*]{3,})[^\S\n]*$", re.MULTILINE)
_LINK = re.compile(r"https?://\S+")
TEMPLATE_SHARE, TEMPLATE_LEAST = 0.1, 5
"""A line that this share of all issues have, and so many of them, is of a template."""


def linked(text: str, repository: str) -> list[int]:
    """Numbers of the issues that a text says it fixes ("Fixes #12"), in their order. Those of another repository do
    not count ("Fixes owner/name#12"; owners are not compared)."""
    found = ((own, number or other) for own, number, other in LINKED.findall(text))
    name = repository.lower().removesuffix(".git")
    return list(dict.fromkeys(int(number) for own, number in found if own.lower() in ("", name)))


def without_trailers(text: str) -> str:
    """A commit message without signatures: names and addresses of people."""
    return re.sub(r"\n{3,}", "\n\n", _TRAILER.sub("", text)).strip()


class Issues:
    """Issues and pull requests by number."""

    def __init__(self, reports: Iterable[tuple[int, Report]] = ()) -> None:
        self._reports = dict(reports)
        lines = Counter(line for one in self._reports.values() for line in set(_lines(one.body)))
        least = max(TEMPLATE_LEAST, TEMPLATE_SHARE * len(self._reports))
        self._template = frozenset(line for line, count in lines.items() if count >= least)

    def get(self, number: int) -> Report | None:
        return self._reports.get(number)

    def own_words(self, body: str) -> tuple[int, int]:
        """Words of a text, and those left without forms, links and lines of the template of these issues."""
        plain = _LINK.sub("", _FORM.sub("", _COMMENT.sub("", body)))
        own = "\n".join(line for line in plain.split("\n") if line.strip() not in self._template)
        return len(plain_words(body)), len(plain_words(own))


def _lines(body: str) -> list[str]:
    return [line for part in body.split("\n") if (line := part.strip())]


def read_issues(files: Sequence[str], most_line: int) -> Issues:
    """The issues in JSONL files. Raises DataError for a file that cannot be read or has none, and for a malformed
    line."""
    found: dict[int, Report] = {}
    for name in files:
        before = len(found)
        try:
            with Path(name).open("rb") as file:
                for number, line in limited_lines(file, most_line):
                    if line is None:
                        raise DataError(f"{name}:{number} has more than {most_line:,} bytes.")
                    if line.strip():
                        key, report = _report(line, f"{name}:{number}")
                        found[key] = report
        except OSError as error:
            raise DataError(f"Cannot read the issues {name}: {error.strerror}.") from None
        if len(found) == before:
            raise DataError(f"The file of issues {name} contains none.")
    return Issues(found.items())


def _report(line: bytes, where: str) -> tuple[int, Report]:
    try:
        row: dict[str, Any] = json.loads(line)
        number, title = row["number"], row["title"]
        body = row.get("body") or ""
        who = row.get("user") or row.get("author") or {}
        login = str(who.get("login", ""))
        named = BOT.search(login) or BOT_TITLE.search(title)
        bot = bool(named) or who.get("type") == "Bot" or who.get("is_bot") is True
        if type(number) is not int or not isinstance(body, str):
            raise ValueError
        kind = "Pull request" if row.get("pull_request") else "Issue"
        return number, Report(f"{kind} #{number}", title.strip(), body.replace("\r\n", "\n").strip(), bot)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(
            f'{where} is not an issue; a line needs "number" and "title", and may have "body" and "user".'
        ) from None
