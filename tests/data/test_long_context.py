"""Long-context rows: nothing is lost, documents keep their order, neighbours resemble each other, answers are true."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm5.data.loader import RowLoader
from glm5.data.long_context import (
    InterleaveLoader,
    NegativesLoader,
    RecallLoader,
    Similarity,
    chunk_length,
    chunks,
    encode,
    interleave,
    similar_order,
)
from glm5.data.packing import Batch
from glm5.data.recall import FORMS, NEEDLES, SPLITS, VARIANTS, recall_text, split_of, turns_bytes, turns_text
from glm5.data.shards import Shard
from glm5.errors import ConfigError, DataError
from glm5.seeds import derive_seed

TOPICS = 4


def place_shard(lengths: list[int]) -> Shard:
    """Token t is its own place in the shard."""
    borders = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return Shard(np.arange(borders[-1], dtype=np.uint32), borders, np.asarray(lengths))


def topic_shard(documents: int = 80, length: int = 60) -> Shard:
    """Document i is random text over the 25 words of topic i % 4: token = 100 * topic + word."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 25, size=(documents, length)) + 100 * (np.arange(documents) % TOPICS)[:, None]
    borders = np.arange(documents + 1) * length
    return Shard(tokens.reshape(-1).astype(np.uint16), borders, np.full(documents, length))


# --- interleaving


def test_interleaved_by_hand() -> None:
    # Four chunks stand at 1/8, 3/8, 5/8 and 7/8 of the row, two at 1/4 and 3/4.
    found = interleave([np.arange(8), np.arange(100, 104)], 2)
    assert found.tolist() == [0, 1, 100, 101, 2, 3, 4, 5, 102, 103, 6, 7]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 9))
def test_interleaving_keeps_all_tokens_and_the_order_of_each_piece(sizes: list[int], length: int) -> None:
    borders = np.concatenate(([0], np.cumsum(sizes)))
    mixed = interleave([np.arange(a, b) for a, b in pairwise(borders)], length).tolist()
    assert sorted(mixed) == list(range(borders[-1]))
    for a, b in pairwise(borders):
        assert [t for t in mixed if a <= t < b] == list(range(a, b))


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=40).filter(lambda lengths: sum(lengths) >= 32), st.integers(0, 3)
)
def test_an_epoch_of_interleaved_rows_holds_every_token_once(lengths: list[int], seed: int) -> None:
    loader = InterleaveLoader(place_shard(lengths), rows=1, row_length=32, seed=seed)
    assert loader.rows_per_epoch == sum(lengths) // 32
    for epoch in range(2):
        rows = range(epoch * loader.rows_per_epoch, (epoch + 1) * loader.rows_per_epoch)
        batch = loader.build(rows)
        assert (batch.documents == 0).all() and batch.loss_mask.all()
        seen = Counter(batch.ids.flatten().tolist())
        assert max(seen.values()) == 1 and len(seen) == loader.rows_per_epoch * 32


def test_windows_of_the_stream_are_as_seamless_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(1).integers(1, 90, size=200).tolist()
    monkeypatch.setattr("glm5.data.long_context.INTERLEAVED_DOCUMENTS", 3)
    loader = InterleaveLoader(place_shard(lengths), rows=1, row_length=32, seed=0)
    assert len(loader._windows) > 20
    backwards = torch.cat([loader.build(range(i, i + 1)).ids for i in reversed(range(loader.rows_per_epoch))])
    assert len(set(backwards.flatten().tolist())) == backwards.numel()
    assert torch.equal(backwards.flip(0), loader.build(range(loader.rows_per_epoch)).ids)
    fresh = InterleaveLoader(place_shard(lengths), rows=1, row_length=32, seed=0)
    assert torch.equal(fresh.build(range(40, 44)).ids, loader.build(range(40, 44)).ids)


def test_a_window_is_ordered_for_the_rows_that_it_lies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    given_rooms = []

    def spy(vectors: np.ndarray, lengths: np.ndarray, row_length: int, room: int) -> np.ndarray:
        given_rooms.append(room)
        return similar_order(vectors, lengths, row_length, room)

    monkeypatch.setattr("glm5.data.long_context.INTERLEAVED_DOCUMENTS", 18)
    monkeypatch.setattr("glm5.data.long_context.similar_order", spy)
    loader = InterleaveLoader(topic_shard(), rows=1, row_length=240, seed=0)
    for place in range(loader.rows_per_epoch):
        loader.pieces(place)
    # Windows of 18 documents of 60 tokens start 0, 1080, 2160, 3240 and 4320 tokens into the stream.
    assert given_rooms == [240, 120, 240, 120, 240]


def test_rows_hold_documents_of_one_topic() -> None:
    loader = InterleaveLoader(topic_shard(), rows=1, row_length=240, seed=0)
    topics = loader.build(range(loader.rows_per_epoch)).ids // 100
    share = [float((row == row.mode().values).float().mean()) for row in topics]
    assert np.mean(share) > 0.9, "four random documents would share a topic by about 0.45"


def test_hashes_spread_evenly() -> None:
    pairs = Similarity([np.array([a, b], dtype=np.uint16) for a in range(64) for b in range(64)])
    load = (pairs.vectors > 0).sum(0)
    # 4096 pairs, and 64 tokens in 127 pieces each, over 512 features: the median feature has pairs alone, about 8.
    assert np.quantile(load, 0.05) >= 3 and np.quantile(load, 0.8) <= 16


def test_similar_order_by_hand() -> None:
    # Two kinds of vectors; rows hold two documents of length 5, the third overflows and opens the next row.
    vectors = np.array([[1, 0], [0, 1], [1, 0], [0, 1], [1, 0]], dtype=np.float32)
    assert similar_order(vectors, np.full(5, 5), 10, 10).tolist() == [0, 2, 4, 1, 3]
    # A full row's last document stands for it, so that the stream goes on where it was.
    assert sorted(similar_order(vectors, np.array([3, 20, 4, 1, 7]), 10, 2).tolist()) == list(range(5))


def test_similarity_is_a_cosine_of_what_is_rare() -> None:
    same, other = [1, 2, 3, 1, 2, 3], [7, 8, 9, 7, 8, 9]
    pieces = [np.array(p, dtype=np.uint16) for p in (same, [3, 1, 2, 3, 1, 2], other, [5, 1, 2, 3], [])]
    found = Similarity(pieces)
    cosines = found.vectors @ found.vectors.T
    assert cosines[0, 0] == pytest.approx(1) and cosines[0, 1] > 0.9 and cosines[0, 2] == pytest.approx(0, abs=1e-6)
    assert 0 < cosines[0, 3] < 0.95 and (cosines[4] == 0).all()
    # A token that all pieces have says less than one that two have.
    common = Similarity([np.array(p, dtype=np.uint16) for p in ([1, 2], [1, 3], [1, 4], [1, 5], [6, 2], [1, 7])])
    assert common.vectors[0] @ common.vectors[4] > common.vectors[0] @ common.vectors[1]
    assert found.of(pieces[:2]) == pytest.approx(found.vectors[:2])


# --- hard negatives


@given(
    st.lists(st.integers(1, 150), min_size=2, max_size=30).filter(lambda lengths: max(lengths) >= 16),
    st.integers(0, 2),
    st.sampled_from([32, 64, 100]),
)
def test_a_stretched_document_keeps_its_order_between_others(lengths: list[int], seed: int, row_length: int) -> None:
    shard = place_shard(lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    loader = NegativesLoader(shard, rows=1, row_length=row_length, seed=seed)
    able = [i for i, length in enumerate(lengths) if length >= 16]
    assert loader.rows_per_epoch == len(able)
    for epoch in range(2):
        batch = loader.build(range(epoch * len(able), (epoch + 1) * len(able)))
        anchors = []
        for row, numbers in zip(batch.ids.tolist(), batch.documents.tolist(), strict=True):
            size = sum(n == 0 for n in numbers)
            assert numbers == [0] * size + [-1] * (row_length - size)
            tokens = row[:size]
            assert len(set(tokens)) == size, "a distractor came twice"
            anchor = int(owner[tokens[0]])
            own = [t for t in tokens if owner[t] == anchor]
            start = int(shard.borders[anchor])
            assert own == list(range(start, start + min(lengths[anchor], row_length // 2)))
            assert owner[tokens[-1]] == anchor, "a row ends with the document's last part"
            others = sum(n for i, n in enumerate(lengths) if i != anchor)
            assert size == min(row_length, len(own) + others) or size < row_length <= len(own) + others + row_length
            if others >= row_length:
                assert size == row_length
                assert any(owner[a] == anchor != owner[b] for a, b in pairwise(tokens))
            anchors.append(anchor)
        assert sorted(anchors) == able


def test_negatives_are_the_most_similar_text() -> None:
    loader = NegativesLoader(topic_shard(), rows=1, row_length=128, seed=0)
    batch = loader.build(range(loader.rows_per_epoch))
    same = []
    for row in (batch.ids // 100).tolist():
        anchor = row[0]
        same.append(sum(t == anchor for t in row) / 128)
    assert np.mean(same) > 0.9, "random distractors would leave about 0.6"


def test_negatives_are_spread_over_all_gaps() -> None:
    shard = place_shard([64] * 20)
    row = NegativesLoader(shard, rows=1, row_length=128, seed=0).batch(0).ids[0].numpy()
    own = row // 64 == row[0] // 64
    starts = np.flatnonzero(np.diff(own.astype(int)) == -1)
    # 64 tokens in chunks of 8 leave seven gaps for 64 tokens of distractors.
    assert chunk_length(128) == 8 and len(starts) == 7
    gaps = [len(gap) for gap in "".join(" " if one else "." for one in own).split()]
    assert sum(gaps) == 64 and max(gaps) - min(gaps) <= 1


# --- recall


def answers_of(text: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """A parser of its own: ((request, reply) of every turn, (question, answer))."""
    lines = text.removesuffix("\n").split("\n")
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    turns = [(a[2:], b) for a, b in pairs if a.startswith("> ")]
    asked = [(a[2:], b) for a, b in pairs if a.startswith("? ")]
    assert pairs == [(f"> {a}", b) for a, b in turns] + [(f"? {a}", b) for a, b in asked]
    return turns, asked


@given(
    st.integers(0, 99),
    st.sampled_from(NEEDLES),
    st.sampled_from(VARIANTS),
    st.integers(1, 8),
    st.integers(0, 2000),
    st.sampled_from(SPLITS),
)
def test_turns_ask_for_what_was_replied(
    index: int, needles: int, variant: str, questions: int, more: int, split: str
) -> None:
    questions = min(questions, needles)
    target = turns_bytes(needles, questions) + more
    pieces = turns_text(3, index, target, needles=needles, variant=variant, questions=questions, split=split)
    assert pieces == turns_text(3, index, target, needles=needles, variant=variant, questions=questions, split=split)
    text = "".join(part for part, _ in pieces)
    assert target - 160 - 60 * questions - 20 * needles < len(text.encode()) <= target
    turns, asked = answers_of(text)
    assert len(asked) == questions
    assert [(part, True) for _, part in asked] == [(p.removesuffix("\n"), m) for p, m in pieces if m]
    request = asked[0][0].split(",")[0]
    assert split_of(f"turns {request}") == split
    assert request.split(" on ")[0] in FORMS
    replies = [reply for asked_for, reply in turns if asked_for == request]
    assert len(replies) == needles and len({r.split(":")[0] for r in replies}) == needles
    used = set()
    for question, answer in asked:
        name, pointer, after = question.split(", ")
        prefix = after.removeprefix("after ")
        assert name == request and answer.startswith(prefix + " ")
        reply = answer.removeprefix(prefix + " ")
        if variant == "key":
            expected = next(r for r in replies if r.startswith(pointer.removeprefix("key ") + ":"))
        elif variant == "last":
            assert pointer == "the last"
            expected = replies[-1]
        elif variant == "reversed":
            expected = replies[-int(re.fullmatch(r"number (\d) from the end", pointer)[1])]  # type: ignore[index]
        else:
            expected = replies[int(re.fullmatch(r"number (\d)", pointer)[1]) - 1]  # type: ignore[index]
        assert reply == expected
        used.add(pointer)
    assert len(used) == (1 if variant == "last" else questions)


def test_every_needle_and_every_depth_is_asked_for() -> None:
    asked, first = Counter(), []
    for index in range(300):
        pieces = turns_text(0, index, 1500, needles=4)
        turns, ((question, _),) = answers_of("".join(part for part, _ in pieces))
        asked[question.split(", ")[1]] += 1
        first.append([request for request, _ in turns].index(question.split(",")[0]) / len(turns))
    assert len(asked) == 4 and min(asked.values()) > 45
    # The first of four uniform places lies at 1/5 on average.
    assert abs(float(np.mean(first)) - 0.2) < 0.04 and max(first) > 0.45


def test_other_requests_are_easy_to_mistake() -> None:
    turns, asked = answers_of("".join(p for p, _ in turns_text(0, 0, 8000)))
    topic = asked[0][0].split(",")[0].split(" on ")[1]
    assert 0.35 < np.mean([request.endswith(f" on {topic}") for request, _ in turns]) < 0.65


def test_options_of_turns_are_checked() -> None:
    for wrong in ({"variant": "first"}, {"split": "test"}, {"questions": 3}, {"questions": 0}):
        with pytest.raises(ConfigError, match="turns_text: variant"):
            turns_text(0, 0, 1000, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="100 bytes are too few for 2 needles and 1 questions; give"):
        turns_text(0, 0, 100)


def recall_rows(kind: Any, tokenizer: Any, rows: int, row_length: int, seed: int, index: int) -> Batch:
    """Rows of recall documents from row `index` on."""
    loader = RecallLoader(kind, tokenizer, rows=rows, row_length=row_length, seed=seed)
    return loader.build(range(index, index + rows))


@pytest.mark.parametrize("kind", ["needle", "turns"])
@pytest.mark.parametrize("row_length", [256, 700])
def test_recall_rows_mark_answers_alone(kind: Any, row_length: int, tokenizer: Any) -> None:
    batch = recall_rows(kind, tokenizer, 6, row_length, 5, 4)
    assert batch.sparse_targets and batch.ids.shape == (6, row_length)
    documents = 0
    for ids, numbers, mask in zip(batch.ids, batch.documents, batch.loss_mask, strict=True):
        assert not mask[numbers < 0].any() and mask.any()
        for n in range(int(numbers.max()) + 1):
            text = tokenizer.decode(ids[numbers == n].tolist())
            marked = [text[i] if m else "\x00" for i, m in enumerate(mask[numbers == n].tolist())]
            answers = [part for part in "".join(marked).split("\x00") if part]
            documents += 1
            if kind == "turns":
                _, asked = answers_of(text)
                assert answers == [f"{answer}\n" for _, answer in asked]
            else:
                again = "".join(answers)
                assert len(answers) <= 1 and text.endswith(again)
                said = text.removesuffix(again)
                assert all(re.fullmatch(r"[a-z]{2,5} = \d{3}", line) for line in said.splitlines()[:-1])
                assert set(again.splitlines()[:-1]) <= set(said.splitlines())
        rest = int((numbers < 0).sum())
        assert rest == 0 if kind == "needle" else rest < turns_bytes(2, 1)
    assert documents > 6 or (kind, row_length) == ("turns", 256)
    assert torch.equal(batch.ids[1], recall_rows(kind, tokenizer, 1, row_length, 5, 5).ids[0])


def test_needle_rows_are_those_of_before(tokenizer: Any) -> None:
    """Row by row from the definition: log-uniform lengths from 32 bytes to two rows, cut at the end of the row."""
    batch = RecallLoader("needle", tokenizer, rows=2, row_length=128, seed=9).batch(3)
    for row, index in enumerate((6, 7)):
        ids: list[int] = []
        number = 0
        while len(ids) < 128:
            draw = torch.rand((), generator=torch.Generator().manual_seed(derive_seed(9, "needle", index, number)))
            pieces = recall_text(derive_seed(9, "text"), index * 1000 + number, int(32 * 8.0 ** float(draw)))
            ids += tokenizer.encode("".join(text for text, _ in pieces))
            number += 1
        assert batch.ids[row].tolist() == ids[:128] and int(batch.documents[row].max()) == number - 1


def test_turn_rows_fill_with_a_tokenizer_that_merges(tokenizer: Any) -> None:
    from glm5.chat.tokenizer import Tokenizer

    texts = ["".join(p for p, _ in turns_text(1, i, 2000)) for i in range(30)]
    merging = Tokenizer.train(texts, 700)
    assert len(merging.encode(texts[0])) < 0.65 * len(texts[0])
    batch = recall_rows("turns", merging, 8, 400, 0, 0)
    assert float((batch.documents < 0).float().mean()) < 0.35
    sizes = [int((n == d).sum()) for n in batch.documents for d in range(int(n.max()) + 1)]
    assert max(sizes) > 300, "no document is about as long as a row"
    with pytest.raises(DataError, match="too short for a recall document"):
        RecallLoader("turns", merging, rows=1, row_length=60, seed=0)


def test_all_variants_and_numbers_of_needles_appear(tokenizer: Any) -> None:
    batch = recall_rows("turns", tokenizer, 60, 1500, 0, 0)
    pointers, needles = set(), set()
    for ids, numbers in zip(batch.ids, batch.documents, strict=True):
        turns, asked = answers_of(tokenizer.decode(ids[numbers == 0].tolist()))
        needles.add([request for request, _ in turns].count(asked[0][0].split(",")[0]))
        pointers |= {re.sub(r"\d+", "N", question.split(", ")[1]) for question, _ in asked}
    assert pointers == {"number N", "key N", "number N from the end", "the last"} and needles == {2, 4, 8}


def test_pieces_are_encoded_one_by_one(tokenizer: Any) -> None:
    expected = tokenizer.encode("ab") + tokenizer.encode("c\n")
    assert encode([("ab", False), ("", True), ("c\n", True)], tokenizer) == (expected, [False] * 2 + [True] * 2)


# --- all of them

BUILDERS: dict[str, Callable[..., RowLoader]] = {"interleave": InterleaveLoader, "negatives": NegativesLoader}


@pytest.mark.parametrize("name", BUILDERS)
def test_rows_are_functions_of_seed_and_index(name: str) -> None:
    shard = topic_shard()

    def make(seed: int) -> RowLoader:
        return BUILDERS[name](shard, rows=3, row_length=128, seed=seed)

    used, whole = make(0), make(0).batch(30)
    for step in (9, 2, 55):
        used.batch(step)
    assert torch.equal(used.batch(30).ids, whole.ids)
    assert torch.equal(used.batch(30, slice(1, 2)).ids, whole.ids[1:2])
    assert not torch.equal(make(1).batch(30).ids, whole.ids)


def test_too_small_shards_are_refused() -> None:
    with pytest.raises(DataError, match="fewer than one row"):
        InterleaveLoader(place_shard([10]), rows=1, row_length=32, seed=0)
    for lengths, row_length in (([50], 64), ([15, 15], 64), ([50, 50], 31)):
        with pytest.raises(DataError, match="negatives_share needs rows of at least 32 tokens"):
            NegativesLoader(place_shard(lengths), rows=1, row_length=row_length, seed=0)


def test_chunks() -> None:
    assert [c.tolist() for c in chunks(np.arange(5), 2)] == [[0, 1], [2, 3], [4]]
    assert [chunk_length(n) for n in (64, 4096, 1 << 20)] == [8, 256, 2048]
