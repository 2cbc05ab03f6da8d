"""A gateway in this process, on an engine that follows a script and writes down every token that it samples."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from glm5.chat.tokenizer import Tokenizer
from glm5.records import SamplingParams
from glm5.rollout.engine_events import EngineLost
from glm5.rollout.engines import EnginePool
from glm5.rollout.gateway import Gateway
from glm5.rollout.gateway_app import create_gateway
from glm5.rollout.store import Store
from glm5.serve.options import Limits
from glm5.serve.samples import Delta

ADMIN = "an-admin-key"


@dataclass
class ScriptedEngine:
    """Answers with what `script` makes of the prompt's text; special tokens are spelled out in it. Each answer comes in
    random pieces, each with a random weight version up to `newest`. `pause` is the time before each piece; `faults`
    ends that many generations early."""

    tokenizer: Tokenizer
    script: Callable[[str], str]
    seed: int = 0
    name: str = "scripted"
    ready: bool = True
    faults: int = 0
    pause: float = 0.0
    newest: int = 3
    log: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """Prompt and sampled ids, also of generations that ended early."""
    asked: list[SamplingParams] = field(default_factory=list)

    async def stream(
        self, ids: Sequence[int], params: SamplingParams, session: str, every: int = 1
    ) -> AsyncGenerator[Delta, None]:
        draw = random.Random(f"{self.seed} {list(ids)} {len(self.log)}")
        self.asked.append(params)
        text = self.script(self.tokenizer.decode(list(ids)))
        left = self.tokenizer.encode(text, allow_special=True)
        cut = len(left) > params.max_tokens
        left, sent = left[: params.max_tokens], list[int]()
        lose = self.faults > 0
        self.faults -= lose
        try:
            while left:
                await asyncio.sleep(self.pause)
                size = draw.randint(1, 1 + len(left) // 2)
                piece, left = left[:size], left[size:]
                if lose and not left:
                    raise EngineLost("it died.")
                sent += piece
                reason = None if left else "length" if cut else "stop"
                scores = [-draw.random() for _ in piece]
                yield Delta(0, piece, scores, [{} for _ in piece], reason, [draw.randint(0, self.newest)] * size)
        finally:
            self.log.append((tuple(ids), tuple(sent)))

    async def version(self) -> int:
        return 3


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.byte_level()


@dataclass
class Setting:
    """A gateway, a client with the admin key, and its engine."""

    gateway: Gateway
    app: FastAPI
    admin: httpx.AsyncClient
    engine: ScriptedEngine

    async def session(self, **options: Any) -> tuple[str, httpx.AsyncClient]:
        """The id of a new session and a client for its agent."""
        made = (await self.admin.post("/sessions", json={"task_id": "t", **options})).raise_for_status().json()
        headers = {"authorization": f"Bearer {made['api_key']}"}
        return made["id"], httpx.AsyncClient(
            transport=self.admin._transport, base_url=made["base_url"] + "/", headers=headers
        )

    async def samples(self, session: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.admin.get(f"/sessions/{session}/samples")).raise_for_status().json()
        return found


Open = Callable[..., AbstractAsyncContextManager[Setting]]


@pytest.fixture
def opened(tokenizer: Tokenizer, tmp_path: Path) -> Open:
    """Open a gateway on `tmp_path/store.db`."""

    @asynccontextmanager
    async def make(
        script: Callable[[str], str] = lambda prompt: "yes<|user|>", limits: Limits | None = None, **engine: Any
    ) -> AsyncIterator[Setting]:
        scripted = ScriptedEngine(tokenizer, script, **engine)
        with Store(tmp_path / "store.db") as store:
            gateway = Gateway(EnginePool([scripted]), store, tokenizer, ADMIN, 1 << 16, limits or Limits())
            app = create_gateway(gateway)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://gateway", headers={"authorization": f"Bearer {ADMIN}"}
            ) as admin:
                yield Setting(gateway, app, admin, scripted)

    return make
