"""The record of an evaluation: `settings.json`, `episodes.jsonl` with one line per answer, and `result.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.errors import DataError
from glm5.files import atomic_write
from glm5.records import Outcome
from glm5.tasks.episode import MOST_REWARD
from glm5.tasks.judged import UNJUDGED
from glm5.tasks.trajectory_json import jsonable

SETTINGS, EPISODES, RESULT = "settings.json", "episodes.jsonl", "result.json"
NO_VERDICT = "the judge gave no verdict: "
"""How the error of an answer begins that a judge could not grade."""
MOST_TEXT = 1 << 20
"""Characters of a line."""


@dataclass
class Record:
    """Answers so far, on disk if there is a folder."""

    folder: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any]) -> Record:
        """Raises DataError for a folder with other settings, or with answers that cannot be read."""
        wanted, file = json.dumps(settings, indent=2, sort_keys=True) + "\n", folder / SETTINGS
        if not file.exists():
            if folder.exists() and any(folder.iterdir()):
                raise DataError(f"{folder} is no record of an evaluation; choose another folder for --out.")
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(file, wanted)
        elif file.read_bytes() != wanted.encode():
            raise DataError(
                f"{folder} has the answers of an evaluation with other settings, or of another model; choose another "
                "folder."
            )
        rows, whole = read_answers(folder)
        if (episodes := folder / EPISODES).exists():
            with episodes.open("r+b") as handle:
                handle.truncate(whole)
        return cls(folder, rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.folder is not None:
            with (self.folder / EPISODES).open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(jsonable(row, MOST_TEXT)) + "\n")


def read_answers(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The answers of a record, and the bytes of the file that hold them: a line without an end is none. Raises
    DataError for a line that is no answer."""
    rows: list[dict[str, Any]] = []
    whole, episodes = 0, folder / EPISODES
    for line in episodes.read_bytes().splitlines(keepends=True) if episodes.exists() else ():
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
            kept: dict[str, Any] = {key: str(row[key]) for key in ("cell", "problem", "key")}
            kept |= {"place": int(row["place"]), "repeat": int(row["repeat"]), "reward": float(row["reward"])}
            if not abs(kept["reward"]) <= MOST_REWARD:
                raise ValueError("its reward is no number")
            rows.append({**row, **kept, "outcome": Outcome(row["outcome"]).value})
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(f"{episodes}, line {len(rows) + 1}: not an answer ({error}).") from None
        whole += len(line)
    return rows, whole


def latest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per answer: the first, but with its verdict, which a judge gives in a later line."""
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for row in rows:
        spot = row["cell"], row["place"], row["repeat"]
        if spot not in found or found[spot].get("cause") == UNJUDGED:
            found[spot] = row
    return list(found.values())


def judged_before(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a judge gave any verdict: a later line of an answer that had none."""
    waiting = set[tuple[str, int, int]]()
    for row in rows:
        spot = row["cell"], row["place"], row["repeat"]
        if spot in waiting and not str(row.get("error", "")).startswith(NO_VERDICT):
            return True
        if row.get("cause") == UNJUDGED:
            waiting.add(spot)
    return False
