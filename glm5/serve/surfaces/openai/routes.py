"""The OpenAI surface: /v1/chat/completions, /v1/completions, /v1/models, and small helpers for tokens."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from glm5.errors import Glm5Error
from glm5.obs.logs import get_logger
from glm5.records import Completion
from glm5.serve.errors import CLIENT_GONE, INTERNAL, ApiError
from glm5.serve.http_io import DONE, EventResponse, event, framed, json_answer, quoted, unless_gone
from glm5.serve.http_io import encode as encode_json
from glm5.serve.prompts import Prompt, encode
from glm5.serve.reply import OpenAIDelta, Reply, Scored, chat_logprobs, text_logprobs
from glm5.serve.samples import SampleStream
from glm5.serve.service import Service, TextService, collect, follow, openai_usage, service_of, text_service_of
from glm5.serve.surfaces.openai.sampling import OpenAISampling
from glm5.serve.surfaces.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

log = get_logger("serve")
SHORT = 1 << 12
"""An answer with at most this many tokens is written in the event loop: a thread would cost more than the work."""
routes = APIRouter()


@routes.post("/v1/chat/completions")
async def chat(request: Request) -> Response:
    """A chat completion, whole or as events."""
    service = text_service_of(request)
    body = await service.read(request, ChatRequest)
    service.check_model(body.model)
    prompt = await service.prompt_of(body, count=len(body.messages))
    form = ChatForm(service, body, prompt)
    jobs = [(body, prompt)]
    stream = await service.begin(request, jobs, [form.head["id"]], field_name="messages", top_logprobs=form.top)
    options = {"logprobs": body.logprobs, "parallel_calls": body.parallel_tool_calls}
    return await _answer(request, body, stream, service.replies(jobs, stream, **options), form)


@routes.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Completions of prompts given as text or as ids, whole or as events."""
    service = service_of(request)
    body = await service.read(request, CompletionRequest)
    service.check_model(body.model)
    service.check_samples(len(body.prompts()) * body.n)
    prompts = [await service.make(encode, service.tokenizer, one) for one in body.prompts()]
    form = await asyncio.to_thread(TextForm, service, body, prompts)
    if body.echo and body.logprobs is not None and not await unless_gone(request, form.score()):
        return Response(status_code=CLIENT_GONE)
    if body.max_tokens == 0:
        return await asyncio.to_thread(_echo, form)
    jobs = [(body, prompt) for prompt in prompts]
    names = [form.head["id"]] * len(jobs)
    stream = await service.begin(request, jobs, names, top_logprobs=body.logprobs)
    replies = service.replies(jobs, stream, logprobs=body.logprobs is not None)
    return await _answer(request, body, stream, replies, form)


@routes.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The list of models, which contains only the served model."""
    service = text_service_of(request)
    found = _model(service)
    # Anthropic's clients find the end of a list by these fields.
    return {"object": "list", "data": [found], "has_more": False, "first_id": found["id"], "last_id": found["id"]}


@routes.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One model; 404 for any name but that of the served model."""
    service = service_of(request)
    service.check_model(name)
    return _model(service)


@routes.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """The ids of a text, or of a rendered conversation."""
    service = service_of(request)
    body = await service.read(request, TokenizeRequest)
    service.check_model(body.model)
    if (body.prompt is None) == (not body.messages):
        raise ApiError(400, "Give either prompt or messages.", param="prompt")
    if body.prompt is None:
        prompt = await service.prompt_of(body, count=len(body.messages))
    else:
        prompt = await service.make(encode, service.tokenizer, body.prompt)
    return {"tokens": prompt.ids, "count": len(prompt.ids), "max_model_len": service.max_length}


@routes.post("/detokenize")
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of ids."""
    service = service_of(request)
    body = await service.read(request, DetokenizeRequest)
    service.check_model(body.model)
    text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, body.skip_special_tokens)
    return {"prompt": text}


def _model(service: TextService) -> dict[str, Any]:
    """The model entry, for OpenAI and Anthropic clients."""
    created = datetime.fromtimestamp(service.created, UTC).isoformat()
    openai = {"object": "model", "created": service.created, "owned_by": "glm5", "root": service.model_name}
    anthropic = {"type": "model", "display_name": service.model_name, "created_at": created}
    return {
        "id": service.model_name,
        **openai,
        **anthropic,
        "max_model_len": service.max_length,
        "chat_template": service.tokenizer.chat_format.describe(),
    }


class ChatForm:
    """Writes chat completions. The result of `whole` contains iterators (see `json_answer`)."""

    whole_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, service: TextService, body: ChatRequest, prompt: Prompt) -> None:
        self.head = _head(service, "chatcmpl")
        self.prompts = [prompt]
        self._tokenizer = service.tokenizer
        self.top = body.top_logprobs if body.logprobs else None

    def whole(self, reply: Reply) -> dict[str, Any]:
        fresh = reply.new_scored()
        told = (entry for one in fresh for entry in chat_logprobs(self._tokenizer, [one]))
        return {"message": reply.message(), "logprobs": {"content": told, "refusal": None} if fresh else None}

    def opening(self, reply: Reply) -> OpenAIDelta | None:
        return {"role": "assistant", "content": ""}

    def piece(self, reply: Reply, delta: OpenAIDelta) -> dict[str, Any]:
        fresh = reply.new_scored()
        told = {"content": chat_logprobs(self._tokenizer, fresh), "refusal": None} if fresh else None
        return {"delta": delta, "logprobs": told}

    def plain(self, delta: OpenAIDelta) -> str | None:
        """`piece` as JSON without its braces, if it is only text; else None."""
        if self.top is not None or "tool_calls" in delta:
            return None
        names = ",".join([f'"{name}":{quoted(text)}' for name, text in delta.items()])
        return f'"delta":{{{names}}},"logprobs":null'


class TextForm:
    """Writes text completions. With `echo` the prompt comes first, with scores if log-probabilities are requested."""

    whole_name = chunk_name = "text_completion"

    def __init__(self, service: Service, body: CompletionRequest, prompts: Sequence[Prompt]) -> None:
        self.head = _head(service, "cmpl")
        self.prompts = list(prompts)
        self._service = service
        self._top = body.logprobs
        self._echoed = [service.tokenizer.decode(prompt.ids) if body.echo else "" for prompt in prompts]
        self._samples = body.n
        self._prompt_scores: list[list[Scored]] = [[] for _ in prompts]

    async def score(self) -> None:
        """Log-probabilities of the prompts."""
        rows = await self._service.score(
            [prompt.ids for prompt in self.prompts],
            samples=[self._samples] * len(self.prompts),
            top_logprobs=self._top or 0,
            names=[self.head["id"]] * len(self.prompts),
        )
        await asyncio.to_thread(self._take, rows)

    def _take(self, rows: Sequence[Completion]) -> None:
        for i, (prompt, row) in enumerate(zip(self.prompts, rows, strict=True)):
            values, tops = [math.nan, *row.logprobs], [{}, *(row.top_logprobs or [{} for _ in row.logprobs])]
            offset = 0
            for token, value, top in zip(prompt.ids, values, tops, strict=True):
                self._prompt_scores[i].append(Scored(token, value, top, offset))
                offset += len(self._service.tokenizer.decode([token]))

    def whole(self, reply: Reply) -> dict[str, Any]:
        return self.text(reply.index // self._samples, reply.content, reply.new_scored())

    def text(self, owner: int, content: str, scored: Sequence[Scored]) -> dict[str, Any]:
        """Text and log-probabilities of one entry of `choices`; `owner` is the index of its prompt."""
        echoed = self._echoed[owner]
        shifted = [Scored(one.token, one.logprob, one.top, one.offset + len(echoed)) for one in scored]
        told = self._written([*self._prompt_scores[owner], *shifted])
        long = told and {name: iter(row) if isinstance(row, list) else row for name, row in told.items()}
        return {"text": echoed + content, "logprobs": long}

    def opening(self, reply: Reply) -> OpenAIDelta | None:
        echoed = self._echoed[reply.index // self._samples]
        return {"content": echoed} if echoed else None

    def piece(self, reply: Reply, delta: OpenAIDelta) -> dict[str, Any]:
        return {"text": delta.get("content", ""), "logprobs": self._written(reply.new_scored())}

    def plain(self, delta: OpenAIDelta) -> str | None:
        """See `ChatForm.plain`."""
        return None if self._top is not None else f'"text":{quoted(delta.get("content", ""))},"logprobs":null'

    def _written(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if self._top is None or not scored:
            return None
        return text_logprobs(self._service.tokenizer, scored, self._top > 0)


def _head(service: TextService, prefix: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": service.model_name,
        "system_fingerprint": service.fingerprint,
    }


async def _answer(
    request: Request, body: OpenAISampling, stream: SampleStream, replies: list[Reply], form: ChatForm | TextForm
) -> Response:
    """The answer in one piece or as events. At its end, also after an error, all its samples are cancelled."""
    if body.stream:
        return EventResponse(_events(form, body, stream, replies), stream)
    if not await unless_gone(request, collect(stream, replies)):
        return Response(status_code=CLIENT_GONE)
    if isinstance(form, ChatForm) and form.top is None and sum(reply.tokens for reply in replies) <= SHORT:
        return Response(encode_json(_whole(body, stream, replies, form)), media_type="application/json")
    return await asyncio.to_thread(lambda: json_answer(_whole(body, stream, replies, form)))


def _whole(
    body: OpenAISampling, stream: SampleStream, replies: list[Reply], form: ChatForm | TextForm
) -> dict[str, Any]:
    choices = [
        {
            "index": reply.index,
            **form.whole(reply),
            "finish_reason": reply.finish_reason,
            "matched_stop": reply.matched,
            **({"token_ids": reply.ids} if body.return_token_ids else {}),
        }
        for reply in replies
    ]
    whole = {**form.head, "object": form.whole_name, "choices": choices, "usage": openai_usage(stream, replies)}
    return whole | _prompt_ids(form, body)


def _prompt_ids(form: ChatForm | TextForm, body: OpenAISampling) -> dict[str, Any]:
    if not body.return_token_ids:
        return {}
    rows = [prompt.ids for prompt in form.prompts]
    return {"prompt_token_ids": rows[0] if len(rows) == 1 else rows}


def _echo(form: TextForm) -> Response:
    """An answer with only the echoed prompts."""
    choices = [{"index": i, **form.text(i, "", ()), "finish_reason": "length"} for i in range(len(form.prompts))]
    count = sum(len(prompt.ids) for prompt in form.prompts)
    usage = {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
    return json_answer({**form.head, "object": form.whole_name, "choices": choices, "usage": usage})


async def _events(
    form: ChatForm | TextForm, body: OpenAISampling, stream: SampleStream, replies: list[Reply]
) -> AsyncGenerator[str, None]:
    """Server-sent events. The status has been sent already, so a late error is an event too."""
    usage, running = body.stream_options.include_usage, body.stream_options.continuous_usage_stats
    told = [0] * len(replies)
    head: Mapping[str, Any] = {**form.head, "object": form.chunk_name}
    # Nearly all chunks differ in their text alone: the rest of their JSON is written once.
    common, end = encode_json(head)[:-1], '],"usage":null}' if usage else "]}"
    simple = not (running or body.return_token_ids)

    def chunk(reply: Reply, delta: OpenAIDelta, *, first: bool = False, last: bool = False) -> str:
        text = form.plain(delta) if simple and not last else None
        if text is not None:
            return framed(f'{common},"choices":[{{"index":{reply.index},{text},"finish_reason":null}}{end}')
        choice = {"index": reply.index, **form.piece(reply, delta), "finish_reason": None}
        if last:
            choice |= {"finish_reason": reply.finish_reason, "matched_stop": reply.matched}
        if body.return_token_ids:
            choice["token_ids"] = reply.ids[told[reply.index] :]
            told[reply.index] = len(reply.ids)
        extra = _prompt_ids(form, body) if first and reply.index == 0 else {}
        so_far = openai_usage(stream, replies) if running else None
        return event({**head, "choices": [choice], **({"usage": so_far} if usage or running else {}), **extra})

    try:
        for reply in replies:
            opening = form.opening(reply)
            if opening is not None or body.return_token_ids:
                yield chunk(reply, opening or {}, first=True)
        async for reply, deltas in follow(stream, replies):
            for delta in deltas:
                yield chunk(reply, delta)
            if reply.finish_reason is not None:
                yield chunk(reply, {}, last=True)
        if usage:
            yield event({**head, "choices": [], "usage": openai_usage(stream, replies)})
    except Glm5Error as error:
        yield event(ApiError.of(error).body())
    except Exception:
        log.exception("A streamed answer failed.")
        yield event(ApiError(500, INTERNAL).body())
    yield DONE
