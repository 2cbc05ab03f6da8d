"""Mixtures: shares that hold for every prefix of the rows, and the factory of a stage's loader."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.config.data import DataOptions
from glm5.data.loader import BestFitLoader, Row, RowLoader, StreamLoader
from glm5.data.long_context import RecallLoader
from glm5.data.mixture import RESOLUTION, Mixture, even_schedule, make_loader, whole_parts
from glm5.data.packing import Batch
from glm5.data.shards import Shard
from glm5.errors import ConfigError, DataError
from glm5.seeds import derive_seed


class Counting(RowLoader):
    """Row i of source k holds k and i."""

    def __init__(self, k: int, rows_per_epoch: int = 10, row_length: int = 2) -> None:
        super().__init__(1, row_length)
        self.k, self.rows_per_epoch = k, rows_per_epoch

    def fill(self, index: int, row: Row) -> None:
        row.put(0, np.array([self.k, index]), 0)


def counting(weights: Sequence[float], rows: int = 1) -> Mixture:
    names = [f"s{k}" for k in range(len(weights))]
    sources = {name: Counting(k) for k, name in enumerate(names)}
    return Mixture(sources, dict(zip(names, weights, strict=True)), rows=rows)


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, k), getattr(other, k)) for k in ("ids", "documents", "loss_mask"))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_every_prefix_has_its_shares_up_to_less_than_one(parts: list[int]) -> None:
    schedule = even_schedule(parts)
    assert len(schedule) == sum(parts) and np.bincount(schedule, minlength=len(parts)).tolist() == parts
    bound = 1 - Fraction(1, max(2, 2 * len(parts) - 2))
    for k, part in enumerate(parts):
        seen = 0
        for n, source in enumerate(schedule.tolist(), 1):
            seen += source == k
            assert abs(seen - Fraction(n * part, sum(parts))) <= bound < 1


def test_the_one_furthest_behind_would_not_do() -> None:
    """Why the schedule looks at deadlines: with this mixture the simple rule is out by 1.25 rows."""
    parts = [1] * 10 + [10] * 3
    total, worst, seen = sum(parts), Fraction(0), [0] * len(parts)
    for n in range(1, total + 1):
        seen[max(range(len(parts)), key=lambda k: n * parts[k] - total * seen[k])] += 1
        worst = max(worst, *(abs(s - Fraction(n * p, total)) for s, p in zip(seen, parts, strict=True)))
    assert worst == Fraction(5, 4)
    hits = (even_schedule(parts)[None] == np.arange(len(parts))[:, None]).cumsum(1)
    assert abs(hits - np.outer(parts, np.arange(1, total + 1)) / total).max() < 1


@settings(max_examples=15)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=5).filter(lambda weights: sum(weights) > 0.01),
    st.integers(1, 5),
    st.lists(st.integers(0, 10_000), min_size=1, max_size=5),
)
def test_rows_of_each_source_come_in_order_at_any_step(weights: list[float], rows: int, steps: list[int]) -> None:
    mixture = counting(weights, rows)
    for step in steps:
        before = mixture.counts(step * rows)
        assert sum(before.values()) == step * rows
        for name, count in before.items():
            assert abs(count - mixture.weights[name] * step * rows) < 1
            assert mixture.epochs(step)[name] == count / 10
        for k, index in mixture.batch(step).ids.tolist():
            assert index == before[f"s{k}"]
            before[f"s{k}"] += 1
        assert before == mixture.counts((step + 1) * rows)


def test_weights_as_whole_parts() -> None:
    assert whole_parts({"a": 0.7, "b": 0.2, "c": 0.1}) == {"a": 7, "b": 2, "c": 1}
    assert whole_parts({"a": 3, "b": 0, "c": 1.5}) == {"a": 2, "c": 1}
    assert whole_parts({"a": Fraction(1, 3), "b": Fraction(2, 3)}) == {"a": 1, "b": 2}
    assert whole_parts({"a": 1e300, "b": 1e300}) == {"a": 1, "b": 1}
    rough = whole_parts({"a": 123_456_789, "b": 987_654_321, "c": 1})
    assert sum(rough.values()) == RESOLUTION and rough["c"] == 1
    assert rough["a"] / RESOLUTION == pytest.approx(123_456_789 / 1_111_111_111, abs=1e-4)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"web": 1.0, "coed": 1.0}, r'Unknown source "coed" \(did you mean "code"\?\); choose one of web, code'),
        ({"web": 1.0}, '"code" has no weight'),
        ({"web": 1.0, "code": -0.5}, '"code" is -0.5'),
        ({"web": float("nan"), "code": 1.0}, '"web" is nan'),
        ({"web": float("inf"), "code": 1.0}, '"web" is inf'),
        ({"web": 0.0, "code": 0}, "No source has a positive weight"),
    ],
)
def test_wrong_weights_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture({"web": Counting(0), "code": Counting(1)}, weights, rows=1)


def test_sources_have_rows_of_one_length() -> None:
    with pytest.raises(ConfigError, match=r"rows of \[2, 3\] tokens"):
        Mixture({"a": Counting(0), "b": Counting(1, row_length=3)}, {"a": 1, "b": 1}, rows=1)


def test_an_epoch_of_a_mixture_ends_with_the_last_source() -> None:
    slow = Mixture({"a": Counting(0, 10), "b": Counting(1, 30), "c": Counting(2, 0)}, {"a": 2, "b": 1, "c": 1}, rows=4)
    assert slow.rows_per_epoch == 120
    assert slow.epochs(30) == {"a": 6.0, "b": 1.0}
    assert slow.epochs(29)["b"] < 1


def test_a_rank_reads_its_rows_of_a_mixture() -> None:
    mixture = counting([0.5, 0.3, 0.2], rows=8)
    parts = [mixture.batch(5, slice(at, at + 2)) for at in range(0, 8, 2)]
    assert torch.equal(torch.cat([part.ids for part in parts]), mixture.batch(5).ids)


def make_shard(seed: int, documents: int = 40) -> Shard:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(20, 120, size=documents)
    borders = np.concatenate(([0], lengths.cumsum()))
    return Shard(generator.integers(0, 256, size=borders[-1]).astype(np.uint16), borders, lengths)


SHARDS = {"web": make_shard(0), "code": make_shard(1, 25)}
EVERYTHING: dict[str, Any] = {
    "weights": {"web": 3, "code": 1},
    "recall_share": 0.1,
    "interleave_share": 0.2,
    "negatives_share": 0.1,
    "packing": "best_fit",
    "fim_rate": 0.5,
    "fim_shards": ["code"],
}


def make(tokenizer: Any, shards: dict[str, Shard] | None = None, rows: int = 4, **options: Any) -> Mixture:
    options_ = DataOptions.model_validate(options)
    return make_loader(options_, shards or SHARDS, tokenizer, rows=rows, row_length=256, seed=7, name="mid")


def test_one_shard_without_options_is_the_plain_stream(tokenizer: Any) -> None:
    seed = derive_seed(7, "corpus", "mid")
    for packing, plain in (("truncate", StreamLoader), ("best_fit", BestFitLoader)):
        found = make(tokenizer, {"web": SHARDS["web"]}, packing=packing)
        expected = plain(SHARDS["web"], rows=4, row_length=256, seed=seed)
        assert all(equal(found.batch(step), expected.batch(step)) for step in range(6))
        assert found.rows_per_epoch == expected.rows_per_epoch
        assert found.epochs(3) == {"web": 12 / expected.rows_per_epoch}


def test_every_step_has_its_share_of_needle_rows(tokenizer: Any) -> None:
    found = make(tokenizer, {"web": SHARDS["web"]}, needle_share=0.4)
    needles = RecallLoader("needle", tokenizer, rows=1, row_length=256, seed=derive_seed(7, "needles", "mid"))
    plain = make(tokenizer, {"web": SHARDS["web"]}, rows=1)
    seen = 0
    for step in range(12):
        batch = found.batch(step)
        assert not batch.sparse_targets  # plain text in every step leaves something for multi-token prediction
        asked = [row for row in range(4) if not batch.loss_mask[row].all()]
        assert len(asked) in (1, 2)
        for row in range(4):
            mine = needles.batch(seen) if row in asked else plain.batch(4 * step + row - seen)
            assert equal(batch.rows(row, row + 1), mine)
            seen += row in asked
        assert abs(seen - 0.4 * 4 * (step + 1)) < 1
    only = make(tokenizer, {"web": SHARDS["web"]}, needle_share=1.0)
    assert only.batch(5).sparse_targets and list(only.sources) == ["needles"]


def test_shares_of_rows_and_weights_meet(tokenizer: Any) -> None:
    found = make(tokenizer, **EVERYTHING)
    assert isinstance(found, Mixture)
    assert found.weights == pytest.approx(
        {
            "web": 0.45,
            "code": 0.15,
            "web interleaved": 0.15,
            "code interleaved": 0.05,
            "web negatives": 0.075,
            "code negatives": 0.025,
            "recall": 0.1,
        }
    )
    fim = tokenizer.special["<|code_middle|>"]
    marked = {
        name: any((source.batch(step).ids == fim).any() for step in range(3)) for name, source in found.sources.items()
    }
    assert [name for name, has in marked.items() if has] == ["code"]
    assert not found.batch(0).sparse_targets
    for step in (11, 0, 4):
        again = make(tokenizer, **EVERYTHING)
        assert equal(found.batch(step, slice(1, 3)), again.batch(step).rows(1, 3))


def test_without_weights_every_token_is_as_likely(tokenizer: Any) -> None:
    found = make(tokenizer)
    tokens = {name: len(shard.tokens) for name, shard in SHARDS.items()}
    assert isinstance(found, Mixture)
    assert found.weights == pytest.approx({n: t / sum(tokens.values()) for n, t in tokens.items()}, abs=1e-4)
    one, other = (make(tokenizer, weights={"web": 1, "code": 0}), make(tokenizer, weights={"web": 0, "code": 1}))
    assert one.epochs(1).keys() == {"web"} and other.epochs(1).keys() == {"code"}


def test_the_stage_and_the_seed_decide_the_order(tokenizer: Any) -> None:
    def batch(seed: int, name: str) -> Batch:
        return make_loader(DataOptions(), SHARDS, tokenizer, rows=4, row_length=256, seed=seed, name=name).batch(0)

    assert equal(batch(0, "a"), batch(0, "a"))
    assert not equal(batch(0, "a"), batch(1, "a")) and not equal(batch(0, "a"), batch(0, "b"))


def test_sources_are_shuffled_apart(tokenizer: Any) -> None:
    twins = make(tokenizer, {"a": SHARDS["web"], "b": SHARDS["web"]})
    assert isinstance(twins, Mixture)
    one, other = (source.batch(0) for source in twins.sources.values())
    assert not equal(one, other)


def test_wrong_options_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r'Unknown source "wbe" \(did you mean "web"'):
        make(tokenizer, weights={"wbe": 1, "code": 1})
    with pytest.raises(ConfigError, match='Unknown source "c0de"'):
        make(tokenizer, fim_rate=0.5, fim_shards=["c0de"])
    with pytest.raises(ConfigError, match='"code" has no weight'):
        make(tokenizer, weights={"web": 1})
    with pytest.raises(DataError, match="fewer than one row"):
        make(tokenizer, {"web": make_shard(0, 2)})
    with pytest.raises(pydantic.ValidationError, match="it must be at most 1"):
        DataOptions(recall_share=0.4, interleave_share=0.3, negatives_share=0.2, needle_share=0.2)
    for wrong in ({"fim_rate": 1.5}, {"packing": "first_fit"}, {"recal_share": 0.1}):
        with pytest.raises(pydantic.ValidationError):
            DataOptions.model_validate(wrong)


def test_no_corpus_takes_the_place_of_generated_rows(tokenizer: Any) -> None:
    for names, share in (
        (("web", "recall"), "recall_share"),
        (("needles", "web"), "needle_share"),
        (("web", "web interleaved"), "interleave_share"),
        (("web negatives", "web"), "negatives_share"),
    ):
        shards = dict(zip(names, SHARDS.values(), strict=True))
        assert len(make(tokenizer, shards).sources) == 2  # the name is free where no such rows are made
        with pytest.raises(ConfigError, match=r'Two sources of rows are called "(recall|needles|web .*)"; give'):
            make(tokenizer, shards, **{share: 0.2})


def test_a_stage_of_recall_alone_has_sparse_targets(tokenizer: Any) -> None:
    found = make(tokenizer, recall_share=1.0)
    assert found.batch(0).sparse_targets and found.rows_per_epoch == 0 and found.epochs(9) == {}
