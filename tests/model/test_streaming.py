"""Loading and saving in a stream: shards, the meta device, what is generated, and other tools' names."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from glm5.config.model import GLM5Config
from glm5.errors import CheckpointError, ConfigError
from glm5.files import MANIFEST, verify_manifest
from glm5.model import load_plan, tensor_files
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.hf_weights import INDEX, SINGLE, census_line, disk_tensors, write_checkpoint
from glm5.model.tensor_files import open_tensors, read_header, read_tensor

Build = Callable[..., GLM5ForCausalLM]
TINY = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def model(build: Build) -> GLM5ForCausalLM:
    return build(1, **TINY)


@pytest.fixture
def folder(model: GLM5ForCausalLM, tmp_path: Path) -> Path:
    """As other tools write it: one file, no manifest."""
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / MANIFEST).unlink()
    return tmp_path / "model"


def same_weights(a: GLM5ForCausalLM, b: GLM5ForCausalLM) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) and x[n].dtype == y[n].dtype for n in x)


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 6_000, 20_000, "30KB"])
def test_sharded_save(model: GLM5ForCausalLM, tmp_path: Path, limit: int | str) -> None:
    path, size = tmp_path / "model", 30_000 if limit == "30KB" else int(limit)
    model.save_pretrained(path, max_shard_size=limit)
    expected = disk_tensors(model)
    index = json.loads((path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in expected.values())
    shards = sorted(path.glob("*.safetensors"))
    assert [s.name for s in shards] == [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    assert len(shards) == len(expected) if limit == 1 else 5 < len(shards) < len(expected)
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        tensors = load_file(shard)
        assert len(tensors) == 1 or sum(t.numel() * 4 for t in tensors.values()) <= size
        assert {index["weight_map"][name] for name in tensors} == {shard.name}
        assert found.keys().isdisjoint(tensors)
        found |= tensors
    assert found.keys() == index["weight_map"].keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert verify_manifest(path)
    assert model.census == {"saved": len(expected), "files": len(shards)}
    assert same_weights(GLM5ForCausalLM.from_pretrained(path), model)


def test_transformers_reads_our_shards(model: GLM5ForCausalLM, tmp_path: Path) -> None:
    import transformers  # at first use: it takes a second, and every worker collects this file

    model.save_pretrained(tmp_path, max_shard_size="20KB")
    theirs, info = transformers.GlmMoeDsaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert torch.equal(theirs.lm_head.weight, model.lm_head.weight)


def test_no_shard_of_an_earlier_save_stays(model: GLM5ForCausalLM, build: Build, tmp_path: Path) -> None:
    path = tmp_path / "model"
    for seed, limit in enumerate([4_000, 40_000, "5GB", 9_000]):
        newer = build(seed, **TINY)
        newer.save_pretrained(path, max_shard_size=limit)
        weights = {p.name for p in path.iterdir() if p.suffix == ".safetensors"}
        index = path / INDEX
        assert weights == (set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {SINGLE})
        assert same_weights(GLM5ForCausalLM.from_pretrained(path), newer)
    write_checkpoint(model, path)  # also without the atomic form around it
    assert {p.name for p in path.iterdir() if p.suffix == ".safetensors" or p.name == INDEX} == {SINGLE}


@pytest.mark.parametrize("size", [0, -1, "", "5 bananas", "0GB", "1.5GB", True, 10**30])
def test_shard_sizes_that_are_none(model: GLM5ForCausalLM, tmp_path: Path, size: Any) -> None:
    with pytest.raises(ConfigError, match="max_shard_size is"):
        model.save_pretrained(tmp_path / "model", max_shard_size=size)
    assert not list(tmp_path.iterdir())


def test_saving_does_not_remove_folders(model: GLM5ForCausalLM, tmp_path: Path) -> None:
    (tmp_path / "work" / "thesis").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds the folder thesis, which saving would remove"):
        model.save_pretrained(tmp_path / "work")
    assert [p.name for p in (tmp_path / "work").iterdir()] == ["thesis"]


def test_each_file_is_opened_once(model: GLM5ForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model.save_pretrained(tmp_path / "model", max_shard_size=20_000)
    opened: list[Path] = []

    @contextmanager
    def counted(file: Path, stamp: tuple[int, ...]) -> Iterator[Any]:
        opened.append(file)
        with real(file, stamp) as handle:
            yield handle

    real = load_plan.open_tensors
    monkeypatch.setattr(load_plan, "open_tensors", counted)
    GLM5ForCausalLM.from_pretrained(tmp_path / "model")
    assert sorted(opened) == sorted((tmp_path / "model").glob("*.safetensors")) and len(opened) > 3


def test_a_file_that_shrinks_while_it_is_read(folder: Path) -> None:
    stored = read_header(folder / SINGLE)["lm_head.weight"]
    with open_tensors(stored.file, stored.stamp) as handle:
        os.truncate(folder / SINGLE, stored.begin + 10)
        with pytest.raises(CheckpointError, match="became shorter while it was read"):
            read_tensor(handle, stored)


def test_views_and_other_types_in_a_file(tmp_path: Path) -> None:
    """Our writer against the safetensors library: columns of a matrix, shared memory, empty and scalar tensors."""
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "a": torch.ones(3).to(torch.float8_e4m3fn),  # three bytes, first by name: the others must stay aligned
        "z": base,
        "columns": base[:, 1:3],
        "same": base[1],
        "bf16": base.bfloat16().T,
        "fp8": base.to(torch.float8_e4m3fn),
        "wide": base.double(),
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(3.5),
    }
    tensor_files.save_file(tensors, str(tmp_path / "x"), metadata={"format": "pt"})
    found = load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name].float(), tensor.float()), name
    for name, stored in read_header(tmp_path / "x").items():
        assert stored.begin % stored.dtype.itemsize == 0 and stored.shape == tuple(tensors[name].shape)


# --- what a load keeps and generates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_declarations_and_types_survive(model: GLM5ForCausalLM, folder: Path, dtype: torch.dtype | None) -> None:
    loaded = GLM5ForCausalLM.from_pretrained(folder, dtype=dtype)
    built = GLM5ForCausalLM(model.config).cast(dtype or torch.float32)
    theirs = dict(built.named_parameters())
    for name, parameter in loaded.named_parameters():
        other = theirs.pop(name)
        assert (parameter.dtype, parameter.shape, parameter.requires_grad) == (other.dtype, other.shape, True)
        assert vars(parameter) == vars(other), name
        assert parameter.is_leaf and parameter.is_contiguous()
    assert not theirs
    assert sum("muon_split" in vars(p) for p in loaded.parameters()) > 20
    buffers = dict(built.named_buffers())
    assert buffers.keys() == dict(loaded.named_buffers()).keys() <= loaded.state_dict().keys()
    for name, buffer in loaded.named_buffers():
        assert buffer.dtype == buffers[name].dtype == (dtype if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_generated_tensors_do_not_depend_on_the_type(folder: Path, model: GLM5ForCausalLM, dtype: torch.dtype) -> None:
    change = load_file(folder / SINGLE)
    gone = [
        name for name in change if "indexer.w" in name or ".experts.2." in name or "e_score" in name or "enorm" in name
    ]
    kept = {name: tensor for name, tensor in change.items() if name not in gone}
    save_file(kept, folder / SINGLE)
    with pytest.raises(CheckpointError, match=f"and {len(gone) - 1} more is missing from the weight files"):
        GLM5ForCausalLM.from_pretrained(folder)
    missing = r"indexer\.w|\.experts\.2\.|e_score|enorm"
    loaded = disk_tensors(GLM5ForCausalLM.from_pretrained(folder, dtype=dtype, allow_missing=missing))
    fresh = disk_tensors(GLM5ForCausalLM(model.config, seed=0).cast(dtype))
    for name, tensor in loaded.items():
        assert torch.equal(tensor, fresh[name] if name in gone else kept[name].to(tensor.dtype)), name
    census = GLM5ForCausalLM.from_pretrained(folder, allow_missing=missing).census
    assert census == {"loaded": len(kept), "generated": len(gone), "ignored": 0}


def test_unexpected_tensors_can_be_allowed(folder: Path, model: GLM5ForCausalLM) -> None:
    save_file({**load_file(folder / SINGLE), "vision.a": torch.ones(2), "vision.b": torch.ones(2)}, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r'tensor "vision\.[ab]" does not belong'):
        GLM5ForCausalLM.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=r'tensor "vision\.b" does not belong'):
        GLM5ForCausalLM.from_pretrained(folder, allow_unexpected=r"^vision\.a")
    loaded = GLM5ForCausalLM.from_pretrained(folder, allow_unexpected=r"^vision\.")
    assert same_weights(loaded, model) and loaded.census["ignored"] == 2
    assert census_line(loaded.census) == f"{loaded.census['loaded']} tensors loaded, 0 generated, 2 ignored"


def test_copies_of_the_embedding_in_an_mtp_layer_are_ignored(folder: Path, model: GLM5ForCausalLM) -> None:
    """Files of the GLM-4.5 family repeat embedding and output matrix there."""
    copies = {
        "model.layers.2.embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
        "model.layers.2.shared_head.head.weight": model.lm_head.weight.detach().clone(),
    }
    save_file({**load_file(folder / SINGLE), **copies}, folder / SINGLE)
    loaded = GLM5ForCausalLM.from_pretrained(folder)
    assert same_weights(loaded, model) and loaded.census["ignored"] == 2
    whole = load_file(folder / SINGLE)
    for name in ("model.layers.1.embed_tokens.weight", "model.layers.2.head.weight", "model.layers.3.norm.weight"):
        save_file({**whole, name: torch.ones(2)}, folder / SINGLE)
        with pytest.raises(CheckpointError, match=f'"{name}" does not belong'):
            GLM5ForCausalLM.from_pretrained(folder)


# --- stacked experts --------------------------------------------------------------------------------------------------


def stack(folder: Path, layers: tuple[int, ...] = (1, 2)) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / SINGLE)
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {leaf: [tensors.pop(f"{prefix}.{e}.{leaf}.weight") for e in range(4)] for leaf in LEAVES}
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat(p) for p in zip(parts["gate_proj"], parts["up_proj"])]
        )
        tensors[f"{prefix}.down_proj"] = torch.stack(parts["down_proj"])
    save_file(tensors, folder / SINGLE)
    return tensors


LEAVES = ("gate_proj", "up_proj", "down_proj")


def test_stacked_experts_load_and_are_saved_apart(folder: Path, model: GLM5ForCausalLM, tmp_path: Path) -> None:
    stack(folder)
    loaded = GLM5ForCausalLM.from_pretrained(folder)
    assert same_weights(loaded, model)
    assert loaded.census == {"loaded": len(disk_tensors(model)), "generated": 0, "ignored": 0}
    loaded.save_pretrained(tmp_path / "apart")
    assert load_file(tmp_path / "apart" / SINGLE).keys() == disk_tensors(model).keys()


def test_transformers_stacks(model: GLM5ForCausalLM, tmp_path: Path) -> None:
    import transformers

    model.save_pretrained(tmp_path / "ours")
    theirs = transformers.GlmMoeDsaForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in read_header(tmp_path / "theirs" / SINGLE)
    loaded = GLM5ForCausalLM.from_pretrained(tmp_path / "theirs", num_nextn_predict_layers=0)
    own = model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.state_dict().items())


def test_stacked_and_single_experts_together_are_an_error(folder: Path) -> None:
    single = load_file(folder / SINGLE)
    tensors = stack(folder)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({**tensors, name: single[name]}, folder / SINGLE)
    with pytest.raises(CheckpointError, match="is stored twice, for single experts and for all in one"):
        GLM5ForCausalLM.from_pretrained(folder)


def test_a_stack_of_another_height_is_an_error(folder: Path) -> None:
    tensors = stack(folder)
    name = "model.layers.1.mlp.experts.down_proj"
    save_file({**tensors, name: tensors[name][:3].contiguous()}, folder / SINGLE)
    with pytest.raises(CheckpointError, match=rf'"{name}" has shape \[3, 40, 24\], config.json demands \[4, 40, 24\]'):
        GLM5ForCausalLM.from_pretrained(folder)


# --- the meta device --------------------------------------------------------------------------------------------------


def test_meta_model(model: GLM5ForCausalLM, tmp_path: Path) -> None:
    with torch.device("meta"):
        empty = GLM5ForCausalLM(model.config)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert {n: t.shape for n, t in disk_tensors(empty).items()} == {n: t.shape for n, t in disk_tensors(model).items()}
    with pytest.raises(CheckpointError, match="a model on the meta device has no weights to save"):
        empty.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_meta_load_checks_headers_and_reads_no_tensor(small: Callable[..., GLM5Config], tmp_path: Path) -> None:
    """The weights are 12 GB of nothing: a sparse file whose bytes could not be read into this process."""
    config = small(**TINY, vocab_size=15_000_000, hidden_size=200, num_nextn_predict_layers=0)
    with torch.device("meta"):
        wanted = disk_tensors(GLM5ForCausalLM(config))
    header, end = {}, 0
    for name, tensor in wanted.items():
        size = tensor.numel() * (4 if "e_score" in name else 2)
        dtype = "F32" if "e_score" in name else "BF16"
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    assert end > 11e9
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    loaded = GLM5ForCausalLM.from_pretrained(tmp_path, device="meta", dtype=torch.bfloat16)
    assert all(tensor.is_meta for tensor in loaded.state_dict().values())
    assert loaded.dtype == torch.bfloat16 and loaded.census["loaded"] == len(wanted)
    with pytest.raises(CheckpointError, match=r"config.json demands \[9, 200\]"):
        GLM5ForCausalLM.from_pretrained(tmp_path, device="meta", vocab_size=9)


# --- any model, any cut -----------------------------------------------------------------------------------------------


@st.composite
def configs(draw: st.DrawFn) -> GLM5Config:
    layers = draw(st.integers(1, 3))
    experts = draw(st.integers(1, 4))
    rope = 2 * draw(st.integers(1, 3))
    values: dict[str, Any] = {
        "vocab_size": draw(st.integers(1, 20)),
        "num_hidden_layers": layers,
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "num_attention_heads": draw(st.integers(1, 3)),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "qk_rope_head_dim": rope,
        "index_head_dim": rope + draw(st.integers(0, 4)),
        "index_n_heads": draw(st.integers(1, 4)),
        "num_nextn_predict_layers": draw(st.integers(0, 1)),
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
    }
    for key in ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank"):
        values[key] = draw(st.integers(1, 12))
    for key in ("qk_nope_head_dim", "v_head_dim", "index_topk", "index_topk_freq"):
        values[key] = draw(st.integers(1, 5))
    if draw(st.booleans()):
        values |= {"use_dsa": False, "index_topk": None}
    return GLM5Config.build(values, where="test")


@pytest.mark.long
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_model_survives_any_cut_bit_by_bit(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, scramble: Callable[..., None]
) -> None:
    model = GLM5ForCausalLM(data.draw(configs()))
    scramble(model, data.draw(st.integers(0, 1000)))
    model.cast(data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))
    path = tmp_path_factory.mktemp("any")
    model.save_pretrained(path / "model", max_shard_size=data.draw(st.integers(1, 20_000)))
    assert same_weights(GLM5ForCausalLM.from_pretrained(path / "model", dtype=model.dtype), model)
    # As another tool might cut it: any tensor in any of four files.
    tensors = {name: tensor.detach().clone() for name, tensor in disk_tensors(model).items()}
    names = sorted(tensors)
    places = data.draw(st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names)))
    (path / "cut").mkdir()
    (path / "cut" / "config.json").write_text((path / "model" / "config.json").read_text())
    for place in set(places):
        part = {name: tensors[name] for name, at in zip(names, places) if at == place}
        save_file(part, path / "cut" / f"part{place}.safetensors")
    where = {name: f"part{at}.safetensors" for name, at in zip(names, places)}
    (path / "cut" / INDEX).write_text(json.dumps({"weight_map": where}))
    again = GLM5ForCausalLM.from_pretrained(path / "cut", dtype=model.dtype)
    assert same_weights(again, model)
    assert again.census == {"loaded": len(names), "generated": 0, "ignored": 0}
