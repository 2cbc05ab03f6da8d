"""The conversation tree of a session: which stored turn a request continues, and which of its messages are new (§4.1).

An agent sends its whole conversation with every request. If the conversation starts with a stored conversation
that ends in an answer of the policy, the new prompt is the stored ids followed by the rendered new messages. So no
sampled token is tokenised again. Otherwise the conversation was edited: the session's tree of turns forks at the
deepest turn that still agrees, and the cause of the fork is counted. This module uses no clock and no files.

Two conversations agree if their messages have the same text and calls. Differences that clients introduce and that do
not change the meaning are tolerated: white space around an answer, the order of arguments, ids of calls, reasoning that
was left out. Tolerance only decides which turn is continued; the ids of that turn are used as they were sampled.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.agents.context_ids import Round
from glm5.chat.messages import canonical
from glm5.records import Message, ToolCall
from glm5.serve.prompts import ChatInput, check_continued

CAUSES = (
    "reencoded",  # the text of an answer was changed
    "tool_reformatted",  # the calls of an answer were changed
    "reasoning_edited",  # the reasoning of an answer was changed
    "reasoning_pruned",  # the client asked to drop reasoning of earlier turns
    "ended_otherwise",  # the answer ended with a marker that the next message cannot follow
    "system_edited",  # other system messages, the same conversation
    "options_changed",  # other tools, thinking mode or effort, the same conversation
    "compacted",  # the same task, with another history
    "subagent",  # another task
    "folded",  # the session's context policy omitted or dropped something
    "branch",  # a second continuation of the same turn, or an answer that the policy did not sample
)
"""Why a turn does not simply extend a leaf of its session's tree."""


@dataclass(eq=False)
class Node:
    """One stored turn. `given` are the ids between the parent's last id and `output`; `tail` are the messages that
    these ids encode. `head` is the digest of the chat options and tools."""

    parent: Node | None
    given: array[int]
    output: array[int]
    logprobs: array[float]
    versions: array[int]
    tail: tuple[Message, ...]
    reply: Message
    head: bytes
    cause: str | None = None
    row: int = 0
    """Row id in the store."""
    chain: bytes = b""
    """Digest of the conversation up to and including the reply."""
    body: bytes = b""
    """The same digest without options and leading system messages."""

    def path(self) -> list[Node]:
        """The path from the first turn of the conversation to this turn."""
        found = [self]
        while found[-1].parent is not None:
            found.append(found[-1].parent)
        return found[::-1]

    def ids(self) -> list[int]:
        """Prompt and output of this turn."""
        found: list[int] = []
        for node in self.path():
            found += node.given
            found += node.output
        return found


@dataclass(frozen=True)
class Place:
    """The place of a request in the tree: it continues `parent` (None: it is a new root) with the messages `tail`. If
    the client wrote the beginning of the answer itself, as its last message, `begun` is that message."""

    parent: Node | None
    tail: tuple[Message, ...]
    head: bytes
    cause: str | None = None
    begun: Message | None = None


class History:
    """The tree of turns of one session. `sort_results`: the template puts tool results into the order of their
    calls."""

    def __init__(self, sort_results: bool = False) -> None:
        self.nodes: list[Node] = []
        self.tokens = 0  # of all nodes
        self._sort = sort_results
        self._chains: dict[bytes, list[Node]] = {}
        self._bodies: set[bytes] = set()

    def place(self, chat: ChatInput) -> Place:
        """Find the deepest turn that the conversation continues. Raises DataError for a malformed message."""
        turns = canonical(chat.messages, self._sort)
        head = _head(chat)
        begun = None
        if chat.ending == "continue":
            begun = turns.pop()
            check_continued(begun, len(turns))
        parent, at = self._deepest(turns, head)
        tail = tuple(turns[at:])
        if parent is not None and chat.mode.clear and any(turn.role == "user" for turn in tail):
            return Place(None, tuple(turns), head, "reasoning_pruned", begun)
        return Place(parent, tail, head, self._cause(parent, head, tail, turns), begun)

    def rounds(self, turns: Sequence[Message], head: bytes) -> list[Round] | None:
        """A conversation as rounds of messages and sampled ids, without the messages after the last answer. None if
        an answer was not sampled in this session."""
        chain, given, found = head, list[Message](), list[Round]()
        for turn in turns:
            chain = _hash(chain, _digest(turn))
            if turn.role != "assistant":
                given.append(turn)
                continue
            if not (nodes := self._chains.get(chain)):
                return None
            found.append(Round(tuple(given), tuple(min(nodes, key=_key).output)))
            given = []
        return found

    def add(self, node: Node) -> None:
        """Add a turn; add its parent first."""
        start = (node.head, b"") if node.parent is None else (node.parent.chain, node.parent.body)
        node.chain, node.body = start
        for message in (*node.tail, node.reply):
            node.chain, node.body = _step(node.chain, node.body, message)
        self.nodes.append(node)
        self.tokens += len(node.given) + len(node.output)
        self._chains.setdefault(node.chain, []).append(node)
        self._bodies.add(node.body)

    def _deepest(self, turns: Sequence[Message], head: bytes) -> tuple[Node | None, int]:
        """The turn to continue and the number of messages that it covers."""
        chain, found = head, []
        for i, turn in enumerate(turns):
            chain = _hash(chain, _digest(turn))
            if turn.role == "assistant" and chain in self._chains:
                found.append((i + 1, self._chains[chain]))
        for count, nodes in reversed(found):
            fitting = [node for node in nodes if _same_reasoning(node, turns[:count])]
            if fitting:
                return min(fitting, key=lambda node: (_other_calls(node, turns[:count]), _key(node))), count
        return None, 0

    def _cause(self, parent: Node | None, head: bytes, tail: Sequence[Message], turns: Sequence[Message]) -> str | None:
        if not self.nodes:
            return None
        siblings = [node for node in self.nodes if node.parent is parent]
        foreign = next((i for i, turn in enumerate(tail) if turn.role == "assistant"), None)
        if foreign is not None:
            told, answer = [_digest(turn) for turn in tail[:foreign]], tail[foreign]
            for node in siblings:
                if node.head == head and [_digest(turn) for turn in node.tail] == told:
                    if _digest(node.reply) == _digest(answer):
                        return "reasoning_edited"
                    same = node.reply.content.strip() == answer.content.strip()
                    return "tool_reformatted" if same else "reencoded"
        if parent is not None:
            return "branch" if siblings or foreign is not None else None
        return self._same_text(turns) or self._same_task(turns)

    def _same_text(self, turns: Sequence[Message]) -> str | None:
        """The cause for a conversation that continues a stored turn in all but system messages and options, else
        None."""
        body, known = b"", False
        for turn in turns:
            _, body = _step(b"", body, turn)
            known = known or (turn.role == "assistant" and body in self._bodies)
        if not known:
            return None
        seen = [_system(node.tail) for node in self.nodes if node.parent is None]
        return "options_changed" if _system(turns) in seen else "system_edited"

    def _same_task(self, turns: Sequence[Message]) -> str:
        roots = [node.tail for node in self.nodes if node.parent is None]
        if _first(turns) in map(_first, roots):
            return "branch" if len(turns) <= max(map(len, roots)) else "compacted"
        system = _system(turns)
        return "compacted" if system and system in map(_system, roots) else "subagent"


def _system(messages: Sequence[Message]) -> list[str]:
    return [message.content for message in messages if message.role == "system"]


def _first(messages: Sequence[Message]) -> str:
    """The first message that is not a system message."""
    return next((message.content for message in messages if message.role != "system"), "")


def _key(node: Node) -> tuple[bytes, ...]:
    """A sort key of turns that does not depend on their order of arrival."""
    return (node.given.tobytes(), node.output.tobytes(), node.logprobs.tobytes())


def _other_calls(node: Node, turns: Sequence[Message]) -> int:
    """Number of stored answers on the path to `node` whose call ids are not those in the client's messages. The prefix
    of an id is ignored, because surfaces change it."""
    return sum(
        list(map(_bare, mine.tool_calls)) != list(map(_bare, said.tool_calls)) for mine, said in _answers(node, turns)
    )


def _answers(node: Node, turns: Sequence[Message]) -> Iterator[tuple[Message, Message]]:
    """The stored answers on the path to `node`, each with the client's message for it; the last one first."""
    at = len(turns) - 1
    here: Node | None = node
    while here is not None:
        yield here.reply, turns[at]
        at -= len(here.tail) + 1
        here = here.parent


def _bare(call: ToolCall) -> str:
    return (call.id or "").rpartition("_")[2]


def _same_reasoning(node: Node, turns: Sequence[Message]) -> bool:
    """Whether all reasoning that the client sent back equals that of the stored turns. Reasoning may be left out."""
    return all(
        (said.reasoning or "").strip() in ("", (mine.reasoning or "").strip()) for mine, said in _answers(node, turns)
    )


def _head(chat: ChatInput) -> bytes:
    mode = [chat.mode.enable, bool(chat.mode.clear), chat.mode.effort]
    mode += [False] if chat.tools and not chat.mode.tools else []  # else as stored before there was this choice
    return _hash(b"", json.dumps([mode, list(chat.tools)], sort_keys=True, default=repr).encode("utf-8", "replace"))


def _step(chain: bytes, body: bytes, message: Message) -> tuple[bytes, bytes]:
    """The digests `chain` and `body` of a conversation after one more message."""
    digest = _digest(message)
    return _hash(chain, digest), body if not body and message.role == "system" else _hash(body, digest)


def _digest(message: Message) -> bytes:
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [[call.name, dict(call.arguments)] for call in message.tool_calls]
    told = json.dumps(calls, sort_keys=True, default=repr) if calls else ""
    return _hash(b"", f"{message.role} {len(content)} {content}{told}".encode("utf-8", "surrogatepass"))


def _hash(before: bytes, added: bytes) -> bytes:
    return hashlib.blake2b(before + added, digest_size=16).digest()


def told(message: Message) -> dict[str, Any]:
    """A message as JSON, for the store."""
    calls = [{"id": call.id, "name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    plain |= {} if message.reasoning is None else {"reasoning": message.reasoning}
    return plain | ({"tool_calls": calls} if calls else {})


def read_message(plain: Mapping[str, Any]) -> Message:
    """The inverse of `told`."""
    calls = tuple(ToolCall(c["name"], c["arguments"], c["id"]) for c in plain.get("tool_calls", ()))
    return Message(plain["role"], plain["content"], plain.get("reasoning"), calls)


def in_order(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Yields the path from the root to each leaf. The order of the paths depends only on their content."""
    keys: dict[Node, bytes] = {}
    following: dict[Node | None, list[Node]] = {}
    for node in nodes:
        following.setdefault(node.parent, []).append(node)
    for node in reversed(nodes):  # in `nodes` a turn comes before its continuations, so these come first here
        below = sorted(keys[child] for child in following.get(node, ()))
        keys[node] = _hash(b"".join((*_key(node), node.versions.tobytes())), b"".join(below))
    open_paths = [[node] for node in sorted(following.get(None, ()), key=keys.__getitem__)]
    while open_paths:
        path = open_paths.pop()
        if path[-1] not in following:
            yield path
        open_paths += [[*path, node] for node in sorted(following.get(path[-1], ()), key=keys.__getitem__)]
