"""FP8 checkpoints against a brute-force loop in float64: block shapes, places of scales, and scales that lie."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5.errors import CheckpointError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.hf_weights import INDEX, SINGLE, disk_tensors
from glm5.model.quantised_files import dequantise, scale_shape

Build = Callable[..., GLM5ForCausalLM]
# Rows and columns around the block size: 150 and 186 + 6 rows end in half blocks, as kv_a_proj's 576 rows do.
WIDE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 150,
    "intermediate_size": 260,
    "kv_lora_rank": 186,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
}
PLAIN = ("embed_tokens", "lm_head", "norm", "weights_proj", "mlp.gate.", "eh_proj")


def by_hand(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """One multiplication per element, in float64; exact, because 4 and 24 bits of mantissa multiply to 28."""
    scales, out = scale.double().tolist(), weight.double().tolist()
    for row, values in enumerate(out):
        for column in range(len(values)):
            values[column] *= scales[row // block[0]][column // block[1]]
    return torch.tensor(out, dtype=torch.float64)


def by_block(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The same with one multiplication per block, for whole checkpoints."""
    out = weight.double()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            rows, columns = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            out[rows, columns] *= float(scale[i, j])
    return out


def random_fp8(shape: tuple[int, ...], block: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(shape, generator=generator) * 60).to(torch.float8_e4m3fn)
    ceilings = (*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))
    return weight, torch.rand(ceilings, generator=generator) * 1e-3 + 1e-4


@pytest.mark.parametrize("block", [(128, 128), (32, 48)])
@pytest.mark.parametrize("shape", [(576, 20), (192, 130), (128, 128), (256, 3), (1, 129), (1, 1), (300, 257)])
def test_dequantise_is_the_loop(shape: tuple[int, int], block: tuple[int, int]) -> None:
    weight, scale = random_fp8(shape, block)
    assert scale_shape(shape, block) == tuple(scale.shape)
    expected = by_hand(weight, scale, block)
    assert torch.equal(by_block(weight, scale, block), expected)
    assert torch.equal(dequantise(weight, scale, block, torch.float64), expected)
    assert torch.equal(dequantise(weight, scale, block), expected.float())


def test_the_released_kv_a_shape() -> None:
    assert scale_shape((576, 6144), (128, 128)) == (5, 48)
    assert scale_shape((4096, 2048), (128, 128)) == (32, 16)
    assert scale_shape((7, 576, 6144), (128, 128)) == (7, 5, 48)


def test_stacks_are_dequantised_matrix_by_matrix() -> None:
    weight, scale = random_fp8((3, 200, 140), (128, 128))
    expected = torch.stack([by_hand(w, s, (128, 128)) for w, s in zip(weight, scale)])
    assert torch.equal(dequantise(weight, scale, (128, 128), torch.float64), expected)


@pytest.fixture(scope="module")
def wide(build: Build) -> GLM5ForCausalLM:
    return build(1, **WIDE)


def quantise_folder(
    model: GLM5ForCausalLM, folder: Path, block: tuple[int, int] = (128, 128), shards: int = 1, **config: Any
) -> dict[str, Tensor]:
    """Write `model` as a release in FP8 is written, and return what its tensors are worth, in float64."""
    model.save_pretrained(folder)
    (folder / "manifest.json").unlink()
    stored, worth = load_file(folder / SINGLE), {}
    for number, (name, tensor) in enumerate(sorted(stored.copy().items())):
        if tensor.ndim < 2 or any(part in name for part in PLAIN):
            worth[name] = tensor.double()
            continue
        weight, scale = random_fp8(tuple(tensor.shape), block, number)
        stored[name], stored[f"{name}_scale_inv"] = weight, scale
        worth[name] = by_block(weight, scale, block)
    (folder / SINGLE).unlink()
    names = sorted(stored)
    for shard in range(shards):  # neighbours in the alphabet, a weight and its scale, go to different files
        file = SINGLE if shards == 1 else f"model-{shard}.safetensors"
        save_file({name: stored[name] for name in names[shard::shards]}, folder / file)
    if shards > 1:
        where = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(names)}
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.indexers_proj"],
    }
    change_config(folder, quantization_config=quantization | config)
    return worth


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("block", "shards"), [((128, 128), 1), ((128, 128), 3), ((64, 32), 2)])
def test_checkpoint(
    wide: GLM5ForCausalLM, tmp_path: Path, dtype: torch.dtype | None, block: tuple[int, int], shards: int
) -> None:
    worth = quantise_folder(wide, tmp_path / "fp8", block, shards)
    model = GLM5ForCausalLM.from_pretrained(tmp_path / "fp8", dtype=dtype)
    target = dtype or torch.float32
    assert model.dtype == target
    for name, tensor in disk_tensors(model).items():
        bias = "e_score_correction_bias" in name
        expected = worth[name].to(torch.float32 if bias and target != torch.float64 else target)
        if target.itemsize == 2 and not bias:
            expected = worth[name].float().to(target)  # through fp32, as serving stacks do
        assert torch.equal(tensor, expected), name
    quantised = sum(tensor.ndim == 2 and not any(part in name for part in PLAIN) for name, tensor in worth.items())
    assert quantised == 10 + 19 + 19  # a dense layer, a MoE layer, the MTP layer: 7 for attention, then 3 a MLP
    assert model.census == {"loaded": len(worth), "generated": 0, "ignored": 0, "dequantised": quantised}


def test_saved_again_it_is_a_plain_checkpoint(wide: GLM5ForCausalLM, tmp_path: Path) -> None:
    quantise_folder(wide, tmp_path / "fp8")
    model = GLM5ForCausalLM.from_pretrained(tmp_path / "fp8")
    for folder in ("fp8", "elsewhere"):  # over the FP8 files, and apart from them
        model.save_pretrained(tmp_path / folder)
        assert "quantization_config" not in json.loads((tmp_path / folder / "config.json").read_text())
        assert {t.dtype for t in load_file(tmp_path / folder / SINGLE).values()} == {torch.float32}
        again = GLM5ForCausalLM.from_pretrained(tmp_path / folder)
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
        assert "dequantised" not in again.census


def test_stacked_experts_in_fp8(build: Build, tmp_path: Path) -> None:
    """Blocks of a stacked gate_up_proj run across the border between gate and up, 100 rows below the top."""
    model = build(2, **WIDE | {"moe_intermediate_size": 100})
    worth = quantise_folder(model, tmp_path / "fp8")
    stored = load_file(tmp_path / "fp8" / SINGLE)
    expected = {}
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for name in [name for name in stored if name.startswith(prefix)]:
            del stored[name]
        for leaf, shape in (("gate_up_proj", (3, 200, 150)), ("down_proj", (3, 150, 100))):
            weight, scale = random_fp8(shape, (128, 128), layer)
            stored[f"{prefix}.{leaf}"], stored[f"{prefix}.{leaf}_scale_inv"] = weight, scale
            values = torch.stack([by_block(w, s, (128, 128)) for w, s in zip(weight, scale)])
            for expert in range(3):
                if leaf == "down_proj":
                    expected[f"{prefix}.{expert}.down_proj.weight"] = values[expert]
                else:
                    expected[f"{prefix}.{expert}.gate_proj.weight"] = values[expert, :100]
                    expected[f"{prefix}.{expert}.up_proj.weight"] = values[expert, 100:]
    save_file(stored, tmp_path / "fp8" / SINGLE)
    found = disk_tensors(GLM5ForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float64))
    assert len(expected) == 18 and len(found) == len(worth)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected.get(name, worth[name])), name


def test_quantised_tensors_that_nobody_needs_are_counted_with_their_scales(
    wide: GLM5ForCausalLM, tmp_path: Path
) -> None:
    quantise_folder(wide, tmp_path / "fp8")
    stored = load_file(tmp_path / "fp8" / SINGLE)
    model = GLM5ForCausalLM.from_pretrained(tmp_path / "fp8", num_nextn_predict_layers=0)
    unused = [name for name in stored if name.startswith("model.layers.2.")]
    assert model.census["ignored"] == len(unused) == 2 * 19 + 13
    assert model.census["loaded"] + model.census["dequantised"] == len(stored) - len(unused)


Q = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
S = f"{Q}_scale_inv"


def edit(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        stored = load_file(folder / SINGLE)
        change(stored)
        save_file(stored, folder / SINGLE)

    return apply


def config(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())["quantization_config"]
        change_config(folder, quantization_config=old | changes)

    return apply


def bad_scale(value: float) -> Callable[[dict[str, Tensor]], None]:
    def apply(stored: dict[str, Tensor]) -> None:
        stored[S][1, 1] = value

    return apply


SCALE_SHAPE = (
    rf'the scale "{S}" is torch.float32 of shape .*; blocks of \[128, 128\] demand torch.float32 of shape \[2, 2\]'
)
BAD_SCALE = rf'"{S}" holds a scale that is negative or not finite'
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing scale": (edit(lambda t: t.pop(S)), f'tensor "{Q}" is stored as torch.float8_e4m3fn; .* a scale "{S}"'),
    "scale without weight": (edit(lambda t: t.pop(Q)), f'the scale "{S}" has no weight'),
    "scale of a plain weight": (edit(lambda t: t.update({Q: t[Q].bfloat16()})), f'"{Q}" has a scale, but is stored'),
    "one scale row lost": (edit(lambda t: t.update({S: t[S][:1].contiguous()})), SCALE_SHAPE),
    "one scale row too many": (edit(lambda t: t.update({S: t[S].repeat(2, 1)})), SCALE_SHAPE),
    "one scale for all": (edit(lambda t: t.update({S: torch.ones(())})), SCALE_SHAPE),
    "scale in bf16": (edit(lambda t: t.update({S: t[S].bfloat16()})), "is torch.bfloat16 of shape"),
    "NaN scale": (edit(bad_scale(math.nan)), BAD_SCALE),
    "infinite scale": (edit(bad_scale(math.inf)), BAD_SCALE),
    "negative scale": (edit(bad_scale(-1.0)), BAD_SCALE),
    "the other FP8 type": (edit(lambda t: t.update({Q: t[Q].to(torch.float8_e5m2)})), "has a scale, but is stored as"),
    "wrong shape": (edit(lambda t: t.update({Q: t[Q][:191].contiguous()})), r"has shape \[191, 150\]"),
    "vector in FP8": (
        edit(lambda t: t.update({"model.norm.weight": torch.ones(150).to(torch.float8_e4m3fn)})),
        'tensor "model.norm.weight" is stored as torch.float8_e4m3fn',
    ),
    "other method": (config(quant_method="modelopt"), "quant_method is 'modelopt', but only \"fp8\" and"),
    "no method": (config(quant_method=None), "quant_method is None"),
    "other format": (config(fmt="e5m2"), "fmt is 'e5m2', but only \"e4m3\" can be read"),
    "one scale per tensor": (config(weight_block_size=None), "weight_block_size is None; it must be two sizes"),
    "three block sizes": (config(weight_block_size=[1, 128, 128]), "weight_block_size is"),
    "block of zero": (config(weight_block_size=[0, 128]), "weight_block_size is"),
    "block of text": (config(weight_block_size=["128", "128"]), "weight_block_size is"),
    "block of true": (config(weight_block_size=[True, 128]), "weight_block_size is"),
    "block that is not the files'": (config(weight_block_size=[64, 128]), r"demand torch.float32 of shape \[3, 3\]"),
    "a list": (lambda p: change_config(p, quantization_config=[1]), "quantization_config must be an object"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_clear_sentence(wide: GLM5ForCausalLM, tmp_path: Path, name: str) -> None:
    quantise_folder(wide, tmp_path / "fp8")
    damage, message = DAMAGE[name]
    damage(tmp_path / "fp8")
    with pytest.raises(CheckpointError, match=message) as caught:
        GLM5ForCausalLM.from_pretrained(tmp_path / "fp8")
    text = str(caught.value)
    assert str(tmp_path) in text and "\n" not in text and text.endswith(".")


def test_without_quantization_config_blocks_are_128(wide: GLM5ForCausalLM, tmp_path: Path) -> None:
    worth = quantise_folder(wide, tmp_path / "fp8")
    change_config(tmp_path / "fp8", quantization_config=None)
    found = disk_tensors(GLM5ForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float64))
    assert torch.equal(found[Q], worth[Q])
