"""metrics.jsonl: what is written is read, and a crash or a resume leaves a correct file."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.errors import DataError
from glm5.obs.metrics import MetricsWriter, read_metrics


def fill(path: Path, *points: tuple[str, int]) -> None:
    with MetricsWriter(path) as writer:
        for stage, step in points:
            writer.write(stage, step, {"loss": step / 2})


def steps(path: Path) -> list[tuple[str, int]]:
    return [(row["stage"], row["step"]) for row in read_metrics(path)]


def test_a_line_is_on_disk_when_write_returns_and_is_strict_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run" / "metrics.jsonl")
    numbers = {"loss": 2.5, "bad": math.nan, "huge": math.inf, "np": numpy.float32(0.5), "on": True, "count": 2**60}
    writer.write("pretrain", 7, numbers)
    [line] = writer.path.read_text().splitlines()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    row = json.loads(line, parse_constant=refuse)
    assert row.pop("time") > 1.6e9
    assert row == {
        "stage": "pretrain", "step": 7, "loss": 2.5, "bad": None, "huge": None, "np": 0.5, "on": 1, "count": 2**60,
    }  # fmt: skip
    writer.close()


def test_names_and_values_that_do_not_fit_are_refused_and_leave_no_line(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m") as writer:
        with pytest.raises(ValueError, match="step"):
            writer.write("s", 1, {"step": 2})
        with pytest.raises(TypeError, match="loss"):
            writer.write("s", 1, {"loss": "2"})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="loss"):
            writer.write("s", 1, {"loss": {"a": 1}})  # type: ignore[dict-item]
    assert read_metrics(tmp_path / "m") == []


def test_rewind_takes_out_later_steps_of_that_stage_only_and_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m"
    fill(path, ("a", 1), ("a", 2), ("b", 5), ("a", 3))
    with MetricsWriter(path) as writer:
        assert writer.rewind("a", 1) == 2
        writer.write("a", 2, {})
        assert writer.rewind("c", 0) == 0
        assert writer.rewind("a", 9) == 0
    assert steps(path) == [("a", 1), ("b", 5), ("a", 2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]
    assert [row["step"] for row in read_metrics(path, "b")] == [5]


@given(cut=st.integers(0, 400), texts=st.lists(st.text(max_size=5), min_size=1, max_size=4))
def test_a_file_cut_anywhere_keeps_its_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "m"
    fill(path, *((text, i) for i, text in enumerate(texts)))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    before = read_metrics(path)
    assert len(before) >= whole[:cut].count(b"\n")
    with MetricsWriter(path) as writer:
        writer.write("after", 99, {})
    after = read_metrics(path)
    assert after[:-1] == before and after[-1]["step"] == 99


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "m"
    fill(path, ("a", 1), ("a", 2))
    path.write_text(path.read_text() + '{"stage": "a"\n' + '{"stage": "a", "step": 3}\n')
    for use in (read_metrics, MetricsWriter):
        with pytest.raises(DataError, match="line 3"):
            use(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_metrics(tmp_path / "none")


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with MetricsWriter(path) as writer:
        threads = [
            threading.Thread(target=lambda s=s: [writer.write(s, i, {"x": i}) for i in range(200)]) for s in "abcd"
        ]
        for thread in threads:
            thread.start()
        writer.rewind("none", 0)
        for thread in threads:
            thread.join()
    assert sorted(steps(path)) == [(s, i) for s in "abcd" for i in range(200)]
