"""Near-duplicates against brute force: every pair compared by the sets of its shingles, groups by walking the graph."""

from __future__ import annotations

import functools
import importlib.util
import random
import re
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.data import dedup
from glm5.data.dedup import bands, distinct, group, select, shingle_hashes, similarity, sketcher
from glm5.data.documents import Document
from glm5.errors import ConfigError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("datasketch") is None, reason="needs datasketch")

WORDS = [f"w{i}" for i in range(3000)]


@functools.cache
def true_shingles(text: str) -> frozenset[tuple[str, ...]]:
    words = re.findall(r"\w+|[^\w\s]+", text)
    return (
        frozenset(tuple(words[i : i + 5]) for i in range(len(words) - 4)) if len(words) >= 5 else frozenset([(text,)])
    )


def jaccard(a: str, b: str) -> float:
    one, other = true_shingles(a), true_shingles(b)
    return len(one & other) / len(one | other)


def brute_force(texts: list[str], threshold: float) -> list[int]:
    """The first member of each text's connected component."""
    sets = [true_shingles(text) for text in texts]
    groups = list(range(len(texts)))
    for i in range(len(texts)):
        for j in range(i):
            if len(sets[i] & sets[j]) / len(sets[i] | sets[j]) >= threshold and groups[i] != groups[j]:
                low, high = sorted((groups[i], groups[j]))
                groups = [low if g == high else g for g in groups]
    return groups


def grouped(texts: list[str], threshold: float = 0.8) -> list[int]:
    sketches = [sketcher()(text) for text in texts]
    signatures = np.array([s.signature for s in sketches], dtype=np.uint32).reshape(-1, dedup.NUM_PERM)
    return group(signatures, lambda i: sketches[i].shingles, threshold).tolist()


def edited(text: str, edits: int, rng: random.Random) -> str:
    words = text.split()
    for _ in range(edits):
        at = rng.randrange(len(words))
        words[at : at + rng.randrange(2)] = [rng.choice(WORDS)] * rng.randrange(2)
    return " ".join(words)


def corpus(seed: int, families: int = 20, size: int = 9, words: int = 150) -> list[str]:
    """Families of texts with up to 11 edits of one ancestor or of each other: similarities from 0.4 to 1."""
    rng = random.Random(seed)
    texts = []
    for _ in range(families):
        family = [" ".join(rng.choices(WORDS, k=rng.randint(20, words)))]
        for _ in range(rng.randrange(size)):
            family.append(edited(rng.choice(family), rng.randrange(12), rng))
        texts += family
    rng.shuffle(texts)
    return texts


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("seed", range(4))
def test_groups_are_those_of_brute_force(seed: int, threshold: float) -> None:
    texts = corpus(seed)
    expected = brute_force(texts, threshold)
    pairs = [jaccard(a, b) for i, a in enumerate(texts) for b in texts[:i]]
    assert (
        sum(threshold <= p < threshold + 0.1 for p in pairs) > 3 < sum(threshold - 0.1 < p < threshold for p in pairs)
    )
    assert 0 < len(set(expected)) < len(texts)
    assert grouped(texts, threshold) == expected


def test_candidates_are_compared_exactly() -> None:
    """Signatures that lie change nothing: with one signature for all, only what is really similar is joined."""
    texts = corpus(7)
    sketch = sketcher()
    shingles = [sketch(text).shingles for text in texts]
    same = np.zeros((len(texts), dedup.NUM_PERM), dtype=np.uint32)
    assert group(same, shingles.__getitem__, 0.8).tolist() == brute_force(texts, 0.8)


def test_a_chain_is_one_group() -> None:
    words = [f"w{i}" for i in range(100)]
    texts = []
    for step in range(12):  # each is a shift of the one before
        texts.append(" ".join(words[step * 4 : step * 4 + 60]))
    assert jaccard(texts[0], texts[1]) >= 0.8 > jaccard(texts[0], texts[2])
    assert grouped(texts[::-1]) == [0] * 12


def test_similarity_is_of_sets_of_five_words() -> None:
    a = "one two three four five six seven"
    b = "one two three four five six eight"
    assert similarity(shingle_hashes(a), shingle_hashes(b)) == jaccard(a, b) == 2 / 4
    assert (shingle_hashes(a) == shingle_hashes("one\ttwo three\n\nfour  five six seven\n")).all()
    assert len(shingle_hashes("x " * 100)) == 1  # a set
    assert similarity(shingle_hashes(a), shingle_hashes("seven six five four three two one")) == 0  # the order counts
    assert similarity(shingle_hashes("1 + 2 * 3 = 7"), shingle_hashes("1 * 2 + 3 = 7")) == 0  # so does punctuation


def test_short_texts_are_duplicates_only_when_equal() -> None:
    texts = ["a b c d", "a b c  d", "", "a b c d", "!", "?", "a b c d e", "a b c d e\n"]
    assert grouped(texts) == [0, 1, 2, 0, 4, 5, 6, 6]


def test_scripts_without_spaces_are_compared_by_character() -> None:
    text = "".join(chr(0x4E00 + i) for i in range(300))
    assert len(shingle_hashes(text)) == 296
    changed = text[:150] + "変" + text[151:]
    other = "".join(chr(0x5E00 + i) for i in range(300))
    assert grouped([text, changed, other]) == [0, 0, 2]


def test_bands_find_what_is_at_the_threshold() -> None:
    for threshold in (0.3, 0.5, 0.8, 0.95, 1.0):
        count, rows = bands(threshold)
        assert count * rows <= dedup.NUM_PERM
        assert (1 - threshold**rows) ** count <= 1e-6
        wider = rows + 1
        assert wider > dedup.NUM_PERM or (1 - threshold**wider) ** (dedup.NUM_PERM // wider) > 1e-6
    for threshold in (0.0, 0.29, 1.01, float("nan")):
        with pytest.raises(ConfigError, match=r"from 0\.3 to 1"):
            bands(threshold)


def test_large_groups_need_few_comparisons() -> None:
    """A thousand copies of one file with another number in it: not every pair is compared."""
    base = " ".join(random.Random(0).choices(WORDS, k=400))
    sketch = sketcher()
    sketches = [sketch(f"{base} number {i}") for i in range(1000)]
    asked: Counter[int] = Counter()

    def shingles(index: int) -> np.ndarray:
        asked[index] += 1
        return sketches[index].shingles

    groups = group(np.array([s.signature for s in sketches]), shingles)
    assert groups.tolist() == [0] * 1000
    assert asked.total() < 4000


def comparisons(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Counter[int]]:
    """Groups, and how often each pair was compared exactly."""
    pairs: Counter[int] = Counter()
    near = dedup.near

    def counted(a: np.ndarray, b: np.ndarray, threshold: float) -> bool:
        pairs[hash((a.tobytes(), b.tobytes()))] += 1
        return near(a, b, threshold)

    monkeypatch.setattr(dedup, "near", counted)
    return grouped(texts), pairs


def test_a_pair_that_is_refused_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that differ in the last word: six of eight shingles are common, and most bands propose most pairs."""
    groups, pairs = comparisons([f"a b c d e f g h i j {k}" for k in range(60)], monkeypatch)
    assert groups == list(range(60))
    assert len(pairs) == pairs.total() <= 60 * 59 // 2


def test_a_crowd_that_is_alike_takes_time_in_proportion_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record is compared with few others, but copies are found, and so are near ones that hide among them."""
    monkeypatch.setattr(dedup, "_CROWD", 16)
    monkeypatch.setattr(dedup, "_REFUSALS", 32)
    texts = [f"a b c d e f g h i j {k}" for k in range(400)]
    hidden = " ".join(WORDS[:50])
    groups, pairs = comparisons([hidden, *texts, *texts, hidden + " end"], monkeypatch)
    assert groups == [0, *range(1, 401), *range(1, 401), 0]
    assert pairs.total() <= 802 * (32 + 1)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=40),
)
@settings(max_examples=200)
def test_selection(members: list[tuple[int, bool]]) -> None:
    labels, held = [label for label, _ in members], [h for _, h in members]
    groups = np.array([labels.index(label) for label in labels], dtype=np.int64)
    found = select(groups, held)
    kept = set()
    near = train = held_out = 0
    for first in set(groups.tolist()):
        indices = [i for i, g in enumerate(groups) if g == first]
        stays = next((i for i in indices if held[i]), indices[0])
        kept.add(stays)
        for i in indices:
            if i != stays:
                held_out += held[i]
                near += not held[i] and held[stays]
                train += not held[i] and not held[stays]
    assert set(np.flatnonzero(found.keep).tolist()) == kept
    assert (found.dropped_near_held_out, found.dropped_train, found.dropped_held_out) == (near, train, held_out)
    assert found.groups == sum(count > 1 for count in Counter(labels).values())


def test_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ConfigError, match=r"pip install 'glm5\[data\]'"):
        sketcher()


def test_distinct_documents_keep_their_order_and_drop_the_near_ones() -> None:
    words = [f"word{i}" for i in range(400)]
    held = next(f"h{i}.py" for i in range(1000) if Document(f"h{i}.py", "").held_out)
    other = " ".join(reversed(words))
    documents = [
        Document("near-held.py", " ".join(words[:-1])),
        Document("first.py", other),
        Document(held, " ".join(words)),
        Document("again.py", other + " end"),
        Document("alone.py", " ".join(f"other{i}" for i in range(400))),
    ]
    assert not any(d.held_out for d in documents if d.path != held)
    assert [d.path for d in distinct(documents)] == ["first.py", held, "alone.py"]
