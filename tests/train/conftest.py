"""Models of a few thousand parameters whose sparse attention really drops keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.chat import Tokenizer
from glm5.config.model import GLM5Config
from glm5.data.shards import Shard, build_shards, open_shard
from glm5.data.sources import Document
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsWriter
from glm5.train.loop import StageIO

SMALL = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    n_routed_experts=4, index_n_heads=4, index_head_dim=8, index_topk=4, initializer_range=0.2,
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
def shard(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Shard:
    """Text in which every line repeats an earlier one."""
    texts = [f"line {i % 7} of file {i}\n" * 12 for i in range(40)]
    folder = tmp_path_factory.mktemp("train") / "data"
    build_shards([Document(f"{i}.txt", text) for i, text in enumerate(texts)], tokenizer, folder, [])
    return open_shard(folder, "train", tokenizer)


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
