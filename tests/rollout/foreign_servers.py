"""The surfaces of SGLang and vLLM over an engine of ours: they take what those servers take, by the fields that
serving_contracts.json records, and answer in their form. `fault` names what goes wrong with the next answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from glm5.engine import weights
from glm5.engine.engine import Engine
from glm5.records import SamplingParams
from glm5.rollout.engines import LocalEngine
from glm5.serve.connection import Server, ServerConfig, bind, url_of
from glm5.serve.engine_thread import EngineThread
from glm5.serve.options import Limits
from glm5.serve.samples import Delta

CONTRACTS = json.loads((Path(__file__).parent / "serving_contracts.json").read_text("utf-8"))
OURS = {"incremental_streaming_output", "any_version"}
"""Fields that only our own server knows; SGLang reads past them."""


class Foreign:
    """What both have in common. `asked` has every request as (line, query and body); `wrong` those that the server
    would not take."""

    which = ""
    hidden: frozenset[str] = frozenset()
    """Lines of routes that this server lacks."""

    def __init__(self, thread: EngineThread, folder: Path, hidden: frozenset[str] = frozenset()) -> None:
        self.thread, self.folder, self.hidden = thread, folder, hidden
        self.asked, self.wrong = list[tuple[str, dict[str, Any]]](), list[str]()
        self.fault, self.label, self.going = "", "default", asyncio.Event()
        self.labels = {thread.engine.weight_version: self.label}
        self.going.set()
        self.app = FastAPI()
        self.app.middleware("http")(self._checked)
        for line in CONTRACTS[self.which]["routes"]:
            method, _, path = line.partition(" ")
            if path and line not in hidden and (answer := getattr(self, self._name(path), None)):
                self.app.add_api_route(path, answer, methods=[method], response_model=None)

    @staticmethod
    def _name(path: str) -> str:
        return path.removeprefix("/").replace("/", "_")

    async def _checked(self, request: Request, call: Any) -> Response:
        line, raw = f"{request.method} {request.url.path}", await request.body()
        given = {**request.query_params, **(json.loads(raw) if raw else {})}
        self.asked.append((line, given))
        routes = CONTRACTS[self.which]["routes"]
        if line in routes:
            self._fields(line, given, routes[line])
        found: Response = await call(request)
        return found

    def _fields(self, line: str, given: Mapping[str, Any], known: Mapping[str, bool]) -> None:
        self.wrong += [f"{line}: unknown {name}" for name in given if name not in known and name not in OURS]
        self.wrong += [f"{line}: no {name}" for name, needed in known.items() if needed and name not in given]

    async def load(self, folder: str) -> None:
        """The engine's weights become those of a folder; their label is set apart."""
        engine = self.thread.engine
        staged = await asyncio.to_thread(partial(weights.stage, engine.model, Path(folder), tokenizer=engine.tokenizer))
        await self.thread.call(lambda engine: weights.apply(engine, staged, engine.weight_version + 1))

    def relabel(self, label: str) -> None:
        self.label = label
        self.labels[self.thread.engine.weight_version] = label

    async def deltas(self, ids: list[int], params: SamplingParams) -> AsyncIterator[Delta]:
        async for delta in LocalEngine(self.thread).stream(ids, params, "session"):
            yield delta

    def spans(self, versions: Sequence[int]) -> list[dict[str, Any]]:
        """Which label sampled which tokens."""
        found: list[dict[str, Any]] = []
        for place, version in enumerate(versions):
            label = "99" if self.fault == "version" else self.labels[version]
            if found and found[-1]["version"] == label:
                found[-1]["end"] = place + 1
            else:
                found.append({"version": label, "start": place, "end": place + 1})
        if self.fault == "short spans" and found:
            found[-1]["end"] -= 1
        return found


class Sglang(Foreign):
    which = "sglang"

    async def model_info(self) -> dict[str, Any]:
        label = "99" if self.fault == "version" else self.label
        return {"model_path": str(self.folder), "tokenizer_path": str(self.folder), "weight_version": label}

    async def server_info(self) -> dict[str, Any]:
        return {"tp_size": 1, "version": CONTRACTS["sglang"]["version"]}

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        sampling = body["sampling_params"]
        self._fields("sampling_params", sampling, CONTRACTS["sglang"]["routes"]["sampling_params"])
        assert body["return_logprob"] is True and body["stream"] is True and sampling["no_stop_trim"] is True
        if self.fault == "refusal":
            return JSONResponse({"error": {"message": "unknown field `x`"}}, 400)
        params = SamplingParams(
            max_tokens=sampling["max_new_tokens"], temperature=sampling["temperature"],
            stop_token_ids=tuple(sampling["stop_token_ids"]), seed=sampling.get("sampling_seed"),
        )  # fmt: skip
        return StreamingResponse(self._events(body["input_ids"], params), media_type="text/event-stream")

    async def _events(self, ids: list[int], params: SamplingParams) -> AsyncIterator[str]:
        sampled, scores, versions = list[int](), list[Any](), list[int]()
        async for delta in self.deltas(ids, params):
            await self.going.wait()
            sampled += delta.token_ids
            scores += delta.logprobs
            versions += delta.weight_versions
            last = delta.finish_reason
            if self.fault in ("error", "end", "silence") and len(sampled) > 2:
                error = {"error": {"message": "the scheduler died", "type": "invalid_request_error", "code": 400}}
                if self.fault == "error":
                    yield f"data: {json.dumps(error)}\n\n"
                if self.fault == "silence":
                    await asyncio.sleep(60)
                return
            if self.fault == "text":
                yield f"data: {json.dumps({'text': 'no ids'})}\n\n"
                return
            reason = None if last is None else {"type": "abort" if self.fault == "abort" else last}
            told = [[float("nan") if self.fault == "nan" else score, token, None] for score, token in zip(
                scores, sampled, strict=True)]  # fmt: skip
            meta = {
                "id": "r", "finish_reason": reason, "prompt_tokens": len(ids), "completion_tokens": len(sampled),
                "cached_tokens": 0, "weight_version": "99" if self.fault == "version" else self.label,
                "output_token_logprobs": [] if self.fault == "no scores" else told,
            }  # fmt: skip
            if last is not None:
                meta["weight_versions"] = self.spans(versions)
            yield f"data: {json.dumps({'text': '', 'output_ids': sampled, 'meta_info': meta})}\n\n"
        yield "data: [DONE]\n\n"

    async def pause_generation(self, request: Request) -> dict[str, str]:
        assert (await request.json())["mode"] == "retract"
        self.thread.pause(True)
        await self.thread.call(lambda engine: None)
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def continue_generation(self) -> dict[str, str]:
        self.thread.pause(False)
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def abort_request(self) -> Response:
        self.thread.abort(None)
        return Response()

    async def update_weights_from_disk(self, request: Request) -> Response:
        body = await request.json()
        if not self.thread.paused and self.thread.samples:
            raise HTTPException(500, "It would wait until all generations have ended.")
        if self.fault == "load":
            return JSONResponse({"success": False, "message": "no such file", "num_paused_requests": 0}, 400)
        await self.load(body["model_path"])
        self.relabel(body["weight_version"])
        return JSONResponse({"success": True, "message": "Succeeded.", "num_paused_requests": 0})


class Vllm(Foreign):
    which = "vllm"
    mode = "processed_logprobs"

    async def v1_models(self) -> dict[str, Any]:
        card = {"id": "policy", "object": "model", "root": str(self.folder), "max_model_len": 4096}
        return {"object": "list", "data": [card]}

    async def weight_info(self) -> dict[str, str]:
        return {"weight_version": "99" if self.fault == "version" else self.label}

    async def server_info(self) -> dict[str, Any]:
        return {"vllm_config": {"model_config": {"logprobs_mode": self.mode}}, "vllm_env": {}, "system_env": {}}

    async def v1_completions(self, request: Request) -> Response:
        body = await request.json()
        assert body["logprobs"] == 0 and body["return_token_ids"] is True
        if self.fault == "refusal":
            return JSONResponse({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, 400)
        params = SamplingParams(
            max_tokens=body["max_tokens"], temperature=body.get("temperature", 1.0),
            stop_token_ids=tuple(body.get("stop_token_ids", ())), seed=body.get("seed"),
        )  # fmt: skip
        if not body.get("stream"):
            return JSONResponse({"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}]})
        return StreamingResponse(self._events(body, params), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any], params: SamplingParams) -> AsyncIterator[str]:
        versions, asked = list[int](), body.get("return_weight_versions")
        async for delta in self.deltas(body["prompt"], params):
            await self.going.wait()
            versions += delta.weight_versions
            if self.fault in ("error", "end", "silence") and len(versions) > 2:
                error = {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}
                if self.fault == "error":
                    yield f"data: {json.dumps(error)}\n\n"
                if self.fault == "silence":
                    await asyncio.sleep(60)
                return
            scores = [float("nan")] * len(delta.logprobs) if self.fault == "nan" else delta.logprobs
            logprobs = {"text_offset": [], "token_logprobs": scores, "tokens": [], "top_logprobs": []}
            choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": logprobs, "token_ids": delta.token_ids}
            if self.fault == "no scores":
                choice["logprobs"] = None
            if self.fault == "text":
                choice |= {"token_ids": None, "logprobs": {**logprobs, "tokens": ["the"]}}
            if delta.finish_reason is not None:
                choice["weight_versions"] = self.spans(versions) if asked else None
            choice["finish_reason"] = "abort" if delta.finish_reason and self.fault == "abort" else delta.finish_reason
            yield f"data: {json.dumps({'id': 'cmpl', 'object': 'text_completion', 'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    async def pause(self, mode: str) -> dict[str, str]:
        assert mode == "keep"
        self.thread.pause(True)
        await self.thread.call(lambda engine: None)
        return {"status": "paused"}

    async def resume(self) -> dict[str, str]:
        self.thread.pause(False)
        return {"status": "resumed"}

    async def abort_requests(self) -> dict[str, Any]:
        return {"status": "aborted", "aborted": self.thread.abort(None)}

    async def collective_rpc(self, request: Request) -> Response:
        body = await request.json()
        assert body["method"] == "reload_weights" and self.thread.paused
        if self.fault == "load":
            error = {"error": {"message": "RuntimeError('no such file')", "type": "InternalServerError", "code": 500}}
            return JSONResponse(error, 500)
        await self.load(body["kwargs"]["weights_path"])
        return JSONResponse({"results": [None]})

    async def update_weight_version(self, request: Request) -> dict[str, Any]:
        label = (await request.json())["new_version"]
        self.relabel(label)
        return {"success": True, "new_version": label}

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, bool]:
        return {"success": reset_running_requests or not self.thread.samples}


KINDS: dict[str, type[Foreign]] = {"sglang": Sglang, "vllm": Vllm}


@contextmanager
def in_thread(which: str, folder: Path, hidden: frozenset[str] = frozenset()) -> Iterator[tuple[str, Foreign]]:
    """(URL, server) with the checkpoint of a folder, in a thread of its own."""
    thread = EngineThread(Engine.from_pretrained(folder, exact=True))
    thread.start()
    foreign = KINDS[which](thread, folder, hidden)
    with bind("127.0.0.1", 0) as listener:
        server = Server(ServerConfig(foreign.app, Limits(), 1.0), lambda _: None)
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        serving.start()
        try:
            yield url_of(listener), foreign
        finally:
            server.should_exit = True
            serving.join(20)
            thread.stop(0.0)
