"""Requests to all workers at once: weights, pauses, aborts, cache flushes, and status."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import httpx
from starlette.responses import JSONResponse, Response

from glm5.serve.errors import ApiError
from glm5.serve.router.places import weights_stamp
from glm5.serve.router.pool import PAUSE, UPDATE, WorkerPool
from glm5.serve.router.workers import Worker

CONTINUE = "/continue_generation"
METRICS_SECONDS = 5.0


async def tell_all(pool: WorkerPool, path: str, method: str, body: bytes) -> Response:
    """Send a request to every running worker and combine the answers: success only if all succeed.

    All workers get the same weight version. A worker that fails an update which others applied is replaced. A worker
    that is starting gets the update before it joins.
    """
    pushed, stamp = None, weights_stamp("")
    async with pool.pushing if path in (UPDATE, PAUSE, CONTINUE) else contextlib.nullcontext():
        workers = pool.live()
        if not workers:
            raise ApiError(503, "No engine is ready; retry later.", code="no_engine", retry_after=5)
        if path == UPDATE and method == "POST":
            body, pushed = _with_version(body, pool.version + 1)
            stamp = weights_stamp(str((pushed or {}).get("model_path", "")))
        answers = dict(
            zip((w.rank for w in workers), await asyncio.gather(*(_tell(w, method, path, body) for w in workers)))
        )
        well = {rank for rank, answer in answers.items() if answer is not None and answer.status_code == 200}
        if well and pushed is not None:
            pool.pushed, pool.version, pool.stamp = pushed, int(pushed["weight_version"]), stamp
            for worker in workers:
                if worker.rank not in well:
                    pool.condemn(worker)
        elif path in (PAUSE, CONTINUE) and well:
            pool.paused = path == PAUSE
    return _combined(answers)


def shown_of(pool: WorkerPool) -> dict[str, Any]:
    """The workers, and by role how many there should be and how many take requests."""
    roles = {role: [one for one in pool.places if one.role == role] for role in pool.roles}
    engines = {
        role: {"wanted": sum(one.wanted for one in own), "up": sum(one.state == "up" for one in own)}
        for role, own in roles.items()
    }
    shown = [place.shown() for place in pool.places]
    state = {"weight_version": str(pool.version), "paused": pool.paused}
    return {"workers": shown, "engines": engines, "max_engines": pool.most, **state}


def asked_size(body: bytes) -> tuple[int, str]:
    """The number of engines and the role in the body of a request to resize. Raises ApiError 400."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    count, role = (fields.get("engines"), fields.get("role", "")) if isinstance(fields, dict) else (None, "")
    known = isinstance(fields, dict) and not fields.keys() - {"engines", "role"}
    if not known or not isinstance(count, int) or isinstance(count, bool) or not isinstance(role, str):
        raise ApiError(400, 'The body must be {"engines": N}, and may have a "role" beside it.')
    return count, role


async def _tell(worker: Worker, method: str, path: str, body: bytes) -> httpx.Response | None:
    """The worker's answer, or None from a lost worker."""
    try:
        return await worker.tell(method, path, body)
    except httpx.TransportError:
        return None


def _with_version(body: bytes, version: int) -> tuple[bytes, dict[str, Any] | None]:
    """The body with a weight version, and the fields to send to workers that start later. A `body` that is not a JSON
    object is returned unchanged, with None."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body, None
    if not isinstance(fields, dict):
        return body, None
    if fields.get("weight_version") is None:
        fields["weight_version"] = version
    kept = {name: fields[name] for name in ("model_path", "load_format", "weight_version") if name in fields}
    return json.dumps(fields).encode(), kept


def _combined(answers: Mapping[int, httpx.Response | None]) -> Response:
    """One answer: numbers are summed, other fields are those of the first worker; `workers` has the answer of each."""
    bodies = {rank: _body(answer) for rank, answer in answers.items()}
    statuses = {rank: 503 if answer is None else answer.status_code for rank, answer in answers.items()}
    each = [{"id": rank, "status": statuses[rank], "answer": bodies[rank]} for rank in answers]
    failed = {rank: status for rank, status in statuses.items() if status != 200}
    if not failed:
        first = next(iter(bodies.values()))
        return JSONResponse({**first, **_sums(list(bodies.values())), "workers": each})
    worst = max(failed, key=lambda rank: failed[rank])
    texts = {rank: _sentence(bodies[rank]) for rank in failed}
    if len(failed) == len(answers) and len(set(texts.values())) == 1:
        text = texts[worst]
    else:
        text = f"{len(failed)} of {len(answers)} workers failed. " + " ".join(
            f"Worker {rank}: {said}" for rank, said in texts.items()
        )
    old = bodies[worst].get("error")
    known = old if isinstance(old, dict) else {}
    error = ApiError(failed[worst], text, param=known.get("param"), code=known.get("code") or "worker_failed")
    answer = {**error.body(), "workers": each}
    if any("success" in body for body in bodies.values()):
        answer |= {"success": False, "message": str(error), "num_paused_requests": 0}
    return JSONResponse(answer, error.status, {"Retry-After": "1"} if error.status in (429, 503) else None)


def _sums(bodies: list[dict[str, Any]]) -> dict[str, int]:
    counted = [k for k, v in bodies[0].items() if isinstance(v, int) and not isinstance(v, bool)]
    return {name: sum(int(body.get(name, 0)) for body in bodies) for name in counted}


def _body(answer: httpx.Response | None) -> dict[str, Any]:
    if answer is None:
        return ApiError(503, "The engine process ended before it answered.", code="engine_lost").body()
    try:
        found = answer.json()
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"text": answer.text[:500]}


def _sentence(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message", "")) if isinstance(error, dict) else str(body.get("text", ""))


async def expositions(pool: WorkerPool) -> dict[int, str]:
    """The metrics of all workers that answer in time."""

    async def one(worker: Worker) -> tuple[int, str]:
        try:
            async with asyncio.timeout(METRICS_SECONDS):
                answer = await worker.client.get("/metrics")
        except (httpx.TransportError, TimeoutError):
            return worker.rank, ""
        return worker.rank, answer.text if answer.status_code == 200 else ""

    return dict(await asyncio.gather(*(one(worker) for worker in pool.live())))
