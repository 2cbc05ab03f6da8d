"""Training rows: every token of an epoch once, and nothing depends on anything but (seed, step)."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.data.loader import BestFitLoader, RowLoader, StreamLoader, shuffled
from glm5.data.packing import Batch, pack
from glm5.data.shards import Shard
from glm5.errors import DataError
from glm5.seeds import derive_seed

LOADERS = (StreamLoader, BestFitLoader)


def make_shard(lengths: list[int]) -> Shard:
    """Token t is its own place in the shard, so every row says where it came from."""
    borders = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return Shard(np.arange(borders[-1], dtype=np.uint16), borders, np.asarray(lengths, dtype=np.int64))


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, k), getattr(other, k)) for k in ("ids", "documents", "loss_mask"))


shards = st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 8)
loaders = pytest.mark.parametrize("loader", LOADERS)


@given(shards, st.integers(1, 8), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_holds_every_row_of_the_shuffled_stream_once(
    lengths: list[int], row_length: int, rows: int, seed: int
) -> None:
    shard = make_shard(lengths)
    loader = StreamLoader(shard, rows=rows, row_length=row_length, seed=seed)
    per_epoch = len(shard.tokens) // row_length
    assert loader.rows_per_epoch == per_epoch
    steps = -(-2 * per_epoch // rows)
    flat = [row.tolist() for step in range(steps) for row in loader.batch(step).ids]
    first, second = flat[:per_epoch], flat[per_epoch : 2 * per_epoch]
    for epoch in (first, second):
        tokens = Counter(token for row in epoch for token in row)
        assert max(tokens.values()) == 1
        assert len(tokens) == per_epoch * row_length  # only the end of the stream, less than a row, is left over


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60).filter(lambda n: sum(n) > 8), st.integers(1, 8))
def test_rows_are_cuts_of_the_stream_of_permuted_documents(lengths: list[int], row_length: int) -> None:
    """The whole stream at once, as a definition; documents may be empty, and places are found block by block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glm5.data.loader.MARKED", 4)
        patch.setattr("glm5.data.loader.BLOCK", 8)
        shard = make_shard(lengths)
        loader = StreamLoader(shard, rows=1, row_length=row_length, seed=7)
        for epoch in range(2):
            generator = np.random.default_rng(derive_seed(7, "document order", epoch))
            order = generator.permutation(len(lengths))
            stream = np.concatenate([shard.document(i) for i in order])
            owner = np.repeat(np.arange(len(lengths)), np.array(lengths)[order])
            for index, place in enumerate(generator.permutation(len(stream) // row_length)):
                span = slice(place * row_length, (place + 1) * row_length)
                row = loader.batch(epoch * loader.rows_per_epoch + index)
                assert row.ids[0].tolist() == stream[span].tolist()
                assert row.documents[0].tolist() == (owner[span] - owner[span][0]).tolist()


@pytest.mark.parametrize("count", [1, 2, 1000, 70_000])
def test_an_order_is_the_permutation_in_fewer_bytes(count: int) -> None:
    generators = np.random.default_rng(5), np.random.default_rng(5)
    found = shuffled(generators[0], count)
    assert found.itemsize == 4 and np.array_equal(found, generators[1].permutation(count))
    assert generators[0].integers(1 << 60) == generators[1].integers(1 << 60)


def test_memory_of_an_epoch_is_bytes_per_document() -> None:
    count = 50_000
    shard = make_shard([3] * count)
    for loader, most in ((StreamLoader, 8), (BestFitLoader, 16)):
        tracemalloc.start()
        made = loader(shard, rows=1, row_length=6, seed=0)
        made.batch(0)
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert 4 * count < kept < most * count, (loader, kept / count)


@given(shards, st.integers(1, 8), st.integers(1, 5), st.integers(0, 3))
def test_documents_are_numbered_and_contiguous(lengths: list[int], row_length: int, rows: int, seed: int) -> None:
    shard = make_shard(lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    batch = StreamLoader(shard, rows=rows, row_length=row_length, seed=seed).batch(0)
    assert batch.loss_mask.all()
    for ids, numbers in zip(batch.ids.tolist(), batch.documents.tolist(), strict=True):
        assert numbers[0] == 0
        for i in range(1, len(ids)):
            # The next token of a row is the next of its document, or the first of another one after the last of this.
            if numbers[i] == numbers[i - 1]:
                assert ids[i] == ids[i - 1] + 1 and owner[ids[i]] == owner[ids[i - 1]]
            else:
                assert numbers[i] == numbers[i - 1] + 1
                assert ids[i - 1] + 1 in shard.borders and ids[i] in shard.borders


@given(shards, st.integers(1, 12), st.integers(1, 5), st.integers(0, 3), st.integers(1, 60))
def test_best_fit_keeps_documents_whole_and_loses_no_token(
    lengths: list[int], row_length: int, rows: int, seed: int, window: int
) -> None:
    shard = make_shard(lengths)
    loader = BestFitLoader(shard, rows=rows, row_length=row_length, seed=seed, window=window)
    per_epoch = loader.rows_per_epoch
    batches = [loader.batch(step) for step in range(-(-2 * per_epoch // rows))]
    ids, documents, mask = (
        torch.cat([getattr(b, k) for b in batches])[: 2 * per_epoch] for k in ("ids", "documents", "loss_mask")
    )
    assert torch.equal(mask, documents >= 0)
    empty = (documents[:per_epoch] < 0).sum() / documents[:per_epoch].numel()
    assert loader.padding_share == pytest.approx(float(empty), abs=1e-6)
    for epoch in range(2):
        span = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        assert sorted(ids[span][mask[span]].tolist()) == list(range(sum(lengths)))
        pieces = []
        for row, numbers in zip(ids[span].tolist(), documents[span].tolist(), strict=True):
            real = [n for n in numbers if n >= 0]
            assert real and numbers == real + [-1] * (row_length - len(real)), "padding is at the end of a row"
            assert list(dict.fromkeys(real)) == list(range(max(real) + 1)) and real == sorted(real)
            for n in range(max(real) + 1):
                piece = [t for t, m in zip(row, numbers, strict=True) if m == n]
                assert piece == list(range(piece[0], piece[0] + len(piece)))
                pieces.append((piece[0], len(piece)))
        # A document is one piece, or as many full rows as it has and a rest.
        expected = []
        for start, length in zip(shard.borders[:-1].tolist(), lengths, strict=True):
            expected += [(start + at, min(row_length, length - at)) for at in range(0, length, row_length)]
        assert sorted(pieces) == expected


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_in_windows_pads_little_more_than_first_fit_of_everything(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 65, size=400).tolist()
    loader = BestFitLoader(make_shard(lengths), rows=1, row_length=64, seed=seed, window=100)
    _, whole = pack(lengths, 64)
    assert whole - 1 <= loader.rows_per_epoch <= 1.03 * whole


@loaders
def test_a_batch_is_a_function_of_seed_and_step(loader: Callable[..., RowLoader]) -> None:
    @given(st.integers(0, 60), st.lists(st.integers(0, 60), max_size=4), st.integers(0, 2))
    def check(step: int, before: list[int], seed: int) -> None:
        shard = make_shard([7, 19, 3, 30, 11, 2, 25])
        used = loader(shard, rows=3, row_length=5, seed=seed)
        for other in before:
            used.batch(other)
        assert equal(loader(shard, rows=3, row_length=5, seed=seed).batch(step), used.batch(step))

    check()


@loaders
def test_row_numbers_do_not_depend_on_rows_per_step(loader: Callable[..., RowLoader]) -> None:
    shard = make_shard([13] * 20)
    one, four = (loader(shard, rows=rows, row_length=6, seed=1) for rows in (1, 4))
    singly = torch.cat([one.batch(step).ids for step in range(100)])
    assert torch.equal(singly, torch.cat([four.batch(step).ids for step in range(25)]))


@loaders
@pytest.mark.parametrize("rows", [slice(0, 2), slice(3, 7), slice(6, 99), slice(1, 7, 3), slice(2, 2), slice(None)])
def test_a_rank_reads_its_rows_of_the_whole_batch(
    loader: Callable[..., RowLoader], rows: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loader(make_shard([13, 5, 8] * 20), rows=7, row_length=6, seed=1)
    whole = made.batch(9)
    built = []
    fill = made.fill
    monkeypatch.setattr(made, "fill", lambda index, row: (built.append(index), fill(index, row)))
    part = made.batch(9, rows)
    assert all(torch.equal(getattr(part, k), getattr(whole, k)[rows]) for k in ("ids", "documents", "loss_mask"))
    assert built == list(range(63, 70))[rows], "rows of other ranks were built"


@loaders
def test_seeds_and_epochs_differ(loader: Callable[..., RowLoader]) -> None:
    shard = make_shard([10, 6, 11, 9] * 10)
    orders = []
    for seed in (0, 1):
        rows = loader(shard, rows=1, row_length=12, seed=seed).rows_per_epoch
        made = loader(shard, rows=rows, row_length=12, seed=seed)
        orders += [made.batch(epoch).ids.tolist() for epoch in range(2)]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


@loaders
def test_an_epoch_is_shuffled_once_even_where_steps_cross_its_border(
    loader: Callable[..., RowLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    real = np.random.default_rng
    made = loader(make_shard([7] * 30), rows=4, row_length=7, seed=0)
    assert made.rows_per_epoch == 30
    monkeypatch.setattr(np.random, "default_rng", lambda seed: (drawn.append(seed), real(seed))[1])
    for step in (7, 6, 7, 8, 7):  # rows 24 to 35: both sides of the border
        made.batch(step)
    assert len(drawn) == 2


@loaders
def test_epochs_count_what_came_before_a_step(loader: Callable[..., RowLoader]) -> None:
    made = loader(make_shard([7] * 30), rows=4, row_length=7, seed=0)
    assert made.epochs(0) == {"rows": 0.0} and made.epochs(15) == {"rows": 2.0}


def test_neighbouring_rows_do_not_come_from_one_long_file() -> None:
    loader = StreamLoader(make_shard([4000]), rows=100, row_length=40, seed=0)
    starts = loader.batch(0).ids[:, 0]
    assert sorted(starts.tolist()) == list(range(0, 4000, 40))
    assert int((starts.diff() == 40).sum()) < 10


def test_a_shard_smaller_than_a_row_is_refused() -> None:
    with pytest.raises(DataError, match="fewer than one row"):
        StreamLoader(make_shard([3, 4]), rows=1, row_length=8, seed=0)
    with pytest.raises(DataError, match="The shard is empty"):
        BestFitLoader(make_shard([]), rows=1, row_length=8, seed=0)
    assert BestFitLoader(make_shard([3, 4]), rows=1, row_length=8, seed=0).rows_per_epoch == 1
