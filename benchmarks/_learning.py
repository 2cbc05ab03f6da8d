"""What the benchmarks of agents' learning share: a base, SFT from it, RL, the baseline that goes on with SFT, episodes
on held-out tasks, gains."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.chat import Tokenizer
from glm5.config.evaluation import EvalConfig
from glm5.config.families import FamilyConfig
from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.data.sft import Conversation
from glm5.eval.harness import play_skill
from glm5.launch.pipeline import run_pipeline
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import Outcome
from glm5.stats import Interval, paired_rewards

RECIPE = """\
name = "NAME"
START
seed = SEED
runs = "RUNS"
"""
RANDOM = """\
preset = "nano"
[model]
vocab_size = 1024
use_dsa = false
max_position_embeddings = 1024
num_nextn_predict_layers = 0
[[stages]]
name = "tokenizer"
kind = "tokenizer"
sources = ["TEXTS"]
vocab_size = 1024
[[stages]]
name = "text"
kind = "pretrain"
rows = 16
row_length = 512
optim = { steps = STEPS, lr = 1.5e-2, final_lr = 4e-3, warmup = 8 }
"""
SFT = """
[[stages]]
name = "sft"
kind = "sft"
rows = 8
row_length = 1024
thinking = "turn"
data = "DATA"
optim = { steps = STEPS, lr = LR, final_lr = 1e-3, warmup = 5 }
"""


def add_arguments(
    parser: argparse.ArgumentParser, updates: int, text_steps: int, base_steps: int, sft_steps: int, sft_rate: str
) -> None:
    """Arguments that these benchmarks share, and how long their stages are."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=updates)
    parser.add_argument("--text-steps", type=int, default=text_steps)
    parser.add_argument("--base", type=Path, help="a policy that an earlier run has trained, instead of a new one")
    parser.add_argument("--base-steps", type=int, default=base_steps)
    parser.add_argument("--sft-steps", type=int, default=sft_steps)
    parser.add_argument("--sft-rate", default=sft_rate)
    parser.add_argument("--threads", type=int, default=2)


def write_texts(shown: Sequence[Conversation], file: Path) -> None:
    """What the tokenizer is trained on."""
    said = (
        m.content + " ".join(str(v) for c in m.tool_calls for v in c.arguments.values())
        for one in shown
        for m in one.messages
    )
    file.write_text("\n".join(said), encoding="utf-8")


def run(text: str, folder: Path, name: str) -> tuple[Path, float]:
    """Run a recipe, or what is left of it: the folder of its last checkpoint, and the seconds that training took."""
    file = folder / f"{name}.toml"
    file.write_text(text.replace("NAME", name), encoding="utf-8")
    run_pipeline(load_recipe(file, RunRecipe, []))
    results = json.loads((folder / "runs" / name / "results.json").read_text(encoding="utf-8"))
    return folder / "runs" / name / "final", sum(s["train_seconds"] for s in results["times"]["stages"].values())


def sft(data: Path, steps: int, rate: str) -> str:
    return SFT.replace("DATA", str(data)).replace("STEPS", str(steps)).replace("LR", rate)


def base(options: argparse.Namespace) -> Path:
    """The policy that every seed starts from: trained on `texts.txt` and `base.jsonl` of the folder."""
    if options.base is not None:
        return Path(options.base.absolute())
    out = options.out.absolute()
    stages = RANDOM.replace("TEXTS", str(out / "texts.txt")).replace("STEPS", str(options.text_steps))
    stages += sft(out / "base.jsonl", options.base_steps, "1e-2")
    head = RECIPE.replace("SEED", "0").replace("RUNS", str(out / "runs")).replace("START", "")
    return run(head + stages, out, "base")[0]


def policies(seed: int, options: argparse.Namespace, rl: str) -> tuple[dict[str, Path], dict[str, float]]:
    """Train on `sft.jsonl` of the folder from the base ("start"), from there with the stage `rl`, and with SFT in the
    same time ("sft goes on"). Returns checkpoints, and the seconds that training took."""
    folder = options.out.absolute() / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    data = options.out.absolute() / "sft.jsonl"
    head = RECIPE.replace("SEED", str(seed)).replace("RUNS", str(folder / "runs"))
    stage = sft(data, options.sft_steps, options.sft_rate)
    start, sft_s = run(head.replace("START", f'start = "{base(options)}"') + stage, folder, "start")
    again = head.replace("START", f'start = "{start}"')
    after, rl_s = run(again + rl.replace("UPDATES", str(options.updates)), folder, "rl")
    steps = max(1, round(rl_s / sft_s * options.sft_steps))
    more, more_s = run(again + sft(data, steps, "2e-3"), folder, "more")
    seconds = {"sft": sft_s, "rl": rl_s, "sft goes on": more_s}
    return {"start": start, "rl": after, "sft goes on": more}, seconds


def evaluate(policy: Path, family: FamilyConfig, config: EvalConfig) -> tuple[list[bool], float]:
    """Whether the policy solves each held-out problem, one sample each; the seconds of an episode."""
    model, tokenizer = GLM5ForCausalLM.from_pretrained(policy), Tokenizer.load(policy)
    start = time.monotonic()
    played = sorted(play_skill(model, tokenizer, family, config, seed=0), key=lambda t: t.group)
    return [one.outcome is Outcome.SOLVED for one in played], (time.monotonic() - start) / len(played)


def gain_of(before: Sequence[bool], now: Sequence[bool], groups: Sequence[str]) -> Interval:
    """The gain in solved share with its 95 % interval; problems of a group, such as one answer, may go together."""
    changes = Counter[str]()
    for group, lost, won in zip(groups, before, now, strict=True):
        changes[group] += won - lost
    return paired_rewards([change * len(changes) / len(groups) for change in changes.values()])


def rates(
    seed: int, solved: Mapping[str, Sequence[bool]], seconds: Mapping[str, float], groups: Sequence[str] = ()
) -> dict[str, Any]:
    """Solved shares, and of the policies that went on their gain over the start with its 95 % interval (paired), which
    knows that problems of one of `groups` may go together."""
    found: dict[str, Any] = {"seed": seed, "seconds": {name: round(value, 2) for name, value in seconds.items()}}
    for name, wins in solved.items():
        found[name] = {"rate": sum(wins) / len(wins)}
        if name in ("rl", "sft goes on"):
            gain = gain_of(solved["start"], wins, groups or [str(place) for place in range(len(wins))])
            found[name] |= {"gain": gain.value, "low": gain.low, "high": gain.high}
    return found
