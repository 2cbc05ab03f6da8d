"""The int8 cache of the engine: memory, agreement with the plain cache, reuse of prefixes, drafts, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm5.engine.engine import Engine
from glm5.engine.kv_pool import PAGE, token_bytes
from glm5.errors import EngineError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 40, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine(model: GLM5ForCausalLM, **options: Any) -> Engine:
    return Engine(model, exact=False, cache_dtype="int8", **options)


@pytest.mark.parametrize("changes", [{}, {"index_topk_freq": 2, "index_skip_topk_offset": 2}], ids=["", "IndexShare"])
def test_pages_take_the_predicted_memory_and_less_than_half(small: Any, changes: dict[str, int]) -> None:
    model = small(**changes)
    pool, config = engine(model).pool, model.config
    assert pool.page_bytes() == PAGE * token_bytes(config, model.dtype, packed=True)
    assert pool.page_bytes() < 0.6 * PAGE * token_bytes(config, model.dtype)
    pages = pool.alloc(2)
    pool.cache.latents[:, pages[0]] = 5
    pool.copy(*pages)
    stored = pool.dump(pages[1], 10)
    assert len(stored) == pool.page_bytes(10)
    pool.cache.latents[:, pages[1]] = 0
    pool.load(pages[1], 10, stored)
    assert bool((pool.cache.latents[:, pages[1], :10] == 5).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_log_probabilities_are_close_to_those_of_the_plain_cache(parrot: GLM5ForCausalLM, dtype: torch.dtype) -> None:
    model = parrot.clone().to(dtype) if dtype != torch.float32 else parrot
    row = prompt(150, seed=1)
    expected, found = (torch.tensor(e.score([row])[0]) for e in (Engine(model, exact=False), engine(model)))
    assert not torch.equal(found, expected)  # it does round
    assert float((found - expected).abs().mean()) < 0.1


def test_greedy_tokens_stay_the_same(parrot: GLM5ForCausalLM, line: str, tokenizer: Any) -> None:
    """Of a model that is sure of its answer: also after the prefix cache, pages in host memory, and preemption."""
    asked = [tokenizer.encode(line * 4)[start:] for start in (0, 3, 9)]
    expected = [c.token_ids for c in Engine(parrot, exact=False).generate(asked, GREEDY)]
    for options in ({}, {"speculative": 2}, {"cache_tokens": 4 * PAGE, "max_batch": 2, "host_cache_bytes": 1 << 20}):
        own = engine(parrot, **options)
        for _ in range(2):  # the second time from the prefix cache
            assert [c.token_ids for c in own.generate(asked, GREEDY)] == expected


def test_layers_without_an_indexer_need_no_index_keys(small: Any) -> None:
    """IndexShare: compiled steps and the layers one by one read the same rows."""
    model = small(num_hidden_layers=4, index_topk_pattern="FSSF")
    row = prompt(150, seed=1)
    expected, found = (torch.tensor(e.score([row])[0]) for e in (Engine(model, exact=False), engine(model)))
    assert float((found - expected).abs().mean()) < 0.1
    whole = engine(model).generate([row], GREEDY)[0].token_ids
    own = engine(model, speculative=2)
    assert [own.generate([row], GREEDY)[0].token_ids for _ in range(2)] == [whole] * 2


def test_what_it_refuses(small: Any) -> None:
    model = small()
    for options, message in (
        ({"cache_dtype": "int8", "exact": True}, "Exact mode"),
        ({"cache_dtype": "int4", "exact": False}, "takes int8"),
    ):
        with pytest.raises(EngineError, match=message):
            Engine(model, **options)
    with pytest.raises(EngineError, match="sparse attention"):
        engine(small(use_dsa=False, index_topk=None))
    with pytest.raises(EngineError, match="one process"):
        Engine.from_pretrained("anywhere", tp=2, cache_dtype="int8")
