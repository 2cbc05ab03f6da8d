"""Files that come to a machine in pieces: shared by processes, checked, and removed."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5.errors import EngineError
from glm5.rollout import node_files
from glm5.rollout.node_files import Piece, arrived, digest, fingerprint, remove_leftovers

DATA = [b"one", b"two", b"", b"three"]
PIECES: list[Piece] = [
    (name, len(data), digest(data)) for name, data in zip(["a", "a", "empty", "b"], DATA, strict=True)
]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is left after each test."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(node_files, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path / "shm" / f"glm5-nodes-{os.geteuid()}"
    assert all(not list(folder.iterdir()) for folder in (tmp_path / "shm").iterdir() if folder.is_dir())


def test_files_are_there_for_the_time_of_the_block(folders: Path) -> None:
    with arrived("run", PIECES, DATA.__getitem__) as folder:
        assert folder.parent == folders and folders.stat().st_mode & 0o777 == 0o700
        assert folder.stat().st_mode & 0o777 == 0o700
        found = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert (found["a"], found["b"], found["empty"]) == (b"onetwo", b"three", b"")


def test_the_fingerprint_of_a_checkpoint(tmp_path: Path) -> None:
    """Equal for the same files under any path. Other files beside them do not matter."""
    weights, found = bytearray(3 << 20), set[str]()
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "more").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
        (folder / f"{name}.txt").write_text("notes")
        found.add(fingerprint(folder))
    assert len(found) == 1
    weights[-1] = 1
    for file, data in (
        ("model.safetensors", weights),  # its last byte
        ("model.safetensors", weights + b"0"),
        ("config.json", b"[]"),
        ("a.json", b"1"),
        ("b.json", b""),
    ):
        (folder / file).write_bytes(data)
        found.add(fingerprint(folder))
    assert len(found) == 6
    with pytest.raises(EngineError, match="no files of a checkpoint"):
        fingerprint(folder / "more")


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
        left = folders / "killed"
        left.mkdir()
        (left / "lock").touch()
        (left / "a").write_bytes(b"half")
        remove_leftovers()
        assert not left.exists() and (folder / "a").exists()


def test_half_of_a_killed_process_is_not_used(folders: Path) -> None:
    with arrived("run", PIECES, DATA.__getitem__) as folder:
        pass
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "a").write_bytes(b"half")
    with arrived("run", PIECES, DATA.__getitem__):
        assert (folder / "a").read_bytes() == b"onetwo"


@pytest.mark.parametrize("name", ["../a", "/a", "lock", "..", ""])
def test_files_stay_in_their_folder(name: str, folders: Path) -> None:
    with pytest.raises(EngineError, match="is no name of a file"):
        with arrived("run", [(name, 1, digest(b"x"))], [b"x"].__getitem__):
            raise AssertionError


def test_a_folder_that_others_can_enter_is_refused(folders: Path, tmp_path: Path) -> None:
    """Whoever made it may put other weights there, or a link that our writes would follow."""
    folders.mkdir()
    folders.chmod(0o777)
    with pytest.raises(EngineError, match="must be a folder that only its user can enter"):
        remove_leftovers()
    folders.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folders.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match="must be a folder that only its user can enter"):
        with arrived("run", PIECES, DATA.__getitem__):
            raise AssertionError
    folders.unlink()


def test_a_folder_is_whole_while_others_remove_it() -> None:
    """Processes take and leave the same folder again and again."""
    pieces: list[Piece] = [(f"m{i}", 3, digest(b"abc")) for i in range(12)]
    children = []
    for _ in range(3):
        if not (pid := os.fork()):
            end, whole = time.monotonic() + 1.5, True
            try:
                while time.monotonic() < end:
                    whole = False
                    with arrived("run", pieces, lambda _: b"abc") as folder:
                        whole = all((folder / name).read_bytes() == b"abc" for name, _, _ in pieces)
                        assert whole
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(not whole)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
