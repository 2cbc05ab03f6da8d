"""Checkpoints on disk: round trips, hostile and damaged files, and saves that fail half-way."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5 import files
from glm5.errors import CheckpointError, ConfigError, Glm5Error
from glm5.model import hf_weights
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.hf_weights import INDEX, SINGLE, disk_tensors, save_checkpoint

Build = Callable[..., GLM5ForCausalLM]
TINY = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def model(build: Build) -> GLM5ForCausalLM:
    return build(1, **TINY)


@pytest.fixture(scope="module")
def pristine(model: GLM5ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    model.save_pretrained(path)
    return path


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage, without manifest, as other tools write checkpoints."""
    path = tmp_path / "copy"
    shutil.copytree(pristine, path)
    (path / files.MANIFEST).unlink()
    return path


def same_weights(a: GLM5ForCausalLM, b: GLM5ForCausalLM) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


# --- round trips ------------------------------------------------------------------------------------------------------


def test_round_trip(model: GLM5ForCausalLM, pristine: Path) -> None:
    again = GLM5ForCausalLM.from_pretrained(pristine)
    assert same_weights(model, again)
    assert again.config.to_dict() == model.config.to_dict()
    assert again.census == {"loaded": len(disk_tensors(model)), "generated": 0, "ignored": 0}
    assert again.mtp is not None


def test_names_on_disk(model: GLM5ForCausalLM, pristine: Path) -> None:
    """The names and shapes that other tools read: experts apart, gate and up apart, MTP as the layer after the last."""
    stored = load_file(pristine / SINGLE)
    first = model.model.layers[1].mlp.experts  # type: ignore[union-attr]
    assert torch.equal(stored["model.layers.1.mlp.experts.3.gate_proj.weight"], first.gate_up_proj[3, :24])
    assert torch.equal(stored["model.layers.1.mlp.experts.3.up_proj.weight"], first.gate_up_proj[3, 24:])
    assert torch.equal(stored["model.layers.1.mlp.experts.0.down_proj.weight"], first.down_proj[0])
    mtp = {name.removeprefix("model.layers.2.") for name in stored if name.startswith("model.layers.2.")}
    layer = {name.removeprefix("model.layers.1.") for name in stored if name.startswith("model.layers.1.")}
    assert mtp - layer == {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert layer < mtp
    assert {name for name in stored if not name.startswith("model.layers.")} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    assert sum(t.numel() for t in stored.values()) == sum(t.numel() for t in model.state_dict().values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(model: GLM5ForCausalLM, pristine: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    cast = GLM5ForCausalLM.from_pretrained(pristine, dtype=dtype)
    assert cast.dtype == dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for (_, mine), (_, theirs) in zip(model.routers(), cast.routers()):
        assert torch.equal(theirs.e_score_correction_bias, mine.e_score_correction_bias.to(wide))
    cast.save_pretrained(tmp_path / "cast")
    stored = load_file(tmp_path / "cast" / SINGLE)
    assert stored["lm_head.weight"].dtype == dtype
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == wide
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    widened = GLM5ForCausalLM.from_pretrained(tmp_path / "cast")
    assert torch.equal(widened.lm_head.weight, model.lm_head.weight.to(dtype).float())


def test_sharded_checkpoint(model: GLM5ForCausalLM, folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    shards = {f"model-{i}.safetensors": names[i::3] for i in range(3)}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    where = {name: file for file, members in shards.items() for name in members}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    again = GLM5ForCausalLM.from_pretrained(folder)
    assert same_weights(model, again)
    # Saving over it leaves one file, and no index that still names the shards.
    again.save_pretrained(folder)
    assert sorted(p.name for p in folder.glob("model*")) == [SINGLE]
    assert same_weights(model, GLM5ForCausalLM.from_pretrained(folder))
    shutil.copytree(folder, folder.with_name("incomplete"))
    (folder.with_name("incomplete") / INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors is missing; the checkpoint is incomplete"):
        GLM5ForCausalLM.from_pretrained(folder.with_name("incomplete"))


def test_saving_keeps_the_tokenizer_and_adds_generation_settings(model: GLM5ForCausalLM, folder: Path) -> None:
    kept = ("tokenizer.json", "adapter_model.safetensors")
    for name in kept:
        (folder / name).write_text("{}")
    (folder / "model-00001-of-00002.safetensors").write_text("of an earlier checkpoint")
    model.save_pretrained(folder, extra={"temperature": 0.5})
    assert [(folder / name).read_text() for name in kept] == ["{}", "{}"]
    assert not (folder / "model-00001-of-00002.safetensors").exists()
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.5
    assert files.verify_manifest(folder)


def test_missing_mtp_layer_loads_the_trunk_with_one_warning(model: GLM5ForCausalLM, folder: Path) -> None:
    change_tensors(folder, lambda t: [t.pop(name) for name in list(t) if name.startswith("model.layers.2.")])
    with pytest.warns(UserWarning, match="announces an MTP layer but holds no tensor of it") as caught:
        trunk = GLM5ForCausalLM.from_pretrained(folder)
    assert len(caught) == 1
    assert trunk.mtp is None and trunk.config.num_nextn_predict_layers == 0
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(trunk(ids).logits, model(ids).logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GLM5ForCausalLM.from_pretrained(folder, num_nextn_predict_layers=0)


def test_half_an_mtp_layer_is_an_error(folder: Path) -> None:
    change_tensors(folder, lambda t: t.pop("model.layers.2.eh_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.eh_proj\.weight\" is missing"):
        GLM5ForCausalLM.from_pretrained(folder)


def test_tensors_that_this_configuration_does_not_need_are_counted(folder: Path) -> None:
    loaded = GLM5ForCausalLM.from_pretrained(folder, use_dsa=False, index_topk=None, num_nextn_predict_layers=0)
    whole = load_file(folder / SINGLE)
    unused = [name for name in whole if ".indexer." in name or name.startswith("model.layers.2.")]
    assert loaded.census == {"loaded": len(whole) - len(unused), "generated": 0, "ignored": len(unused)}


def test_allow_missing_generates_only_what_it_names(build: Build, tmp_path: Path) -> None:
    dense = build(2, use_dsa=False, index_topk=None, **TINY)
    dense.save_pretrained(tmp_path / "dense")
    changes = {"use_dsa": True, "index_topk": 8}
    with pytest.raises(CheckpointError, match=r"indexer\.wq_b\.weight\" and 14 more is missing"):
        GLM5ForCausalLM.from_pretrained(tmp_path / "dense", **changes)
    sparse = GLM5ForCausalLM.from_pretrained(tmp_path / "dense", allow_missing=r"\.indexer\.", **changes)
    assert sparse.census["generated"] == 15
    twin = dense.clone(sparse.config, seed=0)
    assert same_weights(sparse, twin)


# --- errors -----------------------------------------------------------------------------------------------------------


def write_header(folder: Path, length: int, text: bytes = b"{}") -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", length) + text)


def index_with(folder: Path, value: object) -> None:
    (folder / INDEX).write_text(value if isinstance(value, str) else json.dumps({"weight_map": value}))


def truncate(folder: Path, keep: int) -> None:
    with (folder / SINGLE).open("r+b") as file:
        file.truncate(keep)


NORM = "model.norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing tensor": (lambda p: change_tensors(p, lambda t: t.pop(NORM)), f'"{NORM}" is missing'),
    "unexpected tensor": (
        lambda p: change_tensors(p, lambda t: t.update(extra=torch.zeros(2))),
        'tensor "extra" does not belong to this architecture',
    ),
    "wrong shape": (
        lambda p: change_tensors(p, lambda t: t.update({NORM: torch.zeros(41)})),
        f'"{NORM}" has shape \\[41\\], config.json demands \\[40\\]',
    ),
    "transposed": (
        lambda p: change_tensors(p, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()})),
        r"has shape \[40, 83\], config.json demands \[83, 40\]",
    ),
    "fp8": (
        lambda p: change_tensors(p, lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
        "stored as torch.float8_e4m3fn; expected fp32, bf16 or fp16",
    ),
    "integers": (
        lambda p: change_tensors(p, lambda t: t.update({NORM: t[NORM].to(torch.int32)})),
        "stored as torch.int32",
    ),
    "truncated data": (lambda p: truncate(p, 9000), "is damaged or not a safetensors file"),
    "truncated header": (lambda p: truncate(p, 50), "is damaged or not a safetensors file"),
    "empty file": (lambda p: truncate(p, 0), "is damaged or not a safetensors file"),
    "huge header": (lambda p: write_header(p, 2**62), "is damaged or not a safetensors file"),
    "header is no JSON": (lambda p: write_header(p, 2, b"x:"), "is damaged or not a safetensors file"),
    "pickle": (lambda p: (p / SINGLE).write_bytes(b"\x80\x04\x95\x05"), "is damaged or not a safetensors file"),
    "no weights": (lambda p: (p / SINGLE).unlink(), f"holds neither {SINGLE} nor {INDEX}"),
    "index leaves the folder": (lambda p: index_with(p, {NORM: "../../model.safetensors"}), "only plain"),
    "index with an absolute path": (lambda p: index_with(p, {NORM: "/etc/x.safetensors"}), "only plain"),
    "index with a backslash": (lambda p: index_with(p, {NORM: "..\\x.safetensors"}), "only plain"),
    "index names a pickle": (lambda p: index_with(p, {NORM: "weights.bin"}), "only plain"),
    "index with a number": (lambda p: index_with(p, {NORM: 5}), "only plain"),
    "index with a null byte": (lambda p: index_with(p, {NORM: "a\0.safetensors"}), "is missing|is damaged"),
    "index names another file's tensor": (lambda p: index_with(p, {"x": SINGLE}), "is damaged|does not belong"),
    "index is empty": (lambda p: index_with(p, {}), "is missing from the weight files"),
    "index is a list": (lambda p: index_with(p, "[]"), "not a valid safetensors index"),
    "index is null": (lambda p: index_with(p, "null"), "not a valid safetensors index"),
    "index holds a list": (lambda p: index_with(p, []), "not a valid safetensors index"),
    "index is nested deeply": (lambda p: index_with(p, "[" * 100_000), "not a valid safetensors index"),
    "index is no text": (lambda p: (p / INDEX).write_bytes(b"\xff\xfe"), "not a valid safetensors index"),
    "manifest is damaged": (lambda p: (p / files.MANIFEST).write_text("{"), "manifest.json is damaged"),
}
CONFIG_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "does not exist"),
    "config is a folder": (lambda p: ((p / "config.json").unlink(), (p / "config.json").mkdir()), "cannot be read"),
    "config is no JSON": (lambda p: (p / "config.json").write_text("{"), "is not valid JSON"),
    "config is a list": (lambda p: (p / "config.json").write_text("[]"), "must contain one JSON object"),
    "config is nested deeply": (lambda p: (p / "config.json").write_text("[" * 100_000), "is not valid JSON"),
    "config is huge": (lambda p: (p / "config.json").write_text(" " * (5 << 20)), "has more than 4,194,304 bytes"),
    "foreign architecture": (lambda p: change_config(p, model_type="llama"), 'model_type "llama" is not glm_moe_dsa'),
    "unknown key": (
        lambda p: change_config(p, moe_intermediate_siez=5),
        r'unknown key "moe_intermediate_siez" \(did you mean "moe_intermediate_size"\?\); strict_config=False ignores',
    ),
    "negative size": (lambda p: change_config(p, hidden_size=-4), r"hidden_size: .* greater than 0 \(got -4\)"),
}


# An index without any MTP tensor warns before it fails.
@pytest.mark.filterwarnings("ignore:.*announces an MTP layer:UserWarning")
@pytest.mark.parametrize("name", DAMAGE | CONFIG_DAMAGE)
def test_damage_is_one_clear_sentence(folder: Path, name: str) -> None:
    damage, message = (DAMAGE | CONFIG_DAMAGE)[name]
    damage(folder)
    with pytest.raises(Glm5Error, match=message) as caught:
        GLM5ForCausalLM.from_pretrained(folder)
    assert type(caught.value) is (CheckpointError if name in DAMAGE else ConfigError)
    text = str(caught.value)
    assert str(folder) in text and "\n" not in text and len(text) < 400 and text.endswith(".")


def test_unknown_keys_can_be_ignored(folder: Path, model: GLM5ForCausalLM) -> None:
    change_config(folder, moe_intermediate_siez=5)
    assert same_weights(model, GLM5ForCausalLM.from_pretrained(folder, strict_config=False))


@pytest.mark.parametrize("kind", ["nothing", "file"])
def test_no_directory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("")
    with pytest.raises(CheckpointError, match="is not a checkpoint directory"):
        GLM5ForCausalLM.from_pretrained(path)


def test_the_manifest_catches_one_flipped_bit(pristine: Path, tmp_path: Path) -> None:
    path = tmp_path / "flipped"
    shutil.copytree(pristine, path)
    data = bytearray((path / SINGLE).read_bytes())
    data[-3] ^= 1
    (path / SINGLE).write_bytes(data)
    with pytest.raises(CheckpointError, match="missing or damaged"):
        GLM5ForCausalLM.from_pretrained(path)


def test_an_edited_configuration_counts_with_one_warning(pristine: Path, tmp_path: Path) -> None:
    path = tmp_path / "edited"
    shutil.copytree(pristine, path)
    change_config(path, routed_scaling_factor=1.5, max_position_embeddings=77)
    with pytest.warns(UserWarning, match=r"edited since it was saved.*: config\.json\.$") as caught:
        edited = GLM5ForCausalLM.from_pretrained(path)
    assert len(caught) == 1
    assert (edited.config.routed_scaling_factor, edited.config.max_position_embeddings) == (1.5, 77)
    assert same_weights(GLM5ForCausalLM.from_pretrained(pristine), edited)


@pytest.mark.filterwarnings("ignore:.*edited since it was saved")
@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not valid JSON"), (None, "config.json demands"), ("[]", "must contain one JSON object")],
)
def test_an_edited_configuration_that_does_not_fit(
    pristine: Path, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "edited"
    shutil.copytree(pristine, path)
    if text is None:
        change_config(path, hidden_size=48)
    else:
        (path / "config.json").write_text(text)
    with pytest.raises(Glm5Error, match=message) as caught:
        GLM5ForCausalLM.from_pretrained(path)
    assert "\n" not in str(caught.value)


# --- saves that fail --------------------------------------------------------------------------------------------------


@contextmanager
def file_limit(limit: int) -> Iterator[None]:
    """The kernel refuses to let any file grow past `limit` bytes: a real failure inside the writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_that_the_disk_refuses_leaves_the_old_checkpoint(
    model: GLM5ForCausalLM, pristine: Path, build: Build, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(pristine, path)
    other = build(9, **TINY)
    with pytest.raises(CheckpointError, match=r"No space left while writing .*model; what was saved before is intact"):
        with file_limit(20_000):
            other.save_pretrained(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    assert same_weights(GLM5ForCausalLM.from_pretrained(path), model)
    other.save_pretrained(path)  # with space again, the next save goes through
    assert same_weights(GLM5ForCausalLM.from_pretrained(path), other)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
        OSError(5, "Input/output error"),
        KeyboardInterrupt(),
    ],
    ids=["full disk", "full disk, wrapped", "bad disk", "interrupt"],
)
def test_a_save_interrupted_between_two_files(
    model: GLM5ForCausalLM,
    pristine: Path,
    build: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    path = tmp_path / "model"
    shutil.copytree(pristine, path)

    def half_written(handle: Any, stored: Any, value: Tensor) -> None:
        handle.write(b"\0" * 100)
        raise error

    monkeypatch.setattr(hf_weights, "write_tensor", half_written)
    expected = CheckpointError if "28" in str(error) else type(error)
    with pytest.raises(expected):
        save_checkpoint(build(9, **TINY), path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    assert same_weights(GLM5ForCausalLM.from_pretrained(path), model)
