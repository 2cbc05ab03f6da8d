"""The Ascend format: the same numbers as from compressed-tensors, in the layout that vLLM-Ascend documents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5.errors import CheckpointError, ConfigError
from glm5.model.disk_names import disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops.quantisers import pack_int4_rows, unpack_int4_rows
from glm5.quant.convert import quantise_checkpoint
from glm5.quant.formats import format_named
from glm5.quant.schemes import SCHEMES, scheme_named
from tests.quant.same_function import lively

DESCRIPTION = "quant_model_description.json"
IDS = torch.randint(0, 40, (2, 32), generator=torch.Generator().manual_seed(1))
DOWN = "model.layers.1.mlp.experts.2.down_proj"


@pytest.fixture(scope="module")
def source(small: Callable[..., GLM5ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ascend") / "plain"
    lively(small(moe_intermediate_size=32, num_nextn_predict_layers=1)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def four(source: Path) -> Path:
    """A checkpoint with matrices of every type."""
    out = source.parent / "four"
    quantise_checkpoint(source, out, scheme_named("w4a8-channel"), layout="ascend")
    return out


@pytest.mark.parametrize("name", ["w8a8", "w4a8-channel", "paper-w4a8"])
def test_same_bits_as_compressed_tensors(source: Path, tmp_path: Path, name: str) -> None:
    for layout in ("ascend", "compressed-tensors"):
        quantise_checkpoint(source, tmp_path / layout, scheme_named(name), IDS, layout=layout)
    mine, other = (GLM5ForCausalLM.from_pretrained(tmp_path / layout) for layout in ("ascend", "compressed-tensors"))
    theirs = disk_tensors(other)
    for disk, tensor in disk_tensors(mine).items():
        assert torch.equal(tensor, theirs[disk]), disk
    rounded = {n: m.activation for n, m in other.named_modules() if hasattr(m, "activation")}
    assert rounded == {n: m.activation for n, m in mine.named_modules() if hasattr(m, "activation")}
    assert any(rounded.values()) and not all(rounded.values())
    with torch.no_grad():
        assert torch.equal(mine(IDS).logits, other(IDS).logits)
    assert mine.census == other.census


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_layout(four: Path) -> None:
    """Every tensor is listed with its type; four bits are packed along the outputs; sums by plain loops."""
    found, listed = tensors(four), json.loads((four / DESCRIPTION).read_text())
    assert "quantization_config" not in json.loads((four / "config.json").read_text())
    assert {key: listed.pop(key) for key in ("version", "model_quant_type", "group_size", "metadata", "optional")} == {
        "version": "1.0.0", "model_quant_type": "W8A8_DYNAMIC", "group_size": 0, "metadata": {}, "optional": {},
    }  # fmt: skip
    extra = {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
    assert listed.keys() - found.keys() == extra and all(listed[name] == "FLOAT" for name in extra)
    assert found.keys() <= listed.keys()
    for name, kind in listed.items():
        experts = ".mlp.experts." in name
        assert (kind == "W4A8_DYNAMIC") == experts, name
        if kind == "FLOAT" and name in found:
            assert found[name].is_floating_point()
    packed, scale = found[f"{DOWN}.weight"], found[f"{DOWN}.weight_scale"]
    rows, columns = 2 * packed.shape[0], packed.shape[1]
    assert packed.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (rows, 1)
    assert torch.equal(found[f"{DOWN}.weight_offset"], torch.zeros(rows, 1))
    sums = found[f"{DOWN}.scale_bias"]
    assert sums.shape == (rows, 16) and found[DOWN.replace("down", "up") + ".scale_bias"].shape == (32, 1)
    model = disk_tensors(GLM5ForCausalLM.from_pretrained(four))
    for row in range(rows):
        integers = []
        for column in range(columns):
            byte = int(packed[row // 2, column]) & 255
            half = byte >> 4 if row % 2 else byte & 15
            integers.append(half - 16 if half > 7 else half)
        values = [integer * float(scale[row]) for integer in integers]
        assert torch.allclose(model[f"{DOWN}.weight"][row], torch.tensor(values))
        for part in range(16):
            own = values[part * columns // 16 : (part + 1) * columns // 16]
            assert abs(float(sums[row, part]) - 8 * sum(own)) < 1e-5


def test_any_rows(four: Path) -> None:
    """A rank may want rows that begin or end in the middle of a byte."""
    source = GLM5ForCausalLM.from_pretrained(four, device="meta").weight_source
    whole = disk_tensors(GLM5ForCausalLM.from_pretrained(four))[f"{DOWN}.weight"]
    matrix = source.plan.reads[f"{DOWN}.weight"]  # type: ignore[union-attr]
    with matrix.values.file.open("rb", buffering=0) as handle:
        for first, end in ((0, 32), (0, 1), (3, 4), (3, 8), (4, 7), (31, 32)):
            rows = matrix.read_rows(handle, first, torch.empty(end - first, 32), torch.float32)
            assert torch.equal(rows, whole[first:end])


def test_all_pairs_of_rows() -> None:
    values = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).T.to(torch.int8)
    assert pack_int4_rows(values).shape == (1, 256)
    assert torch.equal(unpack_int4_rows(pack_int4_rows(values)), values)


def test_schemes_without_the_form(source: Path, tmp_path: Path, small: Callable[..., GLM5ForCausalLM]) -> None:
    model = GLM5ForCausalLM.from_pretrained(source, device="meta")
    for name in SCHEMES.keys() - {"w8a8", "w4a8-channel", "paper-w4a8"}:
        with pytest.raises(ConfigError, match=f'scheme "{name}" has no Ascend form.*choose w8a8'):
            format_named("ascend").check(SCHEMES[name], model)
    with pytest.raises(ConfigError, match=r'"model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight" is 32 x 24'):
        format_named("ascend").check(scheme_named("w4a8-channel"), small(moe_intermediate_size=24))
    with pytest.raises(ConfigError, match=r'there is no format "ascent" \(did you mean "ascend"\?'):
        quantise_checkpoint(source, tmp_path / "out", scheme_named("w8a8"), layout="ascent")
    assert not (tmp_path / "out").exists()


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        raw = json.loads((folder / DESCRIPTION).read_text())
        change(raw)
        (folder / DESCRIPTION).write_text(json.dumps(raw))

    return apply


def retensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for file in folder.glob("*.safetensors"):
            held = load_file(file)
            if name in held:
                save_file(held | {name: change(held[name])}, file)

    return apply


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no description": (lambda folder: (folder / DESCRIPTION).unlink(), "description.json is missing, but .* copy the"),
    "no JSON": (lambda folder: (folder / DESCRIPTION).write_text("{"), "is not a description of quantised tensors"),
    "groups": (edit(lambda raw: raw.update(group_size=256)), "group_size is 256; only scales per channel"),
    "type": (edit(lambda raw: raw.update({f"{DOWN}.weight": "W4A4"})), "has the type 'W4A4'; only FLOAT, W8A8_DYN"),
    "no text": (edit(lambda raw: raw.update({f"{DOWN}.weight": [1]})), r"has the type \[1\]; only"),
    "cache": (edit(lambda raw: raw.update(kv_cache_type="C8")), '"kv_cache_type" has the type \'C8\''),
    "not listed": (edit(lambda raw: raw.pop("lm_head.weight")), 'does not list "lm_head.weight"'),
    "no tensor": (edit(lambda raw: raw.update({"other.weight": "W8A8_DYNAMIC"})), "but no weight file holds it"),
    "float as int": (edit(lambda raw: raw.update({"lm_head.weight": "W8A8_DYNAMIC"})), "is stored as torch.float32"),
    "int as float": (edit(lambda raw: raw.update({f"{DOWN}.weight": "FLOAT"})), "is stored as torch.int8"),
    "scale as float": (edit(lambda raw: raw.update({f"{DOWN}.weight_scale": "FLOAT"})), "as FLOAT, but it is stored"),
    "half a type": (edit(lambda raw: raw.update({f"{DOWN}.weight": "W8A8_DYNAMIC"})), '_scale" is not'),
    "offset": (retensor(f"{DOWN}.weight_offset", lambda old: old + 1), "is not zero; only symmetric integers"),
    "offsets' shape": (retensor(f"{DOWN}.weight_offset", lambda old: old[1:]), r"float32 of shape \[32, 1\]"),
    "sums' shape": (retensor(f"{DOWN}.scale_bias", lambda old: old[:, 3:].contiguous()), r"shape \[32, 16\]"),
    "scale": (retensor(f"{DOWN}.weight_scale", lambda old: -old), "scale that is negative or not finite"),
    "rows": (
        retensor(f"{DOWN}.weight", lambda old: old[1:].contiguous()),
        r"needs torch.float32 of shape \[30, ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(four: Path, tmp_path: Path, case: str) -> None:
    for file in four.iterdir():
        if file.name != "manifest.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    change, message = BAD[case]
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        GLM5ForCausalLM.from_pretrained(tmp_path)


def test_one_matrix_in_memory_has_one_type(four: Path, source: Path, tmp_path: Path) -> None:
    """An expert that others left as it is."""
    for file in four.iterdir():
        if file.name != "manifest.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    plain, name = tensors(source)[f"{DOWN}.weight"], f"{DOWN}.weight"
    for file in tmp_path.glob("model-*.safetensors"):
        held = load_file(file)
        if name in held:
            save_file({k: v for k, v in held.items() if not k.startswith(DOWN)} | {name: plain}, file)
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"] = {k: v for k, v in raw["weight_map"].items() if k == name or not k.startswith(DOWN)}
    index.write_text(json.dumps(raw))
    listed = json.loads((tmp_path / DESCRIPTION).read_text())
    listed = {k: v for k, v in listed.items() if not k.startswith(DOWN)} | {name: "FLOAT"}
    (tmp_path / DESCRIPTION).write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="they are one matrix in memory and need one type"):
        GLM5ForCausalLM.from_pretrained(tmp_path)


def test_names_of_files_by_msmodelslim(four: Path, tmp_path: Path) -> None:
    for file in four.iterdir():
        if file.name != "manifest.json":
            name = (
                file.name if "safetensors" not in file.name else "quant_" + file.name.replace("model", "model_weights")
            )
            text = file.read_bytes()
            (tmp_path / name).write_bytes(
                text if file.suffix != ".json" else text.replace(b'"model-', b'"quant_model_weights-')
            )
    mine, theirs = (disk_tensors(GLM5ForCausalLM.from_pretrained(folder)) for folder in (four, tmp_path))
    assert (tmp_path / "quant_model_weights.safetensors.index.json").exists()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in mine.items())


def test_saved_again_it_is_plain(four: Path, tmp_path: Path) -> None:
    """The description goes with the weights that it describes."""
    shutil.copytree(four, tmp_path / "copy")
    model = GLM5ForCausalLM.from_pretrained(tmp_path / "copy")
    model.save_pretrained(tmp_path / "copy")
    again = GLM5ForCausalLM.from_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy" / DESCRIPTION).exists()
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_quantised_copy_of_an_ascend_checkpoint(four: Path, tmp_path: Path) -> None:
    """Its description is not copied along."""
    quantise_checkpoint(four, tmp_path / "out", scheme_named("w8a8"))
    assert not (tmp_path / "out" / DESCRIPTION).exists()
    GLM5ForCausalLM.from_pretrained(tmp_path / "out")
