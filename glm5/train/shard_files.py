"""Sharded tensors on disk: which slice of which tensor is in which file, and how to read any other slice.

Every rank writes its own parts. A reader reads only the rows that overlap with its own slices, so writing and reading
jobs may differ in size and layout. An index is checked against the files and the reader's own tensors before anything
is allocated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from glm5.errors import CheckpointError
from glm5.model.tensor_files import Stored, open_tensors, read_header, read_tensor, rows_of, save_file
from glm5.parallel.ranks import ShardSlice

_FILE = re.compile(r"rank-\d{5}\.safetensors")
_MAX_DIMS, _MAX_SIZE = 8, 1 << 48


@dataclass(frozen=True)
class Part:
    """A slice of a stored tensor, and the file that contains it under the tensor's name."""

    file: str
    region: ShardSlice


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk: its dtype by torch's name, its shape, and parts that cover it without overlap."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)


Pieces = Mapping[str, tuple[Tensor, ShardSlice]]
"""A rank's parts by name: (part of the tensor, its slice of the whole)."""


def own_pieces(writes_whole: bool, pieces: Pieces) -> Pieces:
    """The pieces that a rank writes: no empty parts, and whole tensors only from one rank (`Ranks.writes_whole`)."""
    return {n: (t, at) for n, (t, at) in pieces.items() if not at.empty and (writes_whole or at.sizes != at.shape)}


def write_pieces(folder: Path, rank: int, pieces: Pieces) -> dict[str, tuple[str, ShardSlice]]:
    """Write a rank's `own_pieces` into its own file, tensor by tensor; returns (dtype, slice) of each."""
    save_file({name: tensor for name, (tensor, _) in pieces.items()}, str(folder / file_name(rank)), {"format": "pt"})
    return {name: (_dtype_name(tensor), region) for name, (tensor, region) in pieces.items()}


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def index_of(written: Sequence[Mapping[str, tuple[str, ShardSlice]]]) -> dict[str, Any]:
    """JSON of all ranks' parts, in rank order."""
    tensors: dict[str, Any] = {}
    for rank, names in enumerate(written):
        for name, (dtype, region) in names.items():
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": list(region.shape), "boxes": []})
            entry["boxes"].append(
                {"file": file_name(rank), "offsets": list(region.offsets), "shape": list(region.sizes)}
            )
    return tensors


def parse_index(raw: Any, where: Path) -> dict[str, StoredTensor]:
    """Inverse of `index_of`. Raises CheckpointError for an index that is malformed, names a file that is not a rank's,
    or has parts that overlap or leave a gap."""
    found: dict[str, StoredTensor] = {}
    try:
        for name, entry in raw.items():
            stored = StoredTensor(str(entry["dtype"]), _sizes(entry["shape"]))
            for region in entry["boxes"]:
                file = str(region["file"])
                if not _FILE.fullmatch(file):
                    raise ValueError(f"{file!r:.60} is not the file of a rank")
                stored.parts.append(
                    Part(file, ShardSlice(stored.shape, _sizes(region["offsets"]), _sizes(region["shape"])))
                )
            _check_cover(name, stored)
            found[name] = stored
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged ({type(error).__name__}: {error!s:.160}).") from None
    return found


def _sizes(values: Any) -> tuple[int, ...]:
    good = isinstance(values, list) and len(values) <= _MAX_DIMS
    if not good or any(type(v) is not int or not 0 <= v < _MAX_SIZE for v in values):
        raise ValueError(f"{values!r:.60} is not a shape")
    return tuple(values)


def _check_cover(name: str, stored: StoredTensor) -> None:
    """Raises ValueError unless the parts lie inside the whole, do not overlap and add up to it."""
    regions = [part.region for part in stored.parts]
    for region in regions:
        inside = len(region.offsets) == len(region.sizes) == len(stored.shape) and all(
            low + size <= whole for low, size, whole in zip(region.offsets, region.sizes, stored.shape, strict=True)
        )
        if not inside or region.empty:
            raise ValueError(f"a part of {name!r:.80} is outside its shape")
    active: list[ShardSlice] = []
    for region in sorted(regions, key=lambda region: region.offsets):
        first = region.offsets[0] if region.offsets else 0
        active = [b for b in active if b.offsets and b.offsets[0] + b.sizes[0] > first]
        if any(_overlap(region, other) is not None for other in active) or (not region.offsets and len(regions) > 1):
            raise ValueError(f"parts of {name!r:.80} overlap")
        active.append(region)
    if sum(math.prod(region.sizes) for region in regions) != math.prod(stored.shape):
        raise ValueError(f"the parts of {name!r:.80} leave a gap")


def _overlap(a: ShardSlice, b: ShardSlice) -> tuple[slice, ...] | None:
    """Overlap of two slices of one tensor, in the whole tensor's coordinates, or None."""
    slices = tuple(
        slice(max(p, q), min(p + m, q + n)) for p, m, q, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    return slices if all(s.start < s.stop for s in slices) else None


def check_files(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises CheckpointError for files with headers that do not match the index."""
    files = _Files(folder)
    for name, stored in tensors.items():
        for part in stored.parts:
            files.stored(name, stored, part)


class _Files:
    """Files of a state and their headers; each file is opened once, each header read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._headers: dict[str, dict[str, Stored]] = {}
        self._handles: dict[str, BinaryIO] = {}
        self._open = ExitStack()

    def stored(self, name: str, tensor: StoredTensor, part: Part) -> Stored:
        """Location of a part in its file. Raises CheckpointError for a file with other content."""
        if part.file not in self._headers:
            self._headers[part.file] = read_header(self.folder / part.file)
        found = self._headers[part.file].get(name)
        if found is None or found.shape != part.region.sizes or str(found.dtype) != f"torch.{tensor.dtype}":
            raise CheckpointError(
                f"{self.folder / part.file} is damaged: it does not contain the part of {name!r:.80} that the "
                "index lists."
            )
        return found

    def handle(self, stored: Stored) -> BinaryIO:
        name = stored.file.name
        if name not in self._handles:
            self._handles[name] = self._open.enter_context(open_tensors(stored.file, stored.stamp))
        return self._handles[name]

    def close(self) -> None:
        self._open.close()


@torch.no_grad()
def read_pieces(
    folder: Path, tensors: Mapping[str, StoredTensor], targets: Iterable[tuple[str, Tensor, ShardSlice]]
) -> None:
    """Fill every target (name, this rank's part, its slice) from the files; reads only the rows it needs."""
    with closing(_Files(folder)) as files:
        for name, target, region in targets:
            for part in tensors[name].parts if not region.empty else ():
                where = _overlap(region, part.region)
                if where is not None:
                    stored = files.stored(name, tensors[name], part)
                    _copy(files.handle(stored), stored, _within(where, part.region), target[_within(where, region)])


def _copy(handle: BinaryIO, stored: Stored, where: tuple[slice, ...], target: Tensor) -> None:
    """Read a region of a stored part; directly into the target for a run of whole rows."""
    if not where:
        target.copy_(read_tensor(handle, stored))
        return
    run = rows_of(stored, where[0].start, where[0].stop - where[0].start)
    straight = target.shape == run.shape
    value = read_tensor(handle, run, target if straight else None)
    if value is not target:
        target.copy_(value[(slice(None), *where[1:])])


def _within(where: tuple[slice, ...], region: ShardSlice) -> tuple[slice, ...]:
    return tuple(slice(s.start - low, s.stop - low) for s, low in zip(where, region.offsets, strict=True))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
