"""The gateway: sessions for agents that speak Chat Completions, Responses or Messages, and their samples.

An agent gets a base URL and a key. The key gives access to the chat surfaces of its session and to nothing else. All
other paths except `/healthz` need the admin key. A chat request names its session by the path (`/sessions/ID/v1/...`)
or, on plain `/v1/...`, by the key alone.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fastapi import Request
from pydantic import Field

from glm5.agents.context import ContextPolicy
from glm5.chat.tokenizer import Tokenizer
from glm5.errors import Glm5Error
from glm5.obs.logs import get_logger
from glm5.records import SamplingParams
from glm5.rollout.engines import EnginePool
from glm5.rollout.history import History, Node
from glm5.rollout.samples import forks, summary
from glm5.rollout.service import SessionService
from glm5.rollout.session import Session, SessionOptions, session_of_key
from glm5.rollout.store import Store
from glm5.rollout.store_reader import SessionRow
from glm5.serve.access import knows, offered
from glm5.serve.errors import ApiError
from glm5.serve.metrics import Metrics
from glm5.serve.options import Limits
from glm5.serve.surfaces.anthropic.routes import count_tokens, messages
from glm5.serve.surfaces.fields import Fields
from glm5.serve.surfaces.openai.responses import responses
from glm5.serve.surfaces.openai.routes import chat, models
from glm5.tasks.episode import MOST_REWARD

log = get_logger("gateway")

KEPT = 4096
"""Number of sessions kept in memory. Beyond it, idle ones are dropped; the store is read again when needed."""
MOST_REQUESTS = 128
"""Maximum number of concurrent requests of one session, and at most half of the server's: sub-agents may work in
parallel, but one session must not shut out the others."""
FORGET_EVERY = 256
"""How many answers, and sessions read from the store, come between two counts of the tokens in memory."""
KEPT_TOKENS = 1 << 25
"""Number of stored tokens kept in memory, twelve bytes each; see `KEPT`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:~-]{0,127}")
Handler = Callable[[Request], Awaitable[Any]]
DIALECTS: dict[str, Handler] = {
    "chat/completions": chat,
    "responses": responses,
    "messages": messages,
    "messages/count_tokens": count_tokens,
    "models": models,
}


class NewSession(Fields):
    """POST /sessions. `group` identifies the rollouts of one problem. A second request with the same `id` gets the same
    session. See `SessionOptions` for the limits and `temperature`."""

    task_id: str = Field(default="", max_length=1024)
    group: str | int | None = None
    mode: Literal["train", "eval"] = "train"
    id: str | None = None
    turns: int = Field(default=SessionOptions.turns, ge=1, le=1 << 20)
    tokens: int | None = Field(default=None, ge=2)
    answer_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=SessionOptions.temperature, ge=1e-5, le=100)
    context: ContextPolicy = Field(default_factory=ContextPolicy)


class NewReward(Fields):
    """POST /sessions/ID/reward. A later reward replaces an earlier one."""

    reward: float = Field(ge=-MOST_REWARD, le=MOST_REWARD)


class Closing(Fields):
    """POST /sessions/ID/close. `excluded` is the reason why the rollout must not be trained on, such as the failure of
    an environment, or None."""

    excluded: str | None = Field(default=None, max_length=256)


@dataclass
class Gateway:
    """The sessions of a store, sampled by an engine pool. `max_length` is the maximum length of prompt plus answer, in
    tokens."""

    pool: EnginePool
    store: Store
    tokenizer: Tokenizer
    admin_key: str
    max_length: int
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    _sessions: dict[str, Session] = field(default_factory=dict)
    _loading: dict[str, asyncio.Lock] = field(default_factory=dict)
    _used: int = 0

    async def create(self, body: NewSession) -> Session:
        """A new session, or the existing one with this id. Raises ApiError 400 for a malformed id, and for an existing
        session with another task, group or mode."""
        name = body.id or uuid.uuid4().hex
        if not _NAME.fullmatch(name):
            raise ApiError(
                400, "id must have 1 to 128 letters, digits or _ . : ~ -, and begin with a letter or digit.", param="id"
            )
        options = SessionOptions(body.turns, body.tokens, body.answer_tokens, body.temperature, body.context)
        group = None if body.group is None else str(body.group)
        row = SessionRow(name, body.task_id, group, body.mode, asdict(options), time.time())
        if await self.store.add_session(row):
            self._forget()
            return self._sessions.setdefault(name, Session(row, options, History(self._sorts_results())))
        session = await self.session(name)
        if (session.row.task, session.row.group, session.row.mode) != (row.task, row.group, row.mode):
            text = f"The session {name} exists for another task, group or mode; choose another id."
            raise ApiError(400, text, param="id", code="session_exists")
        return session

    async def session(self, name: str) -> Session:
        """A session by its id. Raises ApiError 404 for an unknown id."""
        if (found := self._sessions.get(name)) is not None:
            return found
        async with self._loading.setdefault(name, asyncio.Lock()):
            try:
                if (found := self._sessions.get(name)) is not None:
                    return found
                found = await asyncio.to_thread(self._load, name)
                self._forget()  # before, so that it cannot drop this one
                return self._sessions.setdefault(name, found)  # `create` may have made it meanwhile
            finally:
                self._loading.pop(name, None)

    def loaded(self, name: str) -> Session | None:
        """A session in memory, or None."""
        return self._sessions.get(name)

    def _load(self, name: str) -> Session:
        row = self.store.session(name)
        if row is None:
            raise ApiError(404, f"There is no session {name!r:.140}.", code="session_not_found")
        history, stored = self.store.turns(name, self._sorts_results())
        return Session(row, SessionOptions.stored(row.options), history, stored, retries=row.retries)

    def _sorts_results(self) -> bool:
        return self.tokenizer.chat_format.sorts_results()

    def _forget(self) -> None:
        """Beyond `KEPT` sessions or `KEPT_TOKENS` tokens in memory, drop idle ones down to seven eighths: closed ones
        first, then by last use. Counts tokens at every `FORGET_EVERY`th call."""
        self._used += 1
        if len(self._sessions) <= KEPT and self._used % FORGET_EVERY:
            return
        count, tokens = len(self._sessions), sum(one.history.tokens for one in self._sessions.values())
        if count <= KEPT and tokens <= KEPT_TOKENS:
            return
        idle = [one for one in self._sessions.values() if not one.calls and not one.requests]
        for one in sorted(idle, key=lambda one: (one.row.closed is None, one.used)):
            if count <= KEPT - KEPT // 8 and tokens <= KEPT_TOKENS - KEPT_TOKENS // 8:
                break
            del self._sessions[one.id]
            count, tokens = count - 1, tokens - one.history.tokens

    async def reward(self, name: str, reward: float) -> Session:
        """Set the reward of a session."""
        session = await self.session(name)
        await self.store.change_session(name, reward=reward)
        session.row = replace(session.row, reward=reward)
        return session

    async def end(self, name: str, excluded: str | None = None) -> Session:
        """Close a session and cancel its running requests. No effect on a closed session."""
        session = await self.session(name)
        if session.row.closed is not None:
            return session
        before, closed = session.row, time.time()
        # In memory first: a second close, and a request that arrives during the write, must see it.
        session.row = replace(before, closed=closed, excluded=excluded, retries=session.retries)
        try:
            await self.store.change_session(name, closed=closed, excluded=excluded, retries=session.retries)
        except BaseException:
            session.row = replace(session.row, closed=None, excluded=before.excluded)
            raise
        await session.cancel()
        return session

    def status(self, session: Session) -> dict[str, Any]:
        """State and counters of a session, without its tokens."""
        nodes = session.history.nodes
        return {
            "id": session.id,
            "task_id": session.row.task,
            "group": session.row.group,
            "mode": session.row.mode,
            "turns": len(nodes),
            "tokens_sampled": sum(len(node.output) for node in nodes),
            "forks": forks(nodes),
            "retries": session.retries,
            "under_way": len(session.calls),
            "reward": session.row.reward,
            "closed": session.row.closed is not None,
            "excluded": session.row.excluded,
        }

    def samples(self, session: Session, nodes: Sequence[Node]) -> dict[str, Any]:
        """The training rows of a session with its reward. A session without a sampled token is excluded as "empty":
        its agent never reached the policy."""
        found = summary(nodes)
        excluded = session.row.excluded or (None if found["tokens_sampled"] else "empty")
        head = {"id": session.id, "task_id": session.row.task, "group": session.row.group}
        return {**head, "reward": session.row.reward, "excluded": excluded, **found}

    async def answer(self, request: Request, name: str, dialect: str) -> Any:
        """Answer a request of an agent. `dialect` is a key of `DIALECTS`."""
        session = await self.session(name)
        session.check_open()
        if session.requests >= min(MOST_REQUESTS, max(1, self.limits.requests // 2)):
            text = f"The session has {session.requests} requests under way; retry later."
            raise ApiError(429, text, code="session_busy")
        service = SessionService(
            tokenizer=self.tokenizer,
            model_name="glm5",
            defaults=SamplingParams(),
            max_length=min(self.max_length, session.options.tokens or self.max_length),
            limits=self.limits,
            metrics=self.metrics,
            created=int(session.row.created),
            session=session,
            pool=self.pool,
            store=self.store,
            counts=dialect == "messages/count_tokens",
        )
        request.state.service = service
        session.requests += 1
        try:
            return await DIALECTS[dialect](request)
        except Glm5Error as error:
            session.limited |= ApiError.of(error).code in ("turn_limit", "context_length_exceeded")
            service.release(error)
            raise
        finally:
            session.requests -= 1
            service.release()
            self._forget()

    def check_admin(self, request: Request) -> None:
        """Raise ApiError 401 without the admin key."""
        if not knows(request.headers, self.admin_key):
            raise ApiError(
                401, "This path needs the admin key, as Authorization: Bearer KEY.", code="invalid_admin_key"
            )

    def session_of(self, request: Request, name: str | None) -> str:
        """The session that a request's key opens. Raises ApiError 401 for a key that opens none, or not the session
        `name`."""
        for key in offered(request.headers):
            found = session_of_key(self.admin_key, key)
            if found is not None and name in (None, found):
                return found
        text = "Wrong or missing session key; send it as Authorization: Bearer KEY or as x-api-key: KEY."
        raise ApiError(401, text, code="invalid_api_key")

    def text(self) -> str:
        """Metrics in Prometheus' format."""
        numbers = {
            "sessions": len(self._sessions),
            "turns": sum(len(one.history.nodes) for one in self._sessions.values()),
            "generations_running": self.pool.running,
            "generations_lost": self.pool.lost.total(),
        }
        lines = [f"# TYPE glm5_gateway_{name} gauge\nglm5_gateway_{name} {value}\n" for name, value in numbers.items()]
        return "".join(lines) + "\n".join(self.metrics.answer_lines()) + "\n"
