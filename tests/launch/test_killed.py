"""Runs that are killed at any moment and started again end bit for bit like a run that nobody touched."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.obs.metrics import read_metrics

TIMES = ("time", "step_seconds", "optimizer_seconds", "tokens_per_second", "stage_seconds")
DTYPES = ("float32", "bfloat16")
STEPS = 30


class Driver:
    """Talks to `train_driver.py`."""

    def __init__(self, forks: Any) -> None:
        self.forks = forks

    def train(self, folder: Path, dtype: str, hit: Callable[[int, str], bool] = lambda child, word: False) -> int:
        """Train in `folder`, or go on there; `hit` hears the process's id and every word until it returns true, when it
        has sent a signal. Returns the exit code."""
        folder.mkdir(parents=True, exist_ok=True)
        listening, telling = multiprocessing.Pipe(duplex=False)
        script = Path(__file__).with_name("train_driver.py")
        with listening:
            with telling:
                process = self.forks.start(script, folder, dtype, out=telling.fileno())
            with os.fdopen(os.dup(listening.fileno())) as words:
                done = False
                for word in words:
                    done = done or hit(process.process.pid, word.strip())
        code: int = process.wait(60)
        return code


@pytest.fixture(scope="module")
def driver(forks: Any) -> Driver:
    return Driver(forks)


def outcome(folder: Path) -> tuple[list[dict[str, Any]], bytes]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows], (
        folder / "final.safetensors"
    ).read_bytes()


@pytest.fixture(scope="module")
def untouched(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, bytes]]:
    """Metrics and final weights of runs that nobody touched."""
    found = {}
    for dtype in DTYPES:
        folder = tmp_path_factory.mktemp(dtype)
        assert driver.train(folder, dtype) == 0
        found[dtype] = outcome(folder)
    return found


class Hit:
    """Sends a signal a moment after the `count`-th time that a word was heard."""

    def __init__(self, number: int, word: str, count: int, pause: float) -> None:
        self.number, self.word, self.left, self.pause = number, word, count, pause

    def __call__(self, child: int, word: str) -> bool:
        self.left -= word.split()[0] == self.word
        if self.left:
            return False
        time.sleep(self.pause)
        os.kill(child, self.number)
        return True


# Ten moments: in forward and backward of the first, second and third micro-batch, in updates, in evaluations, and in
# saving, before, between and after the renames that publish a state.
WORDS = ("loss", "sync", "evaluation", "rename", "loss", "update", "rename", "loss", "save", "batch")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])  # bf16: see below
def test_killed_ten_times(driver: Driver, untouched: dict[str, Any], tmp_path: Path, dtype: str) -> None:
    draw = random.Random(f"kill {dtype}")
    for word in WORDS:
        count = draw.randint(1, {"loss": 12, "sync": 8, "batch": 4, "update": 4, "rename": 5}.get(word, 2))
        code = driver.train(tmp_path, dtype, Hit(signal.SIGKILL, word, count, draw.uniform(0, 0.004)))
        assert code == -signal.SIGKILL, (word, count)
        assert not (tmp_path / "final.safetensors").exists()
    before = len(read_metrics(tmp_path / "metrics.jsonl"))
    assert 0 < before < STEPS
    assert driver.train(tmp_path, dtype) == 0
    metrics, weights = untouched[dtype]
    assert outcome(tmp_path)[0] == metrics
    assert outcome(tmp_path)[1] == weights
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert [row["step"] for row in metrics if "held_out_loss" in row] == list(range(3, STEPS + 1, 3))
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]


@pytest.mark.long
def test_terminated_and_killed_in_turn(driver: Driver, untouched: dict[str, Any], tmp_path: Path) -> None:
    """A wish to stop costs nothing: the next process goes on behind the last step that was reported."""
    draw = random.Random("terminate")
    heard: list[str] = []
    reported = None
    for number, word in [
        (signal.SIGTERM, "loss"),
        (signal.SIGTERM, "update"),
        (signal.SIGKILL, "loss"),
        (signal.SIGTERM, "evaluation"),
        (signal.SIGTERM, "rename"),
        (signal.SIGINT, "loss"),
        (signal.SIGKILL, "rename"),
        (signal.SIGTERM, "batch"),
    ]:
        hit = Hit(number, word, draw.randint(1, 3), draw.uniform(0, 0.004))
        code = driver.train(tmp_path, "bfloat16", lambda child, word, hit=hit: heard.append(word) or hit(child, word))  # type: ignore[misc]
        assert code == (-signal.SIGKILL if number == signal.SIGKILL else 1), word
        first = next(word for word in heard if word.startswith("batch"))
        assert reported in (None, int(first.split()[1]))
        steps = read_metrics(tmp_path / "metrics.jsonl")[-1]["step"]
        reported = None if number == signal.SIGKILL else steps
        heard.clear()
    assert driver.train(tmp_path, "bfloat16") == 0
    assert outcome(tmp_path) == untouched["bfloat16"]


def test_precisions_differ(untouched: dict[str, Any]) -> None:
    assert untouched["float32"][1] != untouched["bfloat16"][1]


RECIPE = """
name = "run"
runs = "{folder}"
[model]
hidden_size = 32
intermediate_size = 48
moe_intermediate_size = 16
num_hidden_layers = 2
[[stages]]
name = "tokenizer"
kind = "tokenizer"
vocab_size = 300
sources = ["{text}"]
[[stages]]
name = "pretrain"
kind = "pretrain"
rows = 3
row_length = 32
micro_rows = 1
dtype = "{dtype}"
optim = {{steps = 60, lr = 1e-3, save_every = 4}}
"""


def run_of(folder: Path) -> tuple[Any, Any, bytes]:
    """What a run of the command line leaves that may not depend on who interrupted it."""
    run = folder / "run"
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(run / "metrics.jsonl")]
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    return rows, results["stages"], (run / "final" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_command_line_killed_and_terminated(shell: Any, tmp_path: Path, dtype: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i % 7} of {i}, as before\n" for i in range(300)), encoding="utf-8")
    recipes = {}
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        recipes[name] = tmp_path / name / "recipe.toml"
        recipes[name].write_text(RECIPE.format(folder=tmp_path / name, text=text, dtype=dtype), encoding="utf-8")
    assert shell.run("train", recipes["whole"]).code == 0

    draw, metrics, resume = random.Random(f"cli {dtype}"), tmp_path / "cut" / "run" / "metrics.jsonl", []
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        goal, deadline = lines + draw.randint(3, 15), time.monotonic() + 120
        with shell.start("train", recipes["cut"], *resume) as process:
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < goal:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.02))
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        assert process.returncode == (1 if number == signal.SIGTERM else -signal.SIGKILL)
        if number == signal.SIGTERM:
            said = [line for line in err.splitlines() if not line.startswith("[")]
            assert said == ["Interrupted. What was finished is saved; the same command goes on from there."]
            assert "[pretrain] stopping:" in err
        resume = ["--resume"]
    assert not (tmp_path / "cut" / "run" / "results.json").exists()
    assert shell.run("train", recipes["cut"], "--resume").code == 0
    assert run_of(tmp_path / "cut") == run_of(tmp_path / "whole")
