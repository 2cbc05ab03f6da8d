"""A small talkative model, and a toy family whose rewards vary, so that there is something to learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.chat import Tokenizer
from glm5.config.model import GLM5Config
from glm5.errors import GradingError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsWriter
from glm5.records import Message, Outcome, StepResult
from glm5.tasks import families
from glm5.train.loop import StageIO

SMALL = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    n_routed_experts=4, index_n_heads=4, index_head_dim=8, index_topk=8, initializer_range=0.2,
)  # fmt: skip


@pytest.fixture(scope="session")
def small() -> Callable[..., GLM5ForCausalLM]:
    """Make a small random model; keywords override its configuration."""

    def make(*, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> GLM5ForCausalLM:
        return GLM5ForCausalLM(GLM5Config.preset("nano", **SMALL | overrides), seed=seed).to(dtype)

    return make


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.byte_level("5.0")


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


class ToyFamily:
    name = domain = "toy"

    def __init__(self, seed: int = 0, turns: int = 1, failing: int = 0) -> None:
        self.turns, self.failing = turns, failing

    def problem(self, split: str, index: int) -> ToyProblem:
        return ToyProblem(index, self.turns, self.failing)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the toy family; options are `turns` and `failing`."""
    monkeypatch.setitem(families.FAMILIES, "toy", ToyFamily)  # type: ignore[arg-type]
    return "toy"


@pytest.fixture
def stage_io(tmp_path: Path) -> Iterator[Callable[..., StageIO]]:
    """Where a stage writes; `stop_after` raises KeyboardInterrupt once that many steps were reported."""
    stack = ExitStack()

    def make(folder: str = "run", stop_after: int | None = None, name: str = "stage") -> StageIO:
        reported = 0

        def advance(steps: int, numbers: dict[str, float]) -> None:
            nonlocal reported
            reported += steps
            if stop_after is not None and reported >= stop_after:
                raise KeyboardInterrupt

        root = tmp_path / folder
        (root / name).mkdir(parents=True, exist_ok=True)
        metrics = stack.enter_context(MetricsWriter(root / "metrics.jsonl"))
        return StageIO(name, root / name, metrics, advance)

    with stack:
        yield make
