"""Documents from files. The source `stdlib` is built in: real text that every Python installation carries."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm5.errors import DataError

TEXT_SUFFIXES = (
    ".py",
    ".txt",
    ".md",
    ".rst",
    ".toml",
    ".json",
    ".c",
    ".h",
    ".cpp",
    ".rs",
    ".go",
    ".js",
    ".ts",
    ".java",
)
HELD_OUT_MODULUS = 50


@dataclass(frozen=True)
class Document:
    """One file: its path relative to its source, and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file belongs to the held-out split: sha256(path) mod 50 = 0, whatever else is in the corpus."""
        return int.from_bytes(hashlib.sha256(self.path.encode()).digest(), "big") % HELD_OUT_MODULUS == 0


def read_source(source: str) -> Iterator[Document]:
    """Documents of one source in a fixed order: `stdlib`, a folder (text files below it) or a single text file."""
    if source == "stdlib":
        yield from _folder(Path(sysconfig.get_paths()["stdlib"]), (".py",), _outside_tests)
        return
    path = Path(source)
    if path.is_dir():
        yield from _folder(path, TEXT_SUFFIXES, lambda parts: not any(part.startswith(".") for part in parts))
    elif path.is_file():
        yield Document(path.name, _text(path))
    else:
        raise DataError(f'Source "{source}" is neither a file nor a folder nor the built-in "stdlib".')


def read_sources(sources: Sequence[str]) -> list[Document]:
    """All documents of all sources; an error when there is none."""
    documents = [document for source in sources for document in read_source(source)]
    if not documents:
        raise DataError(f"The sources {', '.join(sources)} hold no text file.")
    return documents


def _outside_tests(parts: Sequence[str]) -> bool:
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}
    return not skipped.intersection(parts)


def _folder(root: Path, suffixes: Sequence[str], keep) -> Iterator[Document]:  # type: ignore[no-untyped-def]
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.suffix in suffixes and keep(relative.parts) and path.is_file():
            text = _text(path)
            if text.strip():
                yield Document(relative.as_posix(), text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None
