"""Answers the chat requests of one session: the surfaces of `serve`, with prompts made of stored token ids."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from glm5.agents.context_ids import fold_ids, remembered
from glm5.chat.template import opens_thinking, render_chat, render_tail
from glm5.errors import DataError, Glm5Error
from glm5.records import Completion, GrammarSpec, Message
from glm5.rollout.engines import EnginePool
from glm5.rollout.history import Place
from glm5.rollout.session import Call, CallStream, Sampled, Session
from glm5.rollout.store import Store
from glm5.serve.errors import ApiError
from glm5.serve.http_io import read_body, unless_gone
from glm5.serve.prompts import ChatBody, ChatInput, Mode, Prompt, render
from glm5.serve.reply import Reply
from glm5.serve.samples import Part, SampleStream
from glm5.serve.service import READ, Job, TextService
from glm5.serve.surfaces.schema import Body, Sampling, parse

Result = TypeVar("Result")
OURS = ("function", "custom")
"""Types of tools that the agent runs itself. All others are removed: a provider runs them, outside the environment."""
SHORT = 1 << 14
"""Maximum bytes of a request body that the event loop processes itself: a thread would cost more than the work."""
EARLY_SECONDS = 0.5
"""Seconds that a streamed response waits for its first token. An error before that still gets its own HTTP status."""


@dataclass(kw_only=True)
class SessionService(TextService):
    """The service of one request. `counts` is True if it only counts tokens, `mine` if it runs `call` itself instead of
    joining an identical request, `short` if its body has at most `SHORT` bytes."""

    session: Session
    pool: EnginePool
    store: Store
    counts: bool = False
    call: Call | None = None
    mine: bool = field(default=False, init=False)
    short: bool = field(default=False, init=False)

    @property
    def weight_version(self) -> int:
        nodes = self.session.history.nodes
        return nodes[-1].versions[-1] if nodes and nodes[-1].versions else 0

    def check_model(self, name: str | None) -> None:
        """Accept any name: agents send model names of their own."""

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Parse the body, without tools that run at a provider, and claim the call of this request."""
        raw = await read_body(request, self.limits)
        # A foreign template may be slow.
        self.short = len(raw) <= SHORT and self.tokenizer.chat_format.version is not None
        body = await self._work(_parsed, kind, raw)
        if not self.counts:
            path = request.scope["path"].rpartition("/v1/")[2]
            digest = hashlib.blake2b(path.encode() + b"\0" + raw, digest_size=16).digest()
            self.call, self.mine = self.session.claim(digest)
        return body

    def release(self, refusal: Glm5Error | None = None) -> None:
        """Clean up at the end of the request. If it claimed a call and did not start it, the identical requests that
        wait for the call get the `refusal`, or 503 without one."""
        if self.call is not None and self.mine and self.call.task is None:
            self.session.calls.pop(self.call.digest, None)
            failed = ApiError(503, "The first request with these bytes failed; send the request again.", code="retry")
            self.call.fail(refusal or failed)

    async def prompt_of(self, body: ChatBody, count: int) -> Prompt:
        """The stored ids of the conversation so far plus its new messages, rendered."""
        self.check_messages(count)
        chat = await self._work(body.chat_input)
        place = await self._work(self.session.history.place, chat)
        before = [] if place.parent is None else place.parent.ids()
        place, prompt = await self._work(self._prompt, chat, place, before)
        if self.call is not None and self.call.place is None:
            self.call.place = place
        return prompt

    def _prompt(self, chat: ChatInput, place: Place, before: list[int]) -> tuple[Place, Prompt]:
        version = self.tokenizer.chat_format.version
        tokenizer, mode = self.tokenizer.bounded(READ * self.max_length), chat.mode
        keep = replace(mode, clear=bool(mode.clear))
        if version is None:
            if self.session.options.context.mode != "none":
                raise ApiError(400, "Sessions with a context policy need one of GLM's chat templates.", param="context")
            whole = render(tokenizer, ChatInput(chat.messages, chat.tools, keep, chat.ending))
            if whole.ids[: len(before)] == before:
                return place, whole
            return _anew(place, "reencoded"), whole
        options: Any = {"tokenizer": tokenizer, "version": version, "enable_thinking": mode.enable}
        ending = chat.ending != "none"
        try:
            if place.parent is None or not place.tail:
                raise DataError("nothing to continue")
            tail = render_tail(place.tail, after=before[-1], add_generation_prompt=ending, **options)
            ids = before + tail
        except DataError:
            place = _anew(place, "ended_otherwise")
            ids = render_chat(
                place.tail, chat.shown, clear_thinking=keep.clear, reasoning_effort=mode.effort,
                add_generation_prompt=ending, **options,
            ).ids  # fmt: skip
        thinking = ending and opens_thinking(version, mode.enable)
        if (folded := self._folded(chat, place, keep, options)) is not None:
            if folded[: len(before)] != before:  # else the fold was that of the turn before
                place = _anew(place, "folded")
            return place, Prompt(folded, thinking, chat.tools)
        if place.begun is None:
            return place, Prompt(ids, thinking, chat.tools)
        if thinking:
            raise DataError("The last message cannot be continued with thinking on; switch thinking off.")
        return place, Prompt(ids + tokenizer.encode(place.begun.content), False, chat.tools, begun=True)

    def _folded(self, chat: ChatInput, place: Place, keep: Mode, options: Any) -> list[int] | None:
        """The prompt under the session's context policy; None if it leaves the conversation as it is. Answers are
        copied as they were sampled, and only messages of the agent are rendered."""
        policy = self.session.options.context
        if policy.mode == "none" or place.parent is None or chat.ending != "answer":
            return None

        def render_given(messages: Sequence[Message], after: int | None) -> list[int]:
            if after is not None:
                return render_tail(messages, after=after, **options)
            more: Any = {"clear_thinking": keep.clear, "reasoning_effort": keep.effort, **options}
            return render_chat(messages, chat.shown, **more).ids

        turns = [message for node in place.parent.path() for message in (*node.tail, node.reply)]
        rounds = self.session.history.rounds(turns, place.head)
        if rounds is None:
            return None
        memo = self.session.rendered.setdefault(place.head, {})
        prompt = fold_ids(rounds, place.tail, policy, remembered(render_given, memo))
        return None if set(prompt.plan.actions) == {"keep"} else prompt.ids

    async def begin(
        self,
        request: Request,
        jobs: Sequence[Job],
        names: Sequence[str],
        *,
        field_name: str = "prompt",
        top_logprobs: int | None = None,
    ) -> SampleStream:
        """Start the turn, or join the identical request that has started it."""
        call, body = self.call, jobs[0][0]
        assert call is not None
        if body.samples() > 1:
            raise ApiError(400, "A session samples one answer per request; leave n out.", param="n", code="unsupported")
        if top_logprobs:
            raise ApiError(
                400, "A session has no top_logprobs; leave them out.", param="top_logprobs", code="unsupported"
            )
        if self.session.trained and body.ignore_eos:
            raise ApiError(400, "A session for training ends at stop tokens; leave ignore_eos out.", param="ignore_eos")
        if self.mine or call.ended:  # else the first of the identical requests does this
            (part,) = await self._work(self._parts, jobs, names, None, field_name)
            call.part = Part(part.prompt, self.session.params(part.params), self.session.id, self.session.id)
            call.sampled = Sampled(frozenset(part.params.stop_token_ids), Completion())
        if self.mine:
            self.session.check_open()  # it may have been closed since the request came
            seconds, one = self.limits.request_seconds, _takes_one_call(body)
            whole = one or not getattr(body, "stream", False)
            (call.reply,) = self.replies(jobs, CallStream(call, self.session.lost), parallel_calls=not one)
            running = self.session.run(call, call.reply, self.pool, self.store, seconds, whole)
            call.start(asyncio.create_task(running), asyncio.get_running_loop().time() + seconds)
        while call.task is None and not call.ended:
            if not await unless_gone(request, call.change()):
                raise ClientDisconnect
        if getattr(body, "stream", False) and not call.ended and not call.deltas:
            if not await unless_gone(request, call.change(EARLY_SECONDS)):
                raise ClientDisconnect
        if call.error is not None:
            raise call.error
        return CallStream(call, self.session.lost)

    def grammar(self, body: Sampling, prompt: Prompt) -> GrammarSpec | None:
        """None in a session for training, also for what could not be demanded (see `Session.params`)."""
        return None if self.session.trained else super().grammar(body, prompt)

    def replies(self, jobs: Sequence[Job], stream: SampleStream, **options: Any) -> list[Reply]:
        """The reply of the call. Identical requests get the same tool-call ids; those without events and
        log-probabilities get the same object, which `Session.run` feeds."""
        assert self.call is not None
        if self.call.reply is not None and not (options.get("logprobs") or getattr(jobs[0][0], "stream", False)):
            return [self.call.reply]
        return super().replies(jobs, stream, name=self.call.digest.hex()[:24], **options)

    async def _work(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a part of the request: in a thread unless the request is short."""
        return function(*arguments) if self.short else await asyncio.to_thread(function, *arguments)


def _anew(place: Place, cause: str) -> Place:
    """The same conversation, but not as a continuation of a stored turn."""
    if place.parent is None:
        return place
    turns = tuple(message for node in place.parent.path() for message in (*node.tail, node.reply))
    return Place(None, (*turns, *place.tail), place.head, cause, place.begun)


def _takes_one_call(body: Any) -> bool:
    """Whether the answer may have at most one tool call."""
    choice = getattr(body, "tool_choice", None)
    return not getattr(body, "parallel_tool_calls", True) or getattr(choice, "disable_parallel_tool_use", False) is True


def _parsed(kind: type[Body], raw: bytes) -> Body:
    try:
        given = json.loads(raw) if b'"tools"' in raw else None
    except (ValueError, RecursionError):
        given = None
    if isinstance(given, dict) and isinstance(tools := given.get("tools"), list):
        kept = [tool for tool in tools if not isinstance(tool, dict) or tool.get("type", OURS[0]) in (*OURS, None)]
        if len(kept) < len(tools):
            raw = json.dumps(given | {"tools": kept}).encode()
    return parse(kind, raw)
