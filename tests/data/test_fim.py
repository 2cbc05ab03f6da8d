"""Fill-in-the-middle: undone, a document is what it was; how many are changed, and which, is decided by the seed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.chat.tokenizer import Tokenizer
from glm5.data.fim import ADDED, SHORTEST, FimDocuments, FimTokens, fim_tokens, rearrange, restore
from glm5.data.loader import BestFitLoader, StreamLoader
from glm5.data.shards import Shard
from glm5.errors import ConfigError
from glm5.seeds import derive_seed

TOKENS = FimTokens(prefix=9001, suffix=9002, middle=9003)
END = 9000


def make_shard(lengths: list[int]) -> Shard:
    """Documents of consecutive numbers (below END, again and again) that end in END."""
    borders = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    tokens = (np.arange(borders[-1]) % END).astype(np.uint16)
    tokens[borders[1:] - 1] = END
    return Shard(tokens, borders, np.asarray(lengths, dtype=np.int64))


def fim(
    shard: Shard, rate: float = 0.5, spm_share: float = 0.5, seed: int = 0, longest: int | None = None
) -> FimDocuments:
    return FimDocuments(shard, TOKENS, rate=rate, spm_share=spm_share, seed=seed, longest=longest)


def test_rearranged_by_hand() -> None:
    ids = np.array([1, 2, 3, 4, 5, 6, END], dtype=np.uint16)
    assert rearrange(ids, 2, 3, TOKENS, suffix_first=False).tolist() == [9001, 1, 2, 9002, 4, 5, 6, 9003, 3, END]
    assert rearrange(ids, 2, 3, TOKENS, suffix_first=True).tolist() == [9002, 4, 5, 6, 9001, 1, 2, 9003, 3, END]
    assert rearrange(ids, 2, 3, TOKENS, suffix_first=True).dtype == np.uint16


@given(st.lists(st.integers(0, 99), max_size=30), st.data(), st.booleans())
def test_restoring_is_exact_for_every_cut(body: list[int], data: st.DataObject, suffix_first: bool) -> None:
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(body))] * 2)))
    ids = np.array([*body, END], dtype=np.uint32)
    assert restore(rearrange(ids, start, end, TOKENS, suffix_first=suffix_first), TOKENS).tolist() == ids.tolist()
    assert restore(ids, TOKENS).tolist() == ids.tolist()


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 3),
    st.sampled_from([None, 20]),
)
def test_an_epoch_changes_its_share_of_the_documents_and_nothing_else(
    lengths: list[int], rate: float, spm_share: float, epoch: int, longest: int | None
) -> None:
    shard = make_shard(lengths)
    documents = fim(shard, rate, spm_share, longest=longest)
    changed = 0
    for i, length in enumerate(lengths):
        found, plain = documents.document(epoch, i), shard.document(i)
        assert restore(found, TOKENS).tolist() == plain.tolist()
        assert len(found) == documents.lengths(epoch)[i] <= documents.slots()[i] <= length + ADDED
        if len(found) != length:
            changed += 1
            assert length > SHORTEST and (longest is None or length <= longest)
            at = sorted(int(np.flatnonzero(found == token)[0]) for token in TOKENS)
            assert at[0] == 0 and at[1] > 1 and at[2] > at[1] + 1 and at[2] < len(found) - 2, "a part is empty"
    can = sum(length > SHORTEST and (longest is None or length <= longest) for length in lengths)
    assert changed == round(rate * can)
    assert documents.lengths(epoch).sum() == documents.total_tokens == sum(lengths) + ADDED * changed


def test_the_share_of_suffix_first_and_the_uniform_cuts() -> None:
    count, length = 4000, 13
    documents = fim(make_shard([length] * count), rate=1.0, spm_share=0.25)
    cuts: Counter[tuple[int, int]] = Counter()
    suffix_first = 0
    for i in range(count):
        found = documents.document(0, i)
        suffix_first += found[0] == TOKENS.suffix
        sizes = {}
        for name, token in zip(TOKENS._fields, TOKENS, strict=True):
            at = int(np.flatnonzero(found == token)[0])
            sizes[name] = next(n for n, t in enumerate(found[at + 1 :]) if t >= END)
        cuts[sizes["prefix"], sizes["prefix"] + sizes["middle"]] += 1
    assert abs(suffix_first / count - 0.25) < 4 * (0.25 * 0.75 / count) ** 0.5
    # 12 tokens have 11 inner borders, so 55 pairs of them; chi-squared with 54 degrees of freedom stays below 100.
    assert len(cuts) == 55 and all(0 < a < b < 12 for a, b in cuts)
    assert sum((n - count / 55) ** 2 / (count / 55) for n in cuts.values()) < 100


def test_epochs_and_seeds_decide_differently_and_purely() -> None:
    shard = make_shard([30] * 50)
    one = fim(shard)

    def state(documents: FimDocuments, epoch: int) -> list[list[int]]:
        return [documents.document(epoch, i).tolist() for i in range(50)]

    first = state(one, 0)
    assert state(one, 1) != first and state(fim(shard, seed=1), 0) != first
    for epoch in (5, 2, 7):
        state(one, epoch)
    assert state(one, 0) == first == state(fim(shard), 0)


@pytest.mark.parametrize(("rate", "longest"), [(0.3, None), (0.7, 40), (1.0, None)])
def test_decisions_are_those_of_one_table_of_draws(
    rate: float, longest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, as a definition; documents are read in blocks and decide one by one."""
    monkeypatch.setattr("glm5.data.fim.BLOCK", 64)
    lengths = np.random.default_rng(3).integers(1, 60, 300)
    documents, epoch = fim(make_shard(lengths.tolist()), rate, 0.3, seed=4, longest=longest), 5
    eligible = (lengths > SHORTEST) & (lengths <= (longest or 99))
    draws = np.random.default_rng(derive_seed(4, "fim", epoch)).random((300, 4))
    order = np.argsort(np.where(eligible, draws[:, 0], 2.0), kind="stable")
    chosen = set(order[: round(rate * eligible.sum())].tolist())
    for i, length in enumerate(lengths.tolist()):
        expected = documents.shard.document(i)
        if i in chosen:
            first = int(draws[i, 1] * (length - 2)) + 1
            second = int(draws[i, 2] * (length - 3)) + 1
            cuts = sorted((first, second + (second >= first)))
            expected = rearrange(expected, *cuts, TOKENS, suffix_first=bool(draws[i, 3] < 0.3))
        assert documents.document(epoch, i).tolist() == expected.tolist()


def test_decisions_of_a_document_do_not_depend_on_those_behind_it() -> None:
    short, long = (fim(make_shard([30] * n), rate=1.0) for n in (10, 50))
    assert all(short.document(3, i).tolist() == long.document(3, i).tolist() for i in range(10))


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("whole", [False, True])
def test_packed_rows_hold_the_changed_documents(rate: float, whole: bool) -> None:
    lengths = [12, 30, 5, 61, 33, 20, 37, 38, 11] * 3
    shard, row_length = make_shard(lengths), 40
    documents = fim(shard, rate, longest=row_length - ADDED if whole else None)
    loader = (BestFitLoader if whole else StreamLoader)(documents, rows=1, row_length=row_length, seed=0)
    for epoch in range(2):
        rows = [loader.batch(epoch * loader.rows_per_epoch + i) for i in range(loader.rows_per_epoch)]
        cells = Counter(t for b in rows for t in b.ids[b.documents >= 0].tolist())
        expected = Counter(t for i in range(len(shard)) for t in documents.document(epoch, i).tolist())
        left_over = expected - cells
        assert not cells - expected
        assert left_over.total() == (0 if whole else documents.total_tokens % row_length)
        if whole:  # every document that fits into a row can be undone there
            found = Counter()
            for b in rows:
                for n in range(int(b.documents.max()) + 1):
                    found[tuple(restore(b.ids[b.documents == n].numpy(), TOKENS).tolist())] += 1
            fitting = [tuple(shard.document(i).tolist()) for i, n in enumerate(lengths) if n <= row_length]
            assert all(found[document] == 1 for document in fitting)


def test_the_tokenizer_must_have_the_tokens(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fim_tokens(tokenizer)
    assert [tokenizer.decode([token]) for token in found] == ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"]
    without = {name: i for name, i in tokenizer.special.items() if name != "<|code_suffix|>"}
    monkeypatch.setattr(tokenizer, "special", without)
    with pytest.raises(ConfigError, match=r"<\|code_suffix\|>"):
        fim_tokens(tokenizer)
