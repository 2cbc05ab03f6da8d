"""The last steps: kept documents to token files per part, and those of all parts to shard folders."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from glm5.chat.tokenizer import Tokenizer
from glm5.data.corpus.held_out import is_held_out
from glm5.data.corpus.samples import KEPT_BY, Samples
from glm5.data.corpus.split import read_moves
from glm5.data.shards import SPLITS, SplitWriter, encode_documents, id_dtype, open_split, publish_shards

_BATCH = 1 << 20  # characters
KEPT = (
    "source", "kind", "format", "code", "license", "language", "url", "repository",
    "quality", "second", "knowledge", "files", "formulas",
)  # fmt: skip
"""What the shards' `.documents` files say of every document, beside its name and the SHA-256 of its text."""


def load_tokenizer(path: str | None) -> Tokenizer:
    """The recipe's tokenizer."""
    return Tokenizer.byte_level() if path is None else Tokenizer.load(path)


class WriteTokens(PipelineStep):
    """Token files of a part: `FOLDER/PART/SHARD/SPLIT.*`, as in a shard folder, with one line of JSON per document."""

    type = "write"
    name = "tokens"

    def __init__(self, folder: Path, tokenizer: str | None, samples: Samples, moves: Path | None) -> None:
        super().__init__()
        self.folder, self.tokenizer, self.samples, self.moves = folder, tokenizer, samples, moves

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:
        part = self.folder / f"{rank:05d}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        tokenizer = load_tokenizer(self.tokenizer)
        moved = read_moves(self.moves, rank)
        with ExitStack() as stack:
            samples = stack.enter_context(self.samples.part("kept", rank))
            writer = _PartWriter(part, tokenizer, stack)
            batch: list[tuple[Document, str]] = []
            size = 0
            for number, document in enumerate(data):
                self.stat_update("total", "forwarded")
                self.stat_update("characters", value=len(document.text))
                known = document.metadata | {"length": f"below {10 ** len(str(len(document.text))):,}"}
                if "quality" in known:
                    known["quality"] = f"{min(9, int(10 * known['quality'])) / 10:.1f}"
                self.stat_update(*(f"{name}:{known[name] or 'unknown'}" for name in KEPT_BY if name in known))
                samples.add(document.metadata["kind"], document.id, document.text, source=document.metadata["source"])
                held_out = is_held_out(document) and number not in moved
                self.stat_update("held_out", value=int(held_out))
                batch.append((document, SPLITS[int(held_out)]))
                size += len(document.text)
                if size >= _BATCH:
                    writer.write(batch)
                    batch, size = [], 0
            writer.write(batch)


class _PartWriter:
    def __init__(self, folder: Path, tokenizer: Tokenizer, stack: ExitStack) -> None:
        self._folder, self._tokenizer, self._stack = folder, tokenizer, stack
        self._writers: dict[tuple[str, str], tuple[SplitWriter, Any]] = {}

    def write(self, documents: list[tuple[Document, str]]) -> None:
        encoded = encode_documents([document.text for document, _ in documents], self._tokenizer)
        for (document, split), ids in zip(documents, encoded, strict=True):
            bucket = document.metadata.get("bucket")
            writer, lines = self._of(document.metadata["kind"] + (f"-{bucket}" if bucket else ""), split)
            text = document.text.encode()
            writer.append(ids, len(text), document.id)
            known = {key: value for key in KEPT if (value := document.metadata.get(key)) not in (None, "")}
            known["sha256"] = hashlib.sha256(text).hexdigest()
            lines.write(json.dumps({"name": document.id, **known}) + "\n")

    def _of(self, kind: str, split: str) -> tuple[SplitWriter, Any]:
        found = self._writers.get((kind, split))
        if found is None:
            folder = self._folder / kind
            folder.mkdir(exist_ok=True)
            writer = SplitWriter(folder, split, id_dtype(self._tokenizer))
            self._stack.callback(writer.close)
            lines = self._stack.enter_context((folder / f"{split}.documents").open("w", encoding="ascii"))
            found = self._writers[kind, split] = writer, lines
        return found


class MergeTokens(PipelineStep):
    """Shard folders, one per kind of document and quality bucket, from the token files of all parts in their order."""

    type = "write"
    name = "shards"

    def __init__(self, folder: Path, out: Path, tokenizer: str | None) -> None:
        super().__init__()
        self.folder, self.out, self.tokenizer = folder, out, tokenizer

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        tokenizer = load_tokenizer(self.tokenizer)
        parts = sorted(path for path in self.folder.iterdir() if path.is_dir())
        for kind in sorted({path.name for part in parts for path in part.iterdir()}):
            self._merge(kind, [part / kind for part in parts], tokenizer)

    def _merge(self, kind: str, parts: list[Path], tokenizer: Tokenizer) -> None:
        with publish_shards(self.out / kind, tokenizer) as (folder, writers, info):
            info["sources"] = [{"source": kind}]
            for split, writer in writers.items():
                with (folder / f"{split}.documents").open("wb") as lines:
                    for part in parts:
                        if not (part / f"{split}.tokens").exists():
                            continue
                        shard = open_split(part, split, id_dtype(tokenizer))
                        for index, path in enumerate(shard.paths):
                            writer.append(shard.document(index), int(shard.num_bytes[index]), path)
                        with (part / f"{split}.documents").open("rb") as own:
                            shutil.copyfileobj(own, lines)
