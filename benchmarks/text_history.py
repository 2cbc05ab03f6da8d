"""Token-in/token-out against the text round trip: how much a trainer without token ids loses, on the same tasks.

`python benchmarks/text_history.py [--seeds 3] [--updates 20] [--sft 150]`. A policy of `nano` with a BPE tokenizer,
made from the standard library's source, learns arithmetic and tool calls by SFT. Then `glm5 rl` trains it live, for
every seed with `launch.history = "tokens"` and with "text". Shares are means over all updates, rewards over the last
quarter; intervals are Student's t over seeds, 95 %; the difference is paired by seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from glm5.stats import Interval, mean_interval, paired_difference

FAMILIES = """[
  { name = "arithmetic", options = { levels = [2, 3], thinking = true } },
  { name = "toolcall", render_tools = false },
]"""
START = """
name = "start"
runs = "{runs}"
preset = "nano"
template = "5.0"
[model]
use_dsa = false
max_position_embeddings = 512
[[stages]]
name = "tokenizer"
kind = "tokenizer"
vocab_size = 1024
max_bytes = 1000000
[[stages]]
name = "sft"
kind = "sft"
rows = 8
row_length = 256
conversations = 8000
families = {families}
optim = {{ steps = {sft}, lr = 6e-3, final_lr = 1e-3, warmup = 5 }}
"""
RECIPE = """
name = "{history}-{seed}"
start = "{start}"
runs = "{runs}"
seed = {seed}
[launch]
history = "{history}"
engine_threads = 1
learner_threads = 1
[[stages]]
kind = "agentic"
name = "rl"
prompts = 16
group = 8
max_tokens = 32
max_turns = 3
max_context = 256
max_staleness = 1
families = {families}
optim = {{ steps = {updates}, lr = 3e-4, schedule = "constant" }}
"""


def run(folder: Path, verb: str, text: str, **fields: Any) -> None:
    recipe = folder / "recipe.toml"
    recipe.write_text(text.format(runs=folder / "runs", families=FAMILIES, **fields))
    done = subprocess.run([sys.executable, "-P", "-m", "glm5", verb, str(recipe)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])


def shown(found: Interval) -> str:
    return f"{found.value:+.4f} ({found.low:+.4f} to {found.high:+.4f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--sft", type=int, default=150, help="steps before RL")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, "pipeline", START, sft=options.sft)
        rows: dict[str, list[list[dict[str, float]]]] = {"tokens": [], "text": []}
        for seed in range(options.seeds):
            for history, found in rows.items():
                start = folder / "runs" / "start" / "final"
                run(folder, "rl", RECIPE, start=start, seed=seed, history=history, updates=options.updates)
                lines = (folder / "runs" / f"{history}-{seed}" / "metrics.jsonl").read_text().splitlines()
                found.append([json.loads(line) for line in lines])
    last = max(1, options.updates // 4)

    def means(history: str, key: str, of: slice = slice(None)) -> Sequence[float]:
        return [fmean(row.get(key, 0.0) for row in updates[of]) for updates in rows[history]]

    print(f"{options.seeds} seeds, {options.updates} updates after {options.sft} steps of SFT")
    for key, meaning in (
        ("history/mismatch", "sampled tokens that the round trip loses"),
        ("history/masked", "tokens of the answers that it masks"),
        ("mismatch_max", "largest |log-probability of engine - learner|, text"),
    ):
        print(f"{meaning}: {shown(mean_interval(means('text', key)))}")
    print(f"the same with ids: {shown(mean_interval(means('tokens', 'mismatch_max')))}")
    for history in rows:
        print(f"reward with {history}: {shown(mean_interval(means(history, 'reward', slice(-last, None))))}")
    pair = [means(history, "reward", slice(-last, None)) for history in ("text", "tokens")]
    print(f"text minus tokens: {shown(paired_difference(*pair))}")


if __name__ == "__main__":
    main()
