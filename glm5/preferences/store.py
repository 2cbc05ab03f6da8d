"""Votes on pairs of answers, in one SQLite file (WAL): every vote is on disk before the page hears of it.

A rater sees the pairs in an order of their own, and which answer is on the left is drawn for each rater and pair: both
follow from the names, so a restart changes nothing. Several raters may use one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import threading
import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from glm5.errors import UsageError
from glm5.files import atomic_write
from glm5.preferences.rows import Pair
from glm5.sqlite_file import open_file, transaction

Choice = Literal["first", "second", "tie", "skip"]
CHOICES = ("first", "second", "tie", "skip")
FORMAT = 1
MOST_WHY = 4000
BUSY_S = 2.0
"""Maximum time to wait for another process that writes to the file: a person waits for the page."""
SCHEMA = """
CREATE TABLE pairs (
    id TEXT PRIMARY KEY, place INTEGER NOT NULL, prompt TEXT NOT NULL, first TEXT NOT NULL, second TEXT NOT NULL,
    grp TEXT NOT NULL
) STRICT;
CREATE TABLE raters (name TEXT PRIMARY KEY, consent TEXT NOT NULL, agreed REAL NOT NULL) STRICT;
CREATE TABLE votes (
    pair TEXT NOT NULL REFERENCES pairs (id), rater TEXT NOT NULL REFERENCES raters (name),
    choice TEXT NOT NULL CHECK (choice IN ('first', 'second', 'tie', 'skip')), why TEXT NOT NULL,
    swapped INTEGER NOT NULL, seconds REAL NOT NULL, voted REAL NOT NULL, PRIMARY KEY (pair, rater)
) STRICT;
"""
CONSENT = """You will compare two answers at a time and say which one you prefer, and why if you like.

Your choices, your reasons, the name that you type here and the time of each vote are written to a file on this
computer. Whoever started this page can read and pass on that file, and may train a model on it. Nothing is sent to
anybody else.

Taking part is voluntary. You can stop at any time, skip any pair, change earlier votes, and have your votes deleted
with one click. Answers were written by models or people and may be wrong or offensive."""
"""Shown before the first vote. Its hash is stored with the agreement, so that a new text is asked for again."""
CONSENT_HASH = hashlib.sha256(CONSENT.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Card:
    """A pair as a rater sees it; `choice` is their vote in terms of left and right, if there is one."""

    id: str
    prompt: str
    left: str
    right: str
    group: str
    choice: str | None = None
    why: str = ""


def check_name(name: object) -> str:
    """A rater's name in Unicode's composed form. Raises UsageError for one that is empty, too long or not printable."""
    if isinstance(name, str) and name.isprintable():
        name = unicodedata.normalize("NFC", name).strip()
        if 0 < len(name) <= 60:
            return name
    raise UsageError("A rater's name is 1 to 60 printable characters.")


def is_same_rater(one: str, other: str) -> bool:
    """Whether two names differ at most in capitals or in the form of their Unicode characters."""
    return one == other or check_name(one).casefold() == check_name(other).casefold()


class PreferenceStore:
    """A file of pairs, raters and votes, created if it does not exist. Thread-safe; use it as a context manager.
    Methods take a rater's name as `rater` gives it. They raise sqlite3.OperationalError if another process holds the
    file for longer than `BUSY_S`.

    Raises DataError for a file that is not such a store, UsageError if its folder does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.RLock()
        if not path.parent.is_dir():
            raise UsageError(f"The folder {path.parent} does not exist; make it, or name another --store.")
        what, advice = "a file of preferences", "name another --store"
        self._db = open_file(path, SCHEMA, FORMAT, what, advice, durable=True)
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_S)}")
        # Temporary: another process may ask other pairs of the same file.
        self._db.execute("CREATE TEMP TABLE listed (id TEXT PRIMARY KEY) STRICT")
        asked = "SELECT * FROM pairs WHERE id IN (SELECT id FROM listed) OR NOT EXISTS (SELECT 1 FROM listed)"
        self._db.execute(f"CREATE TEMP VIEW asked AS {asked}")

    def __enter__(self) -> PreferenceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock, transaction(self._db):
            yield

    def _rows(self, text: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(text, values).fetchall()

    def add_pairs(self, pairs: Sequence[Pair]) -> int:
        """Add the pairs that the file does not have; returns their number. Known ones get the new places and classes.
        From the first call on, this object asks, counts and exports only pairs that were given to it; others stay in
        the file with their votes.
        """
        text = (
            "INSERT INTO pairs VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET place = excluded.place, "
            "grp = excluded.grp WHERE (place, grp) IS NOT (excluded.place, excluded.grp)"
        )
        rows = [(pair.id, at, pair.prompt, pair.first, pair.second, pair.group) for at, pair in enumerate(pairs)]
        with self._writing():
            before = self._db.execute("SELECT count(*) FROM pairs").fetchone()[0]
            self._db.executemany(text, rows)
            self._db.executemany("INSERT OR IGNORE INTO listed VALUES (?)", [(pair.id,) for pair in pairs])
            return int(self._db.execute("SELECT count(*) FROM pairs").fetchone()[0] - before)

    def pairs_left_out(self) -> int:
        """The number of pairs of the file that are not asked."""
        return int(self._rows("SELECT count(*) FROM pairs WHERE id NOT IN (SELECT id FROM asked)")[0][0])

    def votes_left_out(self) -> int:
        """The number of votes on pairs that are not asked; a skipped pair has no vote."""
        text = "SELECT count(*) FROM votes WHERE choice != 'skip' AND pair NOT IN (SELECT id FROM asked)"
        return int(self._rows(text)[0][0])

    def rater(self, name: object) -> str:
        """A rater's name as first written: "ann" is "Ann", if she is known. Raises UsageError like `check_name`."""
        said = check_name(name)
        known = [row[0] for row in self._rows("SELECT name FROM raters ORDER BY rowid")]
        return said if said in known else next((one for one in known if is_same_rater(one, said)), said)

    def agree(self, rater: str, consent: str) -> None:
        """Store that a rater agreed to a text, by its hash. Raises UsageError for another text than `CONSENT`."""
        if consent != CONSENT_HASH:
            raise UsageError("The text of consent has changed; reload the page and read it again.")
        text = (
            "INSERT INTO raters VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "consent = excluded.consent, agreed = excluded.agreed"
        )
        with self._writing():
            self._db.execute(text, (self.rater(rater), consent, time.time()))

    def agreed(self, rater: str) -> bool:
        """Whether a rater agreed to the present text."""
        return bool(self._rows("SELECT 1 FROM raters WHERE name = ? AND consent = ?", (rater, CONSENT_HASH)))

    def vote(self, rater: str, pair: str, side: str, why: str = "", seconds: float = 0.0) -> None:
        """Store a vote, "left", "right", "tie" or "skip"; an earlier one of the same rater on the pair is replaced.

        Raises UsageError for a rater who did not agree, an unknown pair or side, and a reason that is too long.
        """
        if not self.agreed(rater):
            raise UsageError("Read and accept the text of consent first.")
        if not self._rows("SELECT 1 FROM pairs WHERE id = ?", (pair,)):
            raise UsageError("There is no such pair.")
        swapped = swaps(rater, pair)
        choices = {"left": "second" if swapped else "first", "right": "first" if swapped else "second"}
        choice = choices.get(side, side)
        if side not in ("left", "right", "tie", "skip"):
            raise UsageError("A vote is left, right, tie or skip.")
        if len(why) > MOST_WHY:
            raise UsageError(f"A reason has at most {MOST_WHY:,} characters.")
        text = (
            "INSERT INTO votes VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (pair, rater) DO UPDATE SET choice = "
            "excluded.choice, why = excluded.why, seconds = excluded.seconds, voted = excluded.voted"
        )
        with self._writing():
            self._db.execute(text, (pair, rater, choice, why, swapped, max(0.0, seconds), time.time()))

    def forget(self, rater: str) -> int:
        """Delete a rater and their votes; returns the number of votes."""
        with self._writing():
            count = self._db.execute("DELETE FROM votes WHERE rater = ?", (rater,)).rowcount
            self._db.execute("DELETE FROM raters WHERE name = ?", (rater,))
        return count

    def unskip(self, rater: str) -> None:
        """Make the pairs that a rater skipped come again."""
        with self._writing():
            self._db.execute("DELETE FROM votes WHERE rater = ? AND choice = 'skip'", (rater,))

    def order(self, rater: str) -> list[str]:
        """The ids of the pairs that are asked, in this rater's order."""
        ids = [row[0] for row in self._rows("SELECT id FROM asked ORDER BY place")]
        return sorted(ids, key=lambda pair: hashlib.sha256(f"order {rater} {pair}".encode()).digest())

    def next_pair(self, rater: str) -> str | None:
        """The first pair in the rater's order without a vote, which a skip is too; None at the end."""
        votes = {row[0] for row in self._rows("SELECT pair FROM votes WHERE rater = ?", (rater,))}
        return next((pair for pair in self.order(rater) if pair not in votes), None)

    def previous_pair(self, rater: str, pair: str | None) -> str | None:
        """The pair before `pair` in the rater's order, or the last one if `pair` is None; None at the start."""
        ids = self.order(rater)
        at = ids.index(pair) if pair in ids else len(ids)
        return ids[at - 1] if at else None

    def card(self, rater: str, pair: str) -> Card:
        """A pair as the rater sees it. Raises UsageError for an unknown one."""
        found = self._rows("SELECT prompt, first, second, grp FROM pairs WHERE id = ?", (pair,))
        if not found:
            raise UsageError("There is no such pair.")
        prompt, first, second, group = found[0]
        swapped = swaps(rater, pair)
        left, right = (second, first) if swapped else (first, second)
        vote = self._rows("SELECT choice, why FROM votes WHERE pair = ? AND rater = ?", (pair, rater))
        choice = vote[0][0] if vote else None
        sides = {"first": "right" if swapped else "left", "second": "left" if swapped else "right"}
        side = None if choice is None else sides.get(choice, choice)
        return Card(pair, prompt, left, right, group, side, vote[0][1] if vote else "")

    def progress(self, rater: str) -> dict[str, int]:
        """Numbers of pairs, of this rater's votes and of those that they skipped."""
        whole = self._rows("SELECT count(*) FROM asked")[0][0]
        text = "SELECT count(*), coalesce(sum(choice = 'skip'), 0) FROM votes WHERE rater = ? AND pair IN "
        done, skipped = self._rows(text + "(SELECT id FROM asked)", (rater,))[0]
        return {"pairs": whole, "done": done, "skipped": skipped}

    def votes(self) -> dict[str, dict[str, str]]:
        """pair -> rater -> "first", "second" or "tie"; skipped pairs are left out."""
        found: dict[str, dict[str, str]] = {}
        text = "SELECT pair, rater, choice FROM votes WHERE choice != 'skip' AND pair IN (SELECT id FROM asked)"
        for pair, rater, choice in self._rows(text):
            found.setdefault(pair, {})[rater] = choice
        return found

    def export(self, path: Path, source: Path | None = None) -> int:
        """Write the votes as JSONL, in the pairs' order, and return their number: `prompt`, `chosen`, `rejected` (for a
        tie in the order of the file), `tie`, `rater`, `why`, `class`, `left` (whether the chosen answer was on the
        left), `seconds`, `time`. Skipped pairs are left out.

        Raises UsageError for a path that is this store or, also by a link, part of `source`, the file or folder of the
        pairs: it would be overwritten, or its votes read as pairs.
        """
        own = [self.path.with_name(self.path.name + end) for end in ("", "-wal", "-shm")]
        if any(_is_same_file(path, one) for one in own):
            raise UsageError(f"{path} is the file of the votes; export to another file.")
        if source is not None and (_is_same_file(path, source) or _is_read_with(path, source)):
            raise UsageError(f"{path} is part of {source}, where the pairs are; export to another file.")
        rows = self._rows(
            "SELECT p.prompt, p.first, p.second, p.grp, v.choice, v.rater, v.why, v.swapped, v.seconds, v.voted "
            "FROM votes v JOIN asked p ON p.id = v.pair WHERE v.choice != 'skip' ORDER BY p.place, v.rater"
        )
        lines = []
        for prompt, first, second, group, choice, rater, why, swapped, seconds, voted in rows:
            chosen, rejected = (second, first) if choice == "second" else (first, second)
            row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tie": choice == "tie"}
            row |= {"rater": rater, "why": why, "class": group, "left": (choice == "second") == bool(swapped)}
            row |= {"seconds": round(seconds, 1), "time": round(voted)}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        atomic_write(path, "".join(lines))
        return len(lines)


def _is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths are one file, also by links."""
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def _is_read_with(path: Path, folder: Path) -> bool:
    """Whether `conversation_files(folder)` has the path, or would have it after it is written."""
    if not folder.is_dir():
        return False
    return path.resolve().is_relative_to(folder.resolve()) and path.suffix == ".jsonl"


def swaps(rater: str, pair: str) -> bool:
    """Whether a rater sees the second answer on the left."""
    return random.Random(f"side {rater} {pair}").random() < 0.5
