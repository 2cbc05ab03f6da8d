"""The attention variants of §2.1 and §2.1.2: GQA, sliding window, Gated DeltaNet, SimpleGDN. All forms of each agree,
files keep them apart, and converting a full-attention model keeps its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.errors import CheckpointError, ConfigError
from glm5.model.context import ForwardContext, LatentCache, cache_context, packed_context
from glm5.model.gdn import GatedDeltaNet, SimpleGDN
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.gqa import GQA
from glm5.optim import Muon, muon_groups

Build = Callable[..., GLM5ForCausalLM]
Tokens = Callable[..., Tensor]
LENGTH = 70
WINDOW = 9

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": dict(attention_bias=True, use_qk_norm=True),
    "swa": dict(attention_pattern="SFS", efficient_attention="swa", sliding_window=WINDOW),
    "gdn": dict(attention_pattern="SFS", efficient_attention="gdn", attention_bias=True),
    "simple_gdn": dict(attention_pattern="FSS", efficient_attention="simple_gdn", use_qk_norm=True),
    "simple_gdn that fades": dict(
        attention_pattern="FSS", efficient_attention="simple_gdn", simple_gdn_alpha=0.9, simple_gdn_beta=0.5
    ),
    "swa of MLA": dict(
        attention_pattern="SFS", efficient_attention="swa", sliding_window=WINDOW, use_dsa=False, index_topk=None
    ),
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, build: Build, build_grouped: Build) -> GLM5ForCausalLM:
    """In float64, where forms that differ in nothing but rounding agree to many digits."""
    make = build if request.param == "swa of MLA" else build_grouped
    return make(3, **VARIANTS[request.param]).cast(torch.float64)


@torch.no_grad()
def run(model: GLM5ForCausalLM, ids: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
    hidden = model.model(ids, ctx)
    drafted = model.mtp_hidden(ids, hidden, ctx)
    return ctx.rows(model.lm_head(hidden)), ctx.rows(model.lm_head(drafted))


def alone(model: GLM5ForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    return run(model, ids, packed_context(torch.zeros_like(ids)))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if found.dtype == torch.float32 else 1e-10)


def test_plain_forward_is_the_packed_one(variant: GLM5ForCausalLM, tokens: Tokens) -> None:
    ids = tokens(2, LENGTH)
    expected, _ = alone(variant, ids)
    assert expected.std() > 0.3
    with torch.no_grad():
        close(variant(ids).logits, expected)
        half = variant.clone().cast(torch.bfloat16)(ids).logits
    assert half.dtype == torch.bfloat16 and (half - expected).abs().mean() < 0.1


def test_packed_documents_equal_documents_alone(variant: GLM5ForCausalLM, tokens: Tokens) -> None:
    ids = tokens(2, LENGTH)
    documents = torch.zeros_like(ids)
    documents[0, 23:] = 1
    documents[0, 66:] = -1
    documents[1, 1:] = 1
    documents[1, 41:] = 2
    whole = run(variant, ids, packed_context(documents))
    for row in range(2):
        for document in range(int(documents[row].max()) + 1):
            span = (documents[row] == document).nonzero().flatten()
            part = slice(int(span[0]), int(span[-1]) + 1)
            for packed, single in zip(whole, alone(variant, ids[row : row + 1, part])):
                close(packed[row, part], single[0])


@pytest.mark.parametrize(
    "steps", [[LENGTH], [1, 40, 29], [64, 6], [17] + [1] * 20 + [33]], ids=["at once", "1 40 29", "64 6", "17 1 1 … 33"]
)
def test_cache_equals_training_form(variant: GLM5ForCausalLM, tokens: Tokens, steps: list[int]) -> None:
    ids = tokens(3, LENGTH, seed=2)
    cache = LatentCache(variant.config, rows=5, capacity=LENGTH, dtype=variant.dtype)
    for left_behind in (cache.latents, cache.recurrent.memory, cache.recurrent.inputs):
        left_behind.fill_(1e3)
    rows = torch.tensor([3, 0, 4])
    found, start = [], 0
    for step in steps:
        found.append(
            run(variant, ids[:, start : start + step], cache_context(cache, rows, torch.full((3,), start), step))
        )
        start += step
    for parts, expected in zip(zip(*found), alone(variant, ids)):
        close(torch.cat(parts, dim=1), expected)


def test_rows_of_unequal_length_share_a_prefill(variant: GLM5ForCausalLM, tokens: Tokens) -> None:
    """Rows are padded at their end, chunk by chunk; decoding then goes on from each row's own last token."""
    ids, real = tokens(3, LENGTH, seed=3), torch.tensor([50, 33, 3])
    expected, _ = alone(variant, ids)
    cache, rows = LatentCache(variant.config, rows=3, capacity=2 * LENGTH, dtype=variant.dtype), torch.tensor([2, 0, 1])
    start = torch.zeros(3, dtype=torch.long)
    for chunk in (30, 1, 19):
        lengths = (real - start).clamp(0, chunk)
        live = lengths > 0
        at = start[live].unsqueeze(1) + torch.arange(chunk)
        padded = torch.where(torch.arange(chunk) < lengths[live].unsqueeze(1), ids[live].gather(1, at), 7)
        run(variant, padded, cache_context(cache, rows[live], start[live], chunk, lengths[live]))
        start = start + lengths
    assert torch.equal(start, real)
    for offset in range(10):
        at = real + offset
        logits, _ = run(variant, ids.gather(1, at.unsqueeze(1)), cache_context(cache, rows, at, 1))
        for row in range(3):
            close(logits[row, 0], expected[row, int(at[row])])


def test_left_padding(variant: GLM5ForCausalLM, tokens: Tokens) -> None:
    ids = tokens(1, 40, seed=7)
    padded = torch.cat((tokens(1, 9, seed=8), ids), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :9] = 0
    with torch.no_grad():
        close(variant(padded, mask).logits[:, 9:], alone(variant, ids)[0])


def test_no_token_sees_the_future(variant: GLM5ForCausalLM, tokens: Tokens) -> None:
    ids = tokens(1, 40, seed=9)
    changed = ids.clone()
    changed[:, 25] = (ids[:, 25] + 1) % 83
    for x, y in zip(alone(variant, ids), alone(variant, changed)):
        close(x[:, :25], y[:, :25])
        assert (x[:, 25:] - y[:, 25:]).abs().amax() > 1e-3


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_window_is_what_it_says(kind: str, build: Build, build_grouped: Build, tokens: Tokens) -> None:
    """One layer with a window: the token that leaves it changes nothing any more, the last one inside does."""
    variant = dict(num_hidden_layers=1, first_k_dense_replace=1, attention_pattern="S", efficient_attention="swa")
    variant |= dict(sliding_window=WINDOW, num_nextn_predict_layers=0)
    model = build_grouped(1, **variant) if kind == "gqa" else build(1, use_dsa=False, index_topk=None, **variant)
    ids = tokens(1, 30)
    changed = ids.clone()
    changed[:, 10] = (ids[:, 10] + 1) % 83
    with torch.no_grad():
        moved = (model(ids).logits - model(changed).logits).abs().amax(-1)[0]
    assert (moved[10 : 10 + WINDOW] > 1e-4).all()
    assert moved[:10].max() == 0 and moved[10 + WINDOW :].max() < 1e-6


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_window_over_the_whole_row_is_full_attention(
    kind: str, build: Build, build_grouped: Build, tokens: Tokens
) -> None:
    full = build_grouped(2) if kind == "gqa" else build(2, use_dsa=False, index_topk=None)
    variant = dict(attention_pattern="interleave", efficient_attention="swa", sliding_window=40)
    wide = full.clone(full.config.replace(**variant))
    narrow = full.clone(full.config.replace(**variant | {"sliding_window": 4}))
    ids = tokens(2, 40)
    with torch.no_grad():
        close(wide(ids).logits, full(ids).logits)
        assert (narrow(ids).logits - full(ids).logits).abs().max() > 0.05


def test_simple_gdn_reuses_every_weight(build_grouped: Build, tokens: Tokens) -> None:
    full = build_grouped(4, attention_bias=True, use_qk_norm=True)
    variant = full.clone(full.config.replace(attention_pattern="interleave", efficient_attention="simple_gdn"), seed=99)
    assert [type(layer.self_attn) for layer in variant.model.layers] == [SimpleGDN, GQA, SimpleGDN]
    assert variant.state_dict().keys() == full.state_dict().keys()
    for name, tensor in full.state_dict().items():
        assert torch.equal(variant.state_dict()[name], tensor), name
    ids = tokens(1, 30)
    with torch.no_grad():
        assert (variant(ids).logits - full(ids).logits).abs().max() > 0.05


def test_gdn_keeps_the_projections(build_grouped: Build) -> None:
    full = build_grouped(4, use_qk_norm=True)
    variant = full.clone(full.config.replace(attention_pattern="SFF", efficient_attention="gdn"))
    old, new = full.state_dict(), variant.state_dict()
    layer = "model.layers.0.self_attn."
    gates = ("conv_weight", "A_log", "dt_bias", "a_proj.weight", "b_proj.weight", "g_proj.weight", "o_norm.weight")
    assert {name for name in new if name not in old} == {layer + name for name in gates}
    assert {name for name in old if name not in new} == {layer + "q_norm.weight", layer + "k_norm.weight"}
    for name in old.keys() & new.keys():
        assert torch.equal(old[name], new[name]), name


@torch.no_grad()
def test_simple_gdn_by_hand(build_grouped: Build) -> None:
    """One layer against the recurrence of §2.1.2 in float64, heads repeated, no gate and no RoPE."""
    model = build_grouped(5, attention_pattern="SFF", efficient_attention="simple_gdn", simple_gdn_alpha=0.95)
    layer = model.model.layers[0].self_attn
    x = torch.randn(1, 21, 40, generator=torch.Generator().manual_seed(5))
    ctx = packed_context(torch.zeros(1, 21, dtype=torch.long))
    found = ctx.rows(layer(ctx.flat(x), ctx, None)[0])[0]
    weights = {name: getattr(layer, f"{name}_proj").weight.double() for name in "qkvo"}
    x = x[0].double()
    q, k, v = (torch.einsum("td,hd->th", x, weights[name]).unflatten(1, (-1, 12)) for name in "qkv")
    q, k = (y / y.norm(dim=-1, keepdim=True) for y in (q, k))
    heads = []
    for head in range(6):
        memory, out = torch.zeros(12, 12).double(), []
        for t in range(21):
            key, value = k[t, head // 3], v[t, head // 3]
            memory = 0.95 * memory @ (torch.eye(12).double() - torch.outer(key, key)) + torch.outer(value, key)
            out.append(memory @ q[t, head])
        heads.append(torch.stack(out))
    expected = torch.stack(heads, dim=1).flatten(1) @ weights["o"].T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


def test_gates_start_in_their_usual_ranges(grouped: Callable[..., GLM5Config]) -> None:
    """Decay per token between exp(-16 * 0.1) and exp(-1 * 0.001), spread over heads; filters near the identity."""
    config = grouped(attention_pattern="SSS", efficient_attention="gdn", num_attention_heads=64, num_key_value_heads=2)
    layer = GLM5ForCausalLM(config, seed=1).model.layers[0].self_attn
    assert isinstance(layer, GatedDeltaNet)
    rate = layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias)
    assert 1e-3 < rate.min() < 0.02 and 0.2 < rate.max() < 1.6
    assert layer.A_log.min() >= 0.0 and layer.A_log.max() <= math.log(16.0)
    identity = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand_as(layer.conv_weight)
    torch.testing.assert_close(layer.conv_weight.detach(), identity, rtol=0, atol=0.12)
    again = GLM5ForCausalLM(config, seed=1).model.layers[0].self_attn
    assert torch.equal(layer.A_log, again.A_log) and torch.equal(layer.dt_bias, again.dt_bias)


def test_every_parameter_learns(variant: GLM5ForCausalLM, tokens: Tokens) -> None:
    """Muon takes every matrix, queries, keys and values of GQA whole; one step moves everything and lowers the loss."""
    ids = tokens(2, 40)
    optimizer = Muon(muon_groups(variant), lr=5e-3)
    for name, parameter in variant.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            assert parameter.muon_split == (parameter.shape[0],), name  # type: ignore[attr-defined]
    before = {name: p.detach().clone() for name, p in variant.named_parameters()}
    losses = []
    for _ in range(5):
        ctx = packed_context(torch.zeros_like(ids))
        hidden = variant.model(ids, ctx)
        hidden = hidden + variant.mtp_hidden(ids, hidden, ctx)
        logits = ctx.rows(variant.lm_head(hidden))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name, parameter in variant.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    assert losses[-1] < losses[0]


def test_files_of_their_own_type(variant: GLM5ForCausalLM, tmp_path: Path, tokens: Tokens) -> None:
    variant.save_pretrained(tmp_path / "variant")
    raw = json.loads((tmp_path / "variant" / "config.json").read_text())
    hybrid = bool(variant.config.attention_pattern)
    assert raw["model_type"] == ("glm5_hybrid" if hybrid else "glm4_moe")
    again = GLM5ForCausalLM.from_pretrained(tmp_path / "variant", dtype=torch.float64)
    assert again.config == variant.config
    ids = tokens(1, 20)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, variant(ids).logits)
    if variant.config.efficient_attention == "gdn":
        with pytest.raises(CheckpointError, match=r"missing from the weight files|does not belong"):
            GLM5ForCausalLM.from_pretrained(tmp_path / "variant", efficient_attention="simple_gdn")


def test_a_full_checkpoint_becomes_an_variant_on_loading(build_grouped: Build, tmp_path: Path) -> None:
    build_grouped(6).save_pretrained(tmp_path / "full")
    variant = GLM5ForCausalLM.from_pretrained(
        tmp_path / "full", attention_pattern="interleave", efficient_attention="simple_gdn"
    )
    assert variant.config.attention_pattern == "SFS" and variant.census["generated"] == 0


def test_the_cache_holds_keys_values_and_states(build_grouped: Build) -> None:
    config = build_grouped(1, attention_pattern="SFS", efficient_attention="gdn").config
    cache = LatentCache(config, rows=2, capacity=65)
    assert cache.latents.shape == (2, 2, 128, 2 * 2 * 12)  # layer 1 and MTP; keys and values of two heads
    assert cache.recurrent.memory.shape == (2, 2, 6, 12, 12)  # layers 0 and 2
    assert cache.recurrent.inputs.shape == (2, 2, 3, (6 + 2 + 2) * 12)
    simple = LatentCache(config.replace(efficient_attention="simple_gdn"), rows=2, capacity=65)
    assert simple.recurrent.inputs.numel() == 0
    full = LatentCache(config.replace(attention_pattern="", efficient_attention=None), rows=2, capacity=65)
    assert full.latents.shape[0] == 4 and full.recurrent.memory.numel() == 0


def test_dsa_adaptation_needs_latents(build_grouped: Build) -> None:
    with pytest.raises(ConfigError, match="sparse attention selects MLA latents"):
        build_grouped(1).config.replace(use_dsa=True, index_topk=8)
