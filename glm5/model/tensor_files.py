"""Safetensors files: headers are validated first, tensors are read and written one at a time.

Files from outside are not trusted. Lengths, shapes, types, offsets and file names are checked against the real file
size before anything is allocated or opened. Files are read, not mapped: if another machine shortens a file on shared
storage, that is an error and not a crash.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from glm5.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ASCEND = "quant_model_weights.safetensors"
"""The name that msModelSlim gives to its only file; its index and parts are named likewise."""
MAX_HEADER = 32 << 20  # a header of 118,629 tensors, the largest release in one file, would have about 18 MB
MAX_INDEX = 64 << 20
_MAX_DIMS = 8
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """Location of one tensor: `size` bytes at `begin` of `file`. `stamp` shows whether the file was replaced since."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    size: int
    stamp: tuple[int, ...]


def read_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint directory by name, from its index or its single file; reads headers only.

    Raises CheckpointError if index and files disagree, a tensor exists twice, or a file is missing, damaged or outside.
    """
    ours = any((folder / name).exists() for name in (SINGLE, INDEX))
    single = (
        ASCEND if not ours and any((folder / name).exists() for name in (ASCEND, f"{ASCEND}.index.json")) else SINGLE
    )
    index = folder / f"{single}.index.json"
    if not index.exists() and not (folder / single).exists():
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}.")
    where = _read_index(index) if index.exists() else None
    names = [single] if where is None else sorted(set(where.values()))
    found: dict[str, Stored] = {}
    for name in names:
        for tensor, stored in read_header(_locate(folder, name)).items():
            if tensor in found:
                raise _twice(tensor, found[tensor].file, stored.file)
            found[tensor] = stored
    if where is not None:
        _compare_index(index, where, found)
    for other in sorted(folder.glob("model*.safetensors")):
        if other.name not in names:
            for tensor, stored in read_header(_locate(folder, other.name)).items():
                if tensor in found:
                    raise _twice(tensor, found[tensor].file, stored.file)
    return found


def _twice(tensor: str, first: Path, second: Path) -> CheckpointError:
    return CheckpointError(
        f'Tensor "{_short(tensor)}" is stored twice, in {first} and in {second.name}; remove the file that is not part '
        f"of the checkpoint."
    )


def _short(name: str) -> str:
    """A name from a file, made safe for one line of an error message."""
    return ascii(name[:120])[1:-1]


def _compare_index(index: Path, where: Mapping[str, str], found: Mapping[str, Stored]) -> None:
    for name, file in where.items():
        if name not in found or found[name].file.name != file:
            raise CheckpointError(
                f'{index} is damaged: it places tensor "{_short(name)}" in {file}, which does not hold it. '
                f"Download or copy index and files again."
            )
    for name, stored in found.items():
        if name not in where:
            raise CheckpointError(
                f'{index} is damaged: {stored.file.name} holds tensor "{_short(name)}", which the index does not name. '
                f"Download or copy index and files again."
            )


def _read_index(index: Path) -> dict[str, str]:
    raw = read_json(index, MAX_INDEX, "a valid safetensors index")
    entries = raw.get("weight_map")
    if not isinstance(entries, dict):
        raise CheckpointError(f"{index} is not a valid safetensors index (it has no weight_map).")
    for name, file in entries.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise CheckpointError(
                f'{index} is damaged: it names the file {file!r:.80} for "{_short(name)}"; only plain *.safetensors '
                f"names are allowed."
            )
    return entries


def read_json(path: Path, limit: int, kind: str) -> dict[str, Any]:
    """The JSON object in a regular file of at most `limit` bytes, else CheckpointError "... is not {kind}"."""
    with _opened(path) as (handle, size):
        if size > limit:
            raise CheckpointError(f"{path} is larger than {limit >> 20} MiB, so it is not {kind}.")
        raw = handle.read(limit)
    try:
        value = _parse(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not {kind} ({_reason(error)}).") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not {kind} (it must hold one JSON object).")
    return value


def _parse(raw: bytes) -> Any:
    """Parsed JSON. Raises ValueError for an object that repeats a key: other readers may keep the other value."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f'the key "{_short(twice)}" appears twice')
        return made

    return json.loads(raw.decode("utf-8"), object_pairs_hook=unique)


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).split("\n")[0][:160]


def _locate(folder: Path, name: str) -> Path:
    """`folder/name`. Raises CheckpointError for a link out of the folder, except into the hub cache's blobs."""
    file = folder / name
    try:
        home, real = folder.resolve(), file.resolve(strict=True)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; the checkpoint is incomplete.") from None
    except (OSError, RuntimeError) as error:  # a loop of links
        raise CheckpointError(f"{file} cannot be read ({getattr(error, 'strerror', error)}).") from None
    blobs = home.parent.parent / "blobs"
    if real.parent != home and not (home.parent.name == "snapshots" and real.parent == blobs):
        raise CheckpointError(f"{file} is a link that leaves the checkpoint; put the file itself there.")
    return file


@contextmanager
def _opened(file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file, open for reading, and its size; does not block on a pipe or a device."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise CheckpointError(f"{file} is not a regular file; put the file itself there.")
        handle = os.fdopen(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb", buffering=0)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; the checkpoint is incomplete.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from None
    with handle:
        try:
            yield handle, os.fstat(handle.fileno()).st_size
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from None


def _stamp(handle: BinaryIO) -> tuple[int, ...]:
    info = os.fstat(handle.fileno())
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises CheckpointError for types, shapes or offsets that do not match the file."""
    with _opened(file) as (handle, size):
        first = handle.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if length < 2 or length > size - 8:
            raise _damaged(file, f"the header of {length} bytes does not fit the file's {size} bytes")
        if length > MAX_HEADER:
            raise _damaged(file, f"the header is larger than {MAX_HEADER >> 20} MiB")
        raw, stamp = _exactly(handle, length), _stamp(handle)
    try:
        header = _parse(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"the header is not JSON: {_reason(error)}") from None
    if not isinstance(header, dict):
        raise _damaged(file, "the header is not a JSON object")
    header.pop("__metadata__", None)
    base = 8 + length
    found = {name: _entry(file, name, entry, base, stamp) for name, entry in header.items()}
    end = base
    for name, stored in sorted(found.items(), key=lambda item: (item[1].begin, item[1].size)):
        if stored.begin != end:
            relation = "overlaps" if stored.begin < end else "leaves a gap after"
            raise _damaged(file, f'tensor "{_short(name)}" {relation} the one before it')
        end += stored.size
    if end != size:
        raise _damaged(file, f"the header describes {end} bytes, the file has {size}")
    return found


def _exactly(handle: BinaryIO, length: int) -> bytes:
    parts = []
    while length and (part := handle.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged or not a safetensors file ({why}); download or copy it again.")


def _entry(file: Path, name: str, entry: Any, base: int, stamp: tuple[int, ...]) -> Stored:
    """One entry of a header: {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}."""
    entry = entry if isinstance(entry, dict) else {}
    code, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(code, str) or code not in _DTYPES:
        raise _damaged(file, f'tensor "{_short(name)}" has the unknown type {code!r:.40}')
    if not _counts(shape) or len(shape) > _MAX_DIMS:
        raise _damaged(file, f'tensor "{_short(name)}" has no valid shape')
    if not _counts(offsets) or len(offsets) != 2:
        raise _damaged(file, f'tensor "{_short(name)}" has no valid data_offsets')
    size = _DTYPES[code].itemsize
    for dim in shape:
        size *= dim
    if size != offsets[1] - offsets[0]:
        raise _damaged(file, f'the shape and the data_offsets of tensor "{_short(name)}" disagree')
    return Stored(file, _DTYPES[code], tuple(shape), base + offsets[0], size, stamp)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


@contextmanager
def open_tensors(file: Path, stamp: tuple[int, ...]) -> Iterator[BinaryIO]:
    """A file, open for `read_tensor`. Raises CheckpointError for a file that changed after its header was read."""
    with _opened(file) as (handle, _):
        if _stamp(handle) != stamp:
            raise CheckpointError(f"{file} changed while it was loaded; load again when nothing writes to it.")
        yield handle


def read_tensor(handle: BinaryIO, stored: Stored, out: Tensor | None = None) -> Tensor:
    """Read one tensor, into `out` if that is contiguous CPU memory of the same dtype, else into new CPU memory.

    The caller has checked `stored.shape`, so the size of the new memory is not an unchecked claim.
    """
    if out is None or out.dtype != stored.dtype or out.device.type != "cpu" or not out.is_contiguous():
        out = torch.empty(stored.shape, dtype=stored.dtype)
    view = _bytes_of(out)
    handle.seek(stored.begin)
    done = 0
    while done < stored.size:
        count = handle.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{stored.file} became shorter while it was read; load again when it is complete.")
        done += count
    return out


def rows_of(stored: Stored, first: int, count: int) -> Stored:
    """Rows [first, first + count) of a stored tensor."""
    row = stored.size // stored.shape[0]
    return replace(stored, shape=(count, *stored.shape[1:]), begin=stored.begin + first * row, size=count * row)


def save_file(tensors: Mapping[str, Tensor], file: str, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file tensor by tensor; at most one is copied. Views and shared memory are allowed."""
    text, places = _header(tensors, metadata)
    with open(file, "wb") as handle:
        handle.write(text)
        for name in places:
            handle.write(_bytes_of(tensors[name].cpu().contiguous()))


def create_file(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    """Create a safetensors file of these tensors (meta tensors are allowed) with its header and its full size. Their
    data is still to be written, with `write_tensor`."""
    text, places = _header(tensors, metadata)
    with file.open("wb") as handle:
        handle.write(text)
        handle.truncate(len(text) + sum(places.values()))


def write_tensor(handle: BinaryIO, stored: Stored, value: Tensor) -> None:
    """Write one tensor, or some rows of one (see `rows_of`), to its place in an existing file."""
    handle.seek(stored.begin)
    handle.write(_bytes_of(value.cpu().contiguous()))


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header of a file, and the bytes of each tensor in the order of the file. Wide types come first, which keeps
    every tensor aligned to its element size."""
    sizes = {name: tensor.numel() * tensor.dtype.itemsize for name, tensor in tensors.items()}
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        begin, end = end, end + sizes[name]
        header[name] = {
            "dtype": _CODES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, {name: sizes[name] for name in names}


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, through numpy and as bytes: numpy has no bf16, and torch no buffer."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
