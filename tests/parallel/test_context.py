"""Context parallelism on ranks: the losses, gradients and states of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config.layout_rules import job_problems, model_problems, refuse
from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.errors import ConfigError
from glm5.model.glm5 import GLM5ForCausalLM

pytestmark = pytest.mark.dist

STEPS = 20


GROUPED = dict(
    attention_type="gqa", vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, first_k_dense_replace=1,
    n_routed_experts=6, num_experts_per_tok=2, rope_theta=1e4, max_position_embeddings=512, initializer_range=0.2,
    num_nextn_predict_layers=1, attention_pattern="SF", efficient_attention="swa", sliding_window=5,
)  # fmt: skip
"""Grouped queries, in the first layer over a window."""


class Tasks:
    """Runs the tasks of this file in as few jobs as possible; results by name."""

    def __init__(self, job: Any, start: str, folder: Path) -> None:
        self.job, self.start, self.folder = job, start, folder

    def task(self, kind: str, cp: int = 1, plan: str = "workload", **more: Any) -> dict[str, Any]:
        return {"kind": kind, "start": self.start, "layout": {"cp": cp, "cp_plan": plan}, **more}

    def resumed(self, name: str, source: str, **more: Any) -> dict[str, Any]:
        return self.task("run", copy=str(self.folder / source), out=str(self.folder / name), **more)

    def __call__(self, world: int, **tasks: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(tasks, self.job(world, *tasks.values()), strict=True))


@pytest.fixture(scope="module")
def tasks(job: Any, start: str, tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    return Tasks(job, start, tmp_path_factory.mktemp("context"))


@pytest.fixture(scope="module")
def results(tasks: Tasks, small: Any) -> dict[str, Any]:
    """One step, on one process and on four."""
    task, dense, grouped = tasks.task, tasks.folder / "dense-model", tasks.folder / "grouped-model"
    small(seed=2, n_routed_experts=6, use_dsa=False).save_pretrained(dense)
    GLM5ForCausalLM(GLM5Config.build(GROUPED, where="test"), seed=3).save_pretrained(grouped)
    one = tasks(
        1,
        gradients=task("gradients"),
        warmup=task("gradients", warmup=True),
        dense=task("gradients", start=str(dense)),
        grouped=task("gradients", start=str(grouped)),
    )
    return one | tasks(
        4,
        dense4=task("gradients", cp=4, start=str(dense), options={"recompute": "selective"}),
        grouped4=task("gradients", cp=4, start=str(grouped)),
        cp4=task("gradients", cp=4, options={"recompute": True, "micro_rows": 2}),
        cp2=task("gradients", cp=2, plan="zigzag", ep=2, options={"recompute": "selective"}),
        nodes=task("gradients", cp=4, plan="zigzag", local=2, ep=2),
        exchanges=task("exchanges", cp=4, local=2, plans=6),
        warmup4=task("gradients", cp=4, plan="zigzag", warmup=True, options={"recompute": True}),
        warmup2=task("gradients", cp=2, warmup=True),
    )


@pytest.fixture(scope="module")
def runs(tasks: Tasks) -> dict[str, Any]:
    """Many steps, with states on disk."""
    task, resumed = tasks.task, tasks.resumed
    found = tasks(
        1,
        follow=task("follow", steps=STEPS),
        whole=task("run"),
        bf16=task("gradients", options={"dtype": "bfloat16"}),
    )
    found |= tasks(
        2,
        cut=task("run", cp=2, stop=3, out=str(tasks.folder / "two")),
        follow2=task("follow", cp=2, steps=STEPS),
        bf16_2=task("gradients", cp=2, ep=2, options={"dtype": "bfloat16", "recompute": True}),
    )
    found |= tasks(1, single=resumed("single", "two", stop=3))
    return found | tasks(
        4,
        last=resumed("last", "single", cp=4),
        follow22=task("follow", cp=2, ep=2, steps=STEPS),
        follow4=task("follow", cp=4, plan="zigzag", ep=2, steps=STEPS),
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["follow2", "follow22", "follow4"])
def test_losses_follow_one_process(runs: dict[str, Any], name: str) -> None:
    """With MTP, expert balance, router biases and the indexers' loss, over 20 steps: cp 2, cp 2 x dp 2, and cp 4."""
    one, other = runs["follow"], runs[name]
    for key in ("loss", "mtp1_loss", "mtp2_loss", "indexer_kl"):
        values = [[numbers[key] for numbers in result["numbers"]] for result in (one, other)]
        assert values[1] == pytest.approx(values[0], abs=1e-4), key
    for key in ("grad_norm", "load_max", "tokens"):
        values = [[numbers[key] for numbers in result["numbers"]] for result in (one, other)]
        assert values[1] == pytest.approx(values[0], rel=1e-3), key
    monitored = {key: value for key, value in one["numbers"][0].items() if "max_logit" in key or "accuracy" in key}
    assert monitored == pytest.approx({key: other["numbers"][0][key] for key in monitored}, rel=1e-4)
    assert one["numbers"][0]["loss"] - one["numbers"][-1]["loss"] > 0.2  # something was learnt
    assert other["scores"]["held_out"] == pytest.approx(one["scores"]["held_out"], abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("cp4", "gradients"),
        ("cp2", "gradients"),
        ("nodes", "gradients"),
        ("dense4", "dense"),
        ("grouped4", "grouped"),
        ("warmup4", "warmup"),
        ("warmup2", "warmup"),
    ],
)
def test_gradients_are_those_of_one_process(results: dict[str, Any], name: str, reference: str) -> None:
    same(results[reference], results[name])


def same(expected: Any, found: Any) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["loads"] == expected["loads"]
    assert found["gradients"].keys() == expected["gradients"].keys() and len(expected["gradients"]) > 5
    for parameter, values in expected["gradients"].items():
        wanted, got = torch.tensor(values), torch.tensor(found["gradients"][parameter])
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6 * max(1.0, float(wanted.abs().max())), msg=parameter)


@pytest.mark.long
def test_the_way_over_nodes_is_that_between_ranks(results: dict[str, Any]) -> None:
    for plans in results["exchanges"]["found"]:
        assert len(plans) == 6
        for plan in plans:
            assert plan["rows"] == [plan["expected"]] * 2
            assert plan["back"] == [plan["sums"]] * 2


@pytest.mark.long
def test_bf16(runs: dict[str, Any]) -> None:
    """Rounding differs with the order of sums."""
    flat = [
        torch.cat([torch.tensor(values).flatten() for values in runs[name]["gradients"].values()])
        for name in ("bf16", "bf16_2")
    ]
    assert runs["bf16_2"]["loss"] == pytest.approx(runs["bf16"]["loss"], abs=1e-4)
    assert float((flat[1] - flat[0]).norm() / flat[0].norm()) < 2**-7


@pytest.mark.long
def test_states_resume_with_other_groups(runs: dict[str, Any]) -> None:
    """cp = 2, then one process, then cp = 4: each goes on from the last state of the one before."""
    whole = runs["whole"]["losses"]
    assert runs["cut"]["losses"] == pytest.approx(whole[:3], abs=1e-5)
    assert runs["single"]["losses"] == pytest.approx(whole[2:5], abs=1e-5)
    assert runs["last"]["losses"] == pytest.approx(whole[4:5], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, 513, 2048, 8192])
def test_long_rows(job: Any, start: str, length: int) -> None:
    """Documents of many lengths in rows that 8 chunks do not divide."""
    task: dict[str, Any] = {"kind": "gradients", "start": start, "length": length, "options": {"micro_rows": 1}}
    one = job(1, dict(task))[0]
    for plan in ("zigzag", "workload"):
        layout = {"cp": 4, "cp_plan": plan}
        found = job(4, {**task, "layout": layout}, timeout=1200)[0]
        same(one, found)


def test_layouts_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"parallel.cp = 4 does not divide the 6 processes"):
        refuse(job_problems(Layout(cp=4), 6))
    config = GLM5Config.preset("glm9b", attention_pattern="searched", efficient_attention="gdn")
    with pytest.raises(ConfigError, match=r"parallel.cp = 2 cannot divide a recurrence"):
        refuse(model_problems(Layout(cp=2), config))
