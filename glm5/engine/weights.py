"""New weights for a running engine, in two phases: read and check everything, then copy between two steps.

`stage` does the slow part (files, hashes, shapes, rounding for an engine in low precision) while the engine runs, in
any thread. For a directory it needs memory for a second set of weights, and for rounded ones on the engine's device.
`apply` copies within memory, in the engine's thread, so no step mixes two versions. Errors in the source are found in
`stage`; the engine then keeps its weights.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.errors import CheckpointError, EngineError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.parallel.tensor import whole_config, whole_state
from glm5.quant.in_place import NewWeights, differing, new_weights

if TYPE_CHECKING:
    from glm5.engine.engine import Engine

_MAY_DIFFER = {"eos_token_id", "pad_token_id", "max_position_embeddings", "initializer_range", "dtype"}
"""Checkpoint settings that do not change the meaning of weights. The engine keeps its own."""


@dataclass(frozen=True)
class Staged:
    """Checked weights, by names of the engine's `state_dict`, and as the engine takes them."""

    tensors: Mapping[str, Tensor]
    new: NewWeights
    source: str
    bytes: int


@dataclass(frozen=True)
class WeightUpdate:
    """Result of an update. `seconds` is how long the engine was paused."""

    version: int
    tensors: int
    bytes: int
    seconds: float
    source: str


def stage(
    model: GLM5ForCausalLM,
    source: str | Path | Mapping[str, Tensor],
    *,
    hashes: Mapping[str, str] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Staged:
    """Read and check a checkpoint directory, or tensors by names of the engine's `state_dict`, without changing the
    engine. `model` and `tokenizer` are the engine's.

    A directory's manifest is verified before anything is read. `hashes` are SHA-256 digests by name (see
    `tensor_hashes`), one per tensor.

    Raises:
        CheckpointError: the directory is missing, damaged, or belongs to another architecture or tokenizer.
        EngineError: names, shapes, types or hashes do not fit.
    """
    if isinstance(source, Mapping):
        tensors, name = source, "tensors"
    else:
        tensors, name = _read(model, Path(source), tokenizer), str(source)
    return staged(model, tensors, name, hashes)


def staged(
    model: GLM5ForCausalLM, tensors: Mapping[str, Tensor], source: str, hashes: Mapping[str, str] | None = None
) -> Staged:
    """Weights from `source` that are in memory. Raises EngineError if they do not fit the model or their hashes."""
    check_fit(model, tensors)
    if hashes is not None:
        _check_hashes(tensors, hashes)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return Staged(tensors, new_weights(model, tensors), source, size)


def apply(engine: Engine, staged: Staged, version: int, *, hashes: Mapping[str, str] | None = None) -> WeightUpdate:
    """Copy staged weights into the engine as `version`, between two of its steps.

    Running requests use the new weights from their next token. With `hashes`, the tensors that were neither converted
    nor divided are read back from the engine and compared, rounded ones with what they were rounded to. Raises
    EngineError if the engine's memory differs from the staged weights, which only a memory error can cause.
    """
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise EngineError(f"weight_version must be an integer of at least 0, not {version!r}.")
    begun = time.perf_counter()
    engine.update_weights(staged.new, version)
    seconds = time.perf_counter() - begun
    if hashes is not None:
        own, new = engine.model.state_dict(), staged.new.tensors
        kinds = {n: (t.dtype, t.shape) for n, t in staged.tensors.items() if new.get(n) is t}
        same = {name: own[name] for name, kind in kinds.items() if (own[name].dtype, own[name].shape) == kind}
        for name, tensor in same.items():
            if tensor_hash(tensor) != hashes[name].lower():
                raise EngineError(f'Weight push {version}: tensor "{name}" differs in the engine after the copy.')
        rounded = {name: tensor for name, tensor in new.items() if tensor is not staged.tensors[name]}
        check_copy(engine.model, NewWeights(rounded, staged.new.integers), version)
    return WeightUpdate(version, len(staged.tensors), staged.bytes, seconds, staged.source)


def check_copy(model: GLM5ForCausalLM, new: NewWeights, version: int) -> None:
    """Raise EngineError for a weight of the model that differs in any bit from `new`."""
    if names := differing(model, new):
        raise EngineError(f'Weight push {version}: tensor "{names[0]}" differs in the engine after the copy.')


def tensor_hash(tensor: Tensor) -> str:
    """Hex SHA-256 of a tensor's bytes in memory order (little-endian), without its shape or type."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def tensor_hashes(model: nn.Module) -> dict[str, str]:
    """`tensor_hash` of every parameter and buffer by its name in `state_dict`."""
    return {name: tensor_hash(tensor) for name, tensor in model.state_dict().items()}


def _read(model: GLM5ForCausalLM, path: Path, tokenizer: Tokenizer | None) -> Mapping[str, Tensor]:
    """The weights of a directory in host memory. Compares configuration and tokenizer first."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint directory.")
    ours, theirs = _meaning(whole_config(model)), _meaning(GLM5Config.load(path))
    differs = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if differs:
        key = differs[0]
        raise CheckpointError(
            f"{path} has a different architecture than the engine: {key} is {theirs.get(key)!r:.80}, not "
            f"{ours.get(key)!r:.80}; start a new engine for it."
        )
    if tokenizer is not None and (path / "tokenizer.json").exists() and Tokenizer.load(path).hash() != tokenizer.hash():
        raise CheckpointError(f"{path} has a different tokenizer than the engine; start a new engine for it.")
    return GLM5ForCausalLM.from_pretrained(path, dtype=model.dtype).state_dict()


def _meaning(config: GLM5Config) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in _MAY_DIFFER}


def check_fit(model: GLM5ForCausalLM, tensors: Mapping[str, Tensor]) -> None:
    """Raise EngineError unless the tensors are a complete set of weights for the model, undivided."""
    rounds = model.quantised or any(getattr(module, "activation", None) for module in model.modules())
    if model.scheme is None and rounds:
        raise EngineError("This engine multiplies the integers of its checkpoint, so its weights cannot be updated.")
    own = whole_state(model)
    for name in sorted(own.keys() ^ tensors.keys()):
        what = "is missing" if name in own else "is not in the model"
        raise EngineError(f'Weight update does not fit the model: tensor "{name}" {what}.')
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise EngineError(
                f'Weight update does not fit the model: tensor "{name}" has shape {list(tensor.shape)}, not '
                f"{list(own[name].shape)}."
            )
        if tensor.is_floating_point() != own[name].is_floating_point() or tensor.is_meta:
            raise EngineError(f'Weight update does not fit the model: tensor "{name}" is {tensor.dtype}.')


def _check_hashes(tensors: Mapping[str, Tensor], hashes: Mapping[str, str]) -> None:
    for name in sorted(tensors.keys() ^ hashes.keys()):
        raise EngineError(f'Weight update: tensor and hash of "{name}" must come together; one of them is missing.')
    for name, tensor in tensors.items():
        if tensor_hash(tensor) != hashes[name].lower():
            raise EngineError(f'Weight update: tensor "{name}" is corrupt (its SHA-256 differs).')
