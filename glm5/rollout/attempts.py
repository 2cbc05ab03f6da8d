"""The rollouts of a session store as attempts for SFT data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.data.sft import Conversation
from glm5.data.sft_select import Attempt
from glm5.errors import CheckpointError
from glm5.records import Outcome
from glm5.rollout.history import Node
from glm5.rollout.store_reader import StoreReader


def store_attempts(store: Path, tools: Sequence[Mapping[str, Any]] = ()) -> Iterator[Attempt]:
    """One attempt per rollout that ended and was not excluded: the conversation that its last answer ends. A store
    keeps no tool definitions, so `tools` are those that prompts show. Raises CheckpointError for a missing or damaged
    store."""
    if not store.is_file():
        raise CheckpointError(f"There is no session store {store}.")
    reader = StoreReader(store)
    for result in reader.results():
        if result.excluded is not None:
            continue
        if not isinstance(result.reward, float) or not math.isfinite(result.reward):
            raise CheckpointError(f"{store} is damaged: the reward of session {result.session:.80} is not a number.")
        history, _ = reader.turns(result.session)
        if not history.nodes:
            continue
        messages = [message for node in _main_path(history.nodes) for message in (*node.tail, node.reply)]
        conversation = Conversation(messages, tools, any(m.reasoning for m in messages if m.role == "assistant"))
        yield Attempt(
            f"{result.domain}/{result.problem}", result.reward, conversation, result.outcome != Outcome.ENV_ERROR.value
        )


def _main_path(nodes: Sequence[Node]) -> list[Node]:
    """The path to the last turn that is not one of a subagent: of a conversation that a call of another one began."""
    roots: dict[Node, Node] = {}
    calls: dict[Node, list[str]] = {}
    for node in nodes:  # a turn comes before its continuations
        roots[node] = node if node.parent is None else roots[node.parent]
        said = [value for call in node.reply.tool_calls for value in call.arguments.values() if isinstance(value, str)]
        calls.setdefault(roots[node], []).extend(said)
    mine = {root for root in calls if not _handed_over(root, calls)}
    return next((node for node in reversed(nodes) if roots[node] in mine), nodes[-1]).path()


def _handed_over(root: Node, calls: Mapping[Node, Sequence[str]]) -> bool:
    """Whether most of the first question of a conversation stands in a call of another one."""
    asked = next((message.content for message in root.tail if message.role == "user"), "")
    return any(
        len(said) > len(asked) // 2 and said.strip() in asked
        for other, texts in calls.items()
        if other is not root
        for said in texts
    )
