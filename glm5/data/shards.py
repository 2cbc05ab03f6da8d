"""Token shards: one flat file of ids per split, document borders and names, and a manifest of their content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from glm5.chat.tokenizer import Tokenizer
from glm5.data.documents import Document
from glm5.errors import DataError
from glm5.files import ListedFile, damaged, listed_files, publish_dir, read_small

SPLITS = ("train", "held_out")
_TYPES = ("uint16", "uint32")
_ENCODED_DOCUMENTS = 1024
_MOST_INFO = 16 << 20  # bytes of shards.json
_BORDERS = 1 << 20  # checked at a time


class Paths(Sequence[str]):
    """Names of the documents of a split. The file is read on first access; iterating caches nothing."""

    def __init__(self, file: Path, count: int) -> None:
        self._file, self._count = file, count
        self._names: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self._names) if self._names is not None else self._read()

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if self._names is None:
            self._names = list(self._read())
        return self._names[index]

    def _read(self) -> Iterator[str]:
        count = 0
        try:
            with self._file.open(encoding="ascii") as lines:
                for line in lines:
                    name = json.loads(line)
                    count += 1
                    yield name
        except (OSError, ValueError, RecursionError):
            count = -1
        if count != self._count:
            raise DataError(f"{self._file} is missing or damaged; build the shards again.")


@dataclass(frozen=True)
class Shard:
    """One split, its arrays memory-mapped. Document i is tokens[borders[i]:borders[i + 1]], including its end-of-text
    token; `num_bytes[i]` is its length in UTF-8 and `paths[i]` its name."""

    tokens: np.ndarray
    borders: np.ndarray
    num_bytes: np.ndarray
    paths: Sequence[str] = ()

    def document(self, index: int) -> np.ndarray:
        """Token ids of one document."""
        return self.tokens[self.borders[index] : self.borders[index + 1]]

    def lengths(self, documents: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Tokens of these documents, int64."""
        lengths: np.ndarray = self.borders[1:][documents] - self.borders[:-1][documents]
        return lengths

    def __len__(self) -> int:
        return len(self.borders) - 1


class SplitWriter:
    """Appends documents to the files of one split; memory does not grow with their number."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype) -> None:
        self.split, self.dtype = split, dtype
        self.tokens = self.documents = self.bytes = 0
        with ExitStack() as stack:
            self._tokens, self._borders, self._bytes, self._paths = (
                stack.enter_context((folder / f"{split}.{part}").open("wb"))
                for part in ("tokens", "borders", "bytes", "paths")
            )
            self._borders.write(np.int64(0).tobytes())
            self._files = stack.pop_all()

    def append(self, ids: np.ndarray, num_bytes: int, path: str) -> None:
        """Add a document: its ids with the end-of-text token, its length in UTF-8, its name."""
        self._tokens.write(ids.astype(self.dtype, copy=False).tobytes())
        self.tokens += len(ids)
        self.documents += 1
        self.bytes += num_bytes
        self._borders.write(np.int64(self.tokens).tobytes())
        self._bytes.write(np.int64(num_bytes).tobytes())
        self._paths.write(json.dumps(path).encode("ascii") + b"\n")

    def close(self) -> None:
        """Flush buffered data to the files."""
        self._files.close()

    def counts(self) -> dict[str, int]:
        """Tokens, documents and bytes, named after the split."""
        return {f"{self.split}_{name}": getattr(self, name) for name in ("tokens", "documents", "bytes")}


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The narrowest dtype that can hold all ids."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


@contextmanager
def publish_shards(out: Path, tokenizer: Tokenizer) -> Iterator[tuple[Path, dict[str, SplitWriter], dict[str, Any]]]:
    """Yield the new folder, a writer per split, and the manifest to fill. `out` is replaced at the end, or unchanged.

    The caller may put intermediate files into the folder and must delete them.
    """
    dtype = id_dtype(tokenizer)
    with publish_dir(out, unlike="*.safetensors") as folder, ExitStack() as stack:
        writers = {split: SplitWriter(folder, split, dtype) for split in SPLITS}
        for writer in writers.values():
            stack.callback(writer.close)
        info: dict[str, Any] = {"tokenizer": tokenizer.hash(), "dtype": dtype.name}
        yield folder, writers, info
        stack.close()
        for writer in writers.values():
            info |= writer.counts()
        (folder / "shards.json").write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")


def encode_documents(texts: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Ids of each text, followed by the end-of-text token."""
    end, dtype = tokenizer.special["<|endoftext|>"], id_dtype(tokenizer)
    return [np.array([*ids, end], dtype=dtype) for ids in tokenizer.encode_batch(texts)]


def build_shards(
    documents: Sequence[Document], tokenizer: Tokenizer, out: Path, sources: Sequence[str]
) -> dict[str, int]:
    """Tokenise documents that are in memory, in this process, and publish `out` with the splits `train` and `held_out`;
    returns token, document and byte counts. For a corpus of any size use `glm5.data.build`."""
    with publish_shards(out, tokenizer) as (_, writers, info):
        info["sources"] = [{"source": source} for source in sources]
        for start in range(0, len(documents), _ENCODED_DOCUMENTS):
            batch = documents[start : start + _ENCODED_DOCUMENTS]
            for document, ids in zip(batch, encode_documents([d.text for d in batch], tokenizer), strict=True):
                split = "held_out" if document.held_out else "train"
                writers[split].append(ids, len(document.text.encode()), document.path)
    return {name: count for writer in writers.values() for name, count in writer.counts().items()}


def verify_shards(
    *folders: Path, remedy: str = "Build the shards again with `glm5 data build`.", part: int = 0, parts: int = 1
) -> None:
    """Check the hashes of shard folders that have them. Of `parts` processes, each checks its part of the files, about
    as many bytes as the others. Raises DataError, ending with `remedy`, for a wrong hash."""
    listed = [file for folder in folders for file in listed_files(folder, DataError, "shard folder", remedy) or ()]
    shares: list[list[ListedFile]] = [[] for _ in range(parts)]
    for file in sorted(listed, key=lambda file: (-file.bytes, str(file.path))):
        min(shares, key=lambda share: sum(held.bytes for held in share)).append(file)
    for file in damaged(shares[part]):
        raise DataError(file.damage(remedy))


def open_shard(folder: Path, split: str, tokenizer: Tokenizer | None = None, *, verify: bool = True) -> Shard:
    """Memory-map one split. Raises DataError for a folder that is not a shard folder, is damaged or belongs to another
    tokenizer."""
    try:
        info: Mapping[str, Any] = json.loads(read_small(folder / "shards.json", _MOST_INFO))
        dtype = np.dtype(_TYPES[_TYPES.index(info["dtype"])])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{folder} contains no token shards; make them with `glm5 data build`.") from None
    if verify:
        verify_shards(folder)
    if tokenizer is not None and info.get("tokenizer") != tokenizer.hash():
        raise DataError(f"{folder} was tokenised with another tokenizer than the model's; build the shards again.")
    return open_split(folder, split, dtype)


def open_split(folder: Path, split: str, dtype: np.dtype) -> Shard:
    """Memory-map the files of a `SplitWriter`. Raises DataError for a file that is missing or does not fit."""
    try:
        tokens, borders, num_bytes = (
            map_array(folder / f"{split}.{part}", kind)
            for part, kind in (("tokens", dtype), ("borders", np.dtype(np.int64)), ("bytes", np.dtype(np.int64)))
        )
        paths = folder / f"{split}.paths"
        whole = rising(borders, len(tokens)) and len(num_bytes) == len(borders) - 1 and paths.is_file()
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise DataError(f'The split "{split}" of {folder} is missing or damaged; build the shards again.')
    return Shard(tokens, borders, num_bytes, Paths(paths, len(borders) - 1))


def map_array(path: Path, dtype: np.dtype) -> np.ndarray:
    """A file as a memory-mapped array, [number of items]. Raises OSError or ValueError if it is no regular file, or has
    no whole number of items."""
    if not path.is_file():  # a pipe would never answer
        raise OSError(f"{path} is not a file")
    # As a plain array: slices of the class `memmap` take twice as long.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)


def rising(borders: np.ndarray, last: int) -> bool:
    """Whether borders begin with 0, never fall and end with `last`. Reads them in blocks."""
    if not len(borders) or borders[0] != 0 or borders[-1] != last:
        return False
    starts = range(0, len(borders) - 1, _BORDERS)
    return all(bool((np.diff(borders[start : start + _BORDERS + 1]) >= 0).all()) for start in starts)
