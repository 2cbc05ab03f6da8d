"""Sentences of manner: held-out ones are of equal shape, pass the checks, and stand in no pair for training."""

from __future__ import annotations

import random

import pytest

from glm5.tasks.general import manner
from glm5.tasks.general.family import FREE, VERIFIED, AssistantProblem

SPLITS = {"train": manner.PAIRS, "heldout": manner.HELD_OUT}


@pytest.mark.parametrize("dimension", list(manner.PAIRS))
def test_splits_share_no_sentence(dimension: str) -> None:
    said = {
        split: {manner.sentence(random.Random(i), dimension, good, split) for i in range(200) for good in (True, False)}
        for split in SPLITS
    }
    for split, pairs in SPLITS.items():
        assert said[split] == {text for pair in pairs[dimension] for text in pair}
    assert not said["train"] & said["heldout"]
    assert manner.sentence(random.Random(1), dimension, True) in said["train"]


@pytest.mark.parametrize(("dimension", "good", "bad"), [(d, *p) for d, ps in manner.HELD_OUT.items() for p in ps])
def test_held_out_sentences_have_equal_shapes_and_pass_the_checks(dimension: str, good: str, bad: str) -> None:
    shapes = [
        (len(text), [len(text.split()), sum(c.isupper() for c in text)], [c for c in text if c in ".,!?'"])
        for text in (good, bad)
    ]
    assert shapes[0] == shapes[1]
    for name in FREE:
        if name.startswith(f"{dimension}/"):
            problem = AssistantProblem("x", name, VERIFIED[name](random.Random(name)))
            assert [problem.broken(f"{problem.case.good} {text}") for text in (good, bad)] == [[], []], name
