"""Files that come to a machine in pieces: shared by processes, checked, and removed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5.errors import EngineError
from glm5.rollout import node_files
from glm5.rollout.node_files import Piece, arrived, digest, remove_leftovers

DATA = [b"one", b"two", b"", b"three"]
PIECES: list[Piece] = [
    (name, len(data), digest(data)) for name, data in zip(["a", "a", "empty", "b"], DATA, strict=True)
]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is left after each test."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(node_files, "SHARED_MEMORY", tmp_path / "shm")
    yield tmp_path / "shm"
    assert not list((tmp_path / "shm").iterdir())


def test_files_are_there_for_the_time_of_the_block(folders: Path) -> None:
    with arrived("run", PIECES, DATA.__getitem__) as folder:
        assert folder.parent == folders and folder.stat().st_mode & 0o777 == 0o700
        found = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert (found["a"], found["b"], found["empty"]) == (b"onetwo", b"three", b"")


def test_processes_of_a_machine_share_a_folder() -> None:
    """Each piece is read once, and the last one that leaves removes the folder."""
    read: list[int] = []
    inside, leave = threading.Barrier(4), threading.Event()
    folders: set[Path] = set()

    def piece(index: int) -> bytes:
        read.append(index)
        return DATA[index]

    def use(first: bool) -> None:
        with arrived("run", PIECES, piece) as folder:
            inside.wait(10)
            folders.add(folder)
            assert first or leave.wait(10)
            assert (folder / "b").read_bytes() == b"three"

    threads = [threading.Thread(target=use, args=(i == 0,)) for i in range(3)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    threads[0].join()
    assert all((folder / "a").exists() for folder in folders)
    leave.set()
    for thread in threads:
        thread.join()
    assert read == [0, 1, 2, 3] and len(folders) == 1


def test_a_changed_piece_is_an_error() -> None:
    with pytest.raises(EngineError, match="A piece of b has changed"):
        with arrived("run", PIECES, [*DATA[:3], b"x"].__getitem__):
            raise AssertionError


def test_folders_of_killed_processes_are_removed(folders: Path) -> None:
    with arrived("run", PIECES, DATA.__getitem__) as folder:
        left = folders / "glm5-node-killed"
        left.mkdir()
        (left / "lock").touch()
        (left / "a").write_bytes(b"half")
        remove_leftovers()
        assert not left.exists() and (folder / "a").exists()
