"""Models that multiply integers: as those with rounded numbers compute, from quantised files and while loading."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.engine.weights import apply, check_copy, stage, tensor_hash
from glm5.errors import CheckpointError, ConfigError, EngineError
from glm5.model.context import LatentCache, cache_context, packed_context
from glm5.model.fused_decode import FusedDecode
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.integer_layers import hold_integers
from glm5.model.layers import Linear
from glm5.model.rounding import round_activations
from glm5.ops.integers import IntegerWeight, integer_weight
from glm5.ops.native import available
from glm5.ops.quantisers import INT4_CHANNEL, INT8_CHANNEL, INT8_TOKEN, Quantised, Quantiser, quantise
from glm5.quant import in_place
from glm5.quant.convert import quantise_checkpoint
from glm5.quant.in_place import quantise_in_place
from glm5.quant.schemes import scheme_named
from glm5.records import SamplingParams
from glm5.rl.weight_sync import publish
from tests.quant.same_function import lively

IDS = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folders(small: Callable[..., GLM5ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `plain`, `w8a8`, `w4a8` and `paper-w4a8`. All keys are selected: a rounding may flip a choice."""
    folder = tmp_path_factory.mktemp("integers")
    sizes = dict.fromkeys("hidden_size intermediate_size moe_intermediate_size q_lora_rank".split(), 128)
    lively(small(**sizes, v_head_dim=64, index_topk=64, num_nextn_predict_layers=1)).save_pretrained(folder / "plain")
    for name in ("w8a8", "w4a8", "paper-w4a8"):
        quantise_checkpoint(folder / "plain", folder / name, scheme_named(name), IDS)
    return folder


@torch.no_grad()
def hidden(model: GLM5ForCausalLM) -> torch.Tensor:
    return model.model(IDS, packed_context(torch.zeros_like(IDS), exact=True))


@pytest.mark.parametrize("name", ["w8a8", "w4a8", "paper-w4a8"])
def test_integers_of_files(folders: Path, name: str) -> None:
    """The hidden states are those of rounded numbers, but where a sum that is rounded differently flips an integer."""
    rounded = GLM5ForCausalLM.from_pretrained(folders / name)
    integers = GLM5ForCausalLM.from_pretrained(folders / name, integers=True)
    held = [m for m in integers.modules() if isinstance(m, Linear) and m.integers is not None]
    assert len(held) >= 12 and all(module.weight.is_meta for module in held)
    assert all(m.activation is None or m.integers is not None for m in integers.modules() if isinstance(m, Linear))
    one, other = hidden(rounded), hidden(integers)
    apart = (one - other).norm(dim=-1) / one.norm(dim=-1)
    assert apart.median() < 1e-3 and not torch.equal(hidden(GLM5ForCausalLM.from_pretrained(folders / "plain")), one)
    with pytest.raises(CheckpointError, match="has no weights to save"):
        integers.save_pretrained(folders / "again")


@pytest.mark.parametrize("name", ["w8a8", "w4a8"])
def test_integers_while_loading(folders: Path, name: str) -> None:
    """The same bits as from a quantised checkpoint; the engine generates with both, and with drafts."""
    loaded = Engine.from_pretrained(folders / name, device="cpu")
    made = Engine.from_pretrained(folders / "plain", device="cpu", quantize=name, speculative=1)
    assert torch.equal(hidden(loaded.model), hidden(made.model))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    assert [c.token_ids for c in loaded.generate(prompts, params)] == [
        c.token_ids for c in made.generate(prompts, params)
    ]


def test_what_cannot_be_done_while_loading(folders: Path, small: Callable[..., GLM5ForCausalLM]) -> None:
    for name in ("paper-w4a8", "w4a16"):
        with pytest.raises(ConfigError, match="cannot be done while loading"):
            quantise_in_place(small(), name)
    with pytest.raises(ConfigError, match="the device is meta"):
        quantise_in_place(GLM5ForCausalLM.from_pretrained(folders / "plain", device="meta"), "w8a8")
    with pytest.raises(ConfigError, match="one process per engine"):
        Engine.from_pretrained(folders / "plain", quantize="int8", tp=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_new_weights_are_rounded(folders: Path, name: str, dtype: torch.dtype) -> None:
    """An engine in low precision that gets weights in fp32 computes as one made of them, in the same memory."""
    new = GLM5ForCausalLM.from_pretrained(folders / "plain")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(torch.linspace(0.5, 1.5, parameter.shape[-1]))
    models = [GLM5ForCausalLM.from_pretrained(folders / "plain", dtype=dtype), new.clone(dtype=dtype)]
    for model in models:
        quantise_in_place(model, name)
    engine, params = Engine(models[0], exact=False), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    before = engine.generate([[1, 2, 3]], params)[0]
    held = [m.integers for m in models[0].modules() if isinstance(m, Linear) and m.integers is not None]
    places = [weight.values.data_ptr() for weight in held]
    publish(new, engine, 1)
    assert places == [weight.values.data_ptr() for weight in held] and bool(places) == (name != "fp8")
    assert torch.equal(hidden(models[0]), hidden(models[1])) and not torch.equal(hidden(models[0]), hidden(new))
    after_it, expected = (e.generate([[1, 2, 3]], params)[0] for e in (engine, Engine(models[1], exact=False)))
    assert after_it.token_ids == expected.token_ids and after_it.logprobs == expected.logprobs != before.logprobs
    staged = stage(models[0], folders / "plain", hashes=None)
    apply(engine, staged, 2, hashes={n: tensor_hash(t) for n, t in staged.tensors.items()})
    assert engine.generate([[1, 2, 3]], params)[0].logprobs == before.logprobs


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_an_update_that_fails_changes_nothing(folders: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is rounded before anything is copied, and what was copied is compared."""
    model = GLM5ForCausalLM.from_pretrained(folders / "plain")
    quantise_in_place(model, name)
    engine, before = Engine(model, exact=False), hidden(model)
    new = {n: tensor * 1.5 for n, tensor in GLM5ForCausalLM.from_pretrained(folders / "plain").state_dict().items()}
    calls = []

    def short_of_memory(weight: torch.Tensor, form: Quantiser) -> Quantised:
        calls.append(weight)
        if len(calls) == 5:
            raise MemoryError
        return quantise(weight, form)

    with monkeypatch.context() as patch:
        patch.setattr(in_place, "quantise", short_of_memory)
        with pytest.raises(MemoryError):
            engine.update_weights(new, 1)
    assert torch.equal(hidden(model), before) and engine.weight_version != 1
    staged = stage(model, new)
    apply(engine, staged, 2, hashes={n: tensor_hash(t) for n, t in new.items()})
    layer = model.model.layers[0].mlp.down_proj
    (layer.integers.values if layer.integers else layer.weight.data).view(-1)[3] = 9
    with pytest.raises(EngineError, match=r"layers.0.mlp.down_proj.* differs"):
        check_copy(model, staged.new, 2)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("kind", ["no shared expert", "biases"])
def test_rounding_of_other_models(kind: str, name: str, small: Callable[..., GLM5ForCausalLM], tmp_path: Path) -> None:
    """In place and from a file; layers with a bias multiply integers, and what is empty stays."""
    sizes = {"hidden_size": 32, "vocab_size": 40, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4}
    grouped = {
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "num_hidden_layers": 3,
        **sizes,
        **heads,
    }
    biased = GLM5ForCausalLM(GLM5Config.preset("glm4.5", **grouped))
    model = small(n_shared_experts=0) if kind == "no shared expert" else lively(biased)
    model.save_pretrained(tmp_path / "plain")
    quantise_checkpoint(tmp_path / "plain", tmp_path / "out", scheme_named({"int8": "w8a8"}.get(name, name)))
    quantise_in_place(model, name)
    if kind == "biases" and name == "int8":
        assert model.model.layers[0].self_attn.q_proj.integers is not None
    if name == "int8":
        assert torch.equal(hidden(model), hidden(GLM5ForCausalLM.from_pretrained(tmp_path / "out", integers=True)))
    done = Engine(model, exact=False).generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))
    assert all(math.isfinite(p) for p in done[0].logprobs)


def test_what_integers_refuse(folders: Path) -> None:
    """Weight updates, clones and gradients; and matrices whose two halves have different forms stay dequantised."""
    engine = Engine.from_pretrained(folders / "w8a8", device="cpu")
    with pytest.raises(EngineError, match="multiplies the integers"):
        engine.update_weights(GLM5ForCausalLM.from_pretrained(folders / "plain").state_dict(), 1)
    with pytest.raises(ConfigError, match="cannot be cloned"):
        engine.model.clone()
    rounded = GLM5ForCausalLM.from_pretrained(folders / "plain")
    quantise_in_place(rounded, "fp8")
    for again in ("fp8", "int8"):
        with pytest.raises(ConfigError, match="quantised already"):
            quantise_in_place(rounded, again)
    with pytest.raises(ConfigError, match="cannot be cloned"):
        rounded.clone()
    with pytest.raises(CheckpointError, match="not saved"):
        rounded.save_pretrained(folders / "rounded")
    activations = Engine(GLM5ForCausalLM.from_pretrained(folders / "w8a8"), exact=False)
    with pytest.raises(EngineError, match="multiplies the integers"):
        activations.update_weights(GLM5ForCausalLM.from_pretrained(folders / "plain").state_dict(), 1)
    with pytest.raises(ValueError, match="have no gradient"):
        engine.model(IDS)
    mixed = GLM5ForCausalLM.from_pretrained(folders / "plain")
    round_activations(mixed, lambda name: INT8_TOKEN)
    forms = {"gate_proj": INT4_CHANNEL, "kv_b_proj": INT8_CHANNEL, "lm_head": INT8_CHANNEL}
    hold_integers(mixed, lambda disk, w: quantise(w, forms.get(disk.split(".")[-2], INT8_CHANNEL)), mixed.device)
    held = {name for name, module in mixed.named_modules() if getattr(module, "integers", None)}
    assert "model.layers.0.self_attn.o_proj" in held and "model.layers.0.mlp.down_proj" in held
    assert not any("gate_up" in name or "kv_b" in name or "lm_head" in name or name == "experts" for name in held)


@pytest.mark.skipif(not available(), reason="needs compiled kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["w8a8", "w4a8", "int8", "int4"])
@torch.no_grad()
def test_whole_blocks_multiply_integers(
    folders: Path, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compiled call for a few tokens gives what the layers give one by one, for one row and several, any batch."""
    model = GLM5ForCausalLM.from_pretrained(folders / "plain", dtype=dtype)
    quantise_in_place(model, name)
    whole = []
    call = FusedDecode.__call__
    monkeypatch.setattr(FusedDecode, "__call__", lambda *a: whole.append(call(*a)) or whole[-1])
    for count in (1, 3):
        with monkeypatch.context() as patch:
            found = after(model, count)
            assert whole[-1] is not None
            patch.setattr(FusedDecode, "__call__", lambda *a: None)
            expected = after(model, count)
        apart = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        # Sums in another order flip an integer of the next layer's input now and then.
        assert apart.median() < (2e-3 if dtype == torch.float32 else 5e-2)
        whole.clear()
    assert torch.equal(after(model, 3, rows=2), after(model, 3)[:6])


def after(model: GLM5ForCausalLM, count: int, rows: int = 3) -> torch.Tensor:
    """Hidden states [rows * count, D] of tokens that follow eight in the cache."""
    cache, ids = LatentCache(model.config, 4, 64, model.dtype), IDS.repeat(2, 1)[:rows]
    for row in range(rows):
        model.model(ids[row : row + 1, :8], cache_context(cache, torch.tensor([row]), torch.tensor([0]), 8))
    start = torch.full((rows,), 8)
    return model.model(
        ids[:, 8 : 8 + count], cache_context(cache, torch.arange(rows), start, count, exact=False)
    ).float()


@pytest.mark.skipif(not available(), reason="needs compiled kernels")
def test_drafts_are_rounded_and_tokens_are_not(folders: Path) -> None:
    """Drafts in int8 change which are accepted, never a greedy token; their copies follow the weights."""
    model = GLM5ForCausalLM.from_pretrained(folders / "plain", dtype=torch.bfloat16)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    engines = [Engine(model, exact=False, speculative=drafts) for drafts in (0, 3)]
    engines[1].steps.draft_count.adapts = False
    step = engines[1].runner.step
    assert step is not None and step._mtp is not None
    for factor in (1.0, 0.5):
        with torch.no_grad():
            model.lm_head.weight.mul_(factor)
            model.mtp.eh_proj.weight.mul_(factor)  # type: ignore[union-attr]
        plain, drafted = (engine.generate([[1, 2, 3, 4]], params)[0] for engine in engines)
        assert plain.token_ids == drafted.token_ids and drafted.drafted > 0
        head, join = step._mtp._matrices
        assert isinstance(head, IntegerWeight) and isinstance(join, IntegerWeight)
        assert torch.equal(head.scales, integer_weight(quantise(model.lm_head.weight.detach(), INT8_CHANNEL)).scales)
    rounded, stack = step._mtp._blocks, model.mtp.block.mlp.experts.down_proj  # type: ignore[union-attr]
    with torch.no_grad():
        known = rounded.plan(model.dtype)
        assert known is not None and rounded.plan(model.dtype) is known
        stack.data = stack.data.clone()
        assert rounded.plan(model.dtype) is not known
    model.mtp.fused_decode.off = True  # type: ignore[union-attr]
    assert rounded.plan(model.dtype) is None
