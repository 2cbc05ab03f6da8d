"""Corpora into shards from end to end: all kinds of sources, any number of processes, no near-duplicate left."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.chat.tokenizer import Tokenizer
from glm5.data import build as build_module
from glm5.data.build import build
from glm5.data.shards import build_shards, open_shard
from glm5.data.sources import Document, read_sources
from glm5.errors import CheckpointError, ConfigError, DataError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("datasketch") is None, reason="needs datasketch")

ROOT = Path(__file__).parents[2]
TOKENIZER = Tokenizer.byte_level()


def in_split(held_out: bool, name: str = "doc") -> Callable[[], str]:
    """A function that gives names of the wanted split, no name twice."""
    numbers = iter(range(10**6))
    return lambda: next(path for n in numbers if Document(path := f"{name}{n}.py", "").held_out is held_out)


train_name, held_name = in_split(False), in_split(True)


def words(seed: int, count: int = 200) -> str:
    return " ".join(f"w{n}" for n in random.Random(seed).choices(range(2000), k=count))


def write_jsonl(path: Path, documents: list[tuple[str, str]]) -> str:
    path.write_text("".join(json.dumps({"path": p, "text": t}) + "\n" for p, t in documents), encoding="utf-8")
    return str(path)


def splits(out: Path) -> dict[str, list[tuple[str, str]]]:
    """What a shard folder holds, as names and texts."""
    found = {}
    for split in ("train", "held_out"):
        shard = open_shard(out, split, TOKENIZER)
        texts = [TOKENIZER.decode(shard.document(i)[:-1].tolist()) for i in range(len(shard))]
        assert [len(text.encode()) for text in texts] == shard.num_bytes.tolist()
        found[split] = list(zip(shard.paths, texts, strict=True))
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def expected_digest(documents: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.path, document.text):
            digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


@pytest.fixture
def all_kinds(tmp_path: Path) -> list[str]:
    """A folder, a text file, JSONL, parquet and a git repository, with a few flaws each."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for n in range(60):
        (folder / "sub" / f"f{n}.py").write_text(words(n), encoding="utf-8")
    (folder / "binary.txt").write_bytes(b"\0")
    (folder / "away.txt").symlink_to("/etc/hostname")
    (tmp_path / "single.md").write_text(words(100), encoding="utf-8")
    sources = [str(folder), str(tmp_path / "single.md")]
    sources.append(write_jsonl(tmp_path / "lines.jsonl", [(f"j{n}", words(200 + n)) for n in range(60)]))
    with (tmp_path / "lines.jsonl").open("a", encoding="utf-8") as file:
        file.write("{broken\n")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"body": [words(300 + n) for n in range(60)] + [None]})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    sources.append(f"{tmp_path / 'rows.parquet'}#body")
    if shutil.which("git"):
        repository = tmp_path / "repository"
        repository.mkdir()
        for n in range(60):
            (repository / f"g{n}.rs").write_text(words(400 + n), encoding="utf-8")
        run = ["git", "-C", str(repository), "-c", "user.name=x", "-c", "user.email=x"]
        for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
            subprocess.run([*run, *arguments], check=True, capture_output=True)
        (repository / "g0.rs").write_text("not committed", encoding="utf-8")
        sources.append(f"git:{repository}@HEAD")
    return sources


@pytest.mark.long
@pytest.mark.dist
def test_every_kind_of_source_with_one_process_and_two(
    tmp_path: Path, all_kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "BATCH_BYTES", 8000)  # more batches than are under way at a time
    seen: list[tuple[str, int, int | None]] = []
    one = build(all_kinds, TOKENIZER, tmp_path / "one", workers=1, progress=lambda *args: seen.append(args))
    TOKENIZER.save(tmp_path / "tokenizer")
    two = build(all_kinds, tmp_path / "tokenizer", str(tmp_path / "two"), workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert one == two == json.loads((tmp_path / "one" / "shards.json").read_text(encoding="utf-8"))
    names = [f"{split}.{part}" for split in ("train", "held_out") for part in ("tokens", "borders", "bytes", "paths")]
    assert set(files(tmp_path / "one")) == {*names, "shards.json", "manifest.json"}
    assert not list(tmp_path.glob(".*"))

    documents = read_sources(all_kinds)
    assert len(documents) >= 181
    for split, kept in splits(tmp_path / "one").items():
        wanted = [(d.path, d.text) for d in documents if d.held_out is (split == "held_out")]
        assert kept == wanted != []
        assert one[f"{split}_documents"] == len(wanted)
        assert one[f"{split}_bytes"] == sum(len(text.encode()) for _, text in wanted)
        assert one[f"{split}_tokens"] == one[f"{split}_bytes"] + len(wanted)  # bytes, and one end of text each
    entries = one["sources"]
    assert [entry["source"] for entry in entries] == all_kinds
    assert [entry["documents"] for entry in entries] == [60, 1, 60, 60, 60][: len(all_kinds)]
    for entry, source in zip(entries, all_kinds, strict=True):
        assert entry["sha256"] == expected_digest(read_sources([source]))
    assert (entries[0]["binary"], entries[0]["links"], entries[2]["bad"], entries[3]["bad"]) == (1, 1, 1, 1)
    if len(entries) == 5:
        assert len(entries[4]["revision"]) == 40
    assert [record.split(": ")[0] for record in one["bad_records"]] == [
        f"{tmp_path / 'lines.jsonl'}:61", f"{tmp_path / 'rows.parquet'}:row 61",
    ]  # fmt: skip
    assert one["tokenizer"] == TOKENIZER.hash()
    total = len(documents)
    assert [s for s in seen if s[0] == "documents"] == [("documents", n, None) for n in range(1, total + 1)]
    assert seen[-1] == ("documents written", total, total) and ("comparisons", 32, 32) in seen


@functools.cache
def true_shingles(text: str) -> frozenset[tuple[str, ...]]:
    parts = text.split()
    return frozenset(tuple(parts[i : i + 5]) for i in range(len(parts) - 4))


def edited(text: str, edits: int, rng: random.Random) -> str:
    parts = text.split()
    for _ in range(edits):
        parts[rng.randrange(len(parts))] = f"new{rng.randrange(10**9)}"
    return " ".join(parts)


@pytest.mark.parametrize("seed", range(3))
def test_no_training_document_is_near_a_held_out_one(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    documents = []
    for family in range(40):
        texts = [words(1000 * seed + family)]
        for _ in range(rng.randrange(5)):
            texts.append(edited(rng.choice(texts), rng.randrange(7), rng))
        documents += [((held_name if rng.random() < 0.3 else train_name)(), text) for text in texts]
    rng.shuffle(documents)
    source = write_jsonl(tmp_path / "x.jsonl", documents)
    info = build([source], TOKENIZER, tmp_path / "out", workers=1)
    kept = splits(tmp_path / "out")
    plain = splits_without_dedup(tmp_path, source)

    def similar(a: str, b: str) -> bool:
        one, other = true_shingles(a), true_shingles(b)
        return len(one & other) / len(one | other) >= 0.8

    everything = [text for _, text in kept["train"] + kept["held_out"]]
    assert not [1 for i, a in enumerate(everything) for b in everything[:i] if similar(a, b)]
    # There was something to find, across the splits and within each.
    assert [1 for _, a in plain["train"] for _, b in plain["held_out"] if similar(a, b)]
    report = info["near_duplicates"]
    assert min(report[key] for key in report) > 0
    assert report["dropped_near_held_out"] + report["dropped_train"] == len(plain["train"]) - len(kept["train"])
    assert report["dropped_held_out"] == len(plain["held_out"]) - len(kept["held_out"])
    # What stays is in the split that its name says, in its order; every document has something like it that stayed.
    for split in kept:
        remaining = iter(plain[split])
        assert all(document in remaining for document in kept[split])
    for text in (t for _, t in documents):
        assert any(len(true_shingles(text) & true_shingles(other)) > 20 for other in everything)


def splits_without_dedup(tmp_path: Path, source: str) -> dict[str, list[tuple[str, str]]]:
    info = build([source], TOKENIZER, tmp_path / "plain", workers=1, dedup=False)
    assert info["near_duplicates"] is None
    return splits(tmp_path / "plain")


def test_which_member_of_a_group_stays(tmp_path: Path) -> None:
    a, b, c = words(1), words(2), words(3)
    t = [train_name() for _ in range(5)]
    h = [held_name() for _ in range(3)]
    rows = [(t[0], a), (t[1], b), (t[2], a + " x"), (h[0], b + " y"), (h[1], b), (h[2], c), (t[3], b), (t[4], a)]
    info = build([write_jsonl(tmp_path / "x.jsonl", rows)], TOKENIZER, tmp_path / "out", workers=1)
    assert splits(tmp_path / "out") == {"train": [(t[0], a)], "held_out": [(h[0], b + " y"), (h[2], c)]}
    assert info["near_duplicates"] == {
        "threshold": 0.8, "shingle_words": 5, "groups": 2,
        "dropped_near_held_out": 2, "dropped_train": 2, "dropped_held_out": 1,
    }  # fmt: skip
    exact = build([str(tmp_path / "x.jsonl")], TOKENIZER, tmp_path / "exact", workers=1, threshold=1.0)
    assert (exact["train_documents"], exact["held_out_documents"]) == (2, 3)  # a and a + " x"; b, b + " y" and c


def test_the_in_memory_form_writes_the_same_files(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", [(f"{n}.txt", words(n)) for n in range(100)])
    info = build([source], TOKENIZER, tmp_path / "one", dedup=False, workers=1)
    counts = build_shards(read_sources([source]), TOKENIZER, tmp_path / "two", [source])
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert {k: v for k, v in one.items() if not k.endswith(".json")} == {
        k: v for k, v in two.items() if not k.endswith(".json")
    }
    assert counts.items() <= info.items()


def test_without_the_extra_only_dedup_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    source = write_jsonl(tmp_path / "x.jsonl", [("a", "text")])
    with pytest.raises(ConfigError, match=r"pip install 'glm5\[data\]'"):
        build([source], TOKENIZER, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert build([source], TOKENIZER, tmp_path / "out", dedup=False)["train_documents"] == 1


@pytest.mark.long
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "BATCH_BYTES", 1 << 14)
    peak = 0

    def measure(phase: str, done: int, total: int | None) -> None:
        nonlocal peak
        peak = tracemalloc.get_traced_memory()[1]

    peaks = []
    for count in (10, 50, 250):  # the first for what is only imported and allocated once
        source = write_jsonl(tmp_path / "x.jsonl", [(f"{n}.txt", words(n, 400)) for n in range(count)])
        tracemalloc.start()
        try:
            build([source], TOKENIZER, tmp_path / "out", workers=1, progress=measure)
        finally:
            tracemalloc.stop()
        peaks.append(peak)
    assert (tmp_path / "x.jsonl").stat().st_size > 500_000  # and the sketches have more
    assert peaks[2] - peaks[1] < 50_000


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"threshold": 0.1}, ConfigError, "threshold"),
        ({"workers": 0}, ConfigError, "workers"),
        ({"max_bad": -1}, ConfigError, "max_bad"),
        ({"max_record_bytes": 0}, ConfigError, "max_record_bytes"),
        ({"max_bad": 0}, DataError, "1 of the first 3 records"),
        ({"tokenizer": "absent"}, CheckpointError, "cannot read"),
        ({"sources": ["absent"]}, DataError, "neither a file"),
        ({"sources": []}, DataError, "contain no text file"),
    ],
)
def test_what_goes_wrong_leaves_nothing_behind(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text('{"text": "a"}\n{"text": "b"}\n{\n', encoding="utf-8")
    values: dict[str, Any] = {"sources": [str(source)], "tokenizer": TOKENIZER, "out": tmp_path / "out"} | arguments
    with pytest.raises(error, match=match):
        build(**values)
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.dist
def test_a_dead_process_is_an_error_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "BATCH_BYTES", 2000)
    source = write_jsonl(tmp_path / "x.jsonl", [(f"{n}", words(n)) for n in range(400)])

    def kill(phase: str, done: int, total: int | None) -> None:
        if done == 20:
            for child in multiprocessing.active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(DataError, match="ended unexpectedly"):
        build([source], TOKENIZER, tmp_path / "out", workers=2, progress=kill)
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]
    assert not multiprocessing.active_children()


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_the_processes_end_with_their_parent(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [(f"{n}", words(n)) for n in range(400)])
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import multiprocessing, sys, time
from glm5.chat.tokenizer import Tokenizer
from glm5.data import build as b

def stop(phase, done, total):
    print(*[p.pid for p in multiprocessing.active_children()], flush=True)
    time.sleep(600)

if __name__ == "__main__":
    b.BATCH_BYTES = 2000
    b.build([{str(tmp_path / "x.jsonl")!r}], Tokenizer.byte_level(), sys.argv[1], workers=2, progress=stop)
""",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(tmp_path / "out")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children = [int(pid) for pid in process.stdout.readline().split()]
        assert children
        process.kill()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
