"""The prefix cache on disk: it survives the engine, is bounded, and never returns what was not written."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.engine import page_files
from glm5.engine.engine import Engine
from glm5.engine.kv_pool import PAGE
from glm5.engine.page_files import HEAD, WAITING, PageFiles, own_folder
from glm5.errors import ConfigError, EngineError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams

Small = Callable[..., GLM5ForCausalLM]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=3)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 40, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def link(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def files(tmp_path: Path) -> Any:
    opened: list[PageFiles] = []

    def make(limit: int = 1 << 20) -> PageFiles:
        opened.append(PageFiles(tmp_path / "pages", limit))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"speculative": 2}, {}),
        ({"host_cache_bytes": 1 << 20}, {}),
        ({}, {"num_hidden_layers": 3, "index_topk_pattern": "FSF"}),
    ],
    ids=["", "drafts", "host", "IndexShare"],
)
def test_a_new_engine_finds_the_pages_of_the_old_one(
    small: Small, tmp_path: Path, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = small(**changes)
    ids = prompt(4 * PAGE + 20)
    alone = Engine(model, **options)
    expected = [alone.generate([ids], params)[0] for params in (GREEDY, SEEDED)]
    first = Engine(model, disk_cache=tmp_path / "pages", **options)
    assert first.generate([ids], GREEDY)[0].token_ids == expected[0].token_ids
    first.close()
    assert first.stats()["disk_bytes"] == 4 * (HEAD + first.pool.page_bytes())
    second = Engine(model, disk_cache=tmp_path / "pages", cache_tokens=8 * PAGE, max_length=7 * PAGE, **options)
    for params, want in zip((GREEDY, SEEDED), expected, strict=True):
        for _ in range(2):
            found = second.generate([ids], params)[0]
            assert (found.token_ids, found.logprobs) == (want.token_ids, want.logprobs)
            assert found.cached_len >= 4 * PAGE - 1
            second.generate([prompt(6 * PAGE, seed=1)], GREEDY)  # evicts them from the pool, which drops them
    assert second.stats()["disk_pages"] >= (4 if "host_cache_bytes" in options else 8)
    assert second.pool.available == second.pool.total and second.stats()["damaged_pages"] == 0
    second.close()


def test_damaged_files_are_refused_and_computed_again(small: Small, tmp_path: Path) -> None:
    model, ids = small(), prompt(3 * PAGE)
    first = Engine(model, disk_cache=tmp_path)
    want = first.generate([ids], GREEDY)[0].token_ids
    first.close()
    paths = sorted(tmp_path.glob("*.page"))
    assert len(paths) == 3

    def flipped(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1])

    other = paths[1].read_bytes()
    for change in (flipped, lambda data: data[:-5], lambda data: b"", lambda data: other, lambda data: data + b"x"):
        kept = paths[0].read_bytes()
        paths[0].write_bytes(change(kept))
        engine = Engine(model, disk_cache=tmp_path)
        assert engine.generate([ids], GREEDY)[0].token_ids == want
        engine.close()
        damaged = engine.stats()["damaged_pages"]
        assert damaged == 1 and paths[0].read_bytes() == kept  # written again
    paths[0].unlink()
    paths[0].symlink_to(paths[1])
    engine = Engine(model, disk_cache=tmp_path)
    assert engine.generate([ids], GREEDY)[0].token_ids == want
    engine.close()
    assert paths[0].read_bytes() == kept and not paths[0].is_symlink() and paths[1].read_bytes() == other


def test_other_weights_namespaces_and_modes_find_nothing(small: Small, tmp_path: Path) -> None:
    ids = prompt(2 * PAGE)
    first = Engine(small(), disk_cache=tmp_path)
    first.generate([ids], GREEDY)
    first.close()
    changed = small()
    with torch.no_grad():
        changed.model.embed_tokens.weight.view(-1)[333] += 1e-3
    for model, exact in ((small(seed=1), True), (changed, True), (small(), False)):
        engine = Engine(model, exact=exact, disk_cache=tmp_path)
        assert engine.generate([ids], GREEDY)[0].cached_len == 0
        engine.close()
    engine = Engine(small(), disk_cache=tmp_path)
    (request,) = engine.submit(ids, GREEDY, namespace="other")
    while not request.done:
        engine.step()
    assert request.completion.cached_len == 0
    assert engine.generate([ids], GREEDY)[0].cached_len >= 2 * PAGE - 1
    engine.update_weights(changed.state_dict(), 1)
    assert engine.generate([ids], GREEDY)[0].token_ids == Engine(changed).generate([ids], GREEDY)[0].token_ids
    engine.close()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 400), st.booleans()), max_size=40))
@settings(max_examples=25, deadline=None)
def test_space_is_bounded_and_what_is_used_stays(tmp_path_factory: Any, steps: list[tuple[int, int, bool]]) -> None:
    folder, limit = tmp_path_factory.mktemp("pages"), 1000
    pages, written = PageFiles(folder, limit), dict[int, bytes]()
    for number, size, again in steps:
        if again and (data := pages.get(link(number), len(written.get(number, b"x")))) is not None:
            assert data == written[number]
        elif link(number) not in pages:
            written[number] = bytes([number]) * size
            pages.put(link(number), written[number])
            pages.flush()
            assert link(number) in pages
        sizes = {path: path.stat().st_size for path in folder.iterdir()}
        assert sum(sizes.values()) == pages.used <= limit
    pages.close()
    later = PageFiles(folder, limit // 2)
    assert later.used <= limit // 2 and sum(path.stat().st_size for path in folder.iterdir()) == later.used
    for number in range(10):
        if link(number) in later:
            assert later.get(link(number), len(written[number])) == written[number]
    assert later.damaged == 0
    later.close()


def test_the_least_recently_used_goes_first_also_after_a_restart(files: Any) -> None:
    pages = files(4 * (HEAD + 100))
    for number in range(4):
        pages.put(link(number), bytes(100))
        pages.flush()
    assert pages.get(link(0), 100) == bytes(100)
    pages.close()
    pages = files(4 * (HEAD + 100))
    pages.put(link(9), bytes(100))
    pages.flush()
    assert link(1) not in pages and all(link(number) in pages for number in (0, 2, 3, 9))
    pages.put(link(5), bytes(1 << 20))  # larger than all
    pages.clear()
    pages.flush()
    assert pages.used == 0 and not list(pages.folder.iterdir())


def test_folders_that_cannot_be_used(tmp_path: Path, small: Small) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="Others may write"):
        PageFiles(shared, 1000)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot hold pages"):
        PageFiles(tmp_path / "file", 1000)
    with pytest.raises(ConfigError, match="Others may write"):
        own_folder(shared)  # of the engines' folders
    first = PageFiles(tmp_path / "mine", 1000)
    with pytest.raises(ConfigError, match="Another server"):
        PageFiles(tmp_path / "mine", 1000)
    first.close()
    PageFiles(tmp_path / "mine", 1000).close()
    with pytest.raises(EngineError, match="prefix cache"):
        Engine(small(), prefix_cache=False, disk_cache=tmp_path)


def test_a_full_disk_costs_pages_only(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = files()
    pages.put(link(1), bytes(100))
    pages.flush()

    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    pages.put(link(2), bytes(100))
    pages.flush()
    assert pages.dropped == 1 and link(2) not in pages and link(1) in pages
    assert [path.name for path in pages.folder.iterdir()] == [f"{link(1).hex()}.page"]


def test_what_cannot_be_removed_or_is_no_file_is_a_miss(files: Any) -> None:
    pages = files()
    for number in range(3):
        pages.put(link(number), bytes(100))
    pages.close()
    for number in range(3):
        (pages.folder / f"{link(number).hex()}.page").unlink()
    (pages.folder / f"{link(0).hex()}.page").mkdir()
    os.mkfifo(pages.folder / f"{link(1).hex()}.page")
    (pages.folder / ".glm5-history").write_text("mine")
    (pages.folder / f".glm5-{'0' * 16}").write_text("a write that did not end")
    pages = files()
    assert pages.get(link(0), 100) is None and pages.get(link(1), 100) is None and pages.damaged == 2
    pages.put(link(0), bytes(100))
    pages.flush()
    assert pages.dropped == 1 and pages.used == 0
    assert {path.name for path in pages.folder.iterdir()} == {".glm5-history", f"{link(0).hex()}.page"}


def test_clear_forgets_what_waits_and_waits_for_nothing(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, goes = files(), threading.Event()
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda *arguments: (goes.wait(10), rename(*arguments)))
    for number in range(WAITING + 20):
        pages.put(link(number), bytes(100))
    assert pages.dropped
    pages.clear()  # a disk that hangs does not hold up the engine
    monkeypatch.setattr(page_files, "CLOSE_SECONDS", 0.05)
    goes.set()
    pages.flush()
    pages.put(link(3), bytes(100))
    pages.flush()
    assert [path.name for path in pages.folder.iterdir()] == [f"{link(3).hex()}.page"] and link(3) in pages
    goes.clear()
    pages.put(link(4), bytes(100))
    pages.close()
    goes.set()
