"""What the runs of these tests share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5.reproduce import corpus


@pytest.fixture(scope="session", autouse=True)
def one_corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every folder gets a copy of the first corpus of its size; building one takes longer than the training on it."""
    build, folder = corpus._build, tmp_path_factory.mktemp("corpora")

    def copy(place: Path, vocab_size: int, max_bytes: int | None) -> None:
        first = folder / f"{vocab_size}-{max_bytes}"
        if not first.exists():
            build(first, vocab_size, max_bytes)
        shutil.copytree(first, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_build", copy)
        yield
