"""A session store as JSON lines: one object per session, with its messages and its samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm5.errors import CheckpointError
from glm5.rollout.history import told
from glm5.rollout.samples import summary
from glm5.rollout.store_reader import StoreReader


def export(store: Path) -> Iterator[str]:
    """The sessions of a store as JSON texts, in the order of their creation; another process may write it meanwhile.

    Each has the fields of `SessionRow`, `turns` (`parent`: index of the turn that it continues or None, `messages`: the
    new ones and the answer, `finish`, `cause` of a fork) and the fields of `samples.summary`. Raises CheckpointError
    for a missing file.
    """
    if not store.is_file():
        raise CheckpointError(f"There is no session store {store}.")
    reader = StoreReader(store)
    for session in reader.sessions():
        history, stored = reader.turns(session.id)
        finish = dict(stored.values())
        places = {node: place for place, node in enumerate(history.nodes)}
        turns: list[dict[str, Any]] = [
            {
                "parent": None if node.parent is None else places[node.parent],
                "messages": [told(message) for message in (*node.tail, node.reply)],
                "finish": finish[node],
                "cause": node.cause,
            }
            for node in history.nodes
        ]
        yield json.dumps(asdict(session) | summary(history.nodes) | {"turns": turns}, ensure_ascii=False, default=str)
