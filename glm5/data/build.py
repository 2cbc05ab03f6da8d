"""Token shards from a corpus of any size: documents are streamed and tokenised by several processes.

Documents travel in batches of about a megabyte, a few batches per process at a time. Tokens go straight into flat
files. With near-duplicate removal, all documents are first written to intermediate files with their sketches. They are
then compared, and the kept ones are copied to their split. The result depends only on the documents and the tokenizer,
not on the number of processes.

Workers are started with "spawn": a script that calls `build` must do so under `if __name__ == "__main__"`.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from glm5.chat.tokenizer import Tokenizer
from glm5.data.dedup import SHINGLE_WORDS, THRESHOLD, Selection, Sketch, SketchFile, bands, select, sketcher
from glm5.data.documents import Document, ReadReport, need_documents
from glm5.data.shards import SPLITS, SplitWriter, encode_documents, id_dtype, open_split, publish_shards
from glm5.data.sources import MAX_RECORD_BYTES, iter_sources
from glm5.errors import ConfigError, DataError
from glm5.process import safe_path

BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 1024
_BATCHES_PER_WORKER = 2
_STAGING, _ALL = "staging", "all"

Progress = Callable[[str, int, int | None], None]
"""Called as (phase, done, total). Phases: "documents" (read and tokenised; total unknown until the end), "comparisons"
(near-duplicates), "documents written"."""


def build(
    sources: Sequence[str],
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    *,
    workers: int | None = None,
    dedup: bool = True,
    threshold: float = THRESHOLD,
    max_bad: int | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Tokenise `sources` (see `glm5.data.sources`) and publish `out`; returns the content of its `shards.json`.

    A document is held out if sha256(path) mod 50 = 0. With `dedup`, documents are first grouped into near-duplicates
    (`glm5.data.dedup`: Jaccard similarity of at least `threshold`, chains included). One document per group is kept:
    the first held-out one if there is any, otherwise the first. So no training document is a near-duplicate of a
    held-out one, and every kept document stays in the split of its own path.

    `workers` counts processes; None means one per core. Up to `max_bad` malformed records are skipped and named in the
    manifest (None: 0.1 %, at least 10).

    Raises:
        DataError: a source is missing, unreadable, empty or too often malformed, or a process died.
        ConfigError: `threshold`, `workers` or a limit is invalid, or `dedup` is set without datasketch installed.
        MissingExtraError: a parquet source without pyarrow (`pip install 'glm5[data]'` brings both).
    """
    if (workers is not None and workers < 1) or max_record_bytes < 1 or (max_bad is not None and max_bad < 0):
        raise ConfigError("`workers` and `max_record_bytes` must be at least 1, `max_bad` at least 0.")
    if dedup:  # fail now rather than after reading everything
        bands(threshold)
        sketcher()
    used = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    report = ReadReport(max_bad)
    documents = iter_sources(sources, report, max_record_bytes=max_record_bytes)
    tell = progress or (lambda phase, done, total: None)
    selection = None
    with publish_shards(Path(out), used) as (folder, writers, info), closing(documents):
        staging = folder / _STAGING
        staging.mkdir()
        with closing(_encode(documents, used, dedup, workers or _cores(), staging)) as items:
            if dedup:
                selection = _deduplicated(items, writers, staging, id_dtype(used), threshold, tell)
            else:
                for done, item in enumerate(items, 1):
                    writers[SPLITS[item.held_out]].append(item.ids, item.num_bytes, item.path)
                    tell("documents", done, None)
        need_documents(report, sources)
        shutil.rmtree(staging)
        info |= _account(report, selection, threshold)
    return info


@dataclass(frozen=True)
class _Encoded:
    """An encoded document on its way to the files; `ids` end with the end-of-text token."""

    path: str
    held_out: bool
    num_bytes: int
    ids: np.ndarray
    sketch: Sketch | None


def _deduplicated(
    items: Iterable[_Encoded],
    writers: dict[str, SplitWriter],
    staging: Path,
    dtype: np.dtype,
    threshold: float,
    tell: Progress,
) -> Selection:
    """Write all documents to `staging`, then the kept ones to their splits."""
    held_out = bytearray()
    with closing(SplitWriter(staging, _ALL, dtype)) as everything, closing(SketchFile(staging)) as sketches:
        for done, item in enumerate(items, 1):
            everything.append(item.ids, item.num_bytes, item.path)
            if item.sketch is not None:
                sketches.append(item.sketch)
            held_out.append(item.held_out)
            tell("documents", done, None)
    held = np.frombuffer(bytes(held_out), dtype=bool)
    selection = select(sketches.groups(threshold, lambda done, total: tell("comparisons", done, total)), held)
    whole = open_split(staging, _ALL, dtype)
    for index, path in enumerate(whole.paths):
        if selection.keep[index]:
            split = SPLITS[int(held[index])]
            writers[split].append(whole.document(index), int(whole.num_bytes[index]), path)
        tell("documents written", index + 1, len(whole))
    return selection


def _account(report: ReadReport, selection: Selection | None, threshold: float) -> dict[str, Any]:
    """The manifest entries about reading and near-duplicates."""
    account: dict[str, Any] = {
        "sources": [source.plain() for source in report.sources],
        "bad_records": [str(record) for record in report.bad],
        "near_duplicates": None,
    }
    if selection is not None:
        account["near_duplicates"] = {
            "threshold": threshold,
            "shingle_words": SHINGLE_WORDS,
            "groups": selection.groups,
            "dropped_near_held_out": selection.dropped_near_held_out,
            "dropped_train": selection.dropped_train,
            "dropped_held_out": selection.dropped_held_out,
        }
    return account


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group successive documents into batches of about BATCH_BYTES characters, at least one document each."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        if batch and (len(batch) >= BATCH_DOCUMENTS or size + len(document.text) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document.text)
    if batch:
        yield batch


def _encode(
    documents: Iterator[Document], tokenizer: Tokenizer, dedup: bool, workers: int, staging: Path
) -> Generator[_Encoded]:
    """Encoded documents in input order. Starts processes only for more than one batch."""
    batches = _batches(documents)
    first = list(islice(batches, 2))
    alone = workers == 1 or len(first) < 2
    batches = chain(first, batches)
    del first
    if alone:
        work = _Work(tokenizer, dedup)
        for batch in batches:
            yield from _joined(_outline(batch), work([d.text for d in batch]))
        return
    tokenizer.save(staging / "tokenizer")
    safe_path()
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (str(staging / "tokenizer"), dedup))
    pending: deque[tuple[list[_Outline], Future[list[_Result]]]] = deque()
    try:
        for batch in batches:
            pending.append((_outline(batch), pool.submit(_in_worker, [d.text for d in batch])))
            if len(pending) >= _BATCHES_PER_WORKER * workers:
                outline, future = pending.popleft()
                yield from _joined(outline, future.result())
        while pending:
            outline, future = pending.popleft()
            yield from _joined(outline, future.result())
    except BrokenProcessPool:
        raise DataError(
            "A tokenising process ended unexpectedly, probably out of memory; use fewer --workers, or split "
            "very long documents."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_Outline = tuple[str, bool, int]
_Result = tuple[np.ndarray, Sketch | None]


def _outline(batch: list[Document]) -> list[_Outline]:
    """What stays in this process of documents that a worker encodes."""
    return [(d.path, d.held_out, len(d.text.encode())) for d in batch]


def _joined(outline: list[_Outline], results: list[_Result]) -> Iterator[_Encoded]:
    for (path, held_out, num_bytes), (ids, sketch) in zip(outline, results, strict=True):
        yield _Encoded(path, held_out, num_bytes, ids, sketch)


class _Work:
    """Encodes texts to ids and sketches."""

    def __init__(self, tokenizer: Tokenizer, dedup: bool) -> None:
        self._tokenizer = tokenizer
        self._sketch = sketcher() if dedup else None

    def __call__(self, texts: list[str]) -> list[_Result]:
        sketches = [self._sketch(text) for text in texts] if self._sketch else [None] * len(texts)
        return list(zip(encode_documents(texts, self._tokenizer), sketches, strict=True))


_worker: _Work | None = None


def _start_worker(tokenizer: str, dedup: bool) -> None:
    """Set up a worker, once per process. The parent handles Ctrl-C; the worker exits once the parent is gone."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _worker = _Work(Tokenizer.load(tokenizer), dedup)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _in_worker(texts: list[str]) -> list[_Result]:
    if _worker is None:
        raise RuntimeError("the worker was not started")
    return _worker(texts)


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
