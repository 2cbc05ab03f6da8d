"""A session of an agent: its turns, its running requests, its limits.

A request that repeats an earlier one byte for byte joins it while it runs, and gets its stored answer afterwards. So a
retry does not sample a second answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from glm5.agents.context import ContextPolicy
from glm5.chat.messages import normalise
from glm5.errors import Glm5Error
from glm5.obs.logs import get_logger
from glm5.records import Completion, Message, SamplingParams
from glm5.rollout.engines import UNSEEN, EnginePool
from glm5.rollout.history import History, Node, Place
from glm5.rollout.store import Store
from glm5.rollout.store_reader import SessionRow
from glm5.serve.errors import ApiError, TooLate
from glm5.serve.reply import Reply
from glm5.serve.samples import Delta, Part

log = get_logger("gateway")

SHAPING = """top_p top_k min_p min_tokens presence_penalty frequency_penalty repetition_penalty logit_bias bad_words
    allowed_token_ids seed""".split()
"""Sampling parameters that a session for training ignores: those that change the distribution, and the seed, which
would make the samples of a group equal."""


PLAIN: Mapping[str, Any] = {name: getattr(SamplingParams(), name) for name in SHAPING}


@dataclass(frozen=True)
class SessionOptions:
    """Limits of a session, and the temperature of a session for training.

    Attributes:
        turns: maximum number of turns; further requests get status 400 with the code `turn_limit`.
        tokens: maximum length of prompt plus answer; None: the engine's limit.
        answer_tokens: maximum length of an answer; None: the limit that the agent sends.
        temperature: replaces the agent's in a session for training. Such a session also ignores `top_p` and the other
            parameters in `SHAPING`, because the learner computes log-probabilities of the whole distribution.
        context: what of a long conversation goes into the prompt (§4.2.4); the agent does not see it.
    """

    turns: int = 1024
    tokens: int | None = None
    answer_tokens: int | None = None
    temperature: float = 1.0
    context: ContextPolicy = field(default_factory=ContextPolicy)

    @classmethod
    def stored(cls, options: Mapping[str, Any]) -> SessionOptions:
        """From the store, which may have been written before there were context policies."""
        return cls(**{**options, "context": ContextPolicy(**options.get("context", {}))})


@dataclass
class Sampled:
    """What an answer needs to know about its sample (see `SampleStream`)."""

    stop_ids: frozenset[int]
    completion: Completion


class Call:
    """One request of an agent, from its arrival until its turn is stored. Identical requests share one call."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.place: Place | None = None
        self.part: Part | None = None
        self.sampled: Sampled | None = None
        self.reply: Reply | None = None
        self.deltas: list[Delta] = []
        self.ended = False
        self.storing = False
        self.error: Exception | None = None
        self.task: asyncio.Task[None] | None = None
        self.deadline: float | None = None
        self._changed = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Add tokens. A delta with a finish reason ends the call."""
        self.deltas.append(delta)
        self.ended = delta.finish_reason is not None
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        self.error, self.ended = error, True
        self._wake()

    def start(self, task: asyncio.Task[None], deadline: float) -> None:
        """Record that `task` runs the call, until `deadline` in the event loop's time (seconds)."""
        self.task, self.deadline = task, deadline
        self._wake()

    def change(self, seconds: float | None = None) -> Awaitable[None]:
        """Wait for the next `start`, `put` or `fail` after this call, at most for `seconds`."""
        return self._change(self._changed, seconds)

    @staticmethod
    async def _change(changed: asyncio.Event, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class CallStream:
    """The tokens of a call on their way to one client (see `SampleStream`). The call goes on after the client
    disconnects, so a retry gets the answer. A client that gets all tokens takes the call out of `lost`, its session's
    set."""

    def __init__(self, call: Call, lost: set[bytes]) -> None:
        assert call.part is not None and call.sampled is not None
        self.parts = [call.part]
        self.prompt = call.part.prompt
        self.requests = [call.sampled]
        self.deadline = call.deadline
        self._call, self._lost = call, lost
        self._read = 0

    @property
    def caught_up(self) -> bool:
        return self._read >= len(self._call.deltas)

    def cancel(self, index: int | None = None) -> None:
        """No effect: the call goes on (see the class)."""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        call, self._read = self._call, 0
        while True:
            while self._read < len(call.deltas):
                self._read += 1
                if call.ended and self._read == len(call.deltas) and call.error is None:
                    self._lost.discard(call.digest)
                yield call.deltas[self._read - 1]
            if call.ended:
                if call.error is not None:
                    raise call.error
                return
            await call.change()


@dataclass(eq=False)
class Session:
    """One session in memory."""

    row: SessionRow
    options: SessionOptions
    history: History
    stored: dict[bytes, tuple[Node, str]] = field(default_factory=dict)
    """Stored turns and their finish reasons, by the digest of the request."""
    calls: dict[bytes, Call] = field(default_factory=dict)
    """Running requests, by digest."""
    late: dict[bytes, ApiError] = field(default_factory=dict)
    """Refusals of requests whose answers took too long, by digest."""
    rendered: dict[bytes, dict[tuple[tuple[Message, ...], int], array[int]]] = field(default_factory=dict)
    """Rendered messages, by the digest of the chat options; see `remembered`. Only for a context policy."""
    retries: int = 0
    requests: int = 0
    """Number of requests that use this object; a session in use stays in memory."""
    limited: bool = False
    """Whether a request was refused for the turn limit or the length of the context."""
    failing: bool = False
    """Whether the last answer failed on our side (5xx): what the agent did then says nothing about the policy."""
    lost: set[bytes] = field(default_factory=set)
    """Requests, by digest, that an engine has lost and of which the agent has not got the whole answer."""
    used: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def trained(self) -> bool:
        return self.row.mode == "train"

    def check_open(self) -> None:
        """Raise ApiError 410 for a closed session. Clients do not retry this status."""
        if self.row.closed is not None:
            raise ApiError(410, f"The session {self.id} is closed.", code="session_closed")

    def claim(self, digest: bytes) -> tuple[Call, bool]:
        """The call of a request, and whether the caller must run it (False for a repeated request). Raises ApiError 400
        at the turn limit, and for a request whose answer has taken too long before."""
        self.used = time.monotonic()
        if (call := self.calls.get(digest)) is not None:
            self.retries += 1
            return call, False
        if digest in self.late:
            raise self.late[digest]
        call = Call(digest)
        if (found := self.stored.get(digest)) is None:
            taken = len(self.history.nodes) + len(self.calls)
            if taken >= self.options.turns:
                text = f"The session has reached its limit of {self.options.turns} turns."
                raise ApiError(400, text, code="turn_limit")
            self.calls[digest] = call
            return call, True
        self.retries += 1
        node, finish = found
        call.put(Delta(0, list(node.output), list(node.logprobs), [], finish, node.versions))
        return call, False

    def params(self, asked: SamplingParams) -> SamplingParams:
        """The parameters to sample with, given those that the agent asks for."""
        most = min(asked.max_tokens, self.options.answer_tokens or asked.max_tokens)
        if not self.trained:
            return replace(asked, max_tokens=most)
        return replace(asked, max_tokens=most, temperature=self.options.temperature, **PLAIN)

    async def run(self, call: Call, reply: Reply, pool: EnginePool, store: Store, seconds: float, whole: bool) -> None:
        """Sample the answer of a call and store its turn. The last delta is put only after that; with `whole`, all
        tokens are then put as one delta. Errors end the call; they are not raised."""
        assert call.part is not None and call.place is not None
        stops = reply.new_detector()
        deltas: list[Delta] = []
        try:
            try:
                async with asyncio.timeout(seconds):
                    on_loss = partial(self.lost.add, call.digest)
                    every = UNSEEN if whole else 1
                    prompt, params = call.part.prompt, call.part.params
                    async for delta in pool.generate(prompt, params, self.id, stops, on_loss, every):
                        deltas.append(delta)
                        if delta.finish_reason is None and not whole:
                            call.put(delta)
            except TimeoutError:
                text = f"The answer was not complete within {seconds:g} seconds."
                if not deltas:
                    raise TooLate(text) from None
                # Clients repeat 504. The repetition would sample as long, for nothing.
                self.late[call.digest] = ApiError(400, text, code="answer_timeout")
                raise self.late[call.digest] from None
            answer = _joined(deltas)
            reply.feed(answer)
            node = self._node(call, answer, reply)
            finish = str(answer.finish_reason)
            call.storing = True
            await store.add_turn(self.id, node, finish, call.digest, _told(call.part.params))
            self.history.add(node)
            self.stored[call.digest] = (node, finish)
            self.failing = False
            call.put(answer if whole else deltas[-1])
        except asyncio.CancelledError:
            call.fail(ApiError(410, f"The session {self.id} was closed during this request.", code="session_closed"))
            raise
        except Glm5Error as error:
            self.failing = ApiError.of(error).status >= 500
            call.fail(error)
        except Exception as error:
            self.failing = True
            log.exception("A generation of session %s failed.", self.id)
            call.fail(error)
        finally:
            if self.calls.get(call.digest) is call:
                del self.calls[call.digest]

    async def cancel(self) -> None:
        """End all running requests. Waits for those that are storing their turn, so that the history has the same turns
        as the store."""
        storing = [call.task for call in self.calls.values() if call.storing and call.task is not None]
        for call in list(self.calls.values()):
            if call.task is not None and not call.storing:
                # A task that is cancelled before its first step never runs its `finally`, so end the call here.
                self.calls.pop(call.digest, None)
                call.fail(ApiError(410, f"The session {self.id} was closed.", code="session_closed"))
                call.task.cancel()
        await asyncio.gather(*storing, return_exceptions=True)

    def _node(self, call: Call, answer: Delta, reply: Reply) -> Node:
        place, part = call.place, call.part
        assert place is not None and part is not None
        known = 0 if place.parent is None else sum(len(n.given) + len(n.output) for n in place.parent.path())
        said = reply.message()
        if place.begun is not None:
            said["content"] = place.begun.content + (said["content"] or "")
        return Node(
            place.parent,
            array("i", part.prompt[known:]),
            array("i", answer.token_ids),
            array("f", answer.logprobs),
            array("i", answer.weight_versions),
            place.tail,
            normalise(said),
            place.head,
            place.cause,
        )


def _joined(deltas: Sequence[Delta]) -> Delta:
    """All tokens of an answer as one delta."""
    if len(deltas) == 1:
        return deltas[0]
    ids = [token for delta in deltas for token in delta.token_ids]
    scores = [score for delta in deltas for score in delta.logprobs]
    versions = [version for delta in deltas for version in delta.weight_versions]
    return Delta(0, ids, scores, [], deltas[-1].finish_reason, versions)


def _told(params: SamplingParams) -> Mapping[str, Any]:
    told: dict[str, Any] = {"temperature": params.temperature, "max_tokens": params.max_tokens}
    return told | ({} if params.grammar is None else {"grammar": params.grammar.kind})


def key_of(admin_key: str, session: str) -> str:
    """The key of a session. It contains the session's id, and only a holder of the admin key can compute it."""
    mac = hmac.new(admin_key.encode(), session.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
    return f"sk-glm5-{session}-{mac[:40]}"


def session_of_key(admin_key: str, key: str) -> str | None:
    """The session of a valid key, or None."""
    name = key.removeprefix("sk-glm5-").rpartition("-")[0]
    wanted = key_of(admin_key, name).encode("utf-8", "replace")
    return name if name and hmac.compare_digest(key.encode("utf-8", "replace"), wanted) else None
