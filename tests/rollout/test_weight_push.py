"""Weights from a learner to engines over torch.distributed: what they have afterwards, and what happens when one is
lost, refuses, or joins later. The engines run in this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from fastapi import FastAPI, Request
from torch.distributed import distributed_c10d

from glm5.chat.tokenizer import Tokenizer
from glm5.engine import weight_group
from glm5.engine.engine import Engine
from glm5.engine.weight_group import WeightGroup
from glm5.engine.weights import tensor_hashes
from glm5.errors import EngineError
from glm5.model.disk_names import disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.rl.drivers import weight_sender
from glm5.rl.drivers.weight_sender import WeightSender
from glm5.rollout import weight_push
from glm5.rollout.completions_engine import ServerInfo
from glm5.rollout.fleet import LocalFleet, RemoteFleet
from glm5.rollout.given_servers import SglangServer
from glm5.rollout.weight_push import INIT, PART, SenderAddress, WeightPush
from glm5.serve import weight_groups
from glm5.serve.app import create_app
from glm5.serve.options import EngineOptions, Limits
from glm5.serve.router.process import WorkerJob
from glm5.serve.router.workers import Patience, Worker

Make = Callable[..., GLM5ForCausalLM]


class Near(Worker, httpx.AsyncBaseTransport):
    """An engine in this process as a worker. It dies before it answers request number `dies` at `at`."""

    def __init__(
        self, model: GLM5ForCausalLM, tokenizer: Tokenizer, rank: int = 0, dies: int = -1, at: str = PART
    ) -> None:
        self.model, self.at, self.left = model, at, dies
        self.asked: list[str] = []
        self.app = create_app(Engine(model, tokenizer), tokenizer, model_name="m", trusted=True)
        self.service = self.app.state.service
        self.service.thread.start()
        self.gone = asyncio.Event()
        super().__init__(rank, self, Path("/nowhere"))

    def connect(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self, base_url="http://worker")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        self.left -= path == self.at
        if self.left == 0:
            self.send_signal(9)
        if self.gone.is_set():
            raise httpx.ReadError("gone")
        return await httpx.ASGITransport(self.app).handle_async_request(request)

    pid = 1

    async def wait(self) -> int:
        await self.gone.wait()
        return 9

    def send_signal(self, number: int) -> None:
        self.gone.set()
        self.service.groups.close()
        self.service.thread.stop(0.0)


def run(test: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    async def inner() -> None:
        await test(*arguments)

    asyncio.run(inner())


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightSender]:
    """A learner that sends small buffers."""
    monkeypatch.setattr(weight_sender, "pack", partial(weight_group.pack, limit=8000))
    with WeightSender("127.0.0.1", "gloo") as found:
        yield found


@pytest.fixture
def make(small: Any, tokenizer: Tokenizer) -> Make:
    return partial(small, vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)


def test_a_push_is_what_a_checkpoint_gives(
    sender: WeightSender, make: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async def test() -> None:
        engines = [Near(make(seed=0), tokenizer) for _ in range(3)]
        push, names = WeightPush(sender.address), set()
        for version in (1, 2):
            model = make(seed=version)
            parts = sender.write(model, version)
            assert len(parts) > 3
            found = await push.send(dict.fromkeys(engines[:2], 1), version, parts)
            assert {reply.state for reply in found.values()} == {"ok"}
            sender.keep(version)
            names.add(push._name)
            model.save_pretrained(tmp_path / str(version))
            body = json.dumps({"model_path": str(tmp_path / str(version)), "weight_version": version}).encode()
            assert (await engines[2].tell("POST", "/update_weights_from_disk", body)).status_code == 200
            by_engine = [tensor_hashes(engine.model) for engine in engines]
            assert by_engine[0] == by_engine[1] == by_engine[2] == tensor_hashes(model)
            assert [engine.service.weight_version for engine in engines] == [version] * 3
        assert len(names) == 1  # the group is used again
        await push.close()
        assert not engines[0].service.groups._groups and not sender._groups

    run(test)


@pytest.mark.parametrize(("at", "dies"), [(INIT, 1), (PART, 1), (PART, 3), (PART, "last")])
def test_the_others_get_the_weights_if_an_engine_dies(
    sender: WeightSender, make: Make, tokenizer: Tokenizer, at: str, dies: Any
) -> None:
    async def test() -> None:
        model = make(seed=1)
        parts = sender.write(model, 1)
        ill = Near(make(), tokenizer, dies=len(parts) if dies == "last" else dies, at=at)
        engines = [Near(make(), tokenizer), ill, Near(make(), tokenizer)]
        push, began = WeightPush(sender.address), time.monotonic()
        found = await push.send(dict.fromkeys(engines, 1), 1, parts)
        assert [found[engine].state for engine in engines] == ["ok", "lost", "ok"]
        assert time.monotonic() - began < 5
        assert all(tensor_hashes(engine.model) == tensor_hashes(model) for engine in engines if engine is not ill)
        assert tensor_hashes(ill.model) == tensor_hashes(make())
        await push.close()

    run(test)


@pytest.mark.parametrize("at", [INIT, PART])
def test_the_learner_does_not_wait_for_an_engine_that_hangs(
    make: Make, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    class Hanging(Near):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == at:
                await asyncio.sleep(1000)
            return await super().handle_async_request(request)

    async def test(sender: WeightSender) -> None:
        engines, push = [Hanging(make(), tokenizer), Near(make(), tokenizer)], WeightPush(sender.address)
        model, began = make(seed=1), time.monotonic()
        found = await push.send(dict.fromkeys(engines, 1), 1, sender.write(model, 1))
        assert [found[engine].state for engine in engines] == ["lost", "ok"]
        assert time.monotonic() - began < 9 and tensor_hashes(engines[1].model) == tensor_hashes(model)
        await push.close()

    monkeypatch.setattr(weight_push, "GRACE_SECONDS", 1.2)
    monkeypatch.setattr(weight_groups, "WeightGroup", partial(WeightGroup, seconds=1.5))
    with WeightSender("127.0.0.1", "gloo", 1.5) as sender:
        run(test, sender)


def test_a_replaced_engine_gets_the_last_weights(
    sender: WeightSender, make: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Also if all die at once, and although the learner goes on to change its own."""

    async def test() -> None:
        make().save_pretrained(tmp_path / "first")
        started: list[Near] = []
        dies = iter([-1, 3, -1])

        async def launch(rank: int, count: int, job: WorkerJob, seconds: float) -> Worker:
            assert job.directory == str(tmp_path / "first") and job.version == 0
            started.append(Near(make(), tokenizer, rank, next(dies, -1)))
            return started[-1]

        fleet = LocalFleet(tmp_path / "first", 2, EngineOptions(), Limits(), sender.address, launch)
        pool, model = fleet.workers, make(seed=1)
        pool.patience = Patience(back_off=0.01, stable=0.0)
        await fleet.start()

        async def both_have(version: int, hashes: dict[str, str]) -> None:
            async with asyncio.timeout(10):
                while pool.up < 2 or any(worker.doomed for worker in pool.live()):
                    await asyncio.sleep(0.01)
            for worker in pool.live():
                assert isinstance(worker, Near) and worker.service.weight_version == version
                assert tensor_hashes(worker.model) == hashes

        try:
            await fleet.load(tmp_path / "first", 1, sender.write(model, 1))  # one dies in the middle
            sender.keep(1)
            pushed = tensor_hashes(model)
            with torch.no_grad():
                model.lm_head.weight.zero_()
            await both_have(1, pushed)
            assert len(started) == 3
            for worker in pool.live():
                worker.signal(9)  # type: ignore[arg-type]
            await fleet.load(tmp_path / "first", 2, sender.write(model, 2))
            sender.keep(2)
            await both_have(2, tensor_hashes(model))
            assert len(started) == 5
        finally:
            await fleet.close()

    run(test)


def test_who_refuses_keeps_its_weights(
    sender: WeightSender, make: Make, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        other = Near(make(num_hidden_layers=3), tokenizer)
        engines = [Near(make(), tokenizer), other, Near(make(), tokenizer)]
        push, model = WeightPush(sender.address), make(seed=1)
        parts = sender.write(model, 1)
        found = await push.send(dict.fromkeys(engines, 1), 1, parts)
        assert [found[engine].state for engine in engines] == ["ok", "refused", "ok"]
        assert "has shape" in found[other].text or "is not in the model" in found[other].text
        assert other.service.weight_version == 0
        assert tensor_hashes(other.model) == tensor_hashes(make(num_hidden_layers=3))
        engines.remove(other)

        parts = sender.write(make(seed=2), 2)
        corrupt = [*parts[:-1], {**parts[-1], "hashes": ["0" * 64, *parts[-1]["hashes"][1:]]}]
        found = await push.send(dict.fromkeys(engines, 1), 2, corrupt)
        name = parts[-1]["names"][0]
        assert {reply.text for reply in found.values()} == {
            f'Weight update: tensor "{name}" is corrupt (its SHA-256 differs).'
        }
        for engine in engines:
            assert engine.service.weight_version == 1 and tensor_hashes(engine.model) == tensor_hashes(model)
        found = await push.send(dict.fromkeys(engines, 1), 2, parts)
        assert {reply.state for reply in found.values()} == {"ok"}
        found = await push.send(dict.fromkeys(engines, 1), 2, parts)
        assert all("2 is not greater than 2" in reply.text for reply in found.values())

        found = await push.send(dict.fromkeys(engines, 1), 9, parts)
        assert all(reply.state == "broken" and "no weights of version 9" in reply.text for reply in found.values())
        await push.close()
        monkeypatch.setattr(weight_push, "ATTEMPTS", 1)
        address = SenderAddress("127.0.0.1", 1, "x", "gloo")
        monkeypatch.setattr(weight_group, "SECONDS", 0.1)
        found = await WeightPush(address).send({engines[0]: 1}, 3, parts)
        assert found[engines[0]].state == "refused" and ":1 as rank 1 of 2: " in found[engines[0]].text

    run(test)


def test_a_fleet_says_why_no_engine_took_the_weights(
    sender: WeightSender, make: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async def test() -> None:
        async def launch(rank: int, count: int, job: WorkerJob, seconds: float) -> Worker:
            return Near(make(num_hidden_layers=3), tokenizer, rank)

        fleet = LocalFleet(tmp_path, 1, EngineOptions(), Limits(), sender.address, launch)
        await fleet.start()
        try:
            with pytest.raises(EngineError, match='of version 1: Weight update does not fit the model: tensor "'):
                await fleet.load(tmp_path, 1, sender.write(make(), 1))
            assert fleet.workers.up == 1 and fleet.workers.version == 0
        finally:
            await fleet.close()

    run(test)


@pytest.mark.long
def test_servers_like_sglang_can_be_ranks(sender: WeightSender, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of two processes. It makes a rank with torch's own function, knows no hashes, and loads in place."""
    asked: list[str] = []
    groups: list[Any] = []
    weights: dict[str, torch.Tensor] = {}
    app = FastAPI()

    def join(body: dict[str, Any]) -> Any:
        seconds = timedelta(seconds=20)
        address = (body["master_address"], body["master_port"])
        store: Any = dist.TCPStore(*address, body["world_size"], False, seconds)
        store, helper = dist.PrefixStore(body["group_name"], store), distributed_c10d._new_process_group_helper
        size, name = body["world_size"], body["group_name"]
        return helper(size, 1, [], body["backend"], store, group_name=name, timeout=seconds)[0]  # type: ignore[arg-type]

    @app.get("/server_info")
    async def info() -> dict[str, int]:
        return {"tp_size": 2}

    @app.post("/{path}")
    async def post(path: str, request: Request) -> dict[str, Any]:
        asked.append(path)
        body = await request.json()
        if path == "init_weights_update_group":
            ranks = [body["rank_offset"], body["rank_offset"] + 1]
            assert ranks == [1, 2] and body["world_size"] == 3
            address = (body["master_address"], body["master_port"])
            other = partial(WeightGroup, address, body["group_name"], 2, 3, "gloo")
            groups[:] = await asyncio.gather(asyncio.to_thread(join, body), asyncio.to_thread(other))
        if path == "update_weights_from_distributed":
            sizes = [torch.Size(shape).numel() for shape in body["shapes"]]
            assert body.get("any_version") is (True if body["weight_version"] == "7" else None)
            assert set(body["dtypes"]) == {"float32"} and body["load_format"] == "flattened_bucket"
            flat = torch.empty(4 * sum(sizes), dtype=torch.uint8)
            received = asyncio.to_thread(groups[1].receive, flat.numel())
            _, other = await asyncio.gather(asyncio.to_thread(groups[0].broadcast(flat, 0).wait), received)
            assert torch.equal(flat, other)
            pieces = flat.view(torch.float32).split(sizes)
            for name, shape, piece in zip(body["names"], body["shapes"], pieces, strict=True):
                weights[name] = piece.reshape(shape)
        return {"success": True, "message": "ok"}

    async def test() -> None:
        fleet = RemoteFleet(["http://engine"], sender=sender.address)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")
        fleet.servers.append(SglangServer(ServerInfo("http://engine", True), client=client))

        async def seven() -> int:
            return 7

        monkeypatch.setattr(fleet.servers[0].source, "version", seven)
        model = make(seed=3)
        await fleet.load(Path("/nowhere"), 7, sender.write(model, 7))
        own = disk_tensors(model)
        assert own.keys() == weights.keys() and all(torch.equal(own[name], weights[name]) for name in own)
        assert asked[:3] == ["pause_generation", "begin_weight_update", "init_weights_update_group"]
        assert asked[-2:] == ["end_weight_update", "continue_generation"]
        with pytest.raises(EngineError, match="http://engine did not take the weights of version 8"):
            await fleet.load(Path("/nowhere"), 8, sender.write(model, 8))
        await fleet.close()

    run(test)
