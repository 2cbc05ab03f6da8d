"""Token shards: what is written is what is read, and anything else is refused."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5 import files as files_module
from glm5.chat import tokenizer as tokenizer_module
from glm5.chat.split_pattern import pieces
from glm5.chat.tokenizer import Tokenizer
from glm5.data.shards import build_shards, encode_documents, open_shard, verify_shards
from glm5.data.sources import Document
from glm5.errors import DataError, Glm5Error
from glm5.files import MANIFEST
from glm5.launch.pipeline import _verify
from tests.thread_ranks import on_ranks

TOKENIZER = Tokenizer.byte_level()
DOCUMENTS = [Document(f"file{i}.py", f"text {i} – ünïcode <|user|>\n" * (i % 4 + 1)) for i in range(160)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_shards(DOCUMENTS, TOKENIZER, tmp_path / "data", ["somewhere"])
    return tmp_path / "data"


def test_round_trip(tmp_path: Path) -> None:
    counts = build_shards(DOCUMENTS, TOKENIZER, tmp_path / "data", ["somewhere"])
    end = TOKENIZER.special["<|endoftext|>"]
    for split, wanted in (("train", False), ("held_out", True)):
        expected = [d for d in DOCUMENTS if d.held_out is wanted]
        shard = open_shard(tmp_path / "data", split, TOKENIZER)
        assert len(shard) == len(expected) == counts[f"{split}_documents"] > 0
        assert len(shard.tokens) == shard.borders[-1] == counts[f"{split}_tokens"]
        for index, document in enumerate(expected):
            ids = shard.document(index).tolist()
            assert ids[-1] == end and end not in ids[:-1]
            assert shard.paths[index] == document.path
            # The byte-level tokenizer has no merges: a document's tokens are its bytes, special strings included.
            assert TOKENIZER.decode_bytes(ids[:-1]) == document.text.encode()
            assert len(ids) - 1 == shard.num_bytes[index] == len(document.text.encode())


MERGED = Tokenizer.train([Path(np.__file__).read_text(encoding="utf-8"), "a\n\n  b\r\n\tc?\n\n\n" * 9], 600)


@given(
    st.lists(st.sampled_from(["a", "bc ", "  ", "\n", "\n\n", "\r\n", "\t", "?!\n", "é", "1\n2", "<|user|>"])),
    st.integers(3, 40),
)
def test_long_texts_are_encoded_in_pieces_to_the_same_ids(parts: list[str], longest: int) -> None:
    text = "".join(parts)
    found = list(pieces(text, longest))
    assert "".join(found) == text and all(len(piece) <= longest for piece in found)
    for before, after in itertools.pairwise(found):
        if before.endswith("\n") and not before[-2:-1].isspace() and after[0].isalnum():
            whole = MERGED.encode_batch([before + after])[0]
            assert whole == [*MERGED.encode_batch([before])[0], *MERGED.encode_batch([after])[0]]
        else:  # no line end in it is a border
            assert not re.search(r"\S\n[^\W_]", before)


def test_memory_for_a_long_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, real = [], Tokenizer._bpe_ids

    def encode(self: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        sizes.append(sum(map(len, texts)))
        return real(self, texts)

    monkeypatch.setattr(Tokenizer, "_bpe_ids", encode)
    assert tokenizer_module._ENCODED_CHARACTERS <= 1 << 20
    monkeypatch.setattr(tokenizer_module, "_ENCODED_CHARACTERS", 310_000)
    texts = ["x = 1\n" * 60_000, "short", "y" * 300_000]
    found = encode_documents(texts, TOKENIZER)
    assert TOKENIZER.encode_batch(texts) == [TOKENIZER.encode(text) for text in texts]  # whatever stands beside it
    assert max(sizes) <= 310_000 and [len(ids) - 1 for ids in found] == [len(text) for text in texts]


def test_a_split_may_be_empty(tmp_path: Path) -> None:
    train = [d for d in DOCUMENTS if not d.held_out]
    build_shards(train, TOKENIZER, tmp_path / "data", [])
    assert len(open_shard(tmp_path / "data", "held_out", TOKENIZER)) == 0


def test_another_tokenizer_is_refused(folder: Path) -> None:
    other = Tokenizer.train([d.text for d in DOCUMENTS], 300)
    with pytest.raises(DataError, match="another tokenizer"):
        open_shard(folder, "train", other)
    open_shard(folder, "train", None)


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    for content in (None, "{", "[]", '{"dtype": "nonsense"}', '{"dtype": "object"}', '{"tokenizer": "x"}', "[" * 10**5):
        if content is not None:
            (tmp_path / "shards.json").write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match="contains no token shards"):
            open_shard(tmp_path, "train", TOKENIZER)


@pytest.mark.parametrize("name", ["train.tokens", "train.borders", "train.bytes", "train.paths"])
def test_damage_is_found_by_its_hash(folder: Path, name: str) -> None:
    raw = bytearray((folder / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (folder / name).write_bytes(raw)
    with pytest.raises(DataError, match=rf"{name} is missing or damaged .* Build the shards again") as caught:
        open_shard(folder, "train", TOKENIZER)
    assert "checkpoint" not in str(caught.value)


def test_processes_divide_the_files_by_size_and_all_learn_of_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in "abc"]
    for number, folder in enumerate(folders, 1):
        build_shards(DOCUMENTS[: 50 * number], TOKENIZER, folder, [])
    files = {path for folder in folders for path in folder.iterdir() if path.name != MANIFEST}
    real, read = files_module.sha256_file, list[Path]()
    monkeypatch.setattr(files_module, "sha256_file", lambda path, stop=None: (read.append(path), real(path))[1])
    for parts in (1, 2, 3, 40):
        hashed = []
        for part in range(parts):
            read.clear()
            verify_shards(*folders, part=part, parts=parts)
            hashed.append(set(read))
        assert set.union(*hashed) == files and sum(map(len, hashed)) == len(files)
        sizes = [sum(path.stat().st_size for path in share) for share in hashed]
        assert max(sizes) <= sum(sizes) / parts + max(path.stat().st_size for path in files)
    raw = bytearray((folders[1] / "train.bytes").read_bytes())
    (folders[1] / "train.bytes").write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    found = on_ranks(3, lambda ranks: _verify(ranks, *folders, remedy="Build it."))
    assert Counter(map(type, found)) == {DataError: 1, Glm5Error: 2}
    assert all(re.search(r"b/train.bytes is missing or damaged .*\. Build it\.$", str(error)) for error in found)


@pytest.mark.parametrize("content", ["{", '{"files": {"../secret": {"bytes": 1, "sha256": "00"}}}'])
def test_a_damaged_manifest_of_shards_is_a_data_error(folder: Path, content: str) -> None:
    (folder / MANIFEST).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"shard folder.* Build the shards again") as caught:
        open_shard(folder, "train", TOKENIZER)
    assert "checkpoint" not in str(caught.value)


@pytest.mark.parametrize("name", ["train.tokens", "train.borders", "train.bytes"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_what_cannot_be_read_is_a_data_error_without_hashes_too(folder: Path, name: str, damage: str) -> None:
    if damage == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes((folder / name).read_bytes()[: -8 * 3 - 1])
    with pytest.raises(DataError, match="damaged"):
        open_shard(folder, "train", TOKENIZER, verify=False)
    with pytest.raises(DataError, match="damaged"):
        open_shard(folder, "no_such_split", TOKENIZER, verify=False)


def test_ids_are_stored_in_the_narrowest_type(folder: Path) -> None:
    assert open_shard(folder, "train").tokens.dtype == np.uint16


def test_an_open_shard_is_mapped_not_read(folder: Path) -> None:
    shard = open_shard(folder, "train")
    assert all(isinstance(array.base, np.memmap) for array in (shard.tokens, shard.borders, shard.num_bytes))
    assert shard.lengths().tolist() == [len(shard.document(i)) for i in range(len(shard))]
    assert shard.lengths(np.array([5, 2], np.uint32)).tolist() == [len(shard.document(5)), len(shard.document(2))]


def test_names_are_whatever_a_file_can_be_called(tmp_path: Path) -> None:
    names = ["a/b.py", "line\nend", 'quote"', "\u2028 é 日本", "", " ", "\\x"]
    build_shards([Document(name, "x") for name in names], TOKENIZER, tmp_path / "data", [])
    found: list[str] = []
    for split in ("train", "held_out"):
        paths = open_shard(tmp_path / "data", split).paths
        assert len(paths) == len(list(paths)) == len(paths[:])
        found += paths
    assert sorted(found) == sorted(names)


def test_names_are_read_when_they_are_asked_for(folder: Path) -> None:
    shard = open_shard(folder, "train")
    expected = [d.path for d in DOCUMENTS if not d.held_out]
    assert list(shard.paths) == expected
    assert (shard.paths[0], shard.paths[-1], shard.paths[2:4]) == (expected[0], expected[-1], expected[2:4])
    for content in ('"a"\n', "x\n" * len(expected), None):
        shard = open_shard(folder, "train", verify=False)
        if content is None:
            (folder / "train.paths").unlink()
        else:
            (folder / "train.paths").write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match="build the shards again"):
            list(shard.paths)
        with pytest.raises(DataError, match="build the shards again"):
            shard.paths[0]
    with pytest.raises(DataError, match="missing or damaged"):
        open_shard(folder, "train", verify=False)


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
@pytest.mark.parametrize("name", ["manifest.json", "shards.json", "train.borders", "train.tokens", "train.bytes"])
def test_files_of_shards_are_files(folder: Path, name: str, kind: str) -> None:
    """A pipe would never answer, and a device never end."""
    (folder / name).unlink()
    os.mkfifo(folder / name) if kind == "a pipe" else (folder / name).symlink_to("/dev/zero")
    for verify in (True, False):
        if verify or name != "manifest.json":
            with pytest.raises(DataError):
                open_shard(folder, "train", TOKENIZER, verify=verify)


@pytest.mark.parametrize("place", [0, 1, 63, 64, 65])
def test_borders_must_rise(folder: Path, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.data.shards._BORDERS", 64)  # they are read in blocks
    open_shard(folder, "train", verify=False)
    borders = np.fromfile(folder / "train.borders", dtype=np.int64)
    borders[place] = -1 if place == 0 else borders[-1] + 1
    (folder / "train.borders").unlink()  # another file: what is mapped may stay mapped
    borders.tofile(folder / "train.borders")
    with pytest.raises(DataError, match="damaged"):
        open_shard(folder, "train", verify=False)
