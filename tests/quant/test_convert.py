"""Quantised checkpoints: what is read back is what the quantisers say, and steps before rounding keep the function."""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.errors import CheckpointError, ConfigError
from glm5.model.disk_names import disk_tensors
from glm5.model.glm5 import Block, GLM5ForCausalLM
from glm5.ops.quantisers import quantise
from glm5.quant import convert
from glm5.quant.convert import REPORT, quantise_checkpoint
from glm5.quant.formats import quantization_config
from glm5.quant.rotation import rotate
from glm5.quant.schemes import SCHEMES, Scheme, scheme_named
from tests.quant.same_function import lively, same_function, without_rounding

SIZES: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=128, moe_intermediate_size=128, q_lora_rank=128, kv_lora_rank=32, v_head_dim=64,
    num_hidden_layers=3, num_nextn_predict_layers=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def source(small: Callable[..., GLM5ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quant") / "plain"
    lively(small(**SIZES)).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("a file of others")
    return folder


def text(rows: int = 4, length: int = 41) -> Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if not scheme.steps])
def test_what_is_read_is_what_the_quantisers_say(source: Path, tmp_path: Path, name: str) -> None:
    scheme = scheme_named(name)
    report = quantise_checkpoint(source, tmp_path / name, scheme)
    plain = GLM5ForCausalLM.from_pretrained(source)
    found = disk_tensors(GLM5ForCausalLM.from_pretrained(tmp_path / name))
    rounded = 0
    for disk, tensor in disk_tensors(plain).items():
        form = scheme.form(disk, plain.config)
        rounded += form is not None
        expected = tensor if form is None else quantise(tensor, form.weight).dequantise()
        assert torch.equal(found[disk], expected), disk
    assert rounded == sum(len(piece["tensors"]) for piece in report["pieces"].values()) > 0
    assert report["bytes_after"] < report["bytes_before"]
    assert (tmp_path / name / "chat_template.jinja").exists()
    assert json.loads((tmp_path / name / REPORT).read_text())["scheme"] == name


def test_what_is_never_rounded(source: Path) -> None:
    plain = GLM5ForCausalLM.from_pretrained(source, device="meta")
    paper = scheme_named("paper-w4a8")
    for scheme in SCHEMES.values():
        kept = {name for name in disk_tensors(plain) if scheme.form(name, plain.config) is None}
        for part in (
            "embed_tokens",
            "lm_head",
            "norm",
            ".mlp.gate.",
            "kv_b_proj",
            "indexer.wk.",
            "weights_proj",
            "eh_proj",
        ):
            assert any(part in name for name in kept)
            assert all(name in kept for name in disk_tensors(plain) if part in name)
    assert all(paper.form(name, plain.config) is None for name in disk_tensors(plain) if ".layers.3." in name)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_every_matrix_is_named_as_rounded_or_as_kept(source: Path, scheme: Scheme) -> None:
    """Other readers look at these lists alone; SGLang refuses a module that is in none, and looks for the two halves of
    an MLP under one name."""
    named_or_kept(scheme, GLM5ForCausalLM.from_pretrained(source, device="meta"))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize(
    ("preset", "other"),
    [
        ("glm5.2", {"num_hidden_layers": 5, "n_routed_experts": 8}),  # most layers have no indexer
        ("glm4.7-flash", {"num_hidden_layers": 2, "n_routed_experts": 8, "num_nextn_predict_layers": 0}),
        ("glm9b", {"num_hidden_layers": 2, "first_k_dense_replace": 2, "attention_pattern": "SF",
                   "efficient_attention": "gdn"}),
    ],
)  # fmt: skip
def test_every_matrix_of_other_models_is_named(scheme: Scheme, preset: str, other: dict[str, Any]) -> None:
    config = GLM5Config.preset(preset, **other)
    with torch.device("meta"):
        named_or_kept(scheme, GLM5ForCausalLM(config))


def named_or_kept(scheme: Scheme, plain: GLM5ForCausalLM) -> None:
    told = quantization_config(scheme, plain.config)

    def named(patterns: list[str], module: str) -> bool:
        return any(re.match(p[3:], module) if p.startswith("re:") else p == module for p in patterns)

    for name, tensor in disk_tensors(plain).items():
        module, rounded = name.removesuffix(".weight"), scheme.form(name, plain.config) is not None
        if tensor.ndim != 2 or not name.endswith(".weight") or "embed_tokens" in name:
            continue
        if told["quant_method"] == "fp8":
            assert (module in told["modules_to_not_convert"]) != rounded, module
            continue
        for one in {module, module.replace("gate_proj", "gate_up_proj")}:
            groups = [group for group in told["config_groups"].values() if named(group["targets"], one)]
            assert named(told["ignore"], one) != rounded, one
            assert len(groups) == 1 or not rounded, one


@pytest.mark.long
@pytest.mark.parametrize("steps", [("quarot",), ("awq", "smooth", "ssz"), ("quarot", "awq", "smooth", "ssz")])
def test_steps_before_rounding_keep_the_function(source: Path, tmp_path: Path, steps: tuple[str, ...]) -> None:
    plain = GLM5ForCausalLM.from_pretrained(source, dtype=torch.float64)
    changed, report = without_rounding(source, tmp_path / "out", steps, text())
    assert not torch.allclose(
        changed.model.layers[1].mlp.experts.down_proj, plain.model.layers[1].mlp.experts.down_proj
    )
    assert same_function(plain, changed) == []
    found = [junction for piece in report["pieces"].values() for junction in piece["junctions"]]
    assert ("awq" in steps) == any(junction["junction"].startswith("experts") for junction in found)
    assert all(junction["error"] <= junction["without"] for junction in found)


def test_layer_by_layer_is_the_whole_model(source: Path, tmp_path: Path) -> None:
    scheme = Scheme("rotated", SCHEMES["w8a8"].forms, ("quarot",))
    quantise_checkpoint(source, tmp_path / "out", scheme, seed=3)
    whole = rotate(GLM5ForCausalLM.from_pretrained(source), seed=3)
    found = disk_tensors(GLM5ForCausalLM.from_pretrained(tmp_path / "out"))
    for disk, tensor in disk_tensors(whole).items():
        form = scheme.form(disk, whole.config)
        assert torch.equal(found[disk], tensor if form is None else quantise(tensor, form.weight).dequantise()), disk


@pytest.mark.long
def test_an_interrupted_conversion_goes_on(source: Path, tmp_path: Path) -> None:
    scheme, calls = scheme_named("paper-w4a8"), []
    quantise_checkpoint(source, tmp_path / "whole", scheme, text())

    def stop(name: str, done: int, total: int) -> None:
        calls.append(name)
        if name == "layer 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise_checkpoint(source, tmp_path / "out", scheme, text(), progress=stop)
    assert not (tmp_path / "out").exists()
    original, again = convert.Conversion.convert, []

    def noted(self: Any, piece: Any) -> Any:
        again.append(piece.name)
        return original(self, piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert.Conversion, "convert", noted)
        quantise_checkpoint(source, tmp_path / "out", scheme, text())
    assert again == ["layer 2", "end", "MTP layer"]
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").glob("model*")}
    assert whole == {file.name: file.read_bytes() for file in (tmp_path / "out").glob("model*")}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "whole"]


def test_refusals(source: Path, tmp_path: Path, small: Callable[..., GLM5ForCausalLM]) -> None:
    with pytest.raises(ConfigError, match='no scheme "w8a9"'):
        scheme_named("w8a9")
    with pytest.raises(ConfigError, match='needs calibration text for its step "awq"'):
        quantise_checkpoint(source, tmp_path / "out", scheme_named("paper-w4a8"))
    with pytest.raises(ConfigError, match='has no step "awq"; it has: none'):
        scheme_named("w8a8").without("awq")
    small().save_pretrained(tmp_path / "narrow")
    with pytest.raises(ConfigError, match="groups of 32 do not divide 16 columns"):
        quantise_checkpoint(tmp_path / "narrow", tmp_path / "out", scheme_named("w4a16"))


@pytest.mark.long
def test_one_layer_is_in_memory_at_a_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with memory, whenever the next one is about to be read."""
    alive: list[int] = []

    def count() -> int:
        gc.collect()
        return sum(isinstance(found, Block) and not next(found.parameters()).is_meta for found in gc.get_objects())

    others = count()
    progress = lambda name, done, total: alive.append(count() - others)  # noqa: E731
    quantise_checkpoint(source, tmp_path / "out", scheme_named("paper-w4a8"), text(), progress=progress)
    assert len(alive) == 7 and max(alive) <= 1


def test_the_source_is_never_harmed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as its own output, nor from inside; and damage of its weights is found, not given a new manifest."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    monkeypatch.chdir(copy)
    for out in (copy, copy / "inside", tmp_path, Path(), Path("..")):
        with pytest.raises(CheckpointError, match="choose another folder"):
            quantise_checkpoint(copy, out, scheme_named("w8a8"))
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-64, 2)
        file.write(bytes(64))
    with pytest.raises(CheckpointError):
        quantise_checkpoint(copy, tmp_path / "out", scheme_named("w8a8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]
