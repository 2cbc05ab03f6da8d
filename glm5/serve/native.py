"""The native surface, compatible with SGLang: token ids in and out, and the engine control that a trainer needs.

`/generate` reports the log-probability, the id and the weight version of every sampled token, the stop token included.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from glm5 import __version__
from glm5.chat.tokenizer import StreamDecoder, Tokenizer
from glm5.engine import weights
from glm5.engine.stops import StopMatcher, StopStringDetector
from glm5.errors import Glm5Error
from glm5.obs.logs import get_logger
from glm5.records import Completion, SamplingParams
from glm5.serve.engine_thread import Delta, Stream
from glm5.serve.errors import CLIENT_GONE, INTERNAL, ApiError
from glm5.serve.limits import check_samples
from glm5.serve.native_schema import (
    AbortRequest,
    GenerateRequest,
    NativeSampling,
    NoFields,
    PauseRequest,
    UpdateRequest,
)
from glm5.serve.prompts import Prompt, encode
from glm5.serve.reply import finite
from glm5.serve.schema import Body
from glm5.serve.service import Service
from glm5.serve.sse import DONE, EventResponse, event, framed, unless_gone
from glm5.serve.writing import json_answer, json_pieces

log = get_logger("serve")

HEALTH_SECONDS = 20.0
REPEATS = 32
"""Cumulative events together may be this many times as long as the last one, ..."""
FREE = 1 << 14
"""... plus this many tokens: the first 180 tokens or so come one by one."""
LONG = 1024
"""Longer events, in tokens, are encoded in a thread."""


def router(service: Service) -> APIRouter:
    """The routes, bound to one service."""
    routes, updating = APIRouter(), asyncio.Lock()

    @routes.post("/generate")
    async def generate(request: Request) -> Response:
        body = await service.read(request, GenerateRequest)
        check_samples(sum(params.samples() for params in body.each()), service.limits)
        prompts = [await service.make(encode, service.tokenizer, one) for one in body.prompts()]
        return await Generation(service, body, prompts).answer(request)

    @routes.get("/get_model_info")
    @routes.get("/model_info")
    async def model_info() -> dict[str, Any]:
        info = {"model_path": service.model_name, "tokenizer_path": service.model_name, "is_generation": True}
        return {**info, "max_model_len": service.max_length, "weight_version": str(service.weight_version)}

    @routes.get("/get_server_info")
    @routes.get("/server_info")
    async def server_info() -> dict[str, Any]:
        limits = {name: getattr(service.limits, name) for name in service.limits.__dataclass_fields__}
        state = {
            "paused": service.thread.paused,
            "samples": service.thread.samples,
            "weight_version": str(service.weight_version),
        }
        return {
            "version": __version__,
            "model": service.model_name,
            "max_model_len": service.max_length,
            "limits": limits,
            **state,
        }

    @routes.get("/get_weight_version")
    async def weight_version() -> dict[str, str]:
        return {"weight_version": str(service.weight_version)}

    @routes.get("/health_generate")
    async def health_generate() -> dict[str, str]:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                ids = service.tokenizer.encode("<|user|>", allow_special=True)
                stream = await service.thread.submit(ids, SamplingParams(max_tokens=1, temperature=0.0))
                try:
                    async for _ in stream:
                        pass
                finally:
                    stream.cancel()
        except TimeoutError:
            raise ApiError(503, f"No token came within {HEALTH_SECONDS:g} seconds.", code="slow") from None
        return {"status": "ok"}

    @routes.post("/update_weights_from_disk")
    async def update_weights(request: Request) -> Response:
        body = await service.read(request, UpdateRequest)
        async with updating:  # in turn: each version has one content, and only one copy is in memory
            return await _update(service, body)

    @routes.post("/pause_generation")
    async def pause(request: Request) -> dict[str, Any]:
        body = await _optional(service, request, PauseRequest)
        count = service.thread.abort(None) if body.mode == "abort" else service.thread.samples
        service.thread.pause(True)
        await service.thread.call(lambda engine: None)  # waits for the current step to end
        return {
            "status": "ok",
            "message": f"Paused; {count} samples were {'ended' if body.mode == 'abort' else 'kept'}.",
        }

    @routes.post("/continue_generation")
    async def proceed(request: Request) -> dict[str, Any]:
        await _optional(service, request, NoFields)
        service.thread.pause(False)
        return {"status": "ok", "message": "Goes on."}

    @routes.post("/abort_request")
    async def abort(request: Request) -> dict[str, Any]:
        body = await service.read(request, AbortRequest)
        return {"status": "ok", "aborted": service.thread.abort(None if body.abort_all else body.rid)}

    @routes.get("/flush_cache")
    @routes.post("/flush_cache")
    async def flush_cache() -> dict[str, Any]:
        if service.thread.samples:
            text = f"The cache is in use by {service.thread.samples} samples; end or abort them first."
            raise ApiError(400, text, code="busy")
        await service.thread.call(lambda engine: engine.flush_cache())
        return {"status": "ok", "message": "The prefix cache is empty."}

    return routes


async def _optional(service: Service, request: Request, kind: type[Body]) -> Body:
    """An optional body; an empty one gives the defaults."""
    if request.headers.get("content-length") in (None, "0") and "transfer-encoding" not in request.headers:
        return kind()
    return await service.read(request, kind)


async def _update(service: Service, body: UpdateRequest) -> Response:
    """Read and check weights while the engine runs, then apply them between two steps."""
    present = service.weight_version
    version = present + 1 if body.weight_version is None else int(body.weight_version)
    if version <= present:
        text = f"weight_version: {version} is not above {present}, the version that the server has; versions only grow."
        return _refused(ApiError(409, text, param="weight_version", code="old_version"))
    try:
        ours = service.thread.engine.model
        # A short-lived thread: torch keeps a thread pool per computing thread, and the pools compete for cores.
        reader = ThreadPoolExecutor(1)
        staging = partial(weights.stage, ours, Path(body.model_path), tokenizer=service.tokenizer)
        try:
            staged = await asyncio.get_running_loop().run_in_executor(reader, staging)
        finally:
            reader.shutdown(wait=False)
        if body.abort_all_requests:
            service.thread.abort(None)
        waiting = service.thread.samples
        await service.thread.call(lambda engine: weights.apply(engine, staged, version))
    except (Glm5Error, OSError) as error:
        found = ApiError.of(error) if isinstance(error, Glm5Error) else ApiError(400, str(error))
        return _refused(ApiError(found.status, str(found), param="model_path", code=found.code))
    message = f"The weights are now those of version {version}."
    return JSONResponse(
        {"success": True, "message": message, "num_paused_requests": waiting if service.thread.paused else 0}
    )


def _refused(error: ApiError) -> Response:
    """A failed update that changed nothing, in SGLang's format and in ours."""
    return JSONResponse(
        {"success": False, "message": str(error), "num_paused_requests": 0, **error.body()}, error.status
    )


class Plain:
    """One sample as plain text: not parsed, and trimmed as the client requests."""

    def __init__(self, tokenizer: Tokenizer, params: NativeSampling, stop_ids: frozenset[int]) -> None:
        self.ids: list[int] = []
        self.versions: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[dict[int, float]] = []
        self.pieces: list[str] = []  # pieces of the text
        self.told = (0, 0)  # counts of pieces and ids that an incremental stream has sent
        self.finish: dict[str, Any] | None = None
        self._params = params
        self._stop_ids = stop_ids
        self._tokenizer = tokenizer
        self._early = params.min_tokens or 0  # no stop string begins within these tokens
        keep = params.no_stop_trim
        self._watch = StopStringDetector(
            tokenizer, params.stops(), silent=stop_ids, min_tokens=params.min_tokens or 0, keep=keep
        )
        # If the text includes special tokens, stop strings are searched in that text.
        self._decoder = None if params.skip_special_tokens else StreamDecoder(tokenizer)
        self._matcher = StopMatcher(() if self._decoder is None else params.stops(), keep=keep)

    def feed(self, delta: Delta) -> None:
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.tops += delta.top_logprobs
        self.versions += delta.weight_versions
        for token in delta.token_ids:
            last = token in self._stop_ids and not self._params.no_stop_trim
            if self._decoder is None:
                self.pieces.append(self._watch.feed(token))
            else:
                text = "" if last else self._decoder.feed((token,))
                self.pieces.append(text if self._early > 0 else self._matcher.feed(text))
                self._early -= 1
        if delta.finish_reason is not None:
            if self._decoder is None:
                self.pieces.append(self._watch.finish())
            else:
                self.pieces += (self._matcher.feed(self._decoder.finish()), self._matcher.finish())
            self.finish = self._finish(delta.finish_reason)

    def _finish(self, reason: str) -> dict[str, Any]:
        if reason == "length":
            return {"type": "length", "length": len(self.ids)}
        if reason == "abort":
            return {"type": "abort", "message": "The request was aborted."}
        matched: str | int | None = self._watch.matched if self._decoder is None else self._matcher.matched
        if matched is None and self.ids and self.ids[-1] in self._stop_ids:
            matched = self.ids[-1]
        return {"type": "stop", "matched": matched}


class Generation:
    """One request to /generate."""

    def __init__(self, service: Service, body: GenerateRequest, prompts: Sequence[Prompt]) -> None:
        self.service = service
        self.body = body
        self.prompts = prompts
        self.params = body.each()
        given = body.rid if isinstance(body.rid, list) else [body.rid] if body.rid else []
        self.names = given or [uuid.uuid4().hex for _ in prompts]
        self.owners = [i for i, params in enumerate(self.params) for _ in range(params.samples())]
        self.listed = body.batched or len(self.owners) > 1
        self.inputs: list[list[list[Any]]] = [[] for _ in prompts]
        self.input_tops: list[list[list[list[Any]] | None]] = [[] for _ in prompts]
        self.began = time.monotonic()

    async def answer(self, request: Request) -> Response:
        """The response, in one piece or as events."""
        if self.body.return_logprob and self.body.logprob_start_len >= 0:
            if not await unless_gone(request, self._score()):
                return Response(status_code=CLIENT_GONE)
        if all(params.max_new_tokens == 0 for params in self.params):
            empty = [Plain(self.service.tokenizer, params, frozenset()) for params in self.params]
            for plain in empty:
                plain.finish = {"type": "length", "length": 0}
            return await asyncio.to_thread(self._whole, None, empty)
        if any(params.max_new_tokens == 0 for params in self.params):
            raise ApiError(
                400, "max_new_tokens: 0 goes for all prompts of a batch or for none.", param="sampling_params"
            )
        jobs = list(zip(self.params, self.prompts, strict=True))
        tops = self.body.top_logprobs_num if self.body.return_logprob else None
        stream = await self.service.begin(request, jobs, self.names, top_logprobs=tops)
        stop_ids = [request.stop_ids for request in stream.requests]
        samples = [
            Plain(self.service.tokenizer, self.params[o], ids) for o, ids in zip(self.owners, stop_ids, strict=True)
        ]
        if self.body.stream:
            return EventResponse(self._events(stream, samples), stream)
        if not await unless_gone(request, self._collect(stream, samples)):
            return Response(status_code=CLIENT_GONE)
        return await asyncio.to_thread(self._whole, stream, samples)

    async def _collect(self, stream: Stream, plain: Sequence[Plain]) -> None:
        try:
            async for delta in stream:
                plain[delta.index].feed(delta)
        finally:
            stream.cancel()

    async def _score(self) -> None:
        """Log-probabilities of the prompts from `logprob_start_len` on; the first token has none."""
        rows = await self.service.score(
            [prompt.ids for prompt in self.prompts],
            samples=[params.samples() for params in self.params],
            top_logprobs=self.body.top_logprobs_num,
            names=self.names,
        )
        await asyncio.to_thread(self._take, rows)

    def _take(self, rows: Sequence[Completion]) -> None:
        start = self.body.logprob_start_len
        for i, (prompt, row) in enumerate(zip(self.prompts, rows, strict=True)):
            values = [None, *map(finite, row.logprobs)]
            self.inputs[i] = [[value, token, None] for value, token in zip(values, prompt.ids, strict=True)][start:]
            self.input_tops[i] = [None, *map(_told, row.top_logprobs)][start:]

    def _whole(self, stream: Stream | None, plain: Sequence[Plain]) -> Response:
        answers = [self._entry(stream, i, one) for i, one in enumerate(plain)]
        return json_answer(answers if self.listed else answers[0])

    async def _events(self, stream: Stream, plain: Sequence[Plain]) -> AsyncGenerator[str, None]:
        """Each event contains its sample so far, or only the new part. Fewer events are sent under load."""
        incremental = self.body.incremental_streaming_output
        tokens, spent = 0, -FREE
        try:
            async for delta in stream:
                one = plain[delta.index]
                one.feed(delta)
                tokens += len(delta.token_ids)
                cost = 0 if incremental else len(one.ids) + len(self.inputs[self.owners[delta.index]])
                late = not stream.caught_up or spent + cost > REPEATS * tokens
                if delta.finish_reason is None and late:
                    continue
                spent += cost
                long = len(one.ids) - one.told[1] + (0 if one.told[1] else len(self.inputs[self.owners[delta.index]]))
                write = partial(self._event, stream, delta.index, one)
                text = await asyncio.to_thread(write) if long > LONG else write()
                if incremental:
                    one.told = len(one.pieces), len(one.ids)
                yield text
        except Glm5Error as error:
            yield event(ApiError.of(error).body())
        except Exception:
            log.exception("A streamed answer failed.")
            yield event(ApiError(500, INTERNAL).body())
        yield DONE

    def _event(self, stream: Stream, index: int, plain: Plain) -> str:
        entry = self._entry(stream, index, plain)
        return framed("".join(json_pieces({**entry, "index": index} if self.listed else entry)))

    def _entry(self, stream: Stream | None, index: int, plain: Plain) -> dict[str, Any]:
        """A sample, without the part that an incremental stream has sent. Contains iterators (see `json_answer`)."""
        owner, (pieces, start) = self.owners[index], plain.told
        versions = plain.versions[start:]
        meta: dict[str, Any] = {
            "id": self.names[owner],
            "finish_reason": plain.finish,
            "prompt_tokens": len(self.prompts[owner].ids),
            "completion_tokens": len(plain.ids),
            "cached_tokens": 0 if stream is None else stream.requests[index].completion.cached_len,
            "weight_version": str(plain.versions[-1] if plain.versions else self.service.weight_version),
            "output_weight_versions": versions,
            "e2e_latency": time.monotonic() - self.began,
        }
        if self.body.return_logprob:
            meta["input_token_logprobs"] = [] if start else iter(self.inputs[owner])
            pairs = zip(plain.logprobs[start:], plain.ids[start:], strict=True)
            meta["output_token_logprobs"] = ([finite(value), token, None] for value, token in pairs)
            if self.body.top_logprobs_num:
                meta["input_top_logprobs"] = [] if start else iter(self.input_tops[owner])
                meta["output_top_logprobs"] = map(_told, plain.tops[start:])
        return {"text": "".join(plain.pieces[pieces:]), "output_ids": plain.ids[start:], "meta_info": meta}


def _told(top: dict[int, float]) -> list[list[Any]]:
    """The likeliest tokens of one position, without those of probability 0."""
    return [[value, token, None] for token, value in top.items() if math.isfinite(value)]
