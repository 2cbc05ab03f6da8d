"""The text classifier: it learns what words decide, repeats itself, and its evaluation counts right."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from glm5.config.corpus import ClassifierRecipe, SourceConfig
from glm5.data.corpus.classifier import BITS, Classifier, Evaluation, evaluate, features, write_model
from glm5.data.corpus.clusters import rounded
from glm5.data.corpus.embeddings import Embeddings
from glm5.data.corpus.labelled import _intervals, _texts, train_and_evaluate
from glm5.data.corpus.logistic import EmbeddingClassifier, fit, load_classifier
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


class Marks(Embeddings):
    """Counts of the marks, instead of a model."""

    def __call__(self, text: str) -> np.ndarray:
        return rounded(np.array([text.count(mark) for label in (True, False) for mark in MARKS[label]]))

    def sha256(self) -> str:
        return self.model


def test_a_classifier_of_embeddings_learns_them_beats_the_baseline_and_survives_saving(tmp_path: Path) -> None:
    found = train_and_evaluate(*corpus(200), embeddings=Marks("marks"))
    assert found.held_out.area.value == 1 > found.baseline.area.high
    assert isinstance(found.model, EmbeddingClassifier)
    found.model.save(tmp_path / "c", {"name": "x"})
    again = load_classifier(tmp_path / "c")
    vectors = [Marks("marks")(one) for one in corpus(5)[0]]
    assert isinstance(again, EmbeddingClassifier) and again.embeddings.model == "marks"
    assert [again.at(vector) for vector in vectors] == [found.model.at(vector) for vector in vectors]
    for facts in ('"sha256": 5', '"model": "marks"'):
        text = (tmp_path / "c" / "classifier.json").read_text().replace('"sha256": "marks"', facts)
        (tmp_path / facts[1:4]).mkdir()
        write_model(tmp_path / facts[1:4], again.weights, json.loads(text))
        with pytest.raises(DataError, match="another kind"):
            load_classifier(tmp_path / facts[1:4])
    again.embeddings = Marks("other")
    with pytest.raises(DataError, match="another state of other"):
        again.check(tmp_path / "c")


def test_the_regression_is_at_the_minimum_of_its_loss() -> None:
    """By torch's derivative of the loss as it is written down."""
    draw = np.random.default_rng(0)
    rows, labels = draw.normal(size=(300, 6)) * [1, 5, 0.1, 1, 1, 0] + 3, draw.random(300) < 0.3
    rows[labels, 0] += 1
    weights, bias = fit(rows, labels.tolist())
    scaled = (rows - rows.mean(0)) / np.maximum(rows.std(0), 1e-9)
    w = torch.tensor(weights * rows.std(0), requires_grad=True)
    b = torch.tensor(bias + weights @ rows.mean(0), requires_grad=True)
    logits, wanted = torch.tensor(scaled) @ w + b, torch.tensor(labels, dtype=torch.float64)
    worth = torch.where(wanted > 0, 0.5 / wanted.mean(), 0.5 / (1 - wanted.mean()))
    loss = (worth * torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")).sum()
    (loss + w.square().sum() / 2).backward()
    assert w.grad is not None and b.grad is not None
    assert float(w.grad.abs().max()) < 1e-6 and float(b.grad.abs()) < 1e-6
    assert weights[0] > 0.5 and np.isfinite(weights).all()
