"""An engine that says what the test tells it to, without a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.grammar import Grammars
from glm5.errors import EngineError, RequestFailed
from glm5.records import Completion, SamplingParams


@dataclass(eq=False)
class Sample:
    """What the server sees of a request."""

    params: SamplingParams
    stop_ids: frozenset[int]
    completion: Completion = field(default_factory=Completion)
    done: bool = False
    score: bool = False
    error: RequestFailed | None = None

    def finish(self, reason: str) -> None:
        self.completion.finish_reason = reason
        self.done = True


class ScriptedEngine:
    """Answers every prompt with the given ids, one a step. Stands in for `Engine` under the server's thread."""

    max_length = 2048

    def __init__(
        self, ids: Sequence[int], *, pause: float = 0.0, fail_at: int | None = None, fail_rebuilds: int = 0
    ) -> None:
        self.ids = list(ids)
        self.pause = pause
        self.fail_at = fail_at
        self.fail_rebuilds, self.rebuilt = fail_rebuilds, 0
        self.steps = 0
        self.prompts: list[list[int]] = []
        self.namespaces: list[str] = []
        self.params: list[SamplingParams] = []
        self.all: list[Sample] = []
        self.weight_version = 3
        self.flushed = 0
        self.cached = 0

    @property
    def grammars(self) -> Grammars:
        return Grammars(Tokenizer.byte_level())

    def stats(self) -> dict[str, Any]:
        return {"running": len(self.running), "waiting": 0, "rounds": 4, "accepted": [3, 1], "seconds": {"model": 0.5}}

    def flush_cache(self) -> None:
        self.flushed += 1

    def submit_score(self, row: Sequence[int], params: SamplingParams) -> Sample:
        sample = Sample(params, frozenset(), Completion(list(row[1:]), [-0.25] * (len(row) - 1)), score=True)
        if params.top_logprobs:
            sample.completion.top_logprobs = [{token: -0.25} for token in row[1:]]
        sample.finish("length")
        return sample

    def rebuild(self) -> None:
        self.rebuilt += 1
        if self.rebuilt <= self.fail_rebuilds:
            raise RuntimeError("the engine stays broken on purpose")
        self.all = []

    @property
    def running(self) -> list[Sample]:
        return [request for request in self.all if not request.done]

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, namespace: str = "", grammar: Any = None
    ) -> list[Sample]:
        if not prompt:
            raise EngineError("The prompt is empty; give at least one token.")
        self.prompts.append(list(prompt))
        self.namespaces.append(namespace)
        self.params.append(params)
        fresh = [Sample(params, frozenset(params.stop_token_ids)) for _ in range(params.n)]
        for sample in fresh:
            sample.completion.cached_len = self.cached
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
            done.weight_versions.append(self.weight_version)
            if request.params.top_logprobs:
                done.top_logprobs.append({token: -0.5, 0: float("-inf")})
            if token in request.stop_ids:
                request.finish("stop")
            elif len(done.token_ids) >= request.params.max_tokens:
                request.finish("length")

    def abort(self, request: Sample) -> None:
        if not request.done:
            request.finish("abort")
