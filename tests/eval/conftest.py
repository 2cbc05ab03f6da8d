"""A small random model over bytes, and held-out text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from glm5.chat import Tokenizer
from glm5.config.model import GLM5Config
from glm5.data.shards import Shard, build_shards, open_shard
from glm5.data.sources import Document
from glm5.model.glm5 import GLM5ForCausalLM


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.byte_level("5.0")


@pytest.fixture(scope="session")
def small(tokenizer: Tokenizer) -> Callable[..., GLM5ForCausalLM]:
    """Make a small random model; keywords override its configuration."""

    def make(*, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> GLM5ForCausalLM:
        sizes = dict(
            vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
            qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, index_n_heads=4, index_head_dim=8, index_topk=8,
            initializer_range=0.2, eos_token_id=tokenizer.stop_token_ids,
        )  # fmt: skip
        return GLM5ForCausalLM(GLM5Config.preset("nano", **sizes | overrides), seed=seed).to(dtype)

    return make


@pytest.fixture(scope="session")
def shard(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Shard:
    """Documents of 21, 90, 400 and 33 bytes, some of them not ASCII."""
    texts = ["short text, one line\n", "ü" * 45, "x = 1\n" * 66 + "end\n", "print('hello, wide world 123 ok')"]
    folder = tmp_path_factory.mktemp("eval") / "data"
    documents = [Document(f"{i}.txt", text) for i, text in enumerate(texts)]
    assert not any(d.held_out for d in documents)
    build_shards(documents, tokenizer, folder, [])
    return open_shard(folder, "train", tokenizer)
