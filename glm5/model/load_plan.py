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
from glm5.model.ascend_files import BIAS, Description, matrix_of
from glm5.model.disk_names import disk_name, disk_parts, disk_rows, disk_tensors, expert_stacks, ignorable
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.quantised_files import PACKED, SUFFIXES, StoredMatrix, stored_matrix
from glm5.model.tensor_files import Stored, open_tensors
from glm5.model.weight_source import RandomWeights, RowPart
from glm5.ops.wide import wide


@dataclass
class LoadPlan:
    """A load plan: what the files have of each target, by its name, and the names that no file has."""

    reads: dict[str, StoredMatrix] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    generated: set[str] = field(default_factory=set)
    ignored: int = 0

    def census(self) -> dict[str, int]:
        """Counts: `loaded` and `generated` are names as we write them on disk, `ignored` are tensors in the files.
        `dequantised`, if not 0, counts quantised tensors."""
        counts = {"loaded": len(self.filled), "generated": len(self.generated), "ignored": self.ignored}
        quantised = sum(matrix.scale is not None for matrix in self.reads.values())
        return counts | ({"dequantised": quantised} if quantised else {})


def make_plan(
    path: Path,
    model: GLM5ForCausalLM,
    stored: Mapping[str, Stored],
    block: tuple[int, int],
    may_miss: Callable[[str], bool],
    may_ignore: Callable[[str], bool],
    description: Description = Description(),  # noqa: B008
) -> LoadPlan:
    """Match the tensors in the files with those of the model, from the headers and the description alone."""
    plan = LoadPlan()
    targets = {name: (tensor, [name]) for name, tensor in disk_tensors(model).items()}
    wanted = list(targets)
    targets |= {disk: (tensor, disk_parts(name, model.config, tensor)) for name, disk, tensor in expert_stacks(model)}
    for stored_name in stored:
        name = stored_name.removesuffix(PACKED)
        base = _base(name)
        if base != name and base in targets and (base in stored or base + PACKED in stored):
            continue
        if name not in targets:
            _may_ignore(path, stored_name, model.config, may_ignore)
            plan.ignored += 1
            continue
        tensor, parts = targets[name]
        if not plan.filled.isdisjoint(parts):
            twice = "as it is and packed" if name in plan.reads else "for single experts and for all in one"
            raise CheckpointError(f'{path}: tensor "{name}" is stored twice, {twice}.')
        plan.filled.update(parts)
        plan.reads[name] = stored_matrix(path, name, tensor.shape, stored, block, description.types.get(name, ""))
    plan.generated = {name for name in wanted if name not in plan.filled}
    missing = [name for name in wanted if name in plan.generated and not may_miss(name)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f'{path}: tensor "{missing[0]}"{more} is missing from the weight files.')
    return plan


def _base(name: str) -> str:
    """The matrix that a tensor with scales or packed numbers belongs to."""
    if name.endswith(BIAS):
        return matrix_of(name)
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def _may_ignore(path: Path, name: str, config: GLM5Config, may_ignore: Callable[[str], bool]) -> None:
    base = _base(name)
    if may_ignore(name) or ignorable(base, config):
        return
    shown = ascii(name[:120])[1:-1]
    if base != name and not name.endswith(PACKED):
        raise CheckpointError(f'{path}: the scale "{shown}" has no weight; the checkpoint is incomplete.')
    raise CheckpointError(f'{path}: tensor "{shown}" does not belong to this architecture.')


class _Read(NamedTuple):
    """Rows [first, first + len(target)) of a stored tensor, on their way to `target`."""

    matrix: StoredMatrix
    first: int
    target: Tensor


@dataclass(frozen=True)
class FolderWeights:
    """The weights of a checkpoint folder, as a `WeightSource`. Tensors that no file has are drawn from `new`."""

    plan: LoadPlan
    config: GLM5Config
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
                    matrix = self.plan.reads[disk]
                    files.setdefault(matrix.values.file, []).append(_Read(matrix, first, view))
        for file, reads in files.items():
            with open_tensors(file, reads[0].matrix.values.stamp) as handle:
                for read in sorted(reads, key=lambda read: read.matrix.values.begin):
                    self._read(handle, read)

    def _read(self, handle: BinaryIO, read: _Read) -> None:
        value = read.matrix.read_rows(handle, read.first, read.target, wide(read.target.dtype))
        if value is not read.target:
            read.target.copy_(value)
