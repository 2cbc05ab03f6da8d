"""The search over layouts: legal ones only, none that does not fit, none missed that is faster."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from glm5.cli import app
from glm5.config.activations import Forward
from glm5.config.devices import device_named
from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.parameters import parameters
from glm5.config.pipeline import divide
from glm5.config.pipeline_memory import (
    in_flight,
    received_states,
    sent_states,
    stored_bytes,
    waiting_bytes,
)
from glm5.config.pipeline_schedule import make_schedule, simulate, sums_of_stages
from glm5.config.recipe import PretrainStage, RunRecipe
from glm5.config.step_memory import RankStep, Setting
from glm5.config.step_time import bubble, speed_of
from glm5.launch.layout_report import plan_layouts, tensors
from glm5.launch.layouts import base_setting, candidates, evaluate, search
from glm5.launch.plan import plan

TINY = GLM5Config.preset("tiny", use_dsa=False)
BASE = Setting(Forward(1, 1024, 2, depths=1), ns_item=2)
OPTIM = OptimConfig(steps=1, lr=1e-3, ns_dtype="bfloat16")
STAGE = PretrainStage(
    kind="pretrain", name="base", optim=OPTIM, rows=16, row_length=1024, mtp_depths=1, dtype="bfloat16"
)
SMALL = replace(device_named("h100"), memory=1.6e8)
"""A device on which some layouts of `tiny` fit."""


def test_layouts_are_legal() -> None:
    found = list(candidates(TINY, STAGE.model_copy(update={"rows": 32}), 16, 8))
    assert len(set(found)) == len(found) > 100
    for one in found:
        ranks = one.dp * one.cp
        assert one.pp * ranks == 16 and ranks % one.ep == 0 and TINY.n_routed_experts % one.ep == 0
        assert one.dp * one.micro_rows * one.parts == 32


def test_a_model_without_experts_divides_none() -> None:
    stage = PretrainStage(kind="pretrain", name="s", rows=16, row_length=512, optim=OptimConfig(steps=1, lr=1e-4))
    compared = list(candidates(GLM5Config.preset("glm9b"), stage, 8, 8))
    assert compared and {one.ep for one in compared} == {1}


def test_the_best_are_the_fastest_of_all_that_fit() -> None:
    found = search(TINY, STAGE, 8, SMALL, wanted=2)
    speed, base = speed_of(TINY, 1024, False, SMALL, 0.4), base_setting(TINY, STAGE, 8)
    every = [evaluate(TINY, base, one, 8, speed) for one in candidates(TINY, STAGE, 8, 8)]
    fitting = sorted(plan.seconds for plan in every if not plan.problem)
    assert [plan.seconds for plan in found.best] == pytest.approx(fitting[:2])
    assert 0 < len(fitting) < len(every) == found.legal
    usable = 0.9 * SMALL.memory
    assert all(plan.moment.bytes <= usable for plan in found.best)
    assert all(plan.moment.bytes > usable and "does not fit at" in plan.problem for plan in every if plan.problem)


def test_tensors_are_listed_by_name() -> None:
    step = RankStep(TINY, replace(BASE, world=8, ep=2))
    listed = tensors(step)
    assert set(listed["weights"]) == {p.name for p in parameters(TINY)}
    assert sum(listed["weights"].values()) == step.weights
    assert sum(listed["optimizer"].values()) == step.optimizer
    assert sum(listed["gradients"].values()) == step.gradient


SCHEDULES = [(4, 1, 8, 0), (2, 2, 4, 0), (4, 2, 5, 0), (3, 4, 40, 0), (2, 1, 1, 0), (3, 3, 2, 0)]
SCHEDULES += [
    (2, 2, 90, 5),
    (3, 2, 61, 1),
    (3, 3, 95, 0),
    (4, 1, 40, 1),
    (4, 1, 50, 9),
    (2, 2, 31, 3),
    (4, 2, 5, 1),
    (3, 1, 2, 4),
    (3, 2, 48, 20),
]


@pytest.mark.parametrize(("pp", "chunks", "parts", "deferred"), SCHEDULES)
def test_micro_batches_in_flight_are_those_of_the_schedule(pp: int, chunks: int, parts: int, deferred: int) -> None:
    for rank, actions in enumerate(make_schedule(pp, chunks, parts, deferred)):
        active, waiting, seen, sums = [0] * chunks, [0] * chunks, set(), [0] * chunks
        for action in actions:
            stage = action.stage // pp
            active[stage] += action.kind == "F"
            if action.kind in "BIW":
                seen.add((tuple(active), tuple(waiting)))
            active[stage] -= action.kind in "BI"
            waiting[stage] += (action.kind == "I") - (action.kind == "W")
            sums[stage] += action.kind == "R"
        assert max(map(sum, (one for _, one in seen))) <= max(deferred, 0) + 1
        found = {(one.active, one.waiting) for one in in_flight(pp, chunks, rank, parts, deferred)}
        # Those of the whole schedule are no more, whatever a micro-batch keeps.
        for kept, left in ((1, 0), (5, 1), (1, 5), (0, 1)):
            sizes = [[sum(a) * kept + sum(w) * left for a, w in states] for states in (found, seen)]
            assert max(sizes[0]) == max(sizes[1])
        assert sums == [sums_of_stages(pp, chunks, parts, rank, deferred)[s * pp + rank] for s in range(chunks)]


@pytest.mark.parametrize(("pp", "chunks", "parts", "deferred"), [*SCHEDULES, (8, 1, 200, 1), (4, 1, 64, 16)])
@pytest.mark.parametrize("again", [0, 1])
def test_the_bubble_is_that_of_the_whole_schedule(pp: int, chunks: int, parts: int, deferred: int, again: int) -> None:
    cost = {"F": 1, "B": 2 + again, "I": 1 + again, "W": 1, "R": 0}
    times = simulate(make_schedule(pp, chunks, parts, deferred), lambda action: cost[action.kind])
    end = max(rank[-1][1] for rank in times)
    worked = parts * chunks * (3 + again)
    assert bubble(pp, chunks, parts, deferred, again) == pytest.approx((end - worked) / end)
    if parts >= 2 * pp and deferred:
        assert bubble(pp, chunks, parts, deferred, again) < bubble(pp, chunks, parts, 0, again)


@pytest.mark.parametrize("deferred", [0, 2])
def test_the_most_bytes_in_flight_are_those_of_the_schedule(deferred: int) -> None:
    config = GLM5Config.preset("tiny", use_dsa=False)
    setting = replace(BASE, world=2, pp=2, stages_per_rank=2, parts=6, deferred=deferred)
    for rank, actions in enumerate(make_schedule(2, 2, 6, deferred)):
        step = RankStep(config, setting, rank)
        alive = most = 0
        for action in actions:
            stage = action.stage // 2
            alive += ((action.kind == "F") - (action.kind in "BI")) * stored_bytes(step)[stage]
            alive += ((action.kind == "I") - (action.kind == "W")) * waiting_bytes(step)[stage]
            most = max(most, alive)
        held = [moment.held for moment in step.moments()]
        kept = [sum(size for name, size in one.items() if name.startswith("activations: stage")) for one in held]
        assert max(kept) == most


def test_deferring_costs_memory_and_saves_time() -> None:
    """Of a recipe, and in the list of layouts."""
    recipe = {"name": "x", "preset": "tiny", "stages": [STAGE.model_dump(mode="json")], "parallel": {"pp": 4}}
    recipe["stages"][0]["micro_rows"] = 1
    plain, deferred = (
        plan(RunRecipe.model_validate({**recipe, "parallel": {"pp": 4, "pp_deferred": n}}), 4, "h100")["stages"][0]
        for n in (0, 4)
    )
    assert deferred["memory"]["activations"] > plain["memory"]["activations"]
    assert deferred["tokens_per_second"] > plain["tokens_per_second"]
    found = {one.deferred for one in candidates(TINY, STAGE, 8, 8) if one.pp == 4}
    assert found == {0, 1} and {one.deferred for one in candidates(TINY, STAGE, 8, 8) if one.pp == 1} == {0}


@pytest.mark.parametrize(("layers", "mtp"), [((2, 2), 1), ((4, 0), 1), ((3, 1, 0), 1), ((4, 0, 0), 1), ((3, 1, 0), 0)])
def test_what_a_stage_sends_arrives_at_the_next(layers: tuple[int, ...], mtp: int) -> None:
    spans = divide(GLM5Config.preset("nano", num_nextn_predict_layers=mtp), len(layers), layers)
    depths = 3 * mtp
    assert [sent_states(a, depths) for a in spans[:-1]] == [received_states(b, depths) for b in spans[1:]]
    assert received_states(spans[0], depths) == sent_states(spans[-1], depths) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "device"), [(256, "h100"), (512, "h800"), (128, "b200")])
def test_the_paper_s_model_fits(gpus: int, device: str) -> None:
    """744B pre-training in steps of 64M tokens."""
    config = GLM5Config.preset("glm5", use_dsa=False)
    stage = STAGE.model_copy(update={"rows": 16_384, "row_length": 4096, "mtp_depths": 3})
    found = plan_layouts(config, stage, gpus, device_named(device))
    assert len(found["best"]) == 3
    for entry in found["best"]:
        assert entry["peak_bytes"] <= 0.9 * device_named(device).memory


def test_the_command(tmp_path: object) -> None:
    options = ["plan", "layouts", "nano", "--gpus", "2", "--rows", "4", "--row-length", "512", "--price-per-hour", "2"]
    said = CliRunner().invoke(app, options)
    assert said.exit_code == 0 and "Tensor parallelism does not exist in training" in said.output
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert found["best"][0]["cost_per_million_tokens"] > 0 and found["legal"] > len(found["best"])
    assert {"kind", "what", "bytes", "link"} <= found["best"][0]["traffic"][0].keys()
    assert CliRunner().invoke(app, ["plan", "layouts", "nano", "--gpus", "1000000000"]).exit_code == 2
