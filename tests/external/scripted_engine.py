"""An HTTP server with the part of SGLang's API that the gateway uses. It answers with prepared texts and writes down
every token that it samples."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from glm5.chat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sampled:
    """One answer. Its log-probabilities are exact in single precision."""

    session: str
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass
class ScriptedServer:
    """`script` makes the text of an answer from the text of its prompt, both with special tokens spelled out. Each
    answer comes `pause` seconds after its request, in two events, with the next weight version."""

    tokenizer_path: Path
    script: Callable[[str], str] = lambda prompt: "</think>yes<|user|>"
    pause: float = 0.0
    log: list[Sampled] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all requests."""

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer.load(self.tokenizer_path)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        routes = [
            Route("/model_info", self._info),
            Route("/generate", self._generate, methods=["POST"]),
        ]
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    async def _info(self, request: Request) -> JSONResponse:
        told = {"tokenizer_path": str(self.tokenizer_path), "max_model_len": 1 << 15}
        return JSONResponse({**told, "weight_version": str(len(self.log))})

    async def _generate(self, request: Request) -> StreamingResponse:
        body = await request.json()
        self.asked.append(body)
        return StreamingResponse(self._events(body, request.headers["x-session-id"]), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any], session: str) -> AsyncIterator[str]:
        await asyncio.sleep(self.pause)
        text = self.script(self._tokenizer.decode(body["input_ids"]))
        ids = self._tokenizer.encode(text, allow_special=True)
        most = body["sampling_params"]["max_new_tokens"]
        reason = {"type": "length", "length": most} if len(ids) > most else {"type": "stop", "matched": ids[-1]}
        ids, version = ids[:most], len(self.log)
        logprobs = [-(1 + (7 * i + version) % 97) / 64 for i in range(len(ids))]
        self.log.append(Sampled(session, body["input_ids"], ids, logprobs, [version] * len(ids)))
        half = len(ids) // 2
        for start, end in ((0, half), (half, len(ids))):
            meta = {
                "completion_tokens": end,
                "output_token_logprobs": [[logprobs[i], ids[i], None] for i in range(start, end)],
                "weight_version": str(version),
                "finish_reason": reason if end == len(ids) else None,
            }
            yield f"data: {json.dumps({'output_ids': ids[start:end], 'meta_info': meta})}\n\n"
        yield "data: [DONE]\n\n"
