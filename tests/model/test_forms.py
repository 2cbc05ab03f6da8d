"""One model, many ways to run it: expanded and absorbed, packed and alone, at once, in chunks and token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glm5.model.context import ForwardContext, LatentCache, cache_context, packed_context, padded_context
from glm5.model.glm5 import GLM5ForCausalLM

Build = Callable[..., GLM5ForCausalLM]
Tokens = Callable[..., Tensor]
DENSE = {"use_dsa": False, "index_topk": None}
WINDOW = {**DENSE, "attention_pattern": "SFS", "efficient_attention": "swa", "sliding_window": 9}
SHARED = {"indexer_types": ("full", "shared", "full")}
LENGTH = 70


@torch.no_grad()
def run(model: GLM5ForCausalLM, ids: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V], and the MTP layer's logits where it reads the same tokens as the trunk."""
    hidden = model.model(ids, ctx)
    drafted = model.mtp_hidden(ids, hidden, ctx)
    return ctx.rows(model.lm_head(hidden)), ctx.rows(model.lm_head(drafted))


def alone(model: GLM5ForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as one packed document: what training computes."""
    return run(model, ids, packed_context(torch.zeros_like(ids)))


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected), f"largest difference {float((found - expected).abs().max()):.2e}"


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("changes", [{}, SHARED, DENSE, WINDOW], ids=["sparse", "IndexShare", "dense", "window"])
def test_packed_documents_equal_documents_alone(build: Build, tokens: Tokens, changes: dict[str, object]) -> None:
    model = build(1, **changes)
    ids = tokens(2, LENGTH)
    documents = torch.zeros_like(ids)
    documents[0, 23:] = 1
    documents[0, 60:] = -1
    documents[1, 1:] = 1
    documents[1, 41:] = 2
    whole = run(model, ids, packed_context(documents))
    for row in range(2):
        for document in range(int(documents[row].max()) + 1):
            span = (documents[row] == document).nonzero().flatten()
            part = slice(int(span[0]), int(span[-1]) + 1)
            for packed, single in zip(whole, alone(model, ids[row : row + 1, part])):
                assert_same(packed[row, part], single[0])


@pytest.mark.parametrize("changes", [{}, SHARED, DENSE, WINDOW], ids=["sparse", "IndexShare", "dense", "window"])
@pytest.mark.parametrize(
    "steps", [[LENGTH], [1, 40, 29], [64, 6], [17] + [1] * 20 + [33]], ids=["at once", "1 40 29", "64 6", "17 1 1 … 33"]
)
def test_cache_equals_training_form(build: Build, tokens: Tokens, changes: dict[str, object], steps: list[int]) -> None:
    """Prefill at once, in chunks and token by token."""
    model = build(2, **changes)
    ids = tokens(3, LENGTH, seed=2)
    cache = LatentCache(model.config, rows=5, capacity=LENGTH)
    cache.latents.fill_(1e3)  # whatever an earlier request left behind must not matter
    cache.index_keys.fill_(1e3)
    rows = torch.tensor([3, 0, 4])
    found, start = [], 0
    for step in steps:
        ctx = cache_context(cache, rows, torch.full((3,), start), step)
        found.append(run(model, ids[:, start : start + step], ctx))
        start += step
    for parts, expected in zip(zip(*found), alone(model, ids)):
        assert_same(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("changes", [DENSE, WINDOW], ids=["dense", "window"])
def test_expanded_absorbed_and_exact_form_agree(build: Build, tokens: Tokens, changes: dict[str, object]) -> None:
    """Dense attention has three forms: training expands, a cache absorbs, and exact mode selects every key."""
    model = build(2, **changes)
    ids = tokens(2, LENGTH, seed=2)
    exact = alone(model, ids)
    cache = LatentCache(model.config, rows=2, capacity=LENGTH)
    at_once = cache_context(cache, torch.arange(2), torch.zeros(2, dtype=torch.long), LENGTH, exact=False)
    for ctx in (packed_context(torch.zeros_like(ids), exact=False), at_once):
        for found, expected in zip(run(model, ids, ctx), exact, strict=True):
            assert not torch.equal(found, expected)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("changes", [{}, DENSE], ids=["sparse", "dense"])
def test_rows_at_different_positions_decode_together(build: Build, tokens: Tokens, changes: dict[str, object]) -> None:
    """Continuous batching: sequences of different length in one step, and a neighbour that joins later."""
    model = build(3, **changes)
    ids = tokens(2, LENGTH, seed=3)
    expected, _ = alone(model, ids)
    cache = LatentCache(model.config, rows=2, capacity=LENGTH)
    for row, length in ((0, 50), (1, 5)):
        run(model, ids[row : row + 1, :length], cache_context(cache, torch.tensor([row]), torch.tensor([0]), length))
    for offset in range(12):
        start = torch.tensor([50, 5]) + offset
        logits, _ = run(model, ids.gather(1, start.unsqueeze(1)), cache_context(cache, torch.tensor([0, 1]), start, 1))
        for row in range(2):
            assert_same(logits[row, 0], expected[row, int(start[row])])


def test_a_rejected_draft_leaves_no_trace(build: Build, tokens: Tokens) -> None:
    """Speculative decoding writes slots that are overwritten later; slots behind a query are never read."""
    model = build(4)
    ids, wrong = tokens(1, 40, seed=4), tokens(1, 4, seed=5)
    cache, row = LatentCache(model.config, rows=1, capacity=64), torch.tensor([0])
    run(model, ids[:, :30], cache_context(cache, row, torch.tensor([0]), 30))
    run(model, wrong, cache_context(cache, row, torch.tensor([30]), 4))
    found, _ = run(model, ids[:, 30:31], cache_context(cache, row, torch.tensor([30]), 1))
    assert_same(found[0, 0], alone(model, ids)[0][0, 30])


@pytest.mark.parametrize("changes", [{}, SHARED], ids=["sparse", "IndexShare"])
def test_top_k_over_the_whole_row_is_dense_attention(build: Build, tokens: Tokens, changes: dict[str, object]) -> None:
    model = build(5, index_topk=LENGTH, **changes)
    ids = tokens(2, LENGTH, seed=5)
    dense = packed_context(torch.zeros_like(ids))
    dense.attend_dense = True
    for sparse, full in zip(alone(model, ids), run(model, ids, dense)):
        torch.testing.assert_close(sparse, full, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("backend")
def test_outside_exact_mode_only_rounding_differs(build: Build, tokens: Tokens) -> None:
    model = build(6, index_topk=32)
    ids = tokens(2, 20, seed=6)
    loose = packed_context(torch.zeros_like(ids), exact=False)
    torch.testing.assert_close(run(model, ids, loose)[0], alone(model, ids)[0], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("backend")
def test_left_padding(build: Build, tokens: Tokens) -> None:
    model = build(7)
    ids = tokens(1, 40, seed=7)
    padded = torch.cat((tokens(1, 9, seed=8), ids), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :9] = 0
    found, _ = run(model, padded, padded_context(mask))
    assert_same(found[:, 9:], alone(model, ids)[0])


@pytest.mark.parametrize("changes", [{}, DENSE], ids=["sparse", "dense"])
def test_no_token_sees_the_future(build: Build, tokens: Tokens, changes: dict[str, object]) -> None:
    model = build(8, **changes)
    ids = tokens(1, 40, seed=9)
    changed = ids.clone()
    changed[:, 25] = (ids[:, 25] + 1) % 83
    before, after = alone(model, ids), alone(model, changed)
    for x, y in zip(before, after):
        assert torch.equal(x[:, :25], y[:, :25])
        assert not torch.equal(x[:, 25:], y[:, 25:])


def test_flat_and_rows_are_inverse() -> None:
    ctx = packed_context(torch.zeros(3, 7, dtype=torch.long))
    x = torch.randn(3, 7, 2, 5)
    flat = ctx.flat(x)
    assert flat.shape == (32, 2, 5) and not flat[21:].any()
    assert torch.equal(ctx.rows(flat), x)


def test_packed_positions_restart_at_documents_and_queries_stay_inside() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 1, 2, 2, -1, -1]])
    ctx = packed_context(documents)
    assert ctx.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 0, 1]]
    start, end = ctx.key_range()
    for row in range(2):
        for t in range(6):
            own = documents[row, t]
            seen = [s for s in range(t + 1) if own >= 0 and documents[row, s] == own] or [t]
            assert list(range(int(start[row, t]), int(end[row, t]))) == seen


def test_the_cache_holds_only_latents_and_index_keys(build: Build) -> None:
    config = build(9).config
    cache = LatentCache(config, rows=2, capacity=65)
    assert cache.capacity == 128
    assert cache.latents.shape == (4, 2, 128, 26)  # three layers and MTP; 20 latent + 6 rotary values
    assert cache.index_keys.shape == (4, 2, 128, 12)
    shared = LatentCache(config.replace(**SHARED), rows=2, capacity=65)
    assert shared.latents.shape == cache.latents.shape and shared.index_keys.shape == (3, 2, 128, 12)
    assert [shared.index_slots.get(layer) for layer in range(4)] == [0, None, 1, 2]  # the MTP layer's last
    assert LatentCache(config.replace(**DENSE), rows=2, capacity=1).index_keys.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("share", [False, True], ids=["own indexers", "IndexShare"])
def test_fused_decoding_equals_the_whole_row(
    share: bool, dtype: torch.dtype, build: Callable[..., GLM5ForCausalLM], tokens: Callable[..., Tensor]
) -> None:
    """Outside exact mode single tokens take `glm5.ops.small_batch`; three sequences of different lengths."""
    model = build(
        7, num_nextn_predict_layers=0, **({"index_topk_freq": 2, "index_skip_topk_offset": 2} if share else {})
    )
    model = model.cast(dtype)
    ids = tokens(3, 40, seed=7)
    with torch.no_grad():
        whole = model(ids).logits.float()
        cache = LatentCache(model.config, 5, 64, dtype)
        rows, lengths = torch.tensor([4, 0, 2]), torch.tensor([20, 9, 1])
        for row, length in zip(range(3), lengths.tolist(), strict=True):
            ctx = cache_context(cache, rows[row : row + 1], torch.tensor([0]), length, exact=False)
            model.model(ids[row : row + 1, :length], ctx)
        errors = []
        for step in range(20):
            at = lengths + step
            ctx = cache_context(cache, rows, at, 1, exact=False)
            logits = model.lm_head(model.model(ids.gather(1, at[:, None]), ctx)).float()
            errors.append(logits - whole[torch.arange(3), at])
    if dtype == torch.float32:
        assert torch.stack(errors).abs().max() < 1e-5
    else:  # as far from the whole row as bf16 is from fp32
        with torch.no_grad():
            rounding = (whole - model.cast(torch.float32)(ids).logits).pow(2).mean().sqrt()
        assert torch.stack(errors).pow(2).mean().sqrt() < 1.5 * rounding
