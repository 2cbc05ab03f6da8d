"""Context parallelism on ranks: the losses, gradients and states of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.errors import ConfigError
from glm5.parallel.ranks import check_layout, check_model

pytestmark = pytest.mark.dist

STEPS = 20


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
def results(tasks: Tasks) -> dict[str, Any]:
    """One step, on one process and on four."""
    task = tasks.task
    return tasks(1, gradients=task("gradients"), warmup=task("gradients", warmup=True)) | tasks(
        4,
        cp4=task("gradients", cp=4, options={"recompute": True, "micro_rows": 2}),
        cp2=task("gradients", cp=2, plan="zigzag", ep=2, options={"recompute": "selective"}),
        nodes=task("gradients", cp=4, plan="zigzag", local=2, ep=2),
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


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("cp4", "gradients"),
        ("cp2", "gradients"),
        ("nodes", "gradients"),
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
        check_layout(Layout(cp=4), 6)
    config = GLM5Config.preset("glm9b", attention_pattern="searched", efficient_attention="gdn")
    with pytest.raises(ConfigError, match=r"parallel.cp = 2 cannot divide a recurrence"):
        check_model(Layout(cp=2), config)
