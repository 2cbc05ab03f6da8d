"""Context management (§4.2.4): what of a long conversation of tool calls goes into the next prompt.

A conversation is a question q and rounds of reply (reasoning r_i and action a_i) and observation o_i. The modes:

- `none`: everything.
- `keep-recent`: every observation but the latest k becomes "Tool result is omitted to save tokens."
- `discard-all`: when the context has more than `limit` tokens, all rounds go, and the agent starts again from q.
- `hierarchical`: keep-recent always; when the context still has more than `limit` tokens, discard all.

The functions are pure: the same conversation always folds in the same way, so an agent that is restarted, or a gateway
that sees only requests, decides as before. A reply is kept as it is or dropped; it is never edited.
`glm5.agents.context_ids` applies the same decisions to token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from glm5.errors import UsageError, nearest
from glm5.records import Message

Mode = Literal["none", "keep-recent", "discard-all", "hierarchical"]
Kind = Literal["task", "reply", "result"]
"""A part of a conversation: of q (system and user messages), a reply of the policy, an observation."""
Action = Literal["keep", "omit", "drop"]

OMITTED = "Tool result is omitted to save tokens."
"""What stands for an omitted observation: the paper's sentence."""
KINDS: dict[str, Kind] = {"system": "task", "user": "task", "assistant": "reply", "tool": "result"}
LIMITS = {"discard-all": 102_400, "hierarchical": 32_000}
"""Tokens above which a mode discards: 80 % of 128K (DeepSeek-V3.2), and the paper's T = 32k."""

Counter = Callable[[Message], int]
"""The number of tokens of a message in a prompt."""


@dataclass(frozen=True)
class ContextPolicy:
    """A mode with its numbers: the latest `keep` observations stay, and more than `limit` tokens are discarded.

    Raises UsageError for an unknown mode, `keep` below 0 or `limit` below 1.
    """

    mode: Mode = "none"
    keep: int = 5
    limit: int = 0
    """0 takes the mode's default."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            known = get_args(Mode)
            raise UsageError(f'"{self.mode}" is no context mode{nearest(self.mode, known)}; take {", ".join(known)}.')
        if self.keep < 0 or self.limit < 0:
            raise UsageError("The number of observations kept and the token limit of a context cannot be negative.")
        if self.limit == 0:
            object.__setattr__(self, "limit", LIMITS.get(self.mode, 0))

    @property
    def omits(self) -> bool:
        return self.mode in ("keep-recent", "hierarchical")

    @property
    def discards(self) -> bool:
        return self.mode in ("discard-all", "hierarchical")


@dataclass(frozen=True)
class Plan:
    """What happens to each part: `actions` in the order of the parts. `tokens` is the size of the folded context,
    `discards` the number of restarts from the question so far."""

    actions: tuple[Action, ...]
    tokens: int
    discards: int


@dataclass(frozen=True)
class Folded:
    """The messages of the next prompt, and the plan that gave them."""

    messages: list[Message]
    plan: Plan


def plan(
    kinds: Sequence[Kind],
    tokens: Sequence[int],
    omitted: Sequence[int],
    policy: ContextPolicy,
    overhead: int = 0,
    restart: Callable[[int], int] | None = None,
) -> Plan:
    """Decide about every part of a conversation that ends before the next reply.

    The decision is made anew at the end of each round, as an agent does before each request, so it depends only on the
    parts up to there: what was dropped once stays dropped.

    Args:
        kinds: the parts in their order.
        tokens: the size of each part.
        omitted: the size of each part if it is an observation that was omitted; of other parts it is not used.
        overhead: tokens of every prompt that belong to no part, such as tool specifications.
        restart: the size of a prompt of only the tasks among the first n parts; default: their sum.

    Raises:
        ValueError: the sequences have different lengths.
    """
    actions: list[Action] = ["keep"] * len(kinds)
    base = total = overhead  # of what is never dropped; of the folded context
    begun = 0  # the first part after the last discard
    recent: list[list[int]] = []  # observations that are in full, by round
    discards, i = 0, 0
    parts = list(zip(kinds, tokens, omitted, strict=True))
    while i < len(parts):
        opens = parts[i][0] == "reply"
        seen: list[int] = []
        while True:  # one round, or the question
            kind, size, _ = parts[i]
            total += size
            if kind == "task":
                base += size
            elif kind == "result":
                seen.append(i)
            i += 1
            if i == len(parts) or parts[i][0] == "reply":
                break
        if seen:
            recent.append(seen)
        while policy.omits and len(recent) > policy.keep:
            for j in recent.pop(0):
                actions[j] = "omit"
                total += omitted[j] - tokens[j]
        if policy.discards and total > policy.limit and opens:
            for j in range(begun, i):
                if kinds[j] != "task":
                    actions[j] = "drop"
            begun, total, discards = i, restart(i) if restart else base, discards + 1
            recent.clear()
    return Plan(tuple(actions), total, discards)


def fold(messages: Sequence[Message], policy: ContextPolicy, count: Counter, overhead: int = 0) -> Folded:
    """The messages of the next prompt. Kept messages are the same objects; only observations are replaced."""
    kinds = [KINDS[message.role] for message in messages]
    sizes = [count(message) for message in messages]
    made = plan(kinds, sizes, [count(Message("tool", OMITTED))] * len(sizes), policy, overhead)
    kept = ((message, action) for message, action in zip(messages, made.actions, strict=True) if action != "drop")
    return Folded([replace(m, content=OMITTED) if action == "omit" else m for m, action in kept], made)


def approximate_tokens(message: Message) -> int:
    """A guess for endpoints whose tokenizer is not known: four bytes of UTF-8 per token, and four tokens around each
    message and call."""
    size = len(message.content.encode("utf-8", "replace")) + len((message.reasoning or "").encode("utf-8", "replace"))
    for call in message.tool_calls:
        size += len(call.name) + len(repr(dict(call.arguments)).encode("utf-8", "replace"))
    return size // 4 + 4 * (1 + len(message.tool_calls))
