"""A small talkative model, and a toy family whose rewards vary, so that there is something to learn from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from glm5.chat import Tokenizer
from glm5.errors import GradingError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import Message, Outcome, StepResult
from glm5.tasks import families


@pytest.fixture(scope="session")
def small(small: Callable[..., GLM5ForCausalLM]) -> Callable[..., GLM5ForCausalLM]:
    """The shared small model, but keeping eight keys."""
    return functools.partial(small, index_topk=8)


@pytest.fixture(scope="session")
def talker(small: Callable[..., GLM5ForCausalLM], tokenizer: Tokenizer) -> Callable[..., GLM5ForCausalLM]:
    """Make a random policy that ends about every third token with `<|user|>`: all embeddings share one direction."""

    def make(seed: int = 0) -> GLM5ForCausalLM:
        model = small(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids, seed=seed)
        with torch.no_grad():
            model.model.embed_tokens.weight += 1.0
            model.lm_head.weight[tokenizer.special["<|user|>"]] = 0.2
        return model

    return make


@dataclass(frozen=True)
class ToyProblem:
    """Say something of even length; up to `turns` times. Every `failing`-th problem cannot be judged."""

    index: int
    turns: int
    failing: int

    id: str = "toy"
    domain: str = "toy"
    prompt: str = "?"
    tools: tuple[()] = ()
    thinking: bool = False

    @property
    def key(self) -> str:
        return f"toy {self.index}"

    def env(self) -> ToyEnv:
        return ToyEnv(self)


class ToyEnv:
    def __init__(self, problem: ToyProblem) -> None:
        self.problem, self.domain, self.source = f"toy/{problem.index}", "toy", problem
        self.said = 0

    def start(self) -> Any:
        return (Message("user", f"{self.source.index % 7}"),), (), False

    def step(self, message: Message | None) -> StepResult:
        if self.source.failing and self.source.index % self.source.failing == 0:
            raise GradingError("the toy judge is out of order")
        if message is None:
            return StepResult(done=True, outcome=Outcome.MALFORMED)
        self.said += 1
        good = len(message.content) % 2 == 0
        if good or self.said == self.source.turns:
            return StepResult(done=True, reward=float(good), outcome=Outcome.SOLVED if good else Outcome.FAILED)
        return StepResult(messages=(Message("user", "no"),))


class ToyFamily(families.Family):
    name = domain = "toy"

    def __init__(self, seed: int = 0, turns: int = 1, failing: int = 0) -> None:
        self.turns, self.failing = turns, failing

    def problem(self, split: str, index: int) -> ToyProblem:
        return ToyProblem(index, self.turns, self.failing)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the toy family; options are `turns` and `failing`."""
    monkeypatch.setitem(families.FAMILIES, "toy", ToyFamily)
    return "toy"
