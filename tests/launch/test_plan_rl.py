"""The split of devices into learners and engines: rates by hand, the best of all splits, and the pace of the real
controller under these rates."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5.cli import app
from glm5.config.arithmetic import size_report
from glm5.config.devices import Device, device_named
from glm5.config.launch import Launch
from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.config.parameters import parameters
from glm5.config.recipe import AgenticStage
from glm5.launch.plan import load_and_plan, table
from glm5.launch.plan_rl import beside_the_learner, engines_of, rl_split, split_lines
from glm5.records import Trajectory
from tests.rl.test_live_simulation import Simulation, stage_of

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = GLM5Config.preset("tiny", use_dsa=False, index_topk=None, num_nextn_predict_layers=0)
H100 = device_named("h100")
FIELDS = {"prompts": 8, "group": 4, "max_context": 1000, "max_turns": 2, "row_length": 512, "concurrency": 64}


def stage(**fields: Any) -> AgenticStage:
    return stage_of(**{**FIELDS, "max_tokens": 200, "rollouts": "fast", "rollout_dtype": "bfloat16", **fields})


def step_seconds(device: Device, batch: int) -> float:
    """Of `tiny`: hidden 256, six layers of which one dense, 16 experts of 3 x 256 x 128, four of them chosen; half a
    bandwidth, a context of 800 tokens: 600 that are read, and half of the 400 that are sampled."""
    hidden, expert = 256, 3 * 256 * 128
    attention = hidden * 128 + 128 + 128 * 4 * 64 + hidden * 80 + 64 + 64 * 4 * (48 + 64) + 4 * 64 * hidden
    always = 6 * (attention + 2 * hidden) + 3 * hidden * 768 + 5 * (16 * hidden + expert) + hidden + 4096 * hidden
    read = 2 * (always + 5 * 16 * expert * (1 - 0.75**batch)) + batch * 800 * 6 * (64 + 16) * 2
    return 2 * read / device.bandwidth  # an engine of this size is bound by its memory


def test_the_rates_are_those_worked_out_by_hand() -> None:
    found = rl_split(stage(), TINY, Layout(), 4, H100, 0.15)
    batch, report = found["rollouts_per_engine"], size_report(TINY, 1000)
    reading = 600 * report["train_flops_per_token"] / 3 / (0.4 * 989e12)
    each = 400 * step_seconds(H100, batch) / batch + reading
    assert found["engine_tokens_per_second"] == pytest.approx(400 / each, rel=1e-3)
    learner = 0.15 * 67e12 / size_report(TINY, 512)["train_flops_per_token"]
    assert found["learner_tokens_per_second"] == pytest.approx(learner)
    assert found["assumed"]["sampled_tokens"] == 400 and found["engine_devices"] == 1
    assert batch * found["engines"] >= 64 > (batch - 1) * found["engines"]


@pytest.mark.parametrize("fields", [{}, {"max_staleness": 0}, {"minibatches": 2}, {"kl_weight": 0.1}])
@pytest.mark.parametrize("slow", [0.1, 1, 30])
@pytest.mark.parametrize("launch", [None, Launch(engine_urls=["http://engine:1"])], ids=["starts", "servers"])
def test_the_split_is_the_best_of_all(fields: dict[str, Any], slow: float, launch: Launch | None) -> None:
    """Learners that are `slow` times as slow get more of the devices."""
    device, own, gpus = replace(H100, flops_fp32=H100.flops_fp32 / slow), stage(**fields), 12
    found = rl_split(own, TINY, Layout(ep=2), gpus, device, 0.15, launch)
    passes = 1 + bool(fields.keys() & {"minibatches", "kl_weight"}) / 3
    learner = 0.15 * device.flops_fp32 / size_report(TINY, 512)["train_flops_per_token"] / passes
    kinds = engines_of(own, TINY, device, gpus - 1, launch)
    assert [one.devices for one in kinds] == ([1] if launch is None else [1, 2, 4])
    flying, waits, every = 64 if own.max_staleness else 32, 1 + own.max_staleness, {}
    for learners, engine in product(range(2, gpus, 2), kinds):  # ep divides them
        if engines := (gpus - learners) // engine.devices:
            rollout = flying / (engines * engine.rollouts_per_second(-(-flying // engines)))
            own_rows = -(-32_000 // (learners * 512 * own.minibatches))
            learning = own_rows * 512 * own.minibatches / learner
            seconds = max(learning, rollout * 32 / flying, (rollout + learning) / waits)
            every[learners, engine.devices] = seconds
    assert found["seconds_per_update"] == pytest.approx(min(every.values()))
    assert every[found["learners"], found["engine_devices"]] == pytest.approx(min(every.values()))
    assert found["learners"] + found["engines"] * found["engine_devices"] <= gpus


class AtOnce(Simulation):
    """Weights arrive as soon as they are pushed."""

    def update(self, groups: list[list[Trajectory]]) -> None:
        learner, self.learner = self.learner, lambda: 0.0
        super().update(groups)
        self.learner = learner


@pytest.mark.parametrize(
    ("most", "concurrency", "push_every"),
    [(0, 16, 1), (0, 64, 1), (1, 64, 1), (1, 128, 2), (3, 16, 1), (3, 64, 1), (3, 128, 4)],
)
@pytest.mark.parametrize("slow", [0.05, 1])
def test_the_controller_keeps_the_predicted_pace(most: int, concurrency: int, push_every: int, slow: float) -> None:
    """In simulated time, with equal rollouts that take as long as these engines need; the first batch has to wait."""
    fields = {"max_staleness": most, "concurrency": concurrency, "push_every": push_every}
    own = stage(**fields, optim={"steps": 16, "lr": 1e-4})
    found = rl_split(own, TINY, Layout(), 8, replace(H100, flops_fp32=H100.flops_fp32 / slow), 0.15)
    learning, rollout = found["seconds_per_update"] * found["learners_busy"], found["rollout_seconds"]
    run = AtOnce(own, [1.0], random.Random(0), lambda started: rollout, lambda: learning, lambda ended: None)
    run.run()
    assert 0.99 * found["seconds_per_update"] <= run.now / 16 <= 1.15 * found["seconds_per_update"]
    assert run.worst <= most and abs(run.worst - found["staleness"]) <= 1


def test_what_does_not_fit_is_said() -> None:
    own = stage()
    assert "no engine" in rl_split(own, TINY, Layout(), 2, replace(H100, memory=1e7), 0.15)["problem"]
    assert "suits parallel.ep = 4" in rl_split(own, TINY, Layout(ep=4), 4, H100, 0.15)["problem"]
    assert "a learner needs" in rl_split(own, TINY, Layout(), 4, replace(H100, memory=7e7), 0.15)["problem"]
    large = GLM5Config.preset("glm5", use_dsa=False)
    urls = Launch(engine_urls=["http://engine:1"])
    sizes = {one.devices: one.sequences for one in engines_of(own, large, device_named("h200"), 64, urls)}
    assert min(sizes) == 16 and sizes[32] > sizes[16]
    own = stage(max_context=401)
    split = rl_split(own, large, Layout(), 17, device_named("h200"), 0.15, urls)
    assert split["engine_machines"] == 2 and "serve" not in " ".join(split_lines(split))  # of eight devices each
    split = rl_split(own, large, Layout(), 17, replace(device_named("h200"), node=16), 0.15, urls)
    assert "`glm5 serve --tp 16`" in " ".join(split_lines(split))


@pytest.mark.parametrize(
    ("launch", "gpus", "share"),
    [
        ({}, 2, 1),
        ({"engines": 3}, 2, 2),
        ({"engine_device": "cuda"}, 2, 1),
        ({"engine_device": "cuda:7, cuda:1"}, 2, 1),
        ({"engine_device": "cuda:1"}, 1, 0),
        ({"engine_device": "cpu"}, 1, 0),
        ({"engine_urls": ["http://engine:1"]}, 1, 0),
        ({"simulate_engine": 1.0}, 1, 0),
    ],
)
def test_engines_on_devices_of_learners(launch: dict[str, Any], gpus: int, share: int) -> None:
    """Of `tiny`, with index keys of five layers of seven once they are learned: weights in bf16, and a cache of all 64
    rollouts."""
    config = GLM5Config.preset("tiny", indexer_types=("full", "full", "shared", "shared", "full", "full"))
    latents, keys = 7 * (64 + 16), 5 * config.index_head_dim
    for used, numbers in ((config, latents + keys), (config.replace(indexer_adapted=False), latents)):
        found = beside_the_learner(stage(), used, Launch(**launch), gpus)["engine"]
        assert found == share * 2 * (sum(p.size for p in parameters(used)) + numbers * 64 * 1064), used


def test_a_large_job_is_planned_in_seconds() -> None:
    began = time.process_time()
    found = rl_split(stage(), TINY, Layout(), 4096, H100, 0.15)
    assert found["learners"] <= 63 and time.process_time() - began < 5  # an update has 63 rows


def test_the_published_example() -> None:
    """Its recipe is for planning: the header says why it does not run."""
    found = load_and_plan(RECIPES / "glm5-rl.toml", [], 256, "h200")
    text = (RECIPES / "glm5-rl.toml").read_text(encoding="utf-8")
    assert "".join(f"# {line}".rstrip() + "\n" for line in table(found).splitlines()) in text
    [rl] = [one["rl"] for one in found["stages"]]
    assert not found["fits"] and rl["learners"] % 32 == 0
    assert rl["learners"] + rl["engines"] * rl["engine_devices"] <= 256


def test_the_command() -> None:
    options = ["plan", str(RECIPES / "one-gpu.toml"), "--gpus", "4", "--set", "launch.engines=1"]
    said = CliRunner().invoke(app, options).output
    assert "learners and 1 engine, 1 : 0.33 devices" in said and said.count("No rate was measured") == 1
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    stages = {one["name"]: one["rl"] for one in found["stages"]}
    assert stages["pretrain"] is None and stages["agentic-rl"]["most_staleness"] == 2
