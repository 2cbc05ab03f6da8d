"""Lines of JSONL about preferences: pairs to vote on, exported votes, and human answers. The files are untrusted."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.data.readers import bad_json, limited_lines
from glm5.data.sft import conversation_files, read_conversations
from glm5.errors import DataError
from glm5.files import atomic_write

MOST_LINE = 1 << 20
MOST_TEXT = 1 << 18
"""Maximum characters of a prompt or an answer."""
MOST_PAIRS = 1_000_000


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt. `group` is the class of the prompt, for reports; it may be empty."""

    prompt: str
    first: str
    second: str
    group: str = ""

    @property
    def id(self) -> str:
        """Of the content: the same pair in another file, or with its answers exchanged, has the same id."""
        parts = json.dumps([self.prompt, *sorted((self.first, self.second))], ensure_ascii=True)
        return hashlib.sha256(parts.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Preferred:
    """A preference between two answers, of all who voted on them. `strength` is the share of the votes for `better`
    minus that of the others, in (0, 1]: 1 if all agree."""

    prompt: str
    better: str
    worse: str
    strength: float = 1.0


def read_pairs(source: Path) -> list[Pair]:
    """The pairs of a JSONL file, or of all `*.jsonl` of a folder, each once and in order. A line has `prompt` and
    either `answers`, a list of two texts, or `chosen` and `rejected`; `class` is optional.

    Raises DataError for a line of another form (FILE:LINE says which), and for a source without pairs.
    """
    found: dict[str, Pair] = {}
    for where, row in _rows(source, "pairs"):
        answers = row.get("answers", [row.get("chosen"), row.get("rejected")])
        if not isinstance(answers, list) or len(answers) != 2:
            raise DataError(f'{where}: "answers" must be a list of two texts.')
        prompt, first, second = (_text(where, name, value) for name, value in zip(
            ("prompt", "answers[0]", "answers[1]"), (row.get("prompt"), *answers)))  # fmt: skip
        group = row.get("class", "")
        if not isinstance(group, str) or len(group) > 200:
            raise DataError(f'{where}: "class" must be a short text.')
        if first == second:
            raise DataError(f"{where}: the two answers are equal, so there is nothing to prefer.")
        pair = Pair(prompt, first, second, group)
        found.setdefault(pair.id, pair)
        if len(found) > MOST_PAIRS:
            raise DataError(f"{source} has more than {MOST_PAIRS:,} pairs; split it.")
    if not found:
        raise DataError(f'{source} has no pairs; a line is {{"prompt": ..., "answers": [..., ...]}}.')
    return list(found.values())


def read_preferences(source: Path) -> list[Preferred]:
    """Preferences of an exported file (`glm5 prefer --export`), the votes on one pair taken together. Ties count as
    half a vote each; a pair without a majority is left out. Other files with `prompt`, `chosen` and `rejected` do too.

    Raises DataError for a line of another form, and for a source without any preference.
    """
    votes: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for prompt, chosen, rejected, tie in _votes(source):
        first, second = sorted((chosen, rejected))
        votes[prompt, first, second].append(0.0 if tie else 1.0 if chosen == first else -1.0)
    found = []
    for (prompt, first, second), values in votes.items():
        lead = sum(values) / len(values)
        if lead and first != second:
            better, worse = (first, second) if lead > 0 else (second, first)
            found.append(Preferred(prompt, better, worse, abs(lead)))
    if not found:
        raise DataError(f"{source} has no preference; vote with `glm5 prefer`, then export.")
    return found


def write_preferences(source: Path, path: Path) -> None:
    """Write what `read_preferences` reads of `source` to another file: the votes, without raters and their reasons."""
    rows = [{"prompt": p, "chosen": c, "rejected": r, "tie": tie} for p, c, r, tie in _votes(source)]
    _write(path, rows)


def read_anchors(sources: Sequence[str | Path]) -> dict[str, list[str]]:
    """Human answers by prompt, from files of conversations (`messages`, the form of SFT data): the prompt is the last
    user message before the last assistant turn. The same files can be mixed into SFT (`data` of an SFT stage).

    Raises DataError for a line that is not a conversation or has no answer.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for where, conversation in read_conversations(conversation_files(source)):
            roles = [message.role for message in conversation.messages]
            if "assistant" not in roles or "user" not in roles[: len(roles) - roles[::-1].index("assistant") - 1]:
                raise DataError(f"{where}: an anchor needs a user message and an answer of an assistant after it.")
            at = len(roles) - 1 - roles[::-1].index("assistant")
            prompt = next(m.content for m in reversed(conversation.messages[:at]) if m.role == "user")
            answer = conversation.messages[at].content
            if not answer.strip():
                raise DataError(f"{where}: the answer is empty.")
            if answer not in found[prompt]:
                found[prompt].append(answer)
    return dict(found)


def write_anchors(sources: Sequence[str | Path], path: Path) -> None:
    """Write what `read_anchors` reads of `sources` to one file."""
    rows = []
    for prompt, answers in read_anchors(sources).items():
        for answer in answers:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            rows.append({"messages": turns})
    _write(path, rows)


def _votes(source: Path) -> Iterator[tuple[str, str, str, bool]]:
    """The prompt, the chosen and the rejected answer of every vote, and whether it is a tie."""
    for where, row in _rows(source, "votes"):
        prompt, chosen, rejected = (_text(where, name, row.get(name)) for name in ("prompt", "chosen", "rejected"))
        tie = row.get("tie", False)
        if not isinstance(tie, bool):
            raise DataError(f'{where}: "tie" must be true or false.')
        yield prompt, chosen, rejected, tie


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))


def _rows(source: Path, what: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(FILE:LINE, object) of every line that is not blank; errors call the lines `what`."""
    for path in conversation_files(source, what):
        with path.open("rb") as file:
            for number, line in limited_lines(file, MOST_LINE):
                where = f"{path}:{number}"
                if line is None:
                    raise DataError(f"{where} has more than {MOST_LINE:,} bytes.")
                try:
                    row = json.loads(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{where}: {bad_json(error)}.") from None
                if not isinstance(row, dict):
                    raise DataError(f"{where} is not a JSON object.")
                yield where, row


def _text(where: str, name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > MOST_TEXT:
        raise DataError(f'{where}: "{name}" must be a text that is not empty, of at most {MOST_TEXT:,} characters.')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f'{where}: "{name}" has half a surrogate pair; write it as UTF-8.') from None
    return value
