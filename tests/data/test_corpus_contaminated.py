"""Documents with problems of evaluations are found as the check of a trained model finds them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from glm5.data.corpus.contaminated import Problems, read_problems
from glm5.errors import DataError
from glm5.eval.contamination import Overlap

PROBLEM = "A farmer has twelve hens and every hen lays three eggs a day, so how many eggs are there after one week?"


def test_copies_are_found_whatever_their_punctuation_and_other_texts_are_not() -> None:
    problems = Problems({"hens": PROBLEM, "short": "Is this a very short one?", "tiny": "two words"})
    assert len(problems) == 2
    assert problems.worst(f"Before. {PROBLEM.upper().replace(',', ' --')} After.") == ("hens", 1.0)
    assert problems.worst("He asked: is this a very short one? No.") == ("short", 1.0)
    assert problems.worst("A farmer has twelve hens and they lay some eggs; two words") == ("", 0.0)
    assert problems.worst("") == ("", 0.0)


@hypothesis.given(st.integers(0, 10**6))
def test_the_share_is_that_of_the_check_of_a_trained_model(seed: int) -> None:
    draw = random.Random(seed)
    words = [f"w{draw.randrange(30)}" for _ in range(200)]
    problems = {}
    for n in range(6):
        start, length = draw.randrange(150), draw.randint(3, 50)
        problem = words[start : start + length]
        if draw.random() < 0.5:
            problem[draw.randrange(len(problem))] = "other"
        problems[str(n)] = " ".join(problem)
    text = " ".join(words)
    overlap = Overlap(problems)
    overlap.read([text])
    assert Problems(problems).worst(text)[1] == max(share or 0.0 for share in overlap.shares().values())


def test_problems_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": PROBLEM}) + "\n")
    assert read_problems([f"{tmp_path}/p.jsonl#question"]).worst(PROBLEM)[1] == 1.0
    (tmp_path / "q.jsonl").write_text(json.dumps({"text": "short"}) + "\n")
    with pytest.raises(DataError, match="no problem"):
        read_problems([f"{tmp_path}/q.jsonl"])
    with pytest.raises(DataError, match="malformed"):
        read_problems([f"{tmp_path}/p.jsonl"])
