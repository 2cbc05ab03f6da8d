"""Checkpoints in the Hugging Face layout: names on disk, streamed load, tensor census, atomic save (no pickle).

On disk experts are single matrices and gate and up projections are apart, because that is what every other tool reads;
in memory they are stacked. The MTP layer is stored as layer `num_hidden_layers`.
"""

from __future__ import annotations

import json
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.errors import CheckpointError
from glm5.files import publish_dir, verify_manifest
from glm5.model.glm5 import GLM5ForCausalLM

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GENERATION_DEFAULTS = {"temperature": 1.0, "top_p": 0.95}


def disk_tensors(model: GLM5ForCausalLM) -> dict[str, Tensor]:
    """Every tensor under its name on disk, as views of the model's own memory: writing to them writes to the model."""
    found: dict[str, Tensor] = {}
    mtp = f"model.layers.{model.config.num_hidden_layers}."
    for name, tensor in model.state_dict(keep_vars=False).items():
        if name.startswith("mtp."):
            name = mtp + name.removeprefix("mtp.").removeprefix("block.")
        head, _, leaf = name.rpartition(".")
        if ".mlp.experts." in name:
            prefix, stacked = name.rsplit(".", 1)
            for expert in range(tensor.shape[0]):
                _put(found, f"{prefix}.{expert}.{stacked}.weight", tensor[expert])
        else:
            _put(found, f"{head}.{leaf}", tensor)
    return found


def _put(found: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    if name.endswith(".gate_up_proj.weight"):
        gate, up = tensor.chunk(2)
        prefix = name.removesuffix("gate_up_proj.weight")
        found[f"{prefix}gate_proj.weight"], found[f"{prefix}up_proj.weight"] = gate, up
    else:
        found[name] = tensor


def save_checkpoint(model: GLM5ForCausalLM, path: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Publish `path` with config, generation defaults and weights; other files already there (tokenizer) are kept."""
    with publish_dir(path, foreign=True) as folder:
        if path.is_dir():
            for old in path.iterdir():
                if old.is_file() and old.suffix != ".safetensors" and old.name != INDEX:
                    (folder / old.name).write_bytes(old.read_bytes())
        write_checkpoint(model, folder, extra)


def write_checkpoint(model: GLM5ForCausalLM, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write the files of a checkpoint into an existing folder (see `save_checkpoint` for the atomic form)."""
    config = model.config.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
    _write_json(folder / "config.json", config)
    ends = {"eos_token_id": list(model.config.eos_token_id) or None, "pad_token_id": model.config.pad_token_id}
    _write_json(folder / "generation_config.json", {**GENERATION_DEFAULTS, **ends, **(extra or {})})
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in disk_tensors(model).items()}
    save_file(tensors, str(folder / SINGLE), metadata={"format": "pt"})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_checkpoint(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    strict_config: bool = True,
    overrides: Mapping[str, Any] | None = None,
    allow_missing: str = "",
    seed: int = 0,
) -> GLM5ForCausalLM:
    """Build the model of `path/config.json` and fill it tensor by tensor.

    Missing, unexpected and misshapen tensors are errors. `allow_missing` is a regular expression of names
    that may stay at their random initialisation (for example a new indexer). A checkpoint whose configuration announces
    an MTP layer that the files lack, as other tools leave it, loads as trunk only with one warning.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint directory.")
    verify_manifest(path)
    config = GLM5Config.load(path, strict=strict_config, **(overrides or {}))
    files = _weight_files(path)
    mtp = f"model.layers.{config.num_hidden_layers}."
    if config.num_nextn_predict_layers and not any(name.startswith(mtp) for name in files):
        warnings.warn(f"{path} announces an MTP layer but holds no tensor of it; loading the trunk only.", stacklevel=3)
        config = config.replace(num_nextn_predict_layers=0)
    model = GLM5ForCausalLM(config, seed=seed)
    if dtype is not None:
        model.cast(dtype)
    wanted = disk_tensors(model)
    loaded: set[str] = set()
    ignored = 0
    for name, tensor in _stream(files):
        if name not in wanted:
            if not _ignorable(name, config):
                raise CheckpointError(f'{path}: tensor "{name}" does not belong to this architecture.')
            ignored += 1
            continue
        target = wanted[name]
        if tensor.shape != target.shape:
            raise CheckpointError(
                f'{path}: tensor "{name}" has shape {list(tensor.shape)}, config.json demands {list(target.shape)}.'
            )
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise CheckpointError(f'{path}: tensor "{name}" is stored as {tensor.dtype}; expected fp32, bf16 or fp16.')
        with torch.no_grad():
            target.copy_(tensor)
        loaded.add(name)
    missing = [name for name in wanted if name not in loaded and not (allow_missing and re.search(allow_missing, name))]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f'{path}: tensor "{missing[0]}"{more} is missing from the weight files.')
    model.census = {"loaded": len(loaded), "generated": len(wanted) - len(loaded), "ignored": ignored}
    return model.to(device)


def _ignorable(name: str, config: GLM5Config) -> bool:
    """Tensors that other tools write and this model does not need: indexers of shared or dense layers, an MTP layer."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    if not match:
        return False
    layer = int(match.group(1))
    if layer == config.num_hidden_layers and not config.num_nextn_predict_layers:
        return True
    return ".self_attn.indexer." in name and (not config.use_dsa or not config.computes_topk(layer))


def _weight_files(path: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or the single file."""
    index = path / INDEX
    if index.exists():
        try:
            entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{index} is not a valid safetensors index.") from None
        files = {}
        for name, file in entries:
            if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{index} names the file {file!r}; only plain *.safetensors names are allowed.")
            files[str(name)] = path / file
        return files
    single = path / SINGLE
    if not single.exists():
        raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}.")
    return _reading(single, lambda handle: dict.fromkeys(handle.keys(), single))


def _stream(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors file by file, so that at most one is in memory beside the model."""
    for file in dict.fromkeys(files.values()):
        for name in [name for name, where in files.items() if where == file]:
            yield name, _reading(file, operator.methodcaller("get_tensor", name))


def _reading(file: Path, read: Callable[[Any], Any]) -> Any:
    try:
        with safe_open(str(file), framework="pt") as handle:
            return read(handle)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; the checkpoint is incomplete.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or not a safetensors file ({error}).") from None
