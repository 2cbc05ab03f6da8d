"""Weights in a folder of the Hugging Face layout as the source of a model: a plan made from the headers, then streamed
reads of the rows that a process needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.errors import CheckpointError
from glm5.model.disk_names import disk_name, disk_parts, disk_rows, disk_tensors, expert_stacks, ignorable
from glm5.model.fp8 import FP8, SCALE, check_scale, dequantise, scale_shape
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.tensor_files import Stored, open_tensors, read_tensor, rows_of
from glm5.model.weight_source import RandomWeights, RowPart
from glm5.ops.wide import wide

_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class LoadPlan:
    """A load plan: (stored tensor, its FP8 scale or None) by target name, and the names that no file has."""

    reads: dict[str, tuple[Stored, Stored | None]] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    generated: set[str] = field(default_factory=set)
    ignored: int = 0

    def census(self) -> dict[str, int]:
        """Counts: `loaded` and `generated` are names as we write them on disk, `ignored` are tensors in the files.
        `dequantised`, if not 0, counts FP8 tensors."""
        counts = {"loaded": len(self.filled), "generated": len(self.generated), "ignored": self.ignored}
        quantised = sum(scale is not None for _, scale in self.reads.values())
        return counts | ({"dequantised": quantised} if quantised else {})


def make_plan(
    path: Path,
    model: GLM5ForCausalLM,
    stored: Mapping[str, Stored],
    block: tuple[int, int],
    may_miss: Callable[[str], bool],
    may_ignore: Callable[[str], bool],
) -> LoadPlan:
    """Match the tensors in the files with those of the model, from the headers alone."""
    plan = LoadPlan()
    targets = {name: (tensor, [name]) for name, tensor in disk_tensors(model).items()}
    wanted = list(targets)
    targets |= {disk: (tensor, disk_parts(name, model.config, tensor)) for name, disk, tensor in expert_stacks(model)}
    for name, item in stored.items():
        base = name.removesuffix(SCALE)
        if base != name and base in targets and base in stored:
            if stored[base].dtype != FP8:
                raise CheckpointError(f'{path}: tensor "{base}" has a scale, but is stored as {stored[base].dtype}.')
            continue
        if name not in targets:
            _may_ignore(path, name, model.config, may_ignore)
            plan.ignored += 1
            continue
        tensor, parts = targets[name]
        if item.shape != tensor.shape:
            raise CheckpointError(
                f'{path}: tensor "{name}" has shape {list(item.shape)}, config.json demands {list(tensor.shape)}.'
            )
        if not plan.filled.isdisjoint(parts):
            raise CheckpointError(f'{path}: tensor "{name}" is stored twice, for single experts and for all in one.')
        plan.filled.update(parts)
        plan.reads[name] = (item, _scale_of(path, name, item, stored, block))
    plan.generated = {name for name in wanted if name not in plan.filled}
    missing = [name for name in wanted if name in plan.generated and not may_miss(name)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f'{path}: tensor "{missing[0]}"{more} is missing from the weight files.')
    return plan


def _may_ignore(path: Path, name: str, config: GLM5Config, may_ignore: Callable[[str], bool]) -> None:
    base = name.removesuffix(SCALE)
    if may_ignore(name) or ignorable(base, config):
        return
    shown = ascii(name[:120])[1:-1]
    if base != name:
        raise CheckpointError(f'{path}: the scale "{shown}" has no weight; the checkpoint is incomplete.')
    raise CheckpointError(f'{path}: tensor "{shown}" does not belong to this architecture.')


def _scale_of(
    path: Path, name: str, item: Stored, stored: Mapping[str, Stored], block: tuple[int, int]
) -> Stored | None:
    """The checked scale of an FP8 tensor, None for a plain one. The stored type decides, not a list of exceptions."""
    scale = stored.get(name + SCALE)
    if item.dtype in _PLAIN:
        return None
    if item.dtype != FP8 or scale is None or len(item.shape) < 2:
        hint = f', or FP8 matrices with a scale "{name}{SCALE}"' if item.dtype == FP8 else ""
        raise CheckpointError(f'{path}: tensor "{name}" is stored as {item.dtype}; expected fp32, bf16 or fp16{hint}.')
    expected = scale_shape(item.shape, block)
    if scale.dtype != torch.float32 or scale.shape != expected:
        raise CheckpointError(
            f'{path}: the scale "{name}{SCALE}" is {scale.dtype} of shape {list(scale.shape)}; blocks of '
            f"{list(block)} demand torch.float32 of shape {list(expected)}."
        )
    return scale


class _Read(NamedTuple):
    """Rows [first, first + len(target)) of a stored tensor, on their way to `target`."""

    name: str
    stored: Stored
    scale: Stored | None
    first: int
    target: Tensor


@dataclass(frozen=True)
class FolderWeights:
    """The weights of a checkpoint folder, as a `WeightSource`. Tensors that no file has are drawn from `new`."""

    plan: LoadPlan
    config: GLM5Config
    block: tuple[int, int]
    new: RandomWeights

    @torch.no_grad()
    def fill(self, parts: Mapping[str, RowPart]) -> None:
        """Read the rows of every part, file by file in byte order. Raises CheckpointError for a file that changed since
        the plan was made."""
        files: dict[Path, list[_Read]] = {}
        for name, part in parts.items():
            views = list(disk_rows(name, self.config, part.rows, part.first, part.total))
            if any(disk in self.plan.generated for disk, _, _ in views):
                self.new.fill({name: part})
            if ".mlp.experts." in name:
                views.append((disk_name(name, self.config), part.rows, part.first))
            for disk, view, first in views:
                if disk in self.plan.reads and view.numel():
                    stored, scale = self.plan.reads[disk]
                    files.setdefault(stored.file, []).append(_Read(disk, stored, scale, first, view))
        for file, reads in files.items():
            with open_tensors(file, reads[0].stored.stamp) as handle:
                for read in sorted(reads, key=lambda read: read.stored.begin):
                    self._read(handle, read)

    def _read(self, handle: BinaryIO, read: _Read) -> None:
        count, target = read.target.shape[0], read.target
        if read.scale is None:
            value = read_tensor(handle, rows_of(read.stored, read.first, count), target)
        else:
            # Scales are for blocks of rows, or for single experts of a stack.
            height = self.block[0] if len(read.stored.shape) == 2 else 1
            spare, end = read.first % height, read.first + count
            raw = read_tensor(handle, rows_of(read.stored, read.first - spare, count + spare))
            blocks = read.first // height, -(-end // height)
            factors = _read_scale(rows_of(read.scale, blocks[0], blocks[1] - blocks[0]), read.name)
            value = dequantise(raw, factors, self.block, wide(target.dtype))[spare:]
        if value is not target:
            target.copy_(value)


def _read_scale(scale: Stored, name: str) -> Tensor:
    with open_tensors(scale.file, scale.stamp) as handle:
        value = read_tensor(handle, scale)
    check_scale(value, f'{scale.file}: "{name}{SCALE}"')
    return value
