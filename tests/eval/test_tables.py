"""The paper's tables from result files."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5.cli import app
from glm5.cli.lm_eval import scores_of
from glm5.errors import ConfigError, DataError
from glm5.eval.record import RESULT, SETTINGS
from glm5.eval.suite import find_suite, suite_names
from glm5.eval.tables import TABLES, table, table_names

LM_EVAL = {  # the form of lm-eval 0.4.13
    "results": {
        "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.05},
        "mmlu": {"acc,none": 0.25, "acc_stderr,none": "N/A"},
    },
    "config": {"model": "hf"},
    "model_name": "runs/own",
    "n-samples": {"gsm8k": {"original": 1319, "effective": 101}},
}


def record(folder: Path, suite: str, model: dict[str, Any], score: float = 0.5) -> Path:
    folder.mkdir(parents=True)
    title = find_suite(suite, {}).title
    (folder / SETTINGS).write_text(json.dumps({"suite": {"title": title}, "model": model}))
    (folder / RESULT).write_text(json.dumps({"score": score, "low": score - 0.1, "high": score + 0.2, "n": 1234}))
    return folder


def cells(text: str, row: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_data_of_the_tables() -> None:
    for name, one in tomllib.loads(TABLES.read_text("utf-8")).items():
        rows = [row["name"] for row in one["rows"]]
        assert len(set(rows)) == len(rows) and all(len(row["paper"]) == len(one["models"]) for row in one["rows"])
        assert {row["suite"] for row in one["rows"] if "suite" in row} <= set(suite_names())
        assert all(len(cells(table(name, []), row)) == len(one["models"]) for row in rows)
    assert cells(table("7", []), "AIME 2026 I")[0] == "92.7"


def test_own_scores_stand_beside_the_papers(tmp_path: Path) -> None:
    records = [
        record(tmp_path / "a", "aime", {"name": "a|b\n<i>"}),
        record(tmp_path / "b", "gpqa-diamond", {"checkpoint": "/runs/own/final"}, 0.95),
    ]
    text = table("7", [*map(str, records), f"HMMT Nov. 2025={records[0]}"])
    head = next(line for line in text.splitlines() if line.startswith("| |"))
    assert head.startswith("| | a b  i | final | GLM-5 (paper) |") and "copied" in text
    assert cells(text, "AIME 2026 I")[:3] == ["50.0 (40.0 to 70.0), 1,234", "", "92.7"]
    assert cells(text, "GPQA Diamond")[1] == "95.0 (85.0 to 100.0), 1,234"
    assert cells(text, "HMMT Nov. 2025")[0] == cells(text, "AIME 2026 I")[0]
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_dollars_and_logs_of_inspect(tmp_path: Path) -> None:
    year = record(tmp_path / "year", "vending-bench-2", {"name": "m"})
    for low, high, said in ((900.4, 2100.0, "$1,500 ($900 to $2,100), 5"), (None, None, "$1,500 (no interval), 5")):
        values = {"score": 1500.0, "low": low, "high": high, "n": 5, "unit": "$"}
        (year / RESULT).write_text(json.dumps(values))
        text = table("7", [str(year)])
        assert cells(text, "Vending-Bench 2")[:2] == [f"{said} \\*", "$4,432"] and "problems of our own" in text

    def log(name: str, value: float, status: str = "success") -> str:
        scores = [{"name": "x", "metrics": {"accuracy": {"value": value}, "stderr": {"value": 0.05}}}]
        results = {"completed_samples": 101, "scores": scores}
        path = tmp_path / f"{name}.json"
        path.write_text(
            json.dumps({"status": status, "eval": {"task": name, "model": "glm5/runs/own"}, "results": results})
        )
        return str(path)

    one = log("retail", 0.5)
    text = table("7", [f"tau2-bench={one}"])
    assert "| own |" in text and "problems of our own" not in text
    assert cells(text, "tau2-bench")[0] == "50.0 (40.1 to 59.9), 101"
    text = table("7", [f"tau2-bench={one},{log('airline', 0.7)}"])
    assert cells(text, "tau2-bench")[0] == "60.0 (53.0 to 67.0), 202"  # narrower by the root of 2
    wrongs: list[tuple[str, type[Exception], str]] = [
        (one, ConfigError, "need a row"),
        (f"tau2-bench={log('x', 0.1, 'error')}", ConfigError, "did not end"),
        (f"tau2-bench={one},{tmp_path / 'none.json'}", DataError, "no record"),
    ]
    for wrong, error, said in wrongs:
        with pytest.raises(error, match=said):
            table("7", [wrong])


def test_one_record_fills_the_rows_of_its_parts(tmp_path: Path) -> None:
    pages = record(tmp_path / "pages", "cc-bench-frontend", {"name": "m"})
    share = {"score": 0.25, "low": 0.125, "high": 0.5, "n": 8}
    values = {**share, "cells": {"html": share, "svelte": share}, "checks": {"all": share, "html": {**share, "n": 50}}}
    (pages / RESULT).write_text(json.dumps(values | {"built": {"svelte": {**share, "score": 0.375}}}))
    text = table("8", [str(pages)])
    names = ("HTML, whole tasks", "HTML, check-items", "Builds: Svelte", "Backend")
    found = {row: cells(text, row)[0] for row in names}
    assert found == {
        "HTML, whole tasks": "25.0 (12.5 to 50.0), 8 \\*", "HTML, check-items": "25.0 (12.5 to 50.0), 50 \\*",
        "Builds: Svelte": "37.5 (12.5 to 50.0), 8 \\*", "Backend": "",
    }  # fmt: skip
    assert "problems of our own" in text and cells(text, "Vue, whole tasks")[0] == ""


def test_lm_eval_and_wrong_records(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(LM_EVAL))
    text = CliRunner().invoke(app, ["table", "11", str(file)]).output
    assert "| own |" in text and cells(text, "GSM8K")[0] == "50.0 (40.1 to 59.9), 101"
    assert cells(text, "MMLU")[0] == "25.0" and table_names() == ["7", "8", "11", "general"]
    gsm8k = {"exact_match,flexible-extract": 0.7, "exact_match,strict-match": 1, "exact_match_stderr,strict-match": 0}
    assert scores_of({"alias": "x", "acc,none": 0.5, "flag": True, **gsm8k}) == {"acc": 0.5, **gsm8k}
    for results, said in (
        ({"gsm8k": gsm8k}, "100.0, 101"), ({"gsm8k": {"exact_match,mine": 0.7}}, "70.0, 101"),
        ({"gsm8k": {"exact_match,none": 0.6, "exact_match,mine": 0.7}}, "60.0, 101"),
        ({"gsm8k": {"exact_match,a": 0.6, "exact_match,b": 0.7}}, "several filters .a, b."),
        ({"gsm8k": {"acc,none": 0.6}}, "no score of the row's metric"),
    ):  # fmt: skip
        file.write_text(json.dumps(LM_EVAL | {"results": results}))
        if said[0].isdigit():
            assert cells(table("11", [str(file)]), "GSM8K")[0] == said
            continue
        with pytest.raises(ConfigError, match=said):
            table("11", [str(file)])
    file.write_text(json.dumps(LM_EVAL))
    folder = record(tmp_path / "ruler", "ruler", {"name": "m"})
    again = record(tmp_path / "again", "aime", {"name": "m"})
    (tmp_path / "empty").mkdir()
    for name, wrong, error, said in (
        ("12", [], ConfigError, "7, 8, 11, general"),
        ("7", [str(folder)], ConfigError, "ROW="),
        ("7", [f"AIME={folder}"], ConfigError, "no row"),
        ("7", [str(again)] * 2, ConfigError, "Two records"),
        ("7", [str(tmp_path / "empty")], DataError, "no record"),
        ("7", [str(tmp_path / "nothing.json")], DataError, "no record"),
        ("7", [str(file)], ConfigError, "no task of this table: gsm8k, mmlu"),
        ("8", [f"HTML, check-items={folder}"], ConfigError, "HTML, check-items: that part of the suite was not played"),
    ):
        with pytest.raises(error, match=said):
            table(name, wrong)
