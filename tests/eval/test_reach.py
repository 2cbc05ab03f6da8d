"""How far information travels: text whose distance is known, by a scorer that knows a token if it stood before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from glm5.chat import Tokenizer
from glm5.cli import app
from glm5.data.documents import Document
from glm5.data.entropy_long import TokenScores
from glm5.data.shards import Shard, build_shards
from glm5.errors import DataError
from glm5.eval.reach import BLOCK, losses, reach, summarise, told, windows_of
from glm5.report.reach import write_reach_page


def seen_before(sequences: Sequence[np.ndarray], last: int | None = None) -> list[TokenScores]:
    """A token costs 1 nat if the sequence has it before, else 3."""
    found = []
    for sequence in sequences:
        costs = np.full(len(sequence), 1.0)
        costs[np.unique(sequence, return_index=True)[1]] = 3.0
        found.append(TokenScores(-costs[len(costs) - (last or len(costs) - 1) :], np.zeros(0)))
    return found


def repeating(period: int, times: int = 6, documents: int = 3) -> Shard:
    """Documents in which every token comes again after `period` others."""
    one = np.tile(np.arange(period, dtype=np.uint16), times)
    borders = np.arange(documents + 1, dtype=np.int64) * len(one)
    return Shard(np.tile(one, documents), borders, np.full(documents, len(one)))


@pytest.mark.parametrize(("period", "distance"), [(20, 32), (60, 64), (100, 128), (200, 256)])
def test_a_repetition_is_found_at_its_distance(period: int, distance: int) -> None:
    shard = repeating(period)
    found = losses(seen_before, shard, length=period * 6, blocks=40)
    far = found.starts >= period  # before that, nothing is a repetition
    result = summarise(type(found)(found.windows, found.values[far], found.documents[far], found.starts[far]))
    shares = {row["distance"]: row["share"] for row in result["distances"]}
    # Token k of a block sees k tokens more than the window: a few see the repetition in the next smaller one.
    early = sum(distance // 2 + k >= period for k in range(BLOCK)) / BLOCK
    assert shares[f"up to {distance // 2}"] == early and shares[f"up to {distance}"] == 1 - early
    assert result["loss"] == 1.0 and result["hurt"] == 0
    for row in result["windows"]:
        if row["tokens"] and row["window"] + BLOCK <= period:
            assert row["gain"] == 2.0 and row["loss"] == 3.0
        elif row["window"] >= period and row["tokens"]:
            assert row["gain"] == 0.0


def test_only_text_that_has_the_context_counts() -> None:
    found = losses(seen_before, repeating(50, times=4), length=120, blocks=1000)
    assert windows_of(120) == found.windows == [16, 32, 64]
    assert (found.starts + BLOCK <= 120).all() and (found.starts >= 32).all()
    for column, window in enumerate(found.windows):
        assert (np.isnan(found.values[..., column]).all(-1) == (found.starts <= window)).all()
    assert not np.isnan(found.values[..., -1]).any()
    with pytest.raises(DataError, match="No document has the 48 tokens"):
        losses(seen_before, repeating(10, times=4), length=120, blocks=5)


def test_the_page_is_inert_and_tells_every_set(tmp_path: Path) -> None:
    shards = {"<b>near</b>": repeating(20), "far": repeating(100)}
    result = {"checkpoint": "<i>m</i>"} | reach(seen_before, shards, length=300, blocks=20)
    page = write_reach_page(result, tmp_path / "reach.html").read_text(encoding="utf-8")
    assert "<b>" not in page and "<i>m" not in page and "&lt;b&gt;near" in page and "up to 128" in page
    assert len(told(result)) == 2 and "far: " in told(result)[1]
    assert result["sets"]["far"]["windows"][0]["gain"] > result["sets"]["<b>near</b>"]["windows"][1]["gain"]


def test_the_command_writes_both_files(tmp_path: Path, small: Any, tokenizer: Tokenizer) -> None:
    small(vocab_size=tokenizer.vocab_size, use_dsa=False).save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    texts = [Document(f"d{i}", f"{i} mice and men " * 12) for i in range(6)]
    build_shards(texts, tokenizer, tmp_path / "notes", ["test"])
    arguments = ["data", "reach", str(tmp_path / "model"), str(tmp_path / "notes"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--length", "128", "--blocks", "4", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "out" / "reach.json").read_text(encoding="utf-8"))
    assert found["sets"][str(tmp_path / "notes")]["tokens"] == 4 * BLOCK
    assert (tmp_path / "out" / "reach.html").exists()
    wrong = CliRunner().invoke(app, [*arguments, "--split", "test"])
    assert "choose train or held_out" in str(wrong.exception)
