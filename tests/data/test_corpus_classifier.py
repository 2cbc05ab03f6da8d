"""The text classifier: it learns what words decide, repeats itself, and its evaluation counts right."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from glm5.config.corpus import ClassifierRecipe, SourceConfig
from glm5.data.corpus.classifier import BITS, Classifier, Evaluation, evaluate, features
from glm5.data.corpus.labelled import _intervals, _texts, train_and_evaluate
from glm5.errors import DataError
from glm5.stats import roc_area

COMMON = [f"common{n}" for n in range(200)]
MARKS = {True: ["theorem", "river", "century"], False: ["buy", "click", "cookie"]}


def text(label: bool, seed: int, marks: int = 3) -> str:
    draw = random.Random(f"{label} {seed}")
    words = draw.choices(COMMON, k=40) + draw.choices(MARKS[label], k=marks)
    draw.shuffle(words)
    return " ".join(words)


def corpus(count: int, marks: int = 3) -> tuple[list[str], list[str]]:
    return [text(True, n, marks) for n in range(count)], [text(False, n, marks) for n in range(count)]


def test_it_learns_what_distinguishes_the_classes_and_nothing_from_noise() -> None:
    found = train_and_evaluate(*corpus(300))
    model, held_out = found.model, found.held_out
    assert found.counts["train"] + found.counts["held_out"] == 600
    assert held_out.precision > 0.95 and held_out.recall > 0.95 and held_out.area.value > 0.99
    assert model("a theorem of the last century") > 0.5 > model("click here to buy")
    noise = train_and_evaluate(*corpus(300, marks=0)).held_out.area
    assert noise.low < 0.5 < noise.high


def test_classes_of_different_size_count_the_same() -> None:
    positive, negative = corpus(400)
    held_out = train_and_evaluate(positive[:40], negative).held_out
    assert held_out.recall > 0.8 and held_out.area.value > 0.98


def test_the_same_texts_and_seed_give_the_same_weights_and_a_copy_answers_the_same(tmp_path: Path) -> None:
    positive, negative = corpus(50)
    labels = [True] * 50 + [False] * 50
    one, two = (Classifier.train(positive + negative, labels, seed=3) for _ in range(2))
    assert np.array_equal(one.weights, two.weights) and one.bias == two.bias
    assert not np.array_equal(one.weights, Classifier.train(positive + negative, labels, seed=4).weights)
    one.save(tmp_path / "c", {})
    assert Classifier.load(tmp_path / "c")(positive[0]) == one(positive[0])


def test_the_evaluation_counts() -> None:
    found = evaluate([0.9, 0.4, 0.6, 0.6, 0.1], [True, True, True, False, False])
    counts = found.true_positive, found.false_positive, found.false_negative, found.true_negative
    assert counts == (2, 1, 1, 1)
    assert (found.precision, found.recall) == (2 / 3, 2 / 3)
    # Pairs (positive, negative): a beats both; b loses to d and beats e; c ties with d and beats e.
    assert found.area.value == pytest.approx((2 + 1 + 1.5) / 6)
    with pytest.raises(DataError, match="one class"):
        evaluate([0.5], [True])


def test_copies_are_on_one_side_and_texts_of_both_classes_count_for_none() -> None:
    positive, negative = corpus(30)
    counts = train_and_evaluate(positive * 3 + ["shared  text"], [*negative, "shared text"]).counts
    assert counts["train"] + counts["held_out"] == 60


def test_features_are_words_and_pairs() -> None:
    assert len(features("One, two. one TWO")) == 4  # one, two, (one two), (two one)
    assert len(features("")) == 0
    assert 0.0 < Classifier(np.zeros(1 << BITS, np.float32), 0.0)("") < 1.0


def test_one_class_and_damaged_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="both classes"):
        Classifier.train(["a", "b"], [True, True])
    with pytest.raises(DataError, match="has no classifier"):
        Classifier.load(tmp_path)
    model = Classifier(np.zeros(1 << BITS, np.float32), 0.0)
    model.save(tmp_path / "c", {})
    weights = bytearray((tmp_path / "c" / "weights.f32").read_bytes())
    weights[0] ^= 1
    (tmp_path / "c" / "weights.f32").write_bytes(weights)
    with pytest.raises(DataError, match="damaged"):
        Classifier.load(tmp_path / "c")


def test_texts_come_from_folders_repositories_and_commits(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "a.md").write_text("words " * 50)
    for command in (["init", "-q"], ["add", "."], [*"-c user.name=x -c user.email=x commit -qm x".split()]):
        subprocess.run(["git", *command], cwd=tmp_path / "repo", check=True)
    sources = [
        {"path": f"git:{tmp_path}/repo"},
        {"path": str(tmp_path), "repositories": True},
        {"path": str(tmp_path / "repo")},
    ]
    found = [SourceConfig.model_validate({"name": "s", **source}) for source in sources]
    wanted = ClassifierRecipe(name="c", positive=found, negative=found, shortest=10, characters=20)
    for source in found:
        assert list(_texts(source, wanted, lambda format, raw: "damaged")) == [("words " * 4)[:20]]


def test_an_evaluation_without_positives_is_an_error() -> None:
    area = roc_area([1.0], [0.0])
    assert _intervals(Evaluation(1, 0, 0, 1, area))["recall"].value == 1
    for nothing in (Evaluation(0, 1, 0, 1, area), Evaluation(0, 0, 1, 1, area)):
        with pytest.raises(DataError, match="more texts"):
            _intervals(nothing)
