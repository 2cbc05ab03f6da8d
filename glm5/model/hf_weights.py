"""Checkpoints in the Hugging Face layout: streamed load and save, census of tensors (no pickle).

Loading first checks every name, shape and type against the file headers (`load_plan`). Then it reads each tensor
directly into its memory on the device. Saving copies one tensor at a time. Names are in `disk_names`, the file format
in `tensor_files`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.errors import CheckpointError, ConfigError
from glm5.files import MANIFEST, publish_dir, verify_manifest
from glm5.model.ascend_files import DESCRIPTION, read_description
from glm5.model.disk_names import disk_rows, disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.integer_layers import hold_integers
from glm5.model.load_plan import FolderWeights, make_plan
from glm5.model.quantised_files import block_size
from glm5.model.rounding import activations_of, round_activations
from glm5.model.tensor_files import (
    INDEX,
    SINGLE,
    Stored,
    create_file,
    read_folder,
    read_json,
    rows_of,
    write_tensor,
)
from glm5.model.weight_source import RandomWeights, RowPart, allocate, whole_parts
from glm5.obs.logs import get_logger

GENERATION_DEFAULTS = {"temperature": 1.0, "top_p": 0.95}
MAX_SHARD_SIZE = "5GB"
_SIDE_FILE_LIMIT = 64 << 20
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_log = get_logger(__name__)


# --- save -------------------------------------------------------------------------------------------------------------


def save_checkpoint(
    model: GLM5ForCausalLM,
    path: Path,
    extra: Mapping[str, Any] | None = None,
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Publish `path` with config, generation defaults and weights; other files in it (tokenizer, adapters) are kept.

    Raises CheckpointError for a `path` that contains folders, because replacing it would remove them.
    """
    for inner in path.iterdir() if path.is_dir() else ():
        if inner.is_dir():
            raise CheckpointError(f"{path} holds the folder {inner.name}, which saving would remove; save elsewhere.")
    with publish_dir(path, foreign=True, unlike="shards.json") as folder:
        if path.is_dir():
            replaced = {*_weight_files(path), path / MANIFEST}
            for old in path.iterdir():
                if old.is_file() and old not in replaced:
                    shutil.copyfile(old, folder / old.name)
        write_checkpoint(model, folder, extra, max_shard_size=max_shard_size)


def write_checkpoint(
    model: GLM5ForCausalLM,
    folder: Path,
    extra: Mapping[str, Any] | None = None,
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write the files of a checkpoint into an existing folder (`save_checkpoint` is the atomic form).

    Weights above `max_shard_size` (bytes, or text such as "5GB") are split over files with an index. One tensor is
    copied at a time. Files of an earlier checkpoint are removed. `model.census` counts what was saved.
    """
    if model.scheme is not None:
        raise CheckpointError(f"{folder}: weights rounded by {model.scheme} are not saved; save their source.")
    if model.weight_source is None and any(tensor.is_meta for tensor in model.state_dict().values()):
        raise CheckpointError(f"{folder}: a model on the meta device has no weights to save; load it with them.")
    begin_checkpoint(model, folder, extra, max_shard_size=max_shard_size)
    write_rows(folder, model.config, whole_parts(model, model.weight_source))


def begin_checkpoint(
    model: GLM5ForCausalLM,
    folder: Path,
    extra: Mapping[str, Any] | None = None,
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Everything of `write_checkpoint` but the values of the tensors, which `write_rows` writes, also from several
    processes. Of `model` only names, shapes and types matter."""
    tensors = disk_tensors(model)
    shards = _shards(tensors, _bytes(max_shard_size))
    config = model.config.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
    for old in _weight_files(folder):
        old.unlink(missing_ok=True)
    _write_json(folder / "config.json", config)
    ends = {"eos_token_id": list(model.config.eos_token_id) or None, "pad_token_id": model.config.pad_token_id}
    _write_json(folder / "generation_config.json", {**GENERATION_DEFAULTS, **ends, **(extra or {})})
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        create_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    model.census |= {"saved": len(tensors), "files": len(shards)}
    _log.info("%s: %s", folder, census_line({"saved": len(tensors), "files": len(shards)}))


def write_rows(folder: Path, config: GLM5Config, parts: Iterable[tuple[str, RowPart]]) -> None:
    """Write parts, by names in memory, to their places in the files of `begin_checkpoint`."""
    where = read_folder(folder)
    for name, part in parts:
        files: dict[Path, list[tuple[Stored, Tensor]]] = {}
        for disk, view, first in disk_rows(name, config, part.rows.detach(), part.first, part.total):
            if view.numel():
                stored = rows_of(where[disk], first, view.shape[0])
                files.setdefault(stored.file, []).append((stored, view))
        for file, views in files.items():
            with file.open("r+b") as handle:
                for stored, view in views:
                    write_tensor(handle, stored, view)
        del part, files


def _weight_files(folder: Path) -> list[Path]:
    """Weights and what describes them in a checkpoint folder; others' `.safetensors` are not among them."""
    return [*folder.glob("model*.safetensors"), folder / INDEX, folder / DESCRIPTION]


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Names in order, split into files of at most `limit` bytes; a larger tensor gets its own file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.dtype.itemsize
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d{1,18})\s*([KMGT]?B)?", str(size).strip().upper())
    if not match or isinstance(size, bool) or int(match[1]) == 0:
        raise ConfigError(f'max_shard_size is {size!r:.40}; give a number of bytes, or text such as "5GB" or "200MB".')
    return int(match[1]) * _UNITS.get(match[2] or "", 1)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def census_line(census: Mapping[str, int]) -> str:
    """`model.census` as one line: "249 tensors loaded, 0 generated, 12 ignored"."""
    return ", ".join(f"{n:,}{'' if i else ' tensors'} {word}" for i, (word, n) in enumerate(census.items()))


# --- load -------------------------------------------------------------------------------------------------------------


def load_checkpoint(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    strict_config: bool = True,
    overrides: Mapping[str, Any] | None = None,
    allow_missing: str = "",
    allow_unexpected: str = "",
    seed: int = 0,
    integers: bool = False,
) -> GLM5ForCausalLM:
    """Build the model of `path/config.json` and load it tensor by tensor, in `dtype` (None: fp32).

    Raises CheckpointError for a tensor that is missing, unexpected or of another shape. Hashes protect the weights. An
    edited configuration is used, with one warning. `allow_missing` is a regular expression for names that may keep
    their random initialisation (for example a new indexer), `allow_unexpected` one for names to ignore. If the
    configuration has an MTP layer but the files do not, as other tools leave it, only the trunk is loaded, with one
    warning. On device "meta" only file headers are read and checked, and the model is deferred (see `materialise`).
    With `integers`, matrices of a checkpoint with int8 activations stay integers (see `model.integer_layers`).
    """
    device = torch.device(device)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint directory.")
    _check_side_files(path)
    if device.type != "meta":
        _verify(path)
    config = GLM5Config.load(path, strict=strict_config, **(overrides or {}))
    raw = read_json(path / "config.json", _SIDE_FILE_LIMIT, "a model configuration")
    quantization = raw.get("quantization_config")
    block = block_size(quantization, str(path / "config.json"))
    stored = read_folder(path)
    description = read_description(path, stored, quantization)
    mtp = f"model.layers.{config.num_hidden_layers}."
    if config.num_nextn_predict_layers and not any(name.startswith(mtp) for name in stored):
        warnings.warn(f"{path} announces an MTP layer but holds no tensor of it; loading the trunk only.", stacklevel=3)
        config = config.replace(num_nextn_predict_layers=0)
    model = _skeleton(path, config, stored).cast(dtype or torch.float32)
    description.check(path, model)
    rounded = activations_of(quantization, str(path / "config.json"))
    round_activations(model, description.activation if description.types else rounded)
    may_miss, may_ignore = _pattern(allow_missing, "missing"), _pattern(allow_unexpected, "unexpected")
    plan = make_plan(path, model, stored, block, may_miss, may_ignore, description)
    model.census = plan.census()
    model.weight_source = FolderWeights(plan, config, RandomWeights(seed, config.initializer_range))
    if device.type != "meta":
        if integers:
            reads = plan.reads
            model.census["integers"] = hold_integers(
                model, lambda name, _: reads[name].read() if name in reads else None, device
            )
        try:
            allocate(model, device)
        except (RuntimeError, MemoryError) as error:
            if "memory" not in str(error) and not isinstance(error, MemoryError):
                raise
            size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in model.state_dict().values())
            raise CheckpointError(
                f"{path}: no room for the model's {size / 1e9:.1f} GB on device {device}; choose a narrower dtype or "
                f"a device with more memory."
            ) from None
        model.weight_source.fill({name: part for name, part in whole_parts(model, None) if not part.rows.is_meta})
        model.weight_source = None
    _log.info("%s: %s", path, census_line(model.census))
    if config.use_dsa and not config.indexer_adapted:
        _log.info("%s: no DSA stage has adapted the indexers yet, so attention is dense.", path)
    return model


def verify_checkpoint(path: Path) -> None:
    """Check a folder's hashes, as loading to a device does. Raises CheckpointError for damaged weights."""
    if path.is_dir():
        _check_side_files(path)
        _verify(path)


def _verify(path: Path) -> None:
    verify_manifest(path, settings=lambda name: ".safetensors" not in name)


def _check_side_files(path: Path) -> None:
    """Raises CheckpointError for a config.json or manifest that is a pipe, a device or absurdly large."""
    for name in ("config.json", MANIFEST):
        file = path / name
        if file.exists() and not file.is_dir() and not file.is_file():
            raise CheckpointError(f"{file} is not a regular file; put the file itself there.")
        if name == MANIFEST and file.is_file() and file.stat().st_size > _SIDE_FILE_LIMIT:
            raise CheckpointError(f"{file} is damaged: it is larger than {_SIDE_FILE_LIMIT >> 20} MiB.")


def _pattern(text: str, kind: str) -> Callable[[str], bool]:
    try:
        search = re.compile(text).search
    except re.error as error:
        raise ConfigError(f"allow_{kind} is no regular expression: {error}.") from None
    return (lambda name: search(name) is not None) if text else (lambda name: False)


def _skeleton(path: Path, config: GLM5Config, stored: Mapping[str, Stored]) -> GLM5ForCausalLM:
    """The model without storage. Raises CheckpointError for sizes in config.json that the files do not confirm."""
    if config.num_hidden_layers > len(stored):
        raise CheckpointError(
            f"{path}: config.json demands {config.num_hidden_layers} layers, and the last one is missing from the "
            f"weight files, which hold {len(stored)} tensors in all; the two do not belong together."
        )
    largest = max((dim for item in stored.values() if item.size for dim in item.shape), default=0)
    counts = {"num_attention_heads": config.num_attention_heads}
    if config.first_k_dense_replace < config.num_hidden_layers or config.num_nextn_predict_layers:
        counts["n_routed_experts"] = config.n_routed_experts
    for key, count in counts.items():
        if count > largest:
            raise CheckpointError(
                f"{path}: config.json has {key} {count}, but no tensor in the weight files is that large; the two do "
                f"not belong together."
            )
    experts = config.n_routed_experts * max(0, config.num_hidden_layers - config.first_k_dense_replace)
    if experts > sum(math.prod(item.shape) for item in stored.values()):  # the routers alone have more numbers
        raise CheckpointError(
            f"{path}: config.json demands {experts:,} experts in all layers, more than the weight files have numbers; "
            "the two do not belong together."
        )
    try:
        with torch.device("meta"):
            return GLM5ForCausalLM(config)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{path}: no model has the sizes of config.json ({reason:.120}).") from error
