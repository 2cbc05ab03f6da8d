"""The texts of `glm5 reproduce data-quality`: held-out text is new, packages are on one side only, nothing is counted
twice. `test_reproduce.py` runs the experiment."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from glm5.data.shards import Shard
from glm5.errors import MissingExtraError
from glm5.reproduce import quality_corpus
from glm5.reproduce.data_quality import EXPERIMENT, joined
from glm5.reproduce.quality_corpus import CORPORA, HELD_OUT, HELD_OUT_CHARACTERS, TRAIN


def text(seed: int, words: int = 80) -> str:
    return " ".join(f"w{n}" for n in np.random.default_rng(seed).integers(0, 5000, words))


def test_held_out_text_resembles_neither_training_text_nor_itself() -> None:
    seen = [text(0), text(1)]
    near, twice = text(0) + " and an end", text(2)
    found = [("a", near), ("b", twice), ("c", twice + " again"), ("d", text(3)), ("e", text(4, 2000))]
    kept = dict(quality_corpus._fresh(seen, found, 10**6))
    assert "a" not in kept and len({"b", "c"} & set(kept)) == 1 and {"d", "e"} <= set(kept)
    assert len(kept["e"]) == HELD_OUT_CHARACTERS and kept["d"] == text(3)
    few = quality_corpus._fresh(seen, found, 600)
    assert few == list(kept.items())[: len(few)] and len(few) < len(kept)
    assert quality_corpus._fresh(seen, [], 5) == []


def test_a_package_is_for_training_or_held_out_and_files_stay_within_their_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed"
    for package in range(40):
        for file in range(4):
            place = installed / f"p{package}" / f"{file}.py"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("x" * 100)
    (installed / "pydoc_data").mkdir()
    (installed / "pydoc_data" / "topics.py").write_text("the reference")
    monkeypatch.setitem(quality_corpus.SOURCES, "code", str(installed))
    quality_corpus._stage("code", tmp_path / "raw", 2500, 250)
    sides = {split: sorted((tmp_path / "raw" / split / "code").rglob("*.py")) for split in (TRAIN, HELD_OUT)}
    packages = {split: {path.parent.name for path in files} for split, files in sides.items()}
    assert not packages[TRAIN] & packages[HELD_OUT] and "pydoc_data" not in packages[TRAIN] | packages[HELD_OUT]
    assert len(sides[TRAIN]) == 25 and len(sides[HELD_OUT]) == 5, "100 bytes each, within 2,500 and a fifth of it"
    assert all(sum(path.parent.name == package for path in sides[TRAIN]) <= 2 for package in packages[TRAIN])


def test_shards_are_joined_in_order() -> None:
    parts = [
        Shard(np.arange(5, dtype=np.uint16), np.array([0, 2, 5]), np.array([4, 6]), ["a", "b"]),
        Shard(np.arange(10, 13, dtype=np.uint16), np.array([0, 3]), np.array([7]), ["c"]),
    ]
    whole = joined(parts)
    assert [whole.document(i).tolist() for i in range(3)] == [[0, 1], [2, 3, 4], [10, 11, 12]]
    assert whole.num_bytes.tolist() == [4, 6, 7] and list(whole.paths) == ["a", "b", "c"]


def test_every_question_compares_equal_tokens() -> None:
    sizes = EXPERIMENT.sizes(False, None)
    assert sizes["long_rows"] * sizes["long_length"] == sizes["rows"] * sizes["row_length"]
    trained = {**dict.fromkeys(CORPORA, sizes["steps"]), **sizes["variant_steps"]}
    assert set(trained) == {variant.name for variant in EXPERIMENT.variants}
    for question in EXPERIMENT.questions:
        assert trained[question.left] == trained[question.right]
        assert question.expect == "equal" or question.least > 0, "every question names what would matter"


def test_the_extra_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datatrove" else known(name))
    with pytest.raises(MissingExtraError, match=r"glm5\[data\]"):
        quality_corpus.build(tmp_path / "corpus", {})
    assert not (tmp_path / "corpus").exists()
