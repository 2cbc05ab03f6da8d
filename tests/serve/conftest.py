"""A small random model, and an engine that says what the test tells it to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.engine.request import Request
from glm5.errors import EngineError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams
from glm5.serve.app import create_app


class ScriptedEngine:
    """Answers every prompt with the given ids, one a step. Stands in for `Engine` under the server's thread."""

    max_length = 2048

    def __init__(self, ids: Sequence[int], *, pause: float = 0.0, fail_at: int | None = None) -> None:
        self.ids = list(ids)
        self.pause = pause
        self.fail_at = fail_at
        self.steps = 0
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.all: list[Request] = []

    @property
    def running(self) -> list[Request]:
        return [request for request in self.all if not request.done]

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        if not prompt:
            raise EngineError("The prompt is empty; give at least one token.")
        self.prompts.append(list(prompt))
        self.params.append(params)
        fresh = [Request(list(prompt), params, 0, frozenset(params.stop_token_ids)) for _ in range(params.n)]
        self.all += fresh
        return fresh

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the engine broke on purpose")
        time.sleep(self.pause)
        for request in self.running:
            done = request.completion
            token = self.ids[len(done.token_ids) % len(self.ids)]
            done.token_ids.append(token)
            done.logprobs.append(-0.5)
            if request.params.top_logprobs:
                done.top_logprobs.append({token: -0.5, 0: float("-inf")})
            if token in request.stop_ids:
                request.finish("stop")
            elif len(done.token_ids) >= request.params.max_tokens:
                request.finish("length")

    def abort(self, request: Request) -> None:
        if not request.done:
            request.finish("abort")


@pytest.fixture
def engine_of() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.byte_level()


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> GLM5ForCausalLM:
    config = GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)
    return GLM5ForCausalLM(config)


@pytest.fixture(scope="session")
def checkpoint(model: GLM5ForCausalLM, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "nano"
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def client(model: GLM5ForCausalLM, tokenizer: Tokenizer) -> Iterator[TestClient]:
    """The server with the small model."""
    app = create_app(Engine(model, tokenizer), tokenizer, model_name="nano", defaults=SamplingParams(top_p=0.95))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[TestClient, ScriptedEngine]]]:
    """Make a server whose model answers with `text`; keywords go to the engine or, if `app` holds them, the app."""
    with ExitStack() as stack:

        def make(text: str, app: dict[str, Any] | None = None, **options: Any) -> tuple[TestClient, ScriptedEngine]:
            engine = ScriptedEngine(tokenizer.encode(text, allow_special=True), **options)
            application = create_app(engine, tokenizer, model_name="script", **(app or {}))  # type: ignore[arg-type]
            client = stack.enter_context(TestClient(application, raise_server_exceptions=False))
            return client, engine

        yield make


@pytest.fixture(autouse=True)
def one_thread() -> None:
    assert os.environ["OMP_NUM_THREADS"] == "1"
