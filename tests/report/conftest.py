"""A made-up run folder whose numbers behave like those of a real one, and a reader of pages."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from glm5.report import build_report
from glm5.stats import wilson

# name, kind, solved problems of 100 (arithmetic, toolcall, bugfix, general), bits per byte, found of 40 by length
STAGES = [
    ("tokenizer", "tokenizer", None, None, None),
    ("pretrain", "pretrain", (0, 0, 0, 1), 2.512, (9, 3, 1)),
    ("midtrain", "midtrain", (0, 0, 0, 0), 2.498, (35, 31, 24)),
    ("warmup", "dsa_warmup", (0, 0, 0, 0), 2.498, (35, 31, 24)),
    ("sparse", "dsa_sparse", (0, 0, 0, 1), 2.471, (36, 30, 22)),
    ("sft", "sft", (41, 72, 38, 55), 2.74, (30, 24, 16)),
    ("reasoning", "reasoning", (78, 70, 33, 51), 2.75, (30, 24, 15)),
    ("agentic", "agentic", (62, 71, 64, 50), 2.77, (29, 22, 15)),
    ("general", "general", (60, 55, 60, 83), 2.79, (27, 22, 14)),
    ("distill", "distill", (76, 70, 63, 82), 2.76, (28, 23, 14)),
]
FAMILIES = ("arithmetic", "toolcall", "bugfix", "general")
PROMPTS = {
    "arithmetic": "<|user|>37+15=<|assistant|><think>",
    "toolcall": "<|user|>weather in Rome<|assistant|></think>",
    "bugfix": "<|user|>def add(a,b):\n return a-b<|assistant|></think>",
    "general": "<|user|>greet Ann twice<|assistant|></think>",
}
EARLY = "of the self.assertEqual(x, \x00\ufffd\n    def test_of(self):\n        self.r"
LATE = {
    "arithmetic": "7+5=12,1+3+1=5</think>52<|user|>",
    "toolcall": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call><|observation|>"
    "<tool_response>sunny</tool_response><|assistant|></think>sunny<|user|>",
    "bugfix": "<tool_call>edit<arg_key>expr</arg_key><arg_value>a+b</arg_value></tool_call><|observation|>"
    "<tool_response>2 passed</tool_response><|assistant|></think>done<|user|>",
    "general": "Hello Ann, nice to meet you. Hello Ann, nice to meet you.<|user|>",
}


def score(hits: int, n: int) -> dict[str, float | int]:
    found = wilson(hits, n)
    return {"score": found.value, "low": found.low, "high": found.high, "n": n}


def make_results() -> dict[str, Any]:
    stages: list[dict[str, Any]] = []
    for name, kind, solved, bits, found in STAGES:
        if solved is None or found is None:
            stages.append({"name": name, "kind": kind, "numbers": {"vocab_size": 512.0}})
            continue
        late = name not in ("pretrain", "midtrain", "warmup", "sparse")
        evaluation = {
            "text": {"bits_per_byte": bits, "bytes": 60000},
            "skills": {family: score(hits, 100) for family, hits in zip(FAMILIES, solved, strict=True)},
            "needle": {str(256 << i): score(hits, 40) for i, hits in enumerate(found)},
            "mtp": {"accept_length": 2.1 if late else 1.7, "per_position": [0.6, 0.35, 0.15], "n": 500},
            "samples": [
                {"family": f, "prompt": PROMPTS[f], "output": LATE[f] if late else EARLY, "reward": float(late)}
                for f in FAMILIES
            ],
        }
        numbers = {
            "loss": 2.9123, "mtp1_loss": 3.4, "mtp2_loss": 3.9, "mtp3_loss": 4.1, "load_max": 1.31, "indexer_kl": 0.21,
            "indexer_recall": 0.83, "reward": 0.71, "masked_share": 0.00123, "entropy": 0.31, "length": 21.4,
            "staleness_mean": 0.9, "staleness_max": 3.0, "reverse_kl": 0.042,
        }  # fmt: skip
        stages.append({"name": name, "kind": kind, "numbers": numbers, "evaluation": evaluation})
    policies = {"reasoning": 40000, "agentic": 50456, "general": 20000, "distill": 13000}
    return {
        "name": "laptop",
        "seed": 0,
        "preset": "nano",
        "parameters": 1597984,
        "corpus": {"train_tokens": 5_402_113, "train_documents": 612, "held_out_tokens": 540_000,
                   "held_out_documents": 60, "tokenizer_vocab": 512},
        "stages": stages,
        "exact": {"tokens": 123456, "mismatches": 0, "max_abs_diff": 0.0,
                  "stages": {k: {"tokens": n, "mismatches": 0, "max_abs_diff": 0.0} for k, n in policies.items()}},
        "notes": ["agentic: score of skill arithmetic went from 0.78 to 0.62; the stage did not help it."],
        "times": {"total_seconds": 400.0,
                  "stages": {s[0]: {"train_seconds": 12.0 + 9 * i, "evaluation_seconds": 6.0}
                             for i, s in enumerate(STAGES)}},
        "software": {"glm5": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    }  # fmt: skip


def make_metrics() -> list[dict[str, Any]]:
    draw = random.Random(5)
    rows: list[dict[str, Any]] = []

    def curve(start: float, end: float, step: int, steps: int, noise: float) -> float:
        return end + (start - end) * math.exp(-4 * step / steps) + draw.gauss(0, noise)

    for name, kind, *_ in STAGES[1:]:
        steps = {"pretrain": 420, "midtrain": 60, "dsa_warmup": 30, "dsa_sparse": 40, "sft": 120}.get(kind, 30)
        for step in range(1, steps + 1):
            row: dict[str, Any] = {"stage": name, "step": step, "time": 1.8e9 + len(rows)}
            if kind in ("pretrain", "midtrain", "dsa_sparse", "sft"):
                start = {"pretrain": 6.2, "sft": 3.0}.get(kind, 3.2)
                end = 0.4 if kind == "sft" else 2.9
                row["loss"] = curve(start, end, step, steps, 0.05)
                if kind != "sft":
                    row |= {f"mtp{d}_loss": curve(start, end + 0.4 * d, step, steps, 0.05) for d in (1, 2, 3)}
                row["load_max"] = 1 + abs(curve(1.5, 0.25, step, steps, 0.1))
            if kind in ("dsa_warmup", "dsa_sparse"):
                row["indexer_kl"] = abs(curve(1.4 if kind == "dsa_warmup" else 0.4, 0.2, step, steps, 0.02))
            if kind == "dsa_warmup":
                row["indexer_recall"] = min(1.0, curve(0.4, 0.88, step, steps, 0.01))
            if kind in ("reasoning", "agentic", "general", "distill"):
                row |= {
                    "reward": curve(0.4, 0.8, step, steps, 0.05),
                    "masked_share": abs(draw.gauss(0, 0.002)),
                    "entropy": abs(curve(0.8, 0.3, step, steps, 0.03)),
                    "length": curve(18, 24, step, steps, 0.6),
                    "mismatch_max": 0.0,
                }
            if kind == "agentic":
                row |= {"staleness_mean": abs(curve(0, 1.1, step, steps, 0.2)), "staleness_max": min(step // 3, 4)}
            if kind == "distill":
                row["reverse_kl"] = curve(0.3, 0.04, step, steps, 0.01)
            rows.append(row)
        if kind == "general":
            rows += [
                {"stage": "general/reward_model", "step": step, "time": 1.8e9, "loss": curve(0.7, 0.2, step, 20, 0.02),
                 "accuracy": curve(0.5, 0.95, step, 20, 0.01)}
                for step in range(1, 21)
            ]  # fmt: skip
    return rows


@pytest.fixture
def results() -> dict[str, Any]:
    return make_results()


@pytest.fixture
def metrics() -> list[dict[str, Any]]:
    return make_metrics()


WriteRun = Callable[..., Path]


def write(folder: Path, results: object, metrics: list[dict[str, Any]] | None) -> Path:
    folder.mkdir(exist_ok=True)
    if results is not None:
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    if metrics is not None:
        lines = [json.dumps(row) + "\n" for row in metrics]
        (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """write_run(results, metrics) -> folder; None leaves a file out."""
    return lambda results=None, metrics=None, name="laptop": write(tmp_path / name, results, metrics)


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has everything, for tests that only read it."""
    return write(tmp_path_factory.mktemp("whole") / "laptop", make_results(), make_metrics())


VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Parses a page, fails on tags out of balance, and keeps what the tests ask for."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        assert len(names) == len(attrs), f"<{tag}> repeats an attribute"
        self.tags.append((tag, names))
        if names.get("id"):
            self.ids.append(str(names["id"]))

    @property
    def headings(self) -> list[str]:
        return [str(names["id"]) for tag, names in self.tags if tag == "section"]


@pytest.fixture(scope="session")
def page_of() -> Callable[[Path], tuple[str, Page]]:
    """page_of(folder) -> the page of a run, as text and parsed."""

    def read(folder: Path) -> tuple[str, Page]:
        path = build_report(folder)
        assert path == folder / "report.html"
        html = path.read_text(encoding="utf-8")
        return html, Page(html)

    return read
