"""Pre-training rows: every token of an epoch once, and nothing depends on anything but (seed, step)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm5.data.loader import StreamLoader
from glm5.data.shards import Shard
from glm5.errors import DataError


def make_shard(lengths: list[int]) -> Shard:
    """Token t is its own place in the shard, so every row says where it came from."""
    borders = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return Shard(np.arange(borders[-1], dtype=np.uint16), borders, np.asarray(lengths, dtype=np.int64))


shards = st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 8)


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


@given(st.integers(0, 60), st.lists(st.integers(0, 60), max_size=4), st.integers(0, 2))
def test_a_batch_is_a_function_of_seed_and_step(step: int, before: list[int], seed: int) -> None:
    shard = make_shard([7, 19, 3, 30, 11, 2, 25])
    used = StreamLoader(shard, rows=3, row_length=5, seed=seed)
    for other in before:
        used.batch(other)
    fresh = StreamLoader(shard, rows=3, row_length=5, seed=seed).batch(step)
    again = used.batch(step)
    assert torch.equal(fresh.ids, again.ids) and torch.equal(fresh.documents, again.documents)


def test_row_numbers_do_not_depend_on_rows_per_step() -> None:
    shard = make_shard([13] * 20)
    one, four = (StreamLoader(shard, rows=rows, row_length=6, seed=1) for rows in (1, 4))
    singly = torch.cat([one.batch(step).ids for step in range(100)])
    assert torch.equal(singly, torch.cat([four.batch(step).ids for step in range(25)]))


def test_seeds_and_epochs_differ() -> None:
    shard = make_shard([10] * 40)
    epochs = {}
    for seed in (0, 1):
        loader = StreamLoader(shard, rows=50, row_length=8, seed=seed)
        epochs[seed] = [loader.batch(epoch).ids.tolist() for epoch in range(2)]
    orders = [*epochs[0], *epochs[1]]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


def test_neighbouring_rows_do_not_come_from_one_long_file() -> None:
    loader = StreamLoader(make_shard([4000]), rows=100, row_length=40, seed=0)
    starts = loader.batch(0).ids[:, 0]
    assert sorted(starts.tolist()) == list(range(0, 4000, 40))
    assert int((starts.diff() == 40).sum()) < 10


def test_a_shard_smaller_than_a_row_is_refused() -> None:
    with pytest.raises(DataError, match="fewer than one row"):
        StreamLoader(make_shard([3, 4]), rows=1, row_length=8, seed=0)
