"""Which changes become rows, and what a row shows: related files, the changed files before the change, issue, pull
request, diff. The filter of repositories is loose, that of issues and diffs strict (§2.3)."""

from __future__ import annotations

from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.config.corpus import ChangesConfig
from glm5.data.corpus.text import Found, Skipped, Text, tidy
from glm5.data.swe.change import Change, Report, is_code, text_type
from glm5.data.swe.issues import Issues
from glm5.data.swe.patching import PatchError, parse_diff, spans
from glm5.data.swe.related import Retriever

REASONS = {
    "first_commit": "has no parent",
    "no_text_changed": "changes no text file that people of the repository wrote",
    "no_code_changed": "changes no source code of the repository: documents, locked or copied files only",
    "repository_small": "the repository has too few source files",
    "bot": "a program wrote it",
    "revert": "takes another change back",
    "too_large": "the diff has more bytes than a document may have",
    "damaged": "git cannot read it, or it is not what it should be",
    "too_many_files": "changes more files than the limit",
    "too_many_lines": "changes more lines than the limit",
    "no_issue": "names no issue whose text is known",
    "description_short": "too few words say what the change is for",
    "description_template": "nearly all words are those of a form",
    "over_budget": "issue, pull request and diff alone are too long",
    "patch_missing": "the series names a patch that the package lacks",
    "patch_does_not_apply": "a patch does not fit the files before it",
    "dsc_format": "no package of the format 3.0 (quilt) with one original tarball",
    "dsc_incomplete": "an archive that the .dsc names is missing",
}
"""Why a change is not used."""
_MOST_PER_TOKEN, _MOST_KNOWN = 10, 200_000
"""Characters that a token has at most, on average over a file; and files whose tokens are remembered."""
_CONTEXT = (120, 40, 12)
"""Lines around each hunk of a file that is too long to be shown whole: the first that fits."""


class Rows:
    """Makes rows of changes; lengths are those of a tokenizer."""

    def __init__(self, config: ChangesConfig, issues: Issues, tokenizer: Tokenizer) -> None:
        self.config, self.issues, self._tokenizer = config, issues, tokenizer
        self._known: dict[tuple[str, str], int] = {}

    def tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def _fits(self, text: str, left: int, key: tuple[str, str] | None = None) -> int | None:
        """The tokens of a file, unless they are more than `left`. Those of whole files are remembered by `key`: the
        same files come back in the rows of a repository. A text far too long is not counted."""
        if len(text) > _MOST_PER_TOKEN * left:
            return None
        size = self._known.get(key) if key is not None else None
        if size is None:
            size = self.tokens(text)
            if key is not None:
                if len(self._known) > _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = size
        return size if size <= left else None

    def row(self, change: Change, retriever: Retriever) -> Found:
        """The row of a change, or why it is dropped. `more` of the row has `own`, where its issue begins, and
        `counts`."""
        reason = self._unwanted(change)
        if reason:
            return Skipped(change.name, reason)
        head = tidy(f"Repository: {change.repository}\nRevision: {change.revision}") + "\n\n"
        own = "".join(_section(one) for one in (*change.issues, *([change.request] if change.request else [])))
        own = tidy(f"{own}Diff:\n{change.diff}") + "\n"
        left = self.config.tokens - self.tokens(head) - self.tokens(own)
        if left < 0:
            return Skipped(change.name, "over_budget")
        counts: dict[str, int] = {}
        changed, left = self._changed(change, left, counts)
        related, left = self._related(change, retriever, left, counts)
        before = head + related + changed
        counts |= {"tokens": self.config.tokens - left, "issues": len(change.issues)}
        more: dict[str, Any] = {"own": len(before), "counts": counts, "files": len(change.changed)}
        return Text(change.name, before + own, "swe", "change", None, dict(change.more) | more)

    def _unwanted(self, change: Change) -> str:
        config = self.config
        code = [path for path in change.changed if is_code(path)]
        sources = sum(map(is_code, change.tree.keys))
        reports = [*change.issues, *([change.request] if change.request else [])]
        words = [self.issues.own_words(f"{one.title}\n{one.body}") for one in reports]
        most, own = (max((count[at] for count in words), default=0) for at in (0, 1))
        checks = (
            (not code, "no_code_changed"),
            (sources < config.least_sources, "repository_small"),
            (any(one.bot for one in reports), "bot"),
            (change.revert, "revert"),
            (len(change.changed) > config.most_files, "too_many_files"),
            (sum(change.changed.values()) > config.most_lines, "too_many_lines"),
            (config.need_issue and not change.issues, "no_issue"),
            (most < config.least_words, "description_short"),
            (own < config.least_words, "description_template"),
        )
        return next((reason for wrong, reason in checks if wrong), "")

    def _changed(self, change: Change, left: int, counts: dict[str, int]) -> tuple[str, int]:
        """The changed files before the change: whole, or if they are too long the lines around the hunks."""
        parts: dict[str, str] = {}
        for path in sorted(change.changed, key=lambda path: (-change.changed[path], path)):
            text = change.tree.read(path)
            if text is None:
                continue
            whole, shown = _file(path, text), ""
            key = path, change.tree.keys[path]
            for shown in (whole, *(_file(path, part) for part in _around(change, path, text))):
                if (size := self._fits(shown, left, key if shown == whole else None)) is not None:
                    left -= size
                    parts[path] = shown
                    break
            name = "changed_files" + ("_left_out" if path not in parts else "_whole" if shown == whole else "_in_part")
            counts[name] = counts.get(name, 0) + 1
        return "".join(parts[path] for path in sorted(parts)), left

    def _related(self, change: Change, retriever: Retriever, left: int, counts: dict[str, int]) -> tuple[str, int]:
        """The files that BM25 finds with the issue as query, the best last: next to the files that change."""
        asked = change.issues or ((change.request,) if change.request else ())
        query = "\n".join(f"{one.title}\n{one.body}" for one in asked)
        keys = {path: key for path, key in change.tree.keys.items() if path not in change.changed and text_type(path)}
        parts = []
        for path, _ in retriever.ranked(query, keys)[: self.config.related]:
            text = change.tree.read(path)
            if text is None:
                continue
            part = _file(path, text)
            size = self._fits(part, left, (path, keys[path]))
            name = "related_files" + ("" if size is not None else "_left_out")
            counts[name] = counts.get(name, 0) + 1
            if size is not None:
                left -= size
                parts.append(part)
        return "".join(reversed(parts)), left


def _section(report: Report) -> str:
    body = f"\n{report.body.strip()}" if report.body.strip() else ""
    return f"{report.kind}: {report.title}{body}\n\n"


def _file(path: str, text: str) -> str:
    return tidy(f"File: {path}\n{text}") + "\n\n"


def _around(change: Change, path: str, text: str) -> list[str]:
    """Excerpts of a file around the places where the hunks of its diff apply, the longest first."""
    try:
        places = [place for diff in parse_diff(change.diff) if diff.old == path for place in spans(text, diff)]
    except PatchError:
        return []
    lines = text.split("\n")
    found = []
    for context in _CONTEXT:
        kept = {at for low, high in places for at in range(max(0, low - context), min(len(lines), high + context))}
        shown: list[str] = []
        for at in sorted(kept):
            if at and at - 1 not in kept:
                shown.append(f"... line {at + 1}")
            shown.append(lines[at])
        if kept and len(kept) < len(lines):
            found.append("\n".join(shown))
    return found
