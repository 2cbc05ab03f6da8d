"""Steps that drop documents made from a template, over all parts (see `glm5.data.corpus.generated`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.disk_base import DiskWriter

from glm5.data.corpus.generated import Skeleton, from_templates, skeleton
from glm5.files import publish_dir

KINDS = ("web", "prose")
_DROPPED = "dropped.u64"


def key_of(document: Document) -> int:
    """What tells documents apart: name and text."""
    digest = hashlib.sha256(f"{document.id}\0{document.text}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


class WriteSkeletons(PipelineStep):
    """Writes the skeletons of a part's web pages and prose, and passes the documents on."""

    type = "dedup"
    name = "skeletons"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        keys, found = list[int](), list[Skeleton]()
        for document in data:
            if document.metadata["kind"] in KINDS:
                keys.append(key_of(document))
                found.append(skeleton(document.id, document.text, document.metadata.get("url", "")))
            yield document
        with publish_dir(self.folder / f"{rank:05d}") as part:
            np.save(part / "keys", np.array(keys, dtype=np.uint64))
            np.save(part / "groups", np.array([one.group for one in found], dtype=np.uint64))
            np.save(part / "texts", np.array([one.text for one in found], dtype=np.uint64))
            np.save(part / "counts", np.array([len(one.lines) for one in found], dtype=np.int64))
            for name in ("lines", "sizes"):
                arrays = [getattr(one, name) for one in found]
                np.save(part / name, np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint64))


class FindTemplates(PipelineStep):
    """Compares the skeletons of all parts."""

    type = "dedup"
    name = "templates"

    def __init__(self, folder: Path, out: Path, copies: int, share: float) -> None:
        super().__init__()
        self.folder, self.out, self.copies, self.share = folder, out, copies, share

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        keys, found = list[int](), list[Skeleton]()
        for part in sorted(path for path in self.folder.iterdir() if path.name.isdigit()):
            own, groups, texts, counts, lines, sizes = (
                np.load(part / f"{name}.npy", allow_pickle=False)
                for name in ("keys", "groups", "texts", "counts", "lines", "sizes")
            )
            borders = np.cumsum(counts)[:-1]
            keys += own.tolist()
            columns = groups.tolist(), texts.tolist(), np.split(lines, borders), np.split(sizes, borders)
            found += map(Skeleton, *columns)
        dropped = [keys[place] for place in from_templates(found, self.copies, self.share)]
        self.stat_update("templates", value=len(dropped))
        with publish_dir(self.out) as folder:
            (folder / _DROPPED).write_bytes(np.array(sorted(dropped), dtype="<u8").tobytes())


class DropTemplates(BaseFilter):
    """Drops the documents that `FindTemplates` found."""

    name = "templates"

    def __init__(self, folder: Path, exclusion_writer: DiskWriter | None = None) -> None:
        super().__init__(exclusion_writer)
        self.folder = folder
        self._dropped: frozenset[int] | None = None

    def filter(self, document: Document) -> bool:
        if self._dropped is None:
            self._dropped = frozenset(np.fromfile(self.folder / _DROPPED, dtype="<u8").tolist())
        return not self._dropped or key_of(document) not in self._dropped
