"""Our requests and readers against the servers' own code, without the packages for GPUs that it imports:

    python serving_contracts.py sglang|vllm FOLDER

FOLDER has their unpacked files. Prints one JSON object of what was found.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from glm5.records import SamplingParams
from glm5.rollout.completions_engine import CompletionsEngine, CompletionsReading, ServerInfo
from glm5.rollout.engine_events import Reading, spanned
from glm5.rollout.engines import HttpEngine
from glm5.rollout.given_servers import SglangServer, VllmServer
from tests.external.serving_parsers import prepare

ABSENT = {
    "sglang": "numpy psutil requests torch tqdm transformers xgrammar zmq sglang.srt.beam_search "
    "sglang.srt.environ sglang.srt.lora sglang.srt.managers.embed_types sglang.srt.managers.kv_hints "
    "sglang.srt.managers.schedule_batch sglang.srt.multimodal sglang.srt.sampling.sampling_mask "
    "sglang.srt.sampling.watermarking sglang.srt.utils.field_validators sglang.srt.utils.msgpack_utils",
    "vllm": "numpy psutil torch transformers vllm.collect_env vllm.config vllm.distributed vllm.engine "
    "vllm.entrypoints.rl.online.metrics vllm.entrypoints.chat_utils vllm.envs vllm.logger vllm.logprobs vllm.outputs "
    "vllm.renderers vllm.sampling_params vllm.utils vllm.v1",
}
SHELLS = {
    "sglang": ["", "api", "api.v1", "srt", "srt.managers", "srt.sampling", "srt.utils"],
    "vllm": [
        "",
        *("entrypoints", "entrypoints.openai", "entrypoints.openai.completion", "entrypoints.generate"),
        *("entrypoints.generate.base", "entrypoints.rl", "entrypoints.rl.online", "entrypoints.serve"),
        *("entrypoints.serve.engine", "entrypoints.serve.dev", "entrypoints.serve.dev.rpc"),
        *("entrypoints.serve.dev.cache", "entrypoints.serve.dev.server_info"),
    ],
}
PARAMS = [
    SamplingParams(max_tokens=5),
    SamplingParams(
        max_tokens=9, temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, seed=2**62, stop=("x",), stop_token_ids=(1, 2),
        ignore_eos=True, min_tokens=2, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1,
    ),
]  # fmt: skip


class Recorder:
    """Stands for vLLM's engine: what its routes call, in order."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.version = "default"

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append([name, list(args), kwargs])
            if name == "update_weight_version":
                self.version = args[0]
            return {"get_weight_version": self.version, "collective_rpc": [None], "reset_prefix_cache": True}.get(name)

        return call


async def vllm() -> dict[str, Any]:
    """The servers' routes take what `VllmServer` sends, and their models what `CompletionsEngine` does."""
    routers = [
        importlib.import_module(f"vllm.entrypoints.{name}.api_router")
        for name in ("rl.online", "serve.dev.rpc", "serve.dev.cache", "serve.dev.server_info")
    ]
    routers[-1]._get_system_env_info_cached = dict
    app, recorder = FastAPI(), Recorder()
    for module in routers:
        module.logger = logging.getLogger("vllm")
        app.include_router(module.router)
    app.state.engine_client = recorder
    app.state.vllm_config = {"model_config": {"logprobs_mode": "processed_logprobs"}}
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")
    server = VllmServer(ServerInfo("http://engine", False, "m", versions=True), client=client)
    await server.check()
    before = (await client.get("/weight_info")).json()
    await server.load(Path("/weights"), 3)
    after = (await client.get("/weight_info")).json()
    protocol = importlib.import_module("vllm.entrypoints.openai.completion.protocol")
    unknown = []
    engine = CompletionsEngine("http://engine", model="m", versions=True)

    async def version() -> int:
        return 3

    engine.version = version  # type: ignore[method-assign]
    for params in PARAMS:
        _, body, reading = await engine._request([5, 6], params, 64)
        protocol.CompletionRequest.model_validate(body)
        unknown += [name for name in body if name not in protocol.CompletionRequest.model_fields]
    read = []
    for ids, reason in (([7, 8], None), ([9], "stop")):
        spans = [{"version": "3", "start": 0, "end": 3}] if reason else None
        scores = protocol.CompletionLogProbs(token_logprobs=[-0.5] * len(ids), tokens=["t"] * len(ids))
        choice = protocol.CompletionResponseStreamChoice(
            index=0, text="", logprobs=scores, finish_reason=reason, token_ids=ids, weight_versions=spans
        )
        chunk = protocol.CompletionStreamResponse(model="m", choices=[choice])
        delta = reading.feed(chunk.model_dump_json(exclude_unset=True))
        read += [[delta.token_ids, delta.logprobs, delta.finish_reason]]
    assert isinstance(reading, CompletionsReading)
    return {
        "calls": recorder.calls,
        "versions": [before, after],
        "unknown": unknown,
        "read": read,
        "told": reading.told,
    }


async def sglang() -> dict[str, Any]:
    """Their decoders take what `HttpEngine` and `SglangServer` send."""
    from pydantic import TypeAdapter

    for name in ("ImageData", "VideoData"):
        setattr(sys.modules["sglang.srt.utils"], name, Any)
    api = importlib.import_module("sglang.api.v1.api_types")
    sampling = importlib.import_module("sglang.srt.sampling.sampling_params")
    structs = importlib.import_module("sglang.srt.managers.io_struct")
    versions = importlib.import_module("sglang.srt.utils.weight_versions")
    kept = []
    for params in PARAMS:
        _, body, reading = await HttpEngine("http://engine")._request([5, 6], params, 64)
        request = api.GenerateRequest.from_json_value(body)
        kept.append([list(request.input_ids), request.stream, request.return_logprob])
        theirs = sampling.SamplingParams(**body["sampling_params"])
        theirs.verify(100)
        kept[-1] += [theirs.max_new_tokens, theirs.sampling_seed, sorted(theirs.stop_token_ids or ())]
    kinds = {
        "/pause_generation": "PauseGenerationReqInput", "/continue_generation": "ContinueGenerationReqInput",
        "/abort_request": "AbortReq", "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
        "/begin_weight_update": "BeginWeightUpdateReqInput", "/end_weight_update": "EndWeightUpdateReqInput",
    }  # fmt: skip
    calls: list[Any] = []
    app = FastAPI()

    def route(path: str, kind: Any) -> None:
        @app.post(path)
        async def take(body: dict[str, Any]) -> dict[str, Any]:
            calls.append([path, _public(kind.validate_python(body))])
            return {"success": True, "message": ""}

    for path, name in kinds.items():
        route(path, TypeAdapter(getattr(structs, name)))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")
    server = SglangServer(ServerInfo("http://engine", True), client=client)
    await server.load(Path("/weights"), 3)
    async with server.receiving():
        pass
    await server.abort()
    meta: dict[str, Any] = {"id": "r", "completion_tokens": 3, "prompt_tokens": 2, "finish_reason": {"type": "stop"}}
    meta["output_token_logprobs"] = [[-0.5, 7, None], [-0.5, 8, None], [-0.25, 9, None]]
    events = [versions.WeightVersionEvent(old_version="2", num_output_tokens=1)]
    spans = versions.compute_weight_version_spans(events, "3", 3)
    versions.add_weight_versions_to_meta_info(meta, spans, 3)
    delta = reading.feed(json.dumps({"text": "", "output_ids": [7, 8, 9], "meta_info": meta}))
    assert isinstance(reading, Reading) and reading.told == spanned(meta["weight_versions"], 3)
    return {"kept": kept, "calls": calls, "read": [delta.token_ids, delta.logprobs, reading.told]}


def _public(struct: Any) -> dict[str, Any]:
    import msgspec

    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value not in (None, "")}


if __name__ == "__main__":
    which, folder = sys.argv[1:]
    prepare(which, Path(folder), ABSENT[which].split(), SHELLS[which])
    print(json.dumps(asyncio.run({"sglang": sglang, "vllm": vllm}[which]())))
