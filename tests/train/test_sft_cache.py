"""Tokenised SFT rows on disk: made once, used again by what has the same data, and made again by everything else."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glm5.chat import Tokenizer
from glm5.config.optim import OptimConfig
from glm5.config.recipe import FamilyConfig, SftStage
from glm5.data.sft_cache import MappedRows, open_rows, publish_cache, read_cache
from glm5.data.sft_rows import RowCounts, SftRow
from glm5.errors import CheckpointError, DataError, Glm5Error
from glm5.files import write_manifest
from glm5.train import sft
from tests.thread_ranks import on_ranks

FAMILIES = [FamilyConfig(name="arithmetic", options={"levels": [1], "thinking": False})]


def talk(question: str, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns, "thinking": False})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows of several lengths, one that is too long, and a line that is no conversation."""
    lines = [talk("q" * (n % 5), "a" * n) for n in range(1, 30)] + ["{", talk("q", "a" * 100)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "c.jsonl"


def stage_of(data: Path | str, **options: Any) -> SftStage:
    optim = OptimConfig(steps=4, lr=1e-2, save_every=0)
    fields = dict(kind="sft", name="sft", optim=optim, rows=2, row_length=80, data=str(data), bad_lines="skip")
    return SftStage(**fields | options)  # type: ignore[arg-type]


def content(batches: sft.SftBatches, steps: int = 6) -> list[list[Any]]:
    return [[t.tolist() for t in (b.ids, b.documents, b.loss_mask)] for b in map(batches, range(steps))]


def no_work(*_: object) -> None:
    raise AssertionError("a conversation is tokenised again")


def test_a_second_start_uses_the_rows_and_says_the_same(
    data: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, folder = stage_of(data, families=FAMILIES, conversations=20), tmp_path / "sft"
    first, info = sft.prepare(stage, tokenizer, folder, 0)
    expected, said = content(first), [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "c.jsonl:30 is skipped" in said[0] and "1 rows are longer than 80" in said[1]
    assert list((folder / "tokenized").glob("*.jsonl")) == []  # a folder of data may have the run in it
    caplog.clear()
    monkeypatch.setattr(sft, "conversation_rows", no_work)
    again, same = sft.prepare(stage, tokenizer, folder, 0)
    assert content(again) == expected and same == info and again.numbers(6) == first.numbers(6)
    assert [record.getMessage() for record in caplog.records] == said
    names = [json.loads(line) for line in (folder / "tokenized" / "rows.paths").read_text().splitlines()]
    assert names[20:] == [f"{data}:{n}" for n in range(1, 30)]  # after the demonstrations
    targets = np.fromfile(folder / "tokenized" / "rows.bytes", np.int64)
    assert targets.sum() == info.counts.targets and len(targets) == info.counts.rows == 49


CHANGES: dict[str, Any] = {
    "data": lambda stage, data, tokenizer: (data.write_text(talk("other", "text")), (stage, tokenizer))[1],
    "options": lambda stage, data, tokenizer: (stage.model_copy(update={"row_length": 60}), tokenizer),
    "tokenizer": lambda stage, data, tokenizer: (
        stage,
        Tokenizer.train(["aaaa aaaa"], 300, tokenizer.template_version),
    ),
    "template": lambda stage, data, tokenizer: (stage, Tokenizer.byte_level("5.2")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_is_tokenised_again(
    change: str, data: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = stage_of(data)
    before = content(sft.prepare(stage, tokenizer, tmp_path / "sft", 0)[0])
    stage, tokenizer = CHANGES[change](stage, data, tokenizer)
    caplog.clear()
    batches, info = sft.prepare(stage, tokenizer, tmp_path / "sft", 0)
    says = f"out of date ({change} changed); the rows are made again"
    assert any(says in record.getMessage() for record in caplog.records)
    fresh, expected = sft.prepare(stage, tokenizer, tmp_path / "fresh", 0)
    assert content(batches) == content(fresh) != before and info == expected


def test_rows_of_other_code_are_made_again(
    data: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sft.prepare(stage_of(data), tokenizer, tmp_path / "sft", 0)
    caplog.clear()
    monkeypatch.setattr(sft, "_CODE", sft._CODE[1:])
    sft.prepare(stage_of(data), tokenizer, tmp_path / "sft", 0)
    assert "(code changed)" in caplog.text


FILES = ("cache.json", "manifest.json", "rows.tokens", "rows.mask", "rows.borders", "rows.bytes", "rows.paths")


@pytest.mark.parametrize("name", [*FILES, "sources", "counts", "key"])
@pytest.mark.parametrize("how", ["cut", "missing"])
def test_damaged_rows_are_made_again(
    name: str, how: str, data: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "sft"
    batches, info = sft.prepare(stage_of(data), tokenizer, folder, 0)
    expected, cache = content(batches), folder / "tokenized"
    if name in FILES:
        whole = (cache / name).read_bytes()
        (cache / name).unlink()
        if how == "cut":
            (cache / name).write_bytes(whole[: len(whole) // 2])
    else:  # the hashes are right, and what they are of is not
        values = json.loads((cache / "cache.json").read_text())
        values[name] = {"all": [3, 10**9]} if how == "cut" and name != "key" else []
        (cache / "cache.json").write_text(json.dumps(values))
        write_manifest(cache)
    caplog.clear()
    batches, same = sft.prepare(stage_of(data), tokenizer, folder, 0)
    assert content(batches) == expected and same == info
    assert caplog.records[0].getMessage().startswith("The tokenised rows are made again: ")
    assert read_cache(cache) is not None


@pytest.mark.parametrize("sources", [{}, {"all": [0, 0]}, {"all": [2, 1]}])
def test_rows_without_a_source_are_made_again(
    sources: Any, data: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "sft"
    _, info = sft.prepare(stage_of(data), tokenizer, folder, 0)
    file = folder / "tokenized" / "cache.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sources": sources}))
    write_manifest(file.parent)
    assert sft.prepare(stage_of(data), tokenizer, folder, 0)[1] == info
    assert "do not fit each other" in caplog.text


def test_what_a_link_leads_to_is_kept(data: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Rows on another disk: used if the folder is empty or ours, refused if other files are there."""
    folder, disk = tmp_path / "sft", tmp_path / "disk"
    folder.mkdir()
    disk.mkdir()
    (folder / "tokenized").symlink_to(disk)
    (disk / "precious").touch()
    with pytest.raises(CheckpointError, match=r"disk exists and is not a folder that glm5 wrote"):
        sft.prepare(stage_of(data), tokenizer, folder, 0)
    (disk / "precious").unlink()
    sft.prepare(stage_of(data), tokenizer, folder, 0)
    assert (folder / "tokenized").is_symlink() and (disk / "rows.tokens").exists()


def test_data_must_be_files_that_can_be_read(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe is not a file; write the conversations to one"):
        sft.prepare(stage_of(tmp_path / "pipe"), tokenizer, tmp_path / "sft", 0)

    def refuse(paths: list[Path]) -> None:
        raise PermissionError(13, "Permission denied", str(paths[0]))

    (tmp_path / "c.jsonl").write_text(talk("q", "a"))
    monkeypatch.setattr(sft, "sha256_files", refuse)
    with pytest.raises(DataError, match=r"Cannot read .*c.jsonl: Permission denied"):
        sft.prepare(stage_of(tmp_path / "c.jsonl"), tokenizer, tmp_path / "sft", 0)
    assert not (tmp_path / "sft").exists()


def test_an_interrupt_leaves_no_half_of_the_rows(
    data: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real, seen = tmp_path / "sft", sft.conversation_rows, []

    def interrupted(*args: Any) -> Any:
        seen.append(args)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(sft, "conversation_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sft.prepare(stage_of(data), tokenizer, folder, 0)
    assert list(folder.iterdir()) == []
    assert sft.prepare(stage_of(data), tokenizer, folder, 0)[1].counts.conversations == 30


@pytest.mark.parametrize("bad_lines", ["skip", "error"])
def test_one_rank_tokenises_and_all_read(
    bad_lines: str, data: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = [], sft.read_rows
    monkeypatch.setattr(sft, "read_rows", lambda *args: (made.append(1), real(*args))[1])
    stage = stage_of(data, bad_lines=bad_lines, families=FAMILIES, conversations=5)
    found = on_ranks(3, lambda ranks: sft.prepare(stage, tokenizer, tmp_path / "sft", 0, None, ranks))
    assert len(made) == 2  # files
    if bad_lines == "error":
        assert isinstance(found[0], DataError) and "c.jsonl:30: not a conversation" in str(found[0])
        assert all(type(error) is Glm5Error and "Rank 0 failed" in str(error) for error in found[1:])
    else:
        assert len({json.dumps(content(batches)) for batches, _ in found}) == 1
        assert all(counts == found[0][1] for _, counts in found)


def test_rows_are_read_when_they_are_drawn(tokenizer: Any, tmp_path: Path) -> None:
    count = 20_000
    rows = [SftRow(np.full(n, n, np.int32), np.arange(n) % 2 == 1) for n in (3, 8, 40)]
    with publish_cache(tmp_path / "rows", tokenizer) as (writer, finish):
        for i in range(count):
            writer.append(rows[i % 3], "file:1")
        finish(sft.CacheInfo({}, {"all": (0, count)}, RowCounts(), writer.sha256, []))
    info = read_cache(tmp_path / "rows")
    assert info is not None
    tracemalloc.start()
    (mapped,) = open_rows(tmp_path / "rows", info, tokenizer).values()
    batches = sft.SftBatches({"all": mapped}, stage_of("x"), 0)
    batches(3)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 10 * count, kept / count  # an epoch's order is 8 bytes per row
    assert isinstance(mapped, MappedRows) and len(mapped) == count
    for i in (0, 1, 2, count - 1, -1):
        assert mapped[i].ids.tolist() == rows[i % count % 3].ids.tolist()
        assert torch.equal(torch.tensor(mapped[i].mask), torch.tensor(rows[i % count % 3].mask))
        assert not mapped[i].ids.flags.owndata and not mapped[i].mask.flags.writeable
    assert [len(row.ids) for row in mapped[-2:]] == [3, 8]
