"""Scores of documents: chunks, their mean and its floor, resuming, what is unreadable, and the use in a corpus."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.agents.endpoint import Endpoint, EndpointError
from glm5.data.corpus.scores import Chunking, Scores, load_scorer
from glm5.errors import DataError
from glm5.eval.answer_judge import AnswerJudge
from glm5.eval.document_scores import question, score_documents
from tests.agents.scripted_model import Say, ScriptedModel

CHUNKING = Chunking(characters=400, most=6)


def teacher(body: dict[str, Any], turn: int) -> Say:
    """5 for a proof, 0 for advertising, nothing readable for a riddle, else 2."""
    text = body["messages"][-1]["content"]
    (shown,) = re.findall(r"^BEGIN TEXT (\w+)\n((?:\| .*\n)*)END TEXT \1$", text, re.MULTILINE)
    if "riddle" in shown[1]:
        return Say('{"score": 7}' if turn % 2 else "I give it a five")
    score = 5 if "proof" in shown[1] else 0 if "buy" in shown[1] else 2
    return Say(json.dumps({"reason": "It says so.", "score": score}))


@given(st.text(st.sampled_from("ab\n"), min_size=1, max_size=6000), st.integers(200, 900))
def test_pieces_are_the_text(text: str, size: int) -> None:
    pieces = Chunking(size, most=10_000).pieces(text)
    assert "".join(pieces) == text and all(pieces)
    assert all(size // 2 <= len(piece) <= size for piece in pieces[:-1]) and len(pieces[-1]) <= 1.25 * size
    few = Chunking(size, most=3).pieces(text)
    assert len(few) == min(3, len(pieces)) and few[0] == pieces[0] and (len(few) < 3 or few[-1] == pieces[-1])


def test_the_largest_piece_is_shown_whole() -> None:
    (piece,) = Chunking(19_200).pieces("x\n" * 12_000)  # what --chunk allows at most
    assert question(piece, "r").messages[0].content.count("| x") == 12_000


def test_the_mean_counts_lengths_and_the_least_chunk_decides_below_the_floor() -> None:
    assert Chunking(floor=0.2).score([1.0, 0.4], [300, 100]) == pytest.approx(0.85)
    assert Chunking(floor=0.5).score([1.0, 0.4], [300, 100]) == pytest.approx(0.4)
    assert Chunking(floor=0.2).score([0.0], [1]) == 0.0


def test_documents_are_scored_once_and_the_run_goes_on(tmp_path: Path) -> None:
    long = "".join(f"proof number {n}\n" for n in range(40)) + "buy now!\n" * 30
    documents = [("a", "a proof"), ("copy", "a proof"), ("b", "words"), ("c", "a riddle"), ("long", long)]
    out = tmp_path / "scores"
    with ScriptedModel(teacher) as model:
        judge = AnswerJudge.at(model.url, "m", None, 2)
        first = score_documents(documents, out, judge, CHUNKING, most=2)
        assert (first.documents, first.scored, first.left, len(model.bodies)) == (4, 2, 2, 2)
        with (out / "answers.jsonl").open("a") as file:
            file.write('{"sha256": "cut o')  # a crash
        second = score_documents(documents, out, judge, CHUNKING)
        pieces = len(CHUNKING.pieces(long))
        assert (second.scored, second.unreadable, second.left, second.asked) == (3, 1, 0, 2 + pieces)
        assert len(model.bodies) == 2 + 2 + pieces  # the riddle is asked twice
        third = score_documents(documents, out, judge, CHUNKING)
        assert third == second and len(model.bodies) == 4 + pieces
        answers = (out / "answers.jsonl").read_text()
        (out / "answers.jsonl").write_text(answers.replace("{", "", 1))
        with pytest.raises(DataError, match=r"answers.*:1 is damaged"):
            score_documents(documents, out, judge, CHUNKING)
        (out / "answers.jsonl").write_text(answers)
        with pytest.raises(DataError, match="another model, rubric or chunking"):
            score_documents(documents, out, judge, Chunking(500))
    scores = load_scorer(out)
    assert isinstance(scores, Scores)
    found = [scores(text) for _, text in documents]
    assert found[0] == found[1] == 1.0 and found[2] == pytest.approx(0.4) and math.isnan(found[3])
    assert found[4] == 0.0  # a chunk of advertising decides alone
    assert math.isnan(scores("other"))
    (out / "scores.f32").write_bytes(np.zeros(3, "<f4").tobytes())
    with pytest.raises(DataError, match="scores"):
        load_scorer(out)


@pytest.mark.parametrize("status", [400, 401, 403])
def test_documents_without_a_reply_are_asked_again(tmp_path: Path, status: int) -> None:
    documents = [("a", "a proof"), ("b", "words")]
    with ScriptedModel(teacher, refuse=[(status, "no")] * 2) as model:
        judge = AnswerJudge.at(model.url, "m", None, 1)
        with pytest.raises(EndpointError, match="1 documents got no reply; run the same command again"):
            score_documents(documents, tmp_path / "s", judge, CHUNKING)
        assert np.isnan(Scores.load(tmp_path / "s")("a proof"))
        again = score_documents(documents, tmp_path / "s", judge, CHUNKING)
    assert (again.scored, again.unreadable, again.left, len(model.bodies)) == (2, 0, 0, 4)


def test_a_server_that_is_down_ends_the_run_without_a_record(tmp_path: Path) -> None:
    judge = AnswerJudge(Endpoint("http://127.0.0.1:9", "m", pauses=()), 2)
    documents = ((f"d{n}", f"text {n}") for n in range(1000))
    with pytest.raises(EndpointError, match="no verdict 8 times in a row"):
        score_documents(documents, tmp_path / "s", judge, CHUNKING)
    assert not (tmp_path / "s" / "answers.jsonl").exists()


def test_a_server_that_fails_ends_the_run(tmp_path: Path) -> None:
    with ScriptedModel(lambda body, turn: Say("no")) as model:
        judge = AnswerJudge.at(model.url, "m", None, 2)
        documents = ((f"d{n}", f"text {n}") for n in range(1000))
        with pytest.raises(EndpointError, match="no verdict 8 times in a row"):
            score_documents(documents, tmp_path / "s", judge, CHUNKING)
    assert len(model.bodies) < 40
