"""`glm5 plan serve`: its bytes are those of models and caches that are built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from glm5.cli import app
from glm5.config.arithmetic import size_report
from glm5.config.decoding import kinds_of_weights, step_bytes
from glm5.config.model import GLM5Config
from glm5.engine.kv_pool import PAGE, KVPool, token_bytes
from glm5.errors import ConfigError, UsageError
from glm5.launch.plan_serve import config_of, plan_serve, weight_bytes
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.parallel.tensor import divide_model
from glm5.quant.in_place import quantise_in_place

NANO = GLM5Config.preset("nano")


def indexers_of(config: GLM5Config) -> int:
    return sum(config.computes_topk(layer) for layer in range(config.num_hidden_layers))


def built(model: GLM5ForCausalLM) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.parametrize("preset", ["nano", "tiny", "small"])
def test_weights_are_those_of_the_model(preset: str) -> None:
    config = GLM5Config.preset(preset)
    model = GLM5ForCausalLM.deferred(config).cast(torch.bfloat16)
    found = weight_bytes(config)
    routers = config.num_hidden_layers + 1 - config.first_k_dense_replace  # each with biases in fp32
    assert sum(kinds_of_weights(config, 2).values()) == sum(found.values()) - 4 * config.n_routed_experts * routers
    assert kinds_of_weights(config, 2)["experts"] == found["experts"]
    assert sum(found.values()) == built(model)
    assert model.mtp is not None and found["mtp"] == sum(t.nbytes for t in model.mtp.state_dict().values())


@pytest.mark.parametrize("tp", [2, 4])
def test_weights_of_a_rank_are_those_of_the_divided_model(tp: int) -> None:
    model = GLM5ForCausalLM.deferred(NANO).cast(torch.bfloat16)
    with torch.no_grad():
        divide_model(model, 0, tp, lambda share, exact: share)
    assert sum(weight_bytes(NANO, tp).values()) == built(model)


@pytest.mark.parametrize("scheme", ["int8", "w4a8-channel"])
def test_integers_are_those_that_the_engine_keeps(scheme: str) -> None:
    """The engine also pads rows and keeps their sums."""
    config = GLM5Config.preset("tiny", num_hidden_layers=3)
    model = GLM5ForCausalLM(config).cast(torch.bfloat16)
    quantise_in_place(model, scheme)
    held = [getattr(module, "integers", None) for module in model.modules()]
    weights = [one for each in held if each for one in (each if isinstance(each, tuple) else (each,))]
    assert len(weights) > 10
    left = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    found = sum(left.values()) + sum(one.values.nbytes + one.scales.nbytes for one in weights)
    assert sum(weight_bytes(config, quantize=scheme).values()) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["own indexers", "IndexShare"])
def test_cache_bytes_are_those_of_a_pool(packed: bool, shared: bool, tmp_path: Path) -> None:
    config = NANO.replace(index_topk_pattern="FSSF" if shared else None)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    found = plan_serve(str(tmp_path), "h100", cache_dtype="int8" if packed else "auto", contexts=[64])
    pool = KVPool(config, PAGE, states=1, dtype=torch.bfloat16, packed=packed)
    assert found["cache_bytes_per_token"] * PAGE == pool.page_bytes()
    if not packed:  # 4 layers and MTP
        indexers = 3 if shared else 5
        assert found["cache_bytes_per_token"] == 2 * (5 * (32 + 8) + indexers * 32)


def test_the_cache_of_glm52_has_index_keys_of_22_layers() -> None:
    """21 of its 78 layers have an indexer, and the MTP layer."""
    config = GLM5Config.preset("glm5.2")
    assert token_bytes(config, torch.bfloat16) == 2 * (79 * (512 + 64) + 22 * 128)
    assert plan_serve("glm5.2", "h200", 16, 16)["cache_bytes_per_token"] == 96_640


def test_bytes_of_a_decoding_step() -> None:
    """One sequence reads the active weights; many read more experts, and at most all of them. Sparse attention reads
    the selected latents and all index keys. The MTP layer's cache is not read."""
    for depths in (0, 1):
        config = GLM5Config.preset("tiny", num_nextn_predict_layers=depths)

        def bytes_of(config: GLM5Config, batch: int, context: int) -> float:
            return step_bytes(config, weight_bytes(config), token_bytes(config, torch.bfloat16), batch, context)

        report = size_report(config, 1024)
        biases = 2 * config.n_routed_experts * report["layers"]["moe"]  # of routers, in fp32
        active, index, latents = 2 * report["active_params"] + biases, 2 * 64 * 6, 2 * 80 * 6
        assert bytes_of(config, 1, 1024) == pytest.approx(active + 1024 * index + 256 * latents)
        assert bytes_of(config, 1, 100) == pytest.approx(active + 100 * (index + latents))
        dense = config.replace(use_dsa=False, index_topk=None)
        active = 2 * size_report(dense, 1024)["active_params"] + biases
        assert bytes_of(dense, 1, 1024) == pytest.approx(active + 1024 * latents)
        shared = config.replace(index_topk_freq=3)
        assert bytes_of(shared, 1, 1024) - bytes_of(shared, 1, 512) == pytest.approx(512 * 2 * 64 * indexers_of(shared))
        everything = 2 * (report["total_params"] - report["components"]["embedding"]) + biases
        assert bytes_of(config, 10_000, 1) == pytest.approx(everything + 10_000 * (index + latents))


def test_the_papers_model_fits_sixteen_h200_and_not_eight() -> None:
    found = plan_serve("glm5", "h200", 16, 16)
    assert found["fits"] and 1.5e12 < 16 * sum(found["weight_bytes"].values()) < 1.7e12
    rows = found["contexts"]
    assert [row["sequences"] for row in rows] == [found["cache_tokens"] // row["context"] for row in rows]
    ones = [row["tokens_per_second_of_one"] for row in rows]
    assert ones == sorted(ones, reverse=True) and rows[-1]["first_token_seconds"] > 0
    assert "does not fit: the weights of a rank are 195.7 GB" in plan_serve("glm5", "h200", 8, 8)["problems"][0]
    for contexts, text in (([4096, 220_000], "more than the model's 202,752"), ([4096, 150_000, 1], "")):
        problems = plan_serve("glm5", "h200", 16, 16, contexts=contexts)["problems"]
        assert [text in problem for problem in problems] == [True] * bool(text)
    more = plan_serve("glm5", "h200", 32, 16)
    assert more["engines"] == 2 and more["contexts"][0]["tokens_per_second"] == 2 * rows[0]["tokens_per_second"]


def test_what_cannot_be_planned() -> None:
    for arguments, error, text in (
        (("glm5", "h200", 8, 3), UsageError, "multiple"),
        (("glm5", "toaster"), UsageError, "No device"),
        (("nowhere", "h100"), UsageError, "neither a checkpoint"),
        (("glm5", "h200", 8, 8, "int8"), ConfigError, "leave out --tp"),
        (("glm5", "h200", 3, 3), ConfigError, "does not divide"),
        (("nano", "h100", 1, 1, None, "fp4"), UsageError, "cache-dtype"),
        (("nano", "h100", 1, 1, None, "auto", [0]), UsageError, "--context"),
        (("small", "h100", 1, 1, "int4"), ConfigError, "w4a8-channel"),
    ):
        with pytest.raises(error, match=text):
            plan_serve(*arguments)  # type: ignore[arg-type]


def test_the_command_line() -> None:
    found = CliRunner().invoke(app, ["plan", "serve", "glm5", "--gpus", "16", "--tp", "16", "--device", "h200"])
    assert found.exit_code == 0 and "131,072" in found.stdout and "Without drafts at most" in found.stdout
    found = CliRunner().invoke(app, ["plan", "serve", "glm5", "--json"])
    assert found.exit_code == 1 and not json.loads(found.stdout)["fits"]
    assert config_of("nano") == NANO
