"""Held-out documents that resemble training text move to it: against a comparison of all pairs."""

from __future__ import annotations

import random
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from glm5.data.corpus.plan import repository_key
from glm5.data.corpus.split import SKETCH, HeldOutDocuments, moves, shingles_of, write_shingles
from glm5.data.dedup import plain_words


def jaccard(a: str, b: str, size: int = 5) -> float:
    """Of sets of runs of words, without hashes."""
    sets = []
    for text in (a, b):
        words = plain_words(text)
        sets.append({tuple(words[n : n + size]) for n in range(len(words) - size + 1)} or {tuple(words)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def text(draw: random.Random, words: int) -> str:
    return " ".join(f"w{draw.randrange(5000)}" for _ in range(words))


def variant(draw: random.Random, original: str) -> str:
    """The text with a run of words replaced, and words added: any similarity."""
    words = original.split()
    start, gone, more = draw.randrange(len(words)), draw.randrange(len(words)), draw.randrange(len(words))
    return " ".join([*words[:start], *text(draw, more).split(), *words[start + gone :]]) or "none"


def on_disk(folder: Path, texts: list[str]) -> HeldOutDocuments:
    """Held-out documents of two parts."""
    for part in range(2):
        write_shingles(folder, part, ((n, shingles_of(one, 5)) for n, one in enumerate(texts[part::2])))
    return HeldOutDocuments(folder)


@hypothesis.given(seed=st.integers(0, 10**6), length=st.sampled_from([3, 8, 40, 300]))
def test_all_pairs_of_half_the_shingles_are_found(
    tmp_path_factory: pytest.TempPathFactory, seed: int, length: int
) -> None:
    draw = random.Random(seed)
    texts = [text(draw, draw.randint(1, length)) for _ in range(9)]
    held_out = on_disk(tmp_path_factory.mktemp("held-out"), texts)
    for _ in range(6):
        other = variant(draw, draw.choice(texts))
        found = {held_out.places[owner]: value for owner, value in held_out.similar(shingles_of(other, 5), 0.5)}
        for n, one in enumerate(texts):
            place, value = (n % 2, n // 2), jaccard(one, other)
            assert place in found or value < 0.5, (one, other)
            assert place not in found or found[place] == pytest.approx(value)


def test_nothing_is_found_among_nothing(tmp_path: Path) -> None:
    assert list(on_disk(tmp_path, []).similar(shingles_of("a b c d e f", 5), 0.5)) == []
    assert len(shingles_of("", 5)) == len(shingles_of("two words", 5)) == 1
    assert np.array_equal(shingles_of("Two, words!", 5), shingles_of("two words", 5))
    assert len(shingles_of(" ".join(map(str, range(SKETCH + 4))), 5)) == SKETCH


def test_what_resembles_a_moved_document_moves_too() -> None:
    rows = [
        (0, 1, 5, 5, 0, 0.9),  # (0, 1) resembles a training document,
        (0, 2, 0, 1, 1, 0.6),  # (0, 2) resembles (0, 1),
        (3, 3, 0, 2, 1, 0.6),  # (3, 3) resembles (0, 2);
        (4, 4, 4, 5, 1, 1.0),  # (4, 4) and (4, 5) resemble each other only
        (4, 5, 4, 4, 1, 1.0),
    ]
    both = [*rows, *((c, d, a, b, 1, s) for a, b, c, d, other, s in rows if other)]
    assert moves(np.array(both)) == {(0, 1), (0, 2), (3, 3)}


def test_code_and_rows_of_a_repository_move_together() -> None:
    rows = np.array([(0, 1, 5, 5, 0, 0.9), (7, 1, 0, 2, 1, 0.6)])
    repositories = {(0, 1): "a", (0, 2): "a", (0, 3): "b", (1, 1): "a"}
    assert moves(rows, repositories) == {(0, 1), (0, 2), (1, 1), (7, 1)}  # (7, 1) resembles (0, 2)
    assert moves(rows) == {(0, 1)}
    assert moves(rows, repositories, {(1, 1)}) == {(0, 1), (0, 2), (1, 1), (7, 1)}  # a README goes with the code,
    assert moves(rows, repositories, {(0, 1)}) == {(0, 1)}  # a license that everybody has takes nothing along


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("click", "click"),
        ("Click.git", "click"),
        ("click-8.1.7", "click"),
        ("click-8.1.7.dist-info", "click"),
        ("click-main.zip", "click"),
        (f"click-{'3a' * 20}.tar.zst", "click"),
        ("domain", "domain"),
        ("click_8.1.7-2.orig.tar.xz", "click"),
        ("click-v8.tar.gz", "click"),
        ("click.tgz", "click"),
        ("ninja.py", "ninja.py"),
        ("x-2d-draw", "x"),
        ("-1", "-1"),
    ],
)
def test_copies_of_a_repository_have_one_key(name: str, key: str) -> None:
    assert repository_key(name) == key
