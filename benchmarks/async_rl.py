"""Live RL: asynchronous against synchronous, how much of the learner's time the engines use, where the time goes.

`python benchmarks/async_rl.py [--seeds 3] [--updates 16]`. Every figure is a ratio of two runs of `glm5 rl` on this
machine. Part one simulates all sides (answers take 1 s, environments 1 s on average, lognormal with sigma 1) and
varies the learner's time and the number of waits per episode. Part two uses a real engine and a real learner of `nano`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5 import GLM5Config, GLM5ForCausalLM
from glm5.chat import Tokenizer

SKIPPED = 4
"""Updates at the beginning that do not count: the first ones of an asynchronous run find an empty queue."""
RECIPE = """
name = "{name}"
start = "{start}"
runs = "{runs}"
seed = {seed}
[launch]
engine_threads = 1
learner_threads = 1
{launch}
[[stages]]
kind = "agentic"
name = "rl"
group = 8
max_staleness = {staleness}
families = [{{ name = "arithmetic" }}]
optim = {{ steps = {updates}, lr = 1e-5 }}
{stage}
"""
SIMULATED = "prompts = 4\nconcurrency = 32\nmax_tokens = 4\nmax_turns = 1\nmax_context = 256"
REAL = "prompts = 8\nconcurrency = 64\nmax_tokens = 64\nmax_turns = 1\nmax_context = 256"


def run(folder: Path, start: Path, **fields: Any) -> list[Mapping[str, Any]]:
    """The metrics of a run, one row per update that counts."""
    name = "run"
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(name=name, start=start, runs=folder / "runs", **fields))
    subprocess.run(["rm", "-rf", str(folder / "runs")], check=True)
    subprocess.run([sys.executable, "-P", "-m", "glm5", "rl", str(recipe)], check=True, capture_output=True)
    rows = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows][SKIPPED:]


def pace(rows: list[Mapping[str, Any]]) -> float:
    """Seconds per update."""
    return float((rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1))


def total(rows: list[Mapping[str, Any]], *names: str) -> float:
    return float(sum(row.get(name, 0.0) for row in rows for name in names))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start, tokenizer = folder / "start", Tokenizer.byte_level()
        GLM5ForCausalLM(GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size), seed=0).save_pretrained(start)
        tokenizer.save(start)
        print("samples per second, asynchronous over synchronous (median of seeds, least, most); time attributed")
        for learner, waits in ((0.25, 1), (0.5, 1), (1.0, 1), (2.0, 1), (4.0, 1), (1.0, 2), (1.0, 4)):
            ratios, known = [], []
            for seed in range(options.seeds):
                launch = f"simulate_engine = 1.0\nsimulate_environment = 1.0\nsimulated_waits = {waits}\n"
                launch += f"simulate_learner = {learner}"
                common: dict[str, Any] = {"updates": options.updates, "seed": seed, "launch": launch}
                both = [run(folder, start, staleness=tau, stage=SIMULATED, **common) for tau in (0, 4)]
                ratios.append(pace(both[0]) / pace(both[1]))
                for rows in both:
                    spent = total(rows, "update_seconds", "publish_seconds", "save_seconds")
                    waited = sum(value for row in rows for key, value in row.items() if key.startswith("waits/"))
                    known.append((spent + waited) / total(rows, "step_seconds"))
            print(
                f"learner {learner:4.2f} s, {waits} waits: {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}); attributed {min(known):.3f} at least",
                flush=True,
            )
        print("nano, one thread each side: share of update time in which an engine computes; engine's rate beside it")
        for seed in range(options.seeds):
            common = {"updates": options.updates, "seed": seed, "staleness": 4, "stage": REAL}
            rows = run(folder, start, launch="", **common)
            alone = run(folder, start, launch="simulate_learner = 0.0", **common)
            busy = total(rows, "engines_during_update/busy") / total(rows, "update_seconds")
            print(
                f"seed {seed}: overlap {busy:.2f}; samples per second {pace(alone) / pace(rows):.2f} of the rate alone"
            )


if __name__ == "__main__":
    main()
