"""Published folders: a crash or a failing disk at any point leaves a complete version, and damage is always seen."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.errors import CheckpointError, ConfigError, Glm5Error
from glm5.files import (
    MANIFEST,
    atomic_write,
    disk_errors,
    publish_dir,
    recover_dir,
    sha256_file,
    sha256_files,
    verify_manifest,
    write_manifest,
)

CALLS = ("rename", "replace", "mkdir", "unlink", "rmdir", "fsync")
"""The system calls through which a folder changes."""


def publish(path: Path, version: int) -> None:
    with publish_dir(path) as folder:
        (folder / "a.txt").write_text(f"a{version}")
        (folder / "sub").mkdir()
        (folder / "sub" / "b.txt").write_text(f"b{version}")


def version_of(path: Path) -> int:
    """Which version lies at `path`; every file must belong to it."""
    assert verify_manifest(path)
    number = int((path / "a.txt").read_text()[1:])
    assert (path / "sub" / "b.txt").read_text() == f"b{number}"
    assert sorted(p.name for p in path.iterdir()) == ["a.txt", MANIFEST, "sub"]
    return number


def intercept(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    """Call `before` ahead of every system call that changes a folder."""
    for name in CALLS:
        original = getattr(os, name)

        def wrapped(*args: Any, _name: str = name, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            before(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(os, name, wrapped)


def snapshots(work: Path, action: Callable[[], None]) -> list[Path]:
    """Copies of `work` as a kill ahead of each system call of `action` would leave it, and one of its end."""
    taken: list[Path] = []
    busy = False

    def take(name: str) -> None:
        nonlocal busy
        if not busy:
            busy = True
            taken.append(work.with_name(f"kill-{len(taken):03d}-{name}"))
            shutil.copytree(work, taken[-1])
            busy = False

    with pytest.MonkeyPatch.context() as patch:
        intercept(patch, take)
        action()
    take("end")
    return taken


def starts() -> dict[str, Callable[[Path], None]]:
    def after_crash_between_renames(path: Path) -> None:
        publish(path, 1)
        path.rename(path.with_name(".model.old"))
        shutil.copytree(path.with_name(".model.old"), path.with_name(".model.writing"))

    def after_crash_while_cleaning(path: Path) -> None:
        publish(path, 0)
        shutil.copytree(path, path.with_name(".model.old"))
        (path.with_name(".model.old") / "a.txt").unlink()
        publish(path, 1)

    return {
        "first version": lambda path: None,
        "second version": lambda path: publish(path, 1),
        "after a crash between the renames": after_crash_between_renames,
        "after a crash while cleaning up": after_crash_while_cleaning,
    }


@pytest.mark.parametrize("start", starts())
def test_a_kill_at_any_point_leaves_the_old_or_the_new_version(tmp_path: Path, start: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    starts()[start](work / "model")
    taken = snapshots(work, lambda: publish(work / "model", 2))
    found = []
    for snapshot in taken:
        recover_dir(snapshot / "model")
        found.append(version_of(snapshot / "model") if (snapshot / "model").exists() else None)
        assert not (snapshot / ".model.writing").exists()
        publish(snapshot / "model", 3)  # and the next run goes on as if nothing had happened
        assert version_of(snapshot / "model") == 3
        assert [p.name for p in snapshot.iterdir()] == ["model"]
    before = None if start == "first version" else 1
    assert len(taken) > 8 and found[-1] == 2 and found[0] == before
    switch = found.index(2)
    assert found == [before] * switch + [2] * (len(found) - switch)


@pytest.mark.parametrize("start", ["first version", "second version"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_call_at_any_point_leaves_the_old_or_the_new_version(tmp_path: Path, start: str, number: int) -> None:
    points = failures = 0
    while True:
        path = tmp_path / str(points) / "model"
        path.parent.mkdir()
        starts()[start](path)
        count, fired = 0, False

        def fail(name: str, at: int = points) -> None:
            nonlocal count, fired
            if count == at and not fired:
                fired = True
                raise OSError(number, os.strerror(number))
            count += 1

        raised = False
        with pytest.MonkeyPatch.context() as patch:
            intercept(patch, fail)
            try:
                publish(path, 2)
            except CheckpointError as error:
                raised = True
                assert number == errno.ENOSPC and "what was saved before is intact" in str(error)
            except OSError as error:
                raised = True
                assert number == errno.EIO and error.errno == number
        if not fired:
            break
        failures += raised
        if path.exists():
            assert version_of(path) in ((2,) if not raised else (1, 2))
        else:
            assert raised and start == "first version"
        publish(path, 3)
        assert version_of(path) == 3
        points += 1
    assert failures >= 6, "the failure never reached the code"


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), ConfigError("bad")], ids=repr)
def test_an_error_in_the_block_changes_nothing(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "model"
    publish(path, 1)
    with pytest.raises(type(error)) as caught:
        with publish_dir(path) as folder:
            (folder / "half").write_text("x")
            raise error
    assert caught.value is error
    assert version_of(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_parents_are_created_and_leftovers_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "model"
    (path.parent / ".model.writing").mkdir(parents=True)
    (path.parent / ".model.writing" / "leftover").write_text("x")
    publish(path, 1)
    assert version_of(path) == 1


def test_recover_on_a_healthy_folder_does_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model"
    recover_dir(path)
    assert not path.exists()
    publish(path, 1)
    recover_dir(path)
    assert version_of(path) == 1


@pytest.mark.parametrize(
    "error, message",
    [
        (OSError(errno.ENOSPC, "full"), "No space left while writing .*; what was saved before is intact"),
        (OSError(errno.EDQUOT, "quota"), "No space left while writing"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "No space left while writing"),
        (RuntimeError("I/O error: File too large (os error 27)"), "No space left while writing"),
        (OSError(errno.EACCES, "denied"), "Cannot write .*permission denied. Choose a writable folder"),
        (RuntimeError("I/O error: Read-only file system (os error 30)"), "Cannot write .*read-only file system"),
    ],
    ids=repr,
)
def test_disk_errors_become_one_sentence(tmp_path: Path, error: Exception, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        with disk_errors(tmp_path / "x"):
            raise error
    assert str(tmp_path / "x") in str(caught.value) and caught.value.__cause__ is error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad"), ValueError("os errors"), CheckpointError("os error 28")])
def test_other_errors_pass(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        with disk_errors(tmp_path):
            raise error
    assert caught.value is error


# --- manifests --------------------------------------------------------------------------------------------------------

trees = st.dictionaries(st.sampled_from(["a", "b.bin", "d/c", "d/e/f", "ü x"]), st.binary(max_size=40), min_size=1)


@given(trees, st.data())
def test_any_change_of_a_listed_file_is_seen(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    for name, content in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write_manifest(folder)
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    assert {name: entry["bytes"] for name, entry in listed.items()} == {n: len(c) for n, c in tree.items()}
    assert verify_manifest(folder)
    name = data.draw(st.sampled_from(sorted(tree)))
    other = data.draw(st.one_of(st.none(), st.binary(max_size=40).filter(lambda c: c != tree[name])))
    if other is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(other)
    with pytest.raises(CheckpointError, match="is missing or damaged"):
        verify_manifest(folder)


def test_a_folder_without_manifest_is_not_ours(tmp_path: Path) -> None:
    assert verify_manifest(tmp_path) is False


GOOD = {"bytes": 1, "sha256": "00"}
MANIFESTS: dict[str, tuple[str, str]] = {
    "cut off": ('{"files": {', "manifest.json is damaged"),
    "empty": ("", "manifest.json is damaged"),
    "list": ("[]", "manifest.json is damaged"),
    "null": ("null", "manifest.json is damaged"),
    "files are a list": ('{"files": []}', "manifest.json is damaged"),
    "no size": ('{"files": {"a": {"sha256": "x"}}}', "manifest.json is damaged"),
    "size of text": ('{"files": {"a": {"bytes": "x", "sha256": "x"}}}', "manifest.json is damaged"),
    "size without bound": ('{"files": {"a": {"bytes": 1e999, "sha256": "x"}}}', "manifest.json is damaged"),
    "deep": ("[" * 100_000, "manifest.json is damaged"),
    "parent": (json.dumps({"files": {"../secret": GOOD}}), "lies outside the checkpoint"),
    "absolute": (json.dumps({"files": {"/etc/passwd": GOOD}}), "lies outside the checkpoint"),
    "up and down": (json.dumps({"files": {"a/../../secret": GOOD}}), "lies outside the checkpoint"),
    "null byte": (json.dumps({"files": {"a\0": GOOD}}), "lies outside the checkpoint"),
    "long name": (json.dumps({"files": {"a" * 5000: GOOD}}), "is missing or damaged"),
    "folder": (json.dumps({"files": {"sub": GOOD}}), "is missing or damaged"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_hostile_manifests(tmp_path: Path, name: str) -> None:
    text, message = MANIFESTS[name]
    (tmp_path / "secret").write_text("s")
    folder = tmp_path / "model"
    publish(folder, 1)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        verify_manifest(folder)


def test_a_manifest_cannot_reach_outside_through_a_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    folder = tmp_path / "model"
    publish(folder, 1)
    (folder / "link").symlink_to(secret)
    entry = {"bytes": 1, "sha256": sha256_file(secret)}
    (folder / MANIFEST).write_text(json.dumps({"files": {"link": entry}}))
    with pytest.raises(CheckpointError, match="lies outside the checkpoint"):
        verify_manifest(folder)


def test_sha256_of_a_file_longer_than_one_block(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a" * 1_000_000)
    # The published test vector of SHA-256: one million times "a".
    assert sha256_file(tmp_path / "x") == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"


def test_files_are_hashed_together_and_an_error_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / str(i) for i in range(20)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * (i << 14))
    assert sha256_files(paths) == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert sha256_files([]) == []
    paths[3].unlink()
    with pytest.raises(FileNotFoundError):
        sha256_files(paths)
    found = sha256_files(paths, unreadable="?")
    assert found[3] == "?" and found.count("?") == 1
    stop = threading.Event()
    stop.set()
    assert sha256_file(paths[19], stop) == hashlib.sha256().hexdigest()
    ended = []

    def endless(path: Path, stop: threading.Event) -> str:
        if path == paths[0]:
            raise KeyboardInterrupt
        ended.append(stop.wait(60))
        return ""

    monkeypatch.setattr("glm5.files.sha256_file", endless)
    with pytest.raises(KeyboardInterrupt):
        sha256_files(paths)
    assert all(ended)


# --- single files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_atomic_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "deep" / "x.json"
    atomic_write(path, "one")
    atomic_write(path, "zwei ü")
    assert path.read_text(encoding="utf-8") == "zwei ü"

    def full(name: str) -> None:
        if name == call:
            raise OSError(errno.ENOSPC, "full")

    intercept(monkeypatch, full)
    with pytest.raises(CheckpointError, match="No space left"):
        atomic_write(path, "three")
    assert path.read_text(encoding="utf-8") == "zwei ü"
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_two_writers_of_one_folder_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    publish(path, 1)
    with publish_dir(path) as folder:
        (folder / "a.txt").write_text("a2")
        with pytest.raises(CheckpointError, match=r"Another process is writing .*/out; wait for it"):
            publish(path, 3)
        recover_dir(path)  # as a reader does
        (folder / "sub").mkdir()
        (folder / "sub" / "b.txt").write_text("b2")
    assert version_of(path) == 2 and verify_manifest(path)
    publish(path, 4)
    assert version_of(path) == 4 and [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
)
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a large file"])
def test_side_files_of_a_checkpoint_are_files(kind: str, name: str, tmp_path: Path) -> None:
    """A pipe would never answer, and a device never end: a server that updates its weights would be stuck."""
    from glm5.chat import Tokenizer
    from glm5.config.model import GLM5Config
    from glm5.serve.app import load_defaults

    Tokenizer.byte_level().save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GLM5Config.preset("nano").to_dict()), encoding="utf-8")
    file = tmp_path / name
    file.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as sparse:
            sparse.truncate(1 << 40)
    with pytest.raises(Glm5Error, match=r"it is not a file|it has more than [0-9,]+ bytes"):
        GLM5Config.load(tmp_path)
        if name == "chat_template.jinja":
            (tmp_path / "tokenizer_config.json").unlink()
        Tokenizer.load(tmp_path)
        load_defaults(tmp_path)


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk")
    for text in ("one", "two", "three"):
        with publish_dir(link) as folder:
            (folder / "file").write_text(text)
        assert link.is_symlink() and (tmp_path / "disk" / "file").read_text() == text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "link"]
