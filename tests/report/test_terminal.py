"""The table at the end of a pipeline."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from glm5.errors import DataError
from glm5.report import summary_table


def printed(results: dict[str, Any], width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(summary_table(results))
    return out.getvalue()


def row(text: str, name: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"│ {name} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_it_shows_stages_by_skills_in_80_columns(results: dict[str, Any]) -> None:
    text = printed(results)
    assert "laptop" in text
    assert row(text, "sft") == ["sft", "0.41 +", "0.72 +", "0.38 +", "0.55 +", "2.740 -"]
    assert row(text, "reasoning") == ["reasoning", "0.78 +", "0.70", "0.33", "0.51", "2.750 -"]
    assert "tokenizer" not in text
    # arithmetic went from 0.78 to 0.60 and back to 0.76, toolcall from 0.72 to 0.55 and back to 0.70
    assert "distill brought back 89% of arithmetic and 88% of toolcall." in " ".join(text.split())


def test_names_cannot_write_to_the_terminal(results: dict[str, Any]) -> None:
    results["name"] = results["stages"][1]["name"] = "\x1b[31m[bold]x\ud800"
    text = printed(results, width=120)
    assert "\x1b" not in text and "\\x1b[31m[bold]x\\ud800" in text


def test_a_run_without_evaluation_gives_an_empty_table() -> None:
    assert "no stage was evaluated" in printed({"name": "x", "stages": [{"name": "tokenizer", "kind": "tokenizer"}]})


def test_another_shape_is_refused() -> None:
    with pytest.raises(DataError, match="stages"):
        summary_table({"stages": "none"})
