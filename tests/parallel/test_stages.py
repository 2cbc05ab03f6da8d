"""Pipeline stages compute what one process does: losses, gradients, states on disk, gradient bytes, a common end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from glm5.data.packing import Batch
from glm5.errors import ConfigError
from glm5.train.losses import IndexerLoss

pytestmark = pytest.mark.dist

LAYERS = 4
PAPER = {"pp": 2, "pp_layers": [LAYERS, 0]}  # MTP on the stage before the last, the output head alone on the last
INTERLEAVED = {"pp": 2, "pp_stages_per_rank": 2, "pp_layers": [2, 1, 1, 0]}
SHARING = {"pp": 2, "pp_stages_per_rank": 2, "pp_layers": [1, 2, 1, 0]}  # layer 1 needs the keys that layer 0 selected
AUTO = {"micro_rows": 1, "recompute": "auto"}
COMPARED = ("loss", "mtp1_loss", "mtp2_loss", "indexer_kl", "grad_norm", "indexer_grad_norm", "load_max", "tokens")


@pytest.fixture(scope="module")
def start(small: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint in which the second layer attends to the keys that the first one selected."""
    path = tmp_path_factory.mktemp("start") / "model"
    shared = ["full", "shared", *["full"] * (LAYERS - 2)]
    small(seed=1, n_routed_experts=6, num_hidden_layers=LAYERS, indexer_types=shared).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def task(start: str) -> Callable[..., dict[str, Any]]:
    def make(kind: str, layout: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "start": start, "layout": layout or {}, "options": {"micro_rows": 1}, **more}

    return make


@pytest.fixture(scope="module")
def results(job: Any, task: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quick tasks by name, in two jobs: loading torch takes longer than the work."""
    two = {
        "interleaved": task("follow", INTERLEAVED | {"memory": "3800KB"}, steps=3, options=AUTO),
        "deferred": task("gradients", PAPER | {"pp_deferred": 2}),
        "sharing": task("gradients", SHARING, indexers=False),
    }
    found = dict(zip(two, job(2, *two.values()), strict=True))
    one = {
        "follow": task("follow", steps=3),
        "gradients": task("gradients"),
        "sharing one": task("gradients", indexers=False),
    }
    return found | dict(zip(one, job(1, *one.values()), strict=True))


@pytest.fixture(scope="module")
def more(job: Any, task: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stages")
    two = {
        "paper": task("follow", PAPER, options={"micro_rows": 2}),
        "interleaved, deferred": task("gradients", INTERLEAVED | {"pp_deferred": 2}),
        "warmup": task("gradients", {"pp": 2}, warmup=True, options={"micro_rows": 1, "recompute": True}),
        "warmup, paper": task("follow", PAPER, warmup=True, steps=2),
        "cut": task("run", INTERLEAVED, stop=3, out=str(folder / "two")),
        "same": task("run", PAPER, copy=str(folder / "two"), out=str(folder / "same")),
        "skipped": task("spoilt", PAPER),
    }
    found = dict(zip(two, job(2, *two.values()), strict=True))
    one = {
        "follow": task("follow"),
        "warmup one": task("follow", warmup=True, steps=2),
        "kl gradients": task("gradients", warmup=True),
        "whole": task("run", out=str(folder / "one")),
        "single": task("run", copy=str(folder / "two"), out=str(folder / "single")),
        "skipped one": task("spoilt"),
    }
    return found | dict(zip(one, job(1, *one.values()), strict=True)) | {"folder": folder}


def check_follows(one: Any, other: Any, atol: float = 1e-5) -> None:
    for key in COMPARED:
        values = [[numbers[key] for numbers in result["numbers"]] for result in (one, other)]
        assert values[1] == pytest.approx(values[0], abs=atol, rel=1e-4), key
    assert other["scores"]["held_out"] == pytest.approx(one["scores"]["held_out"], abs=atol)
    for name, numbers in one["export"].items():
        assert other["export"][name] == pytest.approx(numbers, rel=1e-4, abs=1e-3), name
    assert one["numbers"][0]["loss"] - one["numbers"][-1]["loss"] > 0.05  # something was learnt


def test_interleaved_stages_follow_one_process(results: dict[str, Any]) -> None:
    """With layers that recompute what the memory asks for: all ranks plan the same."""
    check_follows(results["follow"], results["interleaved"])
    one, other = results["interleaved"]["recompute"]
    assert one == other and len(set(map(str, one))) == 3


@pytest.mark.long
def test_stages_placed_as_in_the_paper_follow_one_process(more: dict[str, Any]) -> None:
    check_follows(more["follow"], more["paper"])


def test_gradients_that_waited_are_those_of_one_process(results: dict[str, Any]) -> None:
    check_gradients(results["gradients"], results["deferred"])


def test_selected_keys_travel_to_the_next_stage(results: dict[str, Any]) -> None:
    check_gradients(results["sharing one"], results["sharing"])


def test_the_loss_of_an_indexer_needs_all_its_layers_in_a_stage() -> None:
    loss = IndexerLoss(Batch(*(torch.zeros(1, 4, dtype=kind) for kind in (torch.int64, torch.int64, torch.bool))), 2)
    with pytest.raises(ConfigError, match=r"Layer 3 shares the indexer .* parallel.pp_layers"):
        loss.selected(3, None, torch.zeros(1, 4, 2), torch.ones(1, 4, 2, dtype=torch.bool))


@pytest.mark.long
def test_other_gradients_are_those_of_one_process(results: dict[str, Any], more: dict[str, Any]) -> None:
    """With both; and of the indexers alone: then no gradient travels between stages."""
    check_gradients(results["gradients"], more["interleaved, deferred"])
    check_gradients(more["kl gradients"], more["warmup"])
    values = [[n["indexer_kl"] for n in more[name]["numbers"]] for name in ("warmup one", "warmup, paper")]
    assert values[1] == pytest.approx(values[0], abs=1e-6)  # also if the last stage has nothing to train


def check_gradients(expected: Any, found: Any) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5) and found["loads"] == expected["loads"]
    assert found["gradients"].keys() == expected["gradients"].keys() and len(expected["gradients"]) > 5
    for parameter, values in expected["gradients"].items():
        wanted, got = torch.tensor(values), torch.tensor(found["gradients"][parameter])
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6 * max(1.0, float(wanted.abs().max())), msg=parameter)


@pytest.mark.long
def test_a_state_of_interleaved_stages_resumes_in_other_layouts(more: dict[str, Any]) -> None:
    whole = more["whole"]
    assert more["cut"]["losses"] == pytest.approx(whole["losses"][:3], abs=1e-5)
    for name in ("same", "single"):  # the last state before step 3 is that of step 2
        assert more[name]["losses"] == pytest.approx(whole["losses"][2:], abs=1e-5), name
        for tensor, numbers in whole["export"].items():
            assert more[name]["export"][tensor] == pytest.approx(numbers, rel=1e-4, abs=1e-3), tensor


@pytest.mark.long
def test_a_step_that_is_not_finite_is_skipped_and_named_by_all_stages(more: dict[str, Any]) -> None:
    one, two = more["skipped one"], more["skipped"]
    assert one["numbers"]["skipped"] == two["numbers"]["skipped"] == 1
    culprits = [{key for key in found["numbers"] if key.startswith("non_finite/")} for found in (one, two)]
    assert culprits[0] == culprits[1] == {"non_finite/model.layers.2.mlp"}


@pytest.mark.long
def test_a_stage_that_breaks_ends_the_others(job: Any, task: Any) -> None:
    ranks = job.start(2, [task("fail", PAPER, how="raise", timeout=60)])
    try:
        assert ranks[1].wait(240) != 0 and "this rank breaks" in ranks[1].err
        assert ranks[0].wait(240) != 0 and "Rank 1 (" in ranks[0].err, ranks[0].err[-2000:]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.long
def test_four_ranks_follow_one_process(job: Any, task: Any, more: dict[str, Any]) -> None:
    """Four stages; and two ranks per stage that compute other rows and divide the experts. Twenty steps, then states of
    two stages on four ranks. Gradient bytes: see `GradientBytes`."""
    long = {"steps": 20, "options": {"micro_rows": 1}}
    tasks = [
        task("follow", {"pp": 4}, **long),
        task("follow", INTERLEAVED | {"pp_deferred": 1}, ep=2, **long),
        task("run", {"pp": 4}, copy=str(more["folder"] / "two"), out=str(more["folder"] / "four")),
        task("gradient_bytes", INTERLEAVED),
    ]
    four, interleaved, resumed, memory = job(4, *tasks)
    (one,) = job(1, task("follow", **long))
    for found in (four, interleaved):
        check_follows(one, found, atol=1e-4)
    assert resumed["losses"] == pytest.approx(more["whole"]["losses"][2:], abs=1e-5)
    for rank in memory:
        assert rank["peak"] == pytest.approx(rank["formula"], rel=0.05) and rank["stages"] == 2
