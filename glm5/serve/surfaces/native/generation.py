"""POST /generate: samples as plain text and ids, in one piece or as events."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from glm5.chat.tokenizer import StreamDecoder, Tokenizer
from glm5.engine.stops import StopMatcher, StopStringDetector
from glm5.errors import Glm5Error
from glm5.obs.logs import get_logger
from glm5.records import Completion
from glm5.serve.errors import CLIENT_GONE, INTERNAL, ApiError
from glm5.serve.http_io import DONE, EventResponse, event, framed, json_answer, json_pieces, unless_gone
from glm5.serve.prompts import Prompt
from glm5.serve.reply import finite
from glm5.serve.samples import Delta, Stream
from glm5.serve.service import Service
from glm5.serve.surfaces.native.schema import GenerateRequest, NativeSampling

log = get_logger("serve")

REPEATS = 32
"""Limit of the tokens in all cumulative events of a request: this many per generated token, plus `FREE`."""
FREE = 1 << 14
"""Tokens that the cumulative events of a request may contain in addition. Event n of one sample contains n tokens, so n
events contain about n^2 / 2; the limit is reached after about 200 events of one token each."""
LONG = 1024
"""Longer events, in tokens, are encoded in a thread."""


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
                400, "max_new_tokens must be 0 for all prompts of a batch or for none.", param="sampling_params"
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
        """Each event contains the whole sample so far, or only its new part. Fewer events are sent under load."""
        incremental = self.body.incremental_streaming_output
        tokens, spent = 0, -FREE
        sent = [0] * len(plain)  # tokens of each sample
        try:
            async for delta in stream:
                one = plain[delta.index]
                one.feed(delta)
                tokens += len(delta.token_ids)
                cost = 0 if incremental else len(one.ids) + len(self.inputs[self.owners[delta.index]])
                late = not stream.caught_up or spent + cost > REPEATS * tokens
                few = len(one.ids) - sent[delta.index] < (self.params[self.owners[delta.index]].stream_interval or 1)
                if delta.finish_reason is None and (late or (few and sent[delta.index])):
                    continue
                sent[delta.index] = len(one.ids)
                spent += cost
                long = len(one.ids) - one.told[1] + (0 if one.told[1] else len(self.inputs[self.owners[delta.index]]))
                write = partial(self._event, stream, delta.index, one)
                text = await asyncio.to_thread(write) if long > LONG else write()
                if incremental:
                    one.told = len(one.pieces), len(one.ids)
                yield text
        except Glm5Error as error:
            for index, one in enumerate(plain):
                if incremental and len(one.ids) > sent[index]:  # what was sampled is not lost with the rest
                    yield self._event(stream, index, one)
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
