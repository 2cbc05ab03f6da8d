"""Tokenised SFT rows on disk: rank 0 writes them once, every rank maps them and reads a row when it is drawn.

A cache is a folder with one split of token shards (`rows.tokens`, `rows.borders`; `rows.bytes` has the number of
targets and `rows.paths` the FILE:LINE of every row), `rows.mask` with a byte per token, and `cache.json`: the key that
says of what the rows were made, rows per source, counts, hash and warnings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, overload

import numpy as np

from glm5.chat.tokenizer import Tokenizer
from glm5.data.sft_rows import RowCounts, SftRow
from glm5.data.shards import Shard, SplitWriter, id_dtype, map_array, open_split
from glm5.errors import DataError
from glm5.files import publish_dir, read_small, recover_dir, verify_manifest

SPLIT = "rows"
CACHE = "cache.json"
_MOST_CACHE = 1 << 28  # bytes of cache.json; every skipped line has a warning in it


class MappedRows(Sequence[SftRow]):
    """Rows [first, last) of a cache; each is a view of the mapped files."""

    def __init__(self, shard: Shard, mask: np.ndarray, first: int, last: int) -> None:
        self._shard, self._mask, self._rows = shard, mask, range(first, last)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> SftRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[SftRow]: ...
    def __getitem__(self, index: int | slice) -> SftRow | list[SftRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._rows[index]
        span = slice(int(self._shard.borders[row]), int(self._shard.borders[row + 1]))
        return SftRow(self._shard.tokens[span], self._mask[span])


@dataclass(frozen=True)
class CacheInfo:
    """Content of `cache.json`. `sources` are the numbers of the first and after the last row by name; `sha256` is the
    hash of all rows (ids as int32, then the mask, row by row); `warnings` were logged when the rows were made."""

    key: Mapping[str, Any]
    sources: Mapping[str, Sequence[int]]
    counts: RowCounts
    sha256: str
    warnings: Sequence[str]


class CacheWriter:
    """Appends rows to the files of a cache; memory does not grow with their number."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._split = SplitWriter(folder, SPLIT, id_dtype(tokenizer))
        self._mask = (folder / f"{SPLIT}.mask").open("wb")
        self._digest = hashlib.sha256()

    def append(self, row: SftRow, where: str) -> None:
        """Add a row; `where` is the FILE:LINE of its conversation."""
        self._split.append(row.ids, int(row.mask.sum()), where)
        self._mask.write(row.mask.tobytes())
        self._digest.update(row.ids.tobytes())
        self._digest.update(row.mask.tobytes())

    @property
    def rows(self) -> int:
        """Rows so far."""
        return self._split.documents

    @property
    def sha256(self) -> str:
        """Hash of the rows so far."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Flush buffered data to the files."""
        self._split.close()
        self._mask.close()


@contextmanager
def publish_cache(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[CacheWriter, Callable[[CacheInfo], None]]]:
    """Yield a writer of rows, and a function that takes the info at the end. `folder` is replaced after the block."""
    foreign = not folder.is_symlink()  # what a link leads to may have other content
    with publish_dir(folder, foreign=foreign) as aside, closing(CacheWriter(aside, tokenizer)) as writer:

        def finish(info: CacheInfo) -> None:
            writer.close()
            plain = {**vars(info), "counts": vars(info.counts)}
            (aside / CACHE).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")

        yield writer, finish


def read_cache(folder: Path) -> CacheInfo | None:
    """The info of a cache after a check of every hash; None without one. Raises DataError, with the damage, for a cache
    that cannot be used."""
    recover_dir(folder)
    if not folder.exists():
        return None
    if not verify_manifest(folder, DataError, "cache", ""):
        raise DataError(f"{folder} has no manifest.")
    try:
        plain = json.loads(read_small(folder / CACHE, _MOST_CACHE))
        counts = RowCounts(**{field.name: int(plain["counts"][field.name]) for field in fields(RowCounts)})
        sources = {str(name): (int(first), int(last)) for name, (first, last) in plain["sources"].items()}
        if not isinstance(plain["key"], dict):
            raise TypeError("the key is not an object")
        return CacheInfo(plain["key"], sources, counts, str(plain["sha256"]), list(map(str, plain["warnings"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{folder / CACHE} is damaged.") from None


def open_rows(folder: Path, info: CacheInfo, tokenizer: Tokenizer) -> dict[str, MappedRows]:
    """Memory-map the rows of a cache by source. Raises DataError for files that do not fit each other."""
    shard = open_split(folder, SPLIT, id_dtype(tokenizer))
    try:
        mask = map_array(folder / f"{SPLIT}.mask", np.dtype(np.bool_))
    except (OSError, ValueError):
        mask = np.empty(0, np.bool_)
    fit = bool(info.sources) and all(0 <= a < b <= len(shard) for a, b in info.sources.values())
    if not fit or len(mask) != len(shard.tokens):
        raise DataError(f"The rows of {folder} do not fit each other; delete it.")
    return {name: MappedRows(shard, mask, first, last) for name, (first, last) in info.sources.items()}
