"""The native surface, compatible with SGLang: token ids in and out, and the engine control that a trainer needs.

`/generate` reports the log-probability, the id and the weight version of every sampled token, the stop token included.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from glm5 import __version__
from glm5.engine import weights
from glm5.errors import Glm5Error
from glm5.records import SamplingParams
from glm5.serve.errors import ApiError
from glm5.serve.prompts import encode
from glm5.serve.service import Service, service_of
from glm5.serve.surfaces.native.generation import Generation
from glm5.serve.surfaces.native.schema import AbortRequest, GenerateRequest, NoFields, PauseRequest, UpdateRequest
from glm5.serve.surfaces.schema import Body

HEALTH_SECONDS = 20.0
routes = APIRouter()


@routes.post("/generate")
async def generate(request: Request) -> Response:
    """Samples for prompts given as text or as ids."""
    service = service_of(request)
    body = await service.read(request, GenerateRequest)
    service.check_samples(sum(params.samples() for params in body.each()))
    prompts = [await service.make(encode, service.tokenizer, one) for one in body.prompts()]
    return await Generation(service, body, prompts).answer(request)


@routes.get("/get_model_info")
@routes.get("/model_info")
async def model_info(request: Request) -> dict[str, Any]:
    """The model's name, its longest context and its weight version."""
    service = service_of(request)
    info = {
        "model_path": service.model_name,
        "tokenizer_path": service.tokenizer_path or service.model_name,
        "is_generation": True,
    }
    return {**info, "max_model_len": service.max_length, "weight_version": str(service.weight_version)}


@routes.get("/get_server_info")
@routes.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """The server's limits and its state."""
    service = service_of(request)
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
async def weight_version(request: Request) -> dict[str, str]:
    """The weight version, as a string."""
    service = service_of(request)
    return {"weight_version": str(service.weight_version)}


@routes.get("/health_generate")
async def health_generate(request: Request) -> dict[str, str]:
    """Generate one token, to show that the engine works."""
    service = service_of(request)
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
        raise ApiError(503, f"No token was generated within {HEALTH_SECONDS:g} seconds.", code="slow") from None
    return {"status": "ok"}


@routes.post("/update_weights_from_disk")
async def update_weights(request: Request) -> Response:
    """Replace the weights by those of a checkpoint directory, without ending requests."""
    service = service_of(request)
    body = await service.read(request, UpdateRequest)
    # One update at a time: a version number never stands for two sets of weights, and memory holds one extra copy.
    async with service.updating:
        return await _update(service, body)


@routes.post("/pause_generation")
async def pause(request: Request) -> dict[str, Any]:
    """Stop generation after the current step. The samples are kept, or ended on request."""
    service = service_of(request)
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
    """Resume generation after a pause."""
    service = service_of(request)
    await _optional(service, request, NoFields)
    service.thread.pause(False)
    return {"status": "ok", "message": "Generation continues."}


@routes.post("/abort_request")
async def abort(request: Request) -> dict[str, Any]:
    """End the samples of one request by its `rid`, or all samples."""
    service = service_of(request)
    body = await service.read(request, AbortRequest)
    return {"status": "ok", "aborted": service.thread.abort(None if body.abort_all else body.rid)}


@routes.get("/flush_cache")
@routes.post("/flush_cache")
async def flush_cache(request: Request) -> dict[str, Any]:
    """Empty the prefix cache. Answers 400 while a sample is running."""
    service = service_of(request)
    if service.thread.samples:
        text = f"The cache is in use by {service.thread.samples} samples; wait for them or abort them first."
        raise ApiError(400, text, code="busy")
    await service.thread.call(lambda engine: engine.flush_cache())
    return {"status": "ok", "message": "The prefix cache is empty."}


async def _optional(service: Service, request: Request, kind: type[Body]) -> Body:
    """Read an optional body; without a body, the fields have their defaults."""
    if request.headers.get("content-length") in (None, "0") and "transfer-encoding" not in request.headers:
        return kind()
    return await service.read(request, kind)


async def _update(service: Service, body: UpdateRequest) -> Response:
    """Read and check weights while the engine runs, then apply them between two steps."""
    present = service.weight_version
    version = present + 1 if body.weight_version is None else int(body.weight_version)
    if version <= present:
        text = f"weight_version: {version} is not greater than {present}, the present version of the server."
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
    message = f"The weights were updated to version {version}."
    return JSONResponse(
        {"success": True, "message": message, "num_paused_requests": waiting if service.thread.paused else 0}
    )


def _refused(error: ApiError) -> Response:
    """A failed update that changed nothing, in SGLang's format and in ours."""
    return JSONResponse(
        {"success": False, "message": str(error), "num_paused_requests": 0, **error.body()}, error.status
    )
