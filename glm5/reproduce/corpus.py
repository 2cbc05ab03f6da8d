"""The corpus of an experiment: one tokenizer and one set of shards, built once, and the hash of their texts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from glm5.chat import Tokenizer
from glm5.data.shards import build_shards, verify_shards
from glm5.data.sources import read_sources
from glm5.errors import DataError
from glm5.files import publish_dir, recover_dir

INFO = "corpus.json"
SOURCES = ["stdlib"]


def build_corpus(folder: Path, vocab_size: int, max_bytes: int | None) -> dict[str, Any]:
    """Make `folder` unless it exists; returns counts and `sha256`, which covers paths and texts of all documents.

    `max_bytes` limits the training text: documents in the order of their path's hash until it is reached.
    """
    recover_dir(folder)
    if not folder.exists():
        _build(folder, vocab_size, max_bytes)
    try:
        info: dict[str, Any] = json.loads((folder / INFO).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DataError(f"{folder} is no corpus of an experiment; delete it to build it again.") from None
    verify_shards(folder / "data", remedy=f"Delete {folder} to build the data again.")
    return info


def _build(folder: Path, vocab_size: int, max_bytes: int | None) -> None:
    digest, total = hashlib.sha256(), 0
    documents = []
    for document in sorted(read_sources(SOURCES), key=lambda d: hashlib.sha256(d.path.encode()).digest()):
        size = len(document.text.encode())
        if not document.held_out:
            if max_bytes is not None and total >= max_bytes:
                continue
            total += size
        documents.append(document)
        for part in (document.path, document.text):
            digest.update(hashlib.sha256(part.encode()).digest())
    with publish_dir(folder) as fresh:
        tokenizer = Tokenizer.train([d.text for d in documents if not d.held_out], vocab_size)
        tokenizer.save(fresh / "tokenizer")
        counts = build_shards(documents, tokenizer, fresh / "data", SOURCES)
        info = {"sources": SOURCES, "sha256": digest.hexdigest(), "train_bytes": total, "vocab": tokenizer.vocab_size}
        (fresh / INFO).write_text(json.dumps(info | counts, indent=1) + "\n", encoding="utf-8")
