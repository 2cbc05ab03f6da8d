"""Training state on disk: model, optimizer and step, written by all ranks, published atomically; no pickle.

`state/step-00000050/` contains one file per rank and an index (see `shard_files`). The newest two states are kept: if
one is damaged, some steps are lost and not the stage. Any number of ranks in any layout can read a state.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.errors import CheckpointError
from glm5.files import disk_errors, exclusive, publish_dir, recover_dir, verify_manifest
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.tensor_files import read_json
from glm5.obs.logs import get_logger
from glm5.optim.distributed import local
from glm5.parallel.ranks import Ranks, ShardSlice
from glm5.train.shard_files import (
    Pieces,
    StoredTensor,
    check_files,
    index_of,
    own_pieces,
    parse_index,
    read_pieces,
    write_pieces,
)

INDEX = "state.json"
KEPT = 2
"""Number of states kept per stage."""

_FORMAT = 1
_INDEX_LIMIT = 1 << 30
_STEP = re.compile(r"step-(\d{8,12})")

_log = get_logger(__name__)


def save_state(
    path: Path,
    model: GLM5ForCausalLM,
    optimizer: torch.optim.Optimizer,
    step: int,
    extra: dict[str, Any] | None = None,
    *,
    ranks: Ranks | None = None,
) -> None:
    """Write everything that the next step depends on to `path/step-NNNNNNNN`; all ranks call. `step` is the number of
    finished steps; `extra` must be JSON.

    The newest earlier state is kept too. If a rank fails, or another process saves to `path`, nothing changes on disk
    and all ranks raise CheckpointError.
    """
    ranks = ranks or Ranks()
    write_state(path, state_pieces(model, optimizer, ranks), step, extra or {}, ranks)


def write_state(path: Path, pieces: Pieces, step: int, extra: dict[str, Any], ranks: Ranks) -> None:
    """`save_state` of parts that the caller took from the model and the optimizer (`state_pieces`)."""
    target = path / f"step-{step:08}"
    with ExitStack() as open_folder:

        def begin() -> Path:
            open_folder.enter_context(_alone(path))
            # The name is ours, even if a damaged state of this step has lost its manifest.
            return open_folder.enter_context(publish_dir(target, foreign=True))

        folder = ranks.on_main(begin)

        def write() -> dict[str, tuple[str, ShardSlice]]:
            if not folder.is_dir():
                raise CheckpointError(f"{folder} is not visible to rank {ranks.rank}; all ranks need the same storage.")
            with disk_errors(target):
                return write_pieces(folder, ranks.rank, pieces)

        written = ranks.gather(ranks.together(write, patient=True))

        def finish() -> None:
            index = {"format": _FORMAT, "step": step, "extra": extra, "tensors": index_of(written)}
            parse_index(index["tensors"], folder / INDEX)  # publish only what can be read back
            (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
            open_folder.close()
            _remove_others(path, step)

        ranks.on_main(finish)


def load_state(
    path: Path, model: GLM5ForCausalLM, optimizer: torch.optim.Optimizer, *, ranks: Ranks | None = None
) -> tuple[int, dict[str, Any]] | None:
    """Restore model and optimizer in place from the newest valid state; all ranks call. Returns (finished steps,
    extra), or None without a state.

    Damaged states are skipped with a warning. Raises CheckpointError after skipping all, and for the state of another
    model.
    """
    ranks = ranks or Ranks()
    folder = ranks.on_main(lambda: _newest_valid(path))
    if folder is None:
        return None
    shapes = ranks.union({name: ranks.shard_slice(t).shape for name, t in _tensors(model).items()})
    trained = ranks.union({name: True for name, _ in _named(optimizer)})
    return ranks.together(lambda: _restore(folder, model, optimizer, ranks, shapes, trained.keys()))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock `path` against saves by other processes, and clean up saves that crashed."""
    busy = f"Another process is saving to {path}; two runs cannot share it. Stop one, or give this run another name."
    with exclusive(path, busy):
        for left in [*path.glob(".step-*.writing"), *path.glob(".step-*.old")]:
            recover_dir(path / left.name[1:].rpartition(".")[0])
        yield


def _states(path: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every state, newest first."""
    found = [(int(match[1]), p) for p in path.iterdir() if (match := _STEP.fullmatch(p.name))]
    return sorted(found, reverse=True)


def _remove_others(path: Path, step: int) -> None:
    """Keep the state of `step` and the ones just before it. Later ones are damaged: loading skipped them."""
    states = _states(path)
    kept = [folder for number, folder in states if number <= step][:KEPT]
    for _, folder in states:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _newest_valid(path: Path) -> Path | None:
    if not path.is_dir():
        return None
    with _alone(path):
        states = _states(path)
        first: CheckpointError | None = None
        for step, folder in states:
            try:
                _verify(folder, path)
            except CheckpointError as error:
                first = first or error
                continue
            if first is not None:
                _log.warning("%s Going on with the state of step %d.", first, step)
            return folder
    if first is not None:
        raise first
    return None


def _verify(folder: Path, path: Path) -> None:
    remedy = f"Delete {path} to start this stage again."
    if not verify_manifest(folder, kind="state", remedy=remedy):
        raise CheckpointError(f"{folder / 'manifest.json'} is missing, so the state is damaged. {remedy}")
    try:
        check_files(folder, _read_index(folder)[2])
    except CheckpointError as error:
        raise CheckpointError(f"{error} {remedy}") from None


def _read_index(folder: Path) -> tuple[int, dict[str, Any], dict[str, StoredTensor]]:
    """Step, extra and tensors of a state. Raises CheckpointError for a damaged index."""
    raw = read_json(folder / INDEX, _INDEX_LIMIT, "the index of a state")
    step, extra = raw.get("step"), raw.get("extra")
    if raw.get("format") != _FORMAT or type(step) is not int or not isinstance(extra, dict):
        raise CheckpointError(f"{folder / INDEX} is damaged, or of another version of glm5.")
    return step, extra, parse_index(raw.get("tensors"), folder / INDEX)


def state_pieces(model: GLM5ForCausalLM, optimizer: torch.optim.Optimizer, ranks: Ranks) -> Pieces:
    """What this rank writes of a state: its own parts of weights, buffers and optimizer state, without copies."""
    own = {name: tensor for name, tensor in _tensors(model).items() if not hasattr(tensor, "tied_copy")}
    found = {f"model/{name}": (local(t.detach()), ranks.shard_slice(t)) for name, t in own.items()}
    for name, parameter in _named(optimizer):
        if hasattr(parameter, "tied_copy"):
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            region = ranks.shard_slice(parameter if value.shape == parameter.shape else value)
            found[f"optim/{name}/{key}"] = (local(value), region)
    return own_pieces(ranks.writes_whole, found)


def _tensors(model: GLM5ForCausalLM) -> dict[str, Tensor]:
    """Parameters and buffers themselves: the copies in `state_dict` lose their attributes."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: own[name] for name in model.state_dict()}


def _restore(
    folder: Path,
    model: GLM5ForCausalLM,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    shapes: Mapping[str, tuple[int, ...]],
    trained: Collection[str],
) -> tuple[int, dict[str, Any]]:
    """`shapes` of all tensors and names of all `trained` parameters, those of other pipeline stages included."""
    step, extra, stored = _read_index(folder)
    own = _tensors(model)
    saved = {name.removeprefix("model/"): t.shape for name, t in stored.items() if name.startswith("model/")}
    if saved != shapes:
        raise CheckpointError(f"{folder} belongs to another model; delete {folder.parent} to start this stage again.")
    states, targets = _optimizer_targets(folder, stored, optimizer, ranks, trained)
    for name, tensor in own.items():
        targets.append((f"model/{name}", local(tensor.detach()), ranks.shard_slice(tensor)))
    read_pieces(folder, stored, targets)
    for parameter, state in states:
        optimizer.state[parameter] = state
    return step, extra


def _optimizer_targets(
    folder: Path,
    stored: dict[str, StoredTensor],
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    trained: Collection[str],
) -> tuple[list[tuple[Tensor, dict[str, Tensor]]], list[tuple[str, Tensor, ShardSlice]]]:
    """Fresh optimizer state for every parameter that has one on disk, and the targets to read it into."""
    keys: dict[str, list[str]] = {}
    for full in stored:
        if full.startswith("optim/"):
            name, _, key = full.removeprefix("optim/").rpartition("/")
            keys.setdefault(name, []).append(key)
    states: list[tuple[Tensor, dict[str, Tensor]]] = []
    targets: list[tuple[str, Tensor, ShardSlice]] = []
    for name, parameter in _named(optimizer):
        state: dict[str, Tensor] = {}
        for key in keys.pop(name, []):
            full, region = f"optim/{name}/{key}", ranks.shard_slice(parameter)
            dtype = getattr(torch, stored[full].dtype, None)
            if stored[full].shape not in (region.shape, ()) or not isinstance(dtype, torch.dtype):
                raise CheckpointError(
                    f"{folder} is damaged: {full!r:.120} is neither a scalar nor of its parameter's shape."
                )
            if stored[full].shape == ():
                state[key] = torch.zeros((), dtype=dtype, device=local(parameter).device)
                region = ranks.shard_slice(state[key])
            else:
                state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            targets.append((full, local(state[key]), region))
        states.append((parameter, state))
    if unknown := [name for name in keys if name not in trained]:
        raise CheckpointError(
            f"{folder} belongs to a stage that trains other parameters ({unknown[0]!r:.80}); delete "
            f"{folder.parent} to start this stage again."
        )
    return [(parameter, state) for parameter, state in states if state], targets


def _named(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    return [pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)]
