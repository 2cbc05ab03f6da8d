"""Weights over `torch.distributed`, as the rollout process directs it: the learner sends, engines receive.

The learner's store has a queue of requests: to open a group, to send a version of the weights in it, to close it.
Engines get theirs over HTTP, under SGLang's names. A group lasts while its engines do. One that breaks is closed on all
sides, so that nobody waits in it, and the push begins again with the engines that are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol

import httpx
import torch.distributed as dist

from glm5.engine.weight_group import SECONDS, connect, new_name
from glm5.errors import EngineError
from glm5.obs.logs import get_logger
from glm5.serve.router.pool import WorkerPool
from glm5.serve.router.workers import Worker
from glm5.serve.weight_groups import alone

log = get_logger("rollout")

INIT, PART, DESTROY = "/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"
QUEUE = "requests"
GRACE_SECONDS = 10.0
"""An engine that has not answered this long after its group was closed hangs."""
PART_SECONDS, SEND_SECONDS = 600.0, 1800.0
"""Longest time for an engine to receive, check and load one buffer, and for the learner to send all."""
ATTEMPTS = 3
"""How often a push begins again although no engine was lost."""
Parts = Sequence[Mapping[str, Any]]
"""The buffers of a set of weights, each as the fields of `weight_group.Part`."""


@dataclass(frozen=True)
class SenderAddress:
    """How to reach the learner's sender: its store, the secret prefix of its queue, and the backend of its groups."""

    host: str
    port: int
    prefix: str
    backend: str

    def store(self, seconds: float) -> dist.Store:
        """A new connection to its part of the store. Raises OSError or RuntimeError."""
        return dist.PrefixStore(self.prefix, connect((self.host, self.port), seconds))

    def ask(self, request: Mapping[str, Any], seconds: float) -> str:
        """Its answer to a request; "" if it did it, else what went wrong."""
        answer = secrets.token_hex(8)
        try:
            store = self.store(seconds)
            store.queue_push(QUEUE, json.dumps({**request, "answer": answer}))
            store.wait([answer], timedelta(seconds=seconds))
            found: bytes = store.get(answer)
            store.delete_key(answer)
        except (RuntimeError, OSError) as error:
            return f"The learner does not answer: {str(error).splitlines()[0]:.200}"
        return found.decode()


class Engine(Protocol):
    """An engine as a group sees it."""

    async def tell(self, method: str, path: str, body: bytes) -> httpx.Response:
        """The answer to a request. Raises httpx.TransportError if the engine is lost."""
        ...


@dataclass(frozen=True)
class Reply:
    """What became of a request to an engine. "broken": the group failed, not the engine."""

    state: Literal["ok", "refused", "broken", "lost"]
    text: str = ""


class WeightPush:
    """The sender and the group of the engines that got the last weights. Not for two tasks at a time."""

    def __init__(self, sender: SenderAddress) -> None:
        self.sender = sender
        self._name = ""
        self._engines: list[Engine] = []

    async def send(self, engines: Mapping[Engine, int], version: int, parts: Parts) -> dict[Engine, Reply]:
        """Send the learner's weights of `version` to engines; the number of each is that of its ranks. An engine with
        the reply "ok" has them."""
        found: dict[Engine, Reply] = {}
        left, attempts = list(engines), 0
        while left and attempts < ATTEMPTS:
            found |= await self._attempt({engine: engines[engine] for engine in left}, version, parts)
            again = [engine for engine in left if found[engine].state == "broken"]
            attempts += again == left
            left = again
        return found

    async def close(self) -> None:
        """Close the group on all sides, also if it is just being made."""
        name, engines = self._name, self._engines
        self._name, self._engines = "", []
        if not name:
            return
        body = json.dumps({"group_name": name}).encode()
        telling = [asyncio.ensure_future(_tell(engine, DESTROY, body)) for engine in engines]
        closing = asyncio.ensure_future(self._ask("close", name))
        await asyncio.wait([*telling, closing], timeout=GRACE_SECONDS)
        for task in (*telling, closing):
            task.cancel()

    async def _attempt(self, engines: Mapping[Engine, int], version: int, parts: Parts) -> dict[Engine, Reply]:
        if self._engines != list(engines):
            await self.close()
            opened = await self._open(engines)
            if any(reply.state != "ok" for reply in opened.values()):
                return {e: Reply("broken", reply.text) if reply.state == "ok" else reply for e, reply in opened.items()}
        sending = asyncio.ensure_future(self._ask("send", self._name, version=version))
        found: dict[Engine, Reply] = {}
        for index, part in enumerate(parts):
            fields: dict[str, Any] = {
                "group_name": self._name,
                "load_format": "flattened_bucket",
                "weight_version": str(version),
            }
            fields |= {"flush_cache": index == len(parts) - 1, "abort_all_requests": False}
            body = json.dumps({**part, **fields}).encode()
            found = await self._tell_all(PART, dict.fromkeys(engines, body), sending)
            if any(reply.state != "ok" for reply in found.values()):
                break
        else:
            return found
        await self.close()
        why = Reply("broken", (sending.result() if sending.done() else "") or "Another engine failed.")
        kept = ("refused", "lost", "ok") if index == len(parts) - 1 else ("refused", "lost")
        return {engine: reply if reply.state in kept else why for engine, reply in found.items()}

    async def _open(self, engines: Mapping[Engine, int]) -> dict[Engine, Reply]:
        self._name, self._engines = new_name(), list(engines)
        world = 1 + sum(engines.values())
        bodies, rank = {}, 1
        for engine, ranks in engines.items():
            fields = {"master_address": self.sender.host, "master_port": self.sender.port, "rank_offset": rank}
            fields |= {"world_size": world, "group_name": self._name, "backend": self.sender.backend}
            bodies[engine] = json.dumps(fields).encode()
            rank += ranks
        opening = asyncio.ensure_future(self._ask("open", self._name, world=world))
        return await self._tell_all(INIT, bodies, opening)

    async def _tell_all(
        self, path: str, bodies: Mapping[Engine, bytes], learner: asyncio.Future[str]
    ) -> dict[Engine, Reply]:
        """Send a request to every engine while the learner does its part. If one of them fails, the group is closed, so
        that the others do not wait for it."""
        tasks = {engine: asyncio.ensure_future(_tell(engine, path, body)) for engine, body in bodies.items()}
        waiting: set[asyncio.Future[Any]] = {*tasks.values()}
        limit = PART_SECONDS if path == PART else 2 * SECONDS
        broken, silent = False, Reply("lost", "It does not answer.")
        while waiting:
            watched = waiting if learner.done() else {*waiting, learner}
            done, _ = await asyncio.wait(watched, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            waiting -= done
            failed = learner.done() and learner.result() != ""
            states = {task.result().state for task in done if task is not learner} - {"ok"}
            if (failed or states) and not broken:
                broken, limit = True, GRACE_SECONDS
                await self.close()
                if path == INIT and states & {"refused", "lost"}:  # the others wait for it in vain, but they are well
                    silent = Reply("broken", "Another engine did not join the group.")
                    break
        for task in waiting:
            task.cancel()
        if not broken and path == INIT and await learner:
            await self.close()
            return dict.fromkeys(bodies, Reply("broken", learner.result()))
        return {engine: silent if task in waiting else task.result() for engine, task in tasks.items()}

    async def _ask(self, do: str, name: str, **fields: Any) -> str:
        request = {"do": do, "group": name, **fields}
        return await alone(partial(self.sender.ask, request, SEND_SECONDS if do == "send" else 2 * SECONDS))


class GroupPool(WorkerPool):
    """Workers that get their weights in a group with the learner. One that starts later gets the last ones so."""

    def __init__(self, *arguments: Any, push: WeightPush, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._push = push
        self._parts: Parts = ()

    async def push(self, version: int, parts: Parts) -> str:
        """Send weights to all running workers; those that did not take what others took are replaced. Returns what a
        worker said that refused them, or ""."""
        async with self.pushing:
            workers: Mapping[Engine, int] = dict.fromkeys(self.live(), 1)
            found = await self._push.send(workers, version, parts)
            if any(reply.state == "ok" for reply in found.values()):
                self.version, self._parts = version, parts
            for engine, reply in found.items():
                assert isinstance(engine, Worker)
                if reply.state != "ok":
                    log.warning(
                        "Engine %d did not take the weights of version %d: %s", engine.rank, version, reply.text
                    )
                    if self.version == version and self._holds(engine):
                        self.condemn(engine)
        return next((reply.text for reply in found.values() if reply.state in ("refused", "broken")), "")

    async def _catch_up(self, worker: Worker) -> None:
        await super()._catch_up(worker)
        if self._parts:
            reply = (await self._push.send({worker: 1}, self.version, self._parts))[worker]
            if reply.state != "ok":
                raise EngineError(f"The engine did not take the weights of version {self.version}: {reply.text:.500}")


async def _tell(engine: Engine, path: str, body: bytes) -> Reply:
    try:
        answer = await engine.tell("POST", path, body)
    except (httpx.TransportError, OSError, RuntimeError) as error:  # RuntimeError: its client has been closed
        return Reply("lost", f"It was lost: {type(error).__name__} {error}")
    told: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        told = answer.json()
    told = told if isinstance(told, dict) else {"message": answer.text[:500]}
    said = told.get("error")
    said = said if isinstance(said, dict) else {}
    text = str(said.get("message") or told.get("message") or "")
    if answer.status_code == 200 and told.get("success") is True:
        return Reply("ok")
    return Reply("broken" if said.get("code") == "group_failed" else "refused", text)
