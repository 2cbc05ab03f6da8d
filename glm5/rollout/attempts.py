"""The rollouts of a session store as attempts for SFT data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.data.sft import Conversation
from glm5.data.sft_select import Attempt
from glm5.errors import CheckpointError
from glm5.records import Outcome
from glm5.rollout.history import in_order
from glm5.rollout.store_reader import StoreReader


def store_attempts(store: Path, tools: Sequence[Mapping[str, Any]] = ()) -> Iterator[Attempt]:
    """One attempt per rollout that ended and was not excluded: its longest conversation. A store keeps no tool
    definitions, so `tools` are those that prompts show. Raises CheckpointError for a missing or damaged store."""
    if not store.is_file():
        raise CheckpointError(f"There is no session store {store}.")
    reader = StoreReader(store)
    for result in reader.results():
        if result.excluded is not None:
            continue
        history, _ = reader.turns(result.session)
        paths = list(in_order(history.nodes))
        if not paths:
            continue
        path = max(paths, key=len)
        messages = [message for node in path for message in (*node.tail, node.reply)]
        conversation = Conversation(messages, tools, any(m.reasoning for m in messages if m.role == "assistant"))
        yield Attempt(
            f"{result.domain}/{result.problem}", result.reward, conversation, result.outcome != Outcome.ENV_ERROR.value
        )
