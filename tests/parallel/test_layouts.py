"""Pipeline, context, expert and data parallelism together compute what one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.dist

WORLD, STEPS = 8, 20
LAYOUTS = {
    "pp2 cp2 dp2 ep2": {"pp": 2, "cp": 2, "ep": 2},
    "pp2 cp2 dp2 ep1": {"pp": 2, "cp": 2},
    "pp2 cp4 ep2": {"pp": 2, "cp": 4, "ep": 2},
    "pp2 cp4 zigzag": {"pp": 2, "cp": 4, "cp_plan": "zigzag"},
    "pp2 dp4 ep2": {"pp": 2, "ep": 2, "pp_layers": [4, 0]},
    "pp4 dp2 ep2": {"pp": 4, "ep": 2},
    "pp4 cp2": {"pp": 4, "cp": 2, "pp_layers": [1, 1, 2, 0]},
    "pp4 cp2 ep2 deferred": {"pp": 4, "cp": 2, "ep": 2, "pp_deferred": 2},
    "interleaved cp2 dp2 ep2": {"pp": 2, "pp_stages_per_rank": 2, "cp": 2, "ep": 2, "pp_layers": [1, 2, 1, 0]},
    "interleaved cp4 deferred": {"pp": 2, "pp_stages_per_rank": 2, "cp": 4, "pp_deferred": 1},
    "cp2 dp4 ep2": {"cp": 2, "ep": 2},
    "cp4 dp2 ep2": {"cp": 4, "ep": 2},
    "cp8": {"cp": 8},
    "dp8 ep2": {"ep": 2},
}
"""Six experts: they divide over two ranks."""
NO_CHOICE = {"num_experts_per_tok": 6, "index_topk": 128}
"""All experts and all keys. Chosen by scores, two that are nearly equal change places by the rounding of a sum over
other ranks; after one such token the runs differ by more than 1e-4, as do two runs whose weights differ by 3e-7."""


@pytest.fixture(scope="module")
def start(small: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    def saved(**overrides: Any) -> str:
        path = tmp_path_factory.mktemp("start") / "model"
        small(seed=1, n_routed_experts=6, num_hidden_layers=4, **overrides).save_pretrained(path)
        return str(path)

    return saved


def gradients(start: str, **layout: Any) -> dict[str, Any]:
    return {"kind": "gradients", "start": start, "layout": {"ep": 1, **layout}, "options": {"micro_rows": 1}}


@pytest.fixture(scope="module")
def results(job: Any, start: Callable[..., str]) -> dict[str, list[dict[str, Any]]]:
    """By layout: 20 steps of a model without choices, and the gradients of one step of a model that chooses."""
    free, sparse = start(**NO_CHOICE), start()

    def tasks(**layout: Any) -> list[dict[str, Any]]:
        follow = {"kind": "follow", "start": free, "steps": STEPS, "layout": {"ep": 1, **layout}}
        return [{**follow, "options": {"micro_rows": 1, "recompute": True}}, gradients(sparse, **layout)]

    # Processes of their own for each layout, for those of before keep the threads of their groups.
    return {"one": job(1, *tasks()), **{n: job(WORLD, *tasks(**layout), timeout=1800) for n, layout in LAYOUTS.items()}}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_eight_ranks_follow_one(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    """With MTP at two depths, expert balance, router biases and the indexers' loss, over 20 steps."""
    (one, _), (other, _) = results["one"], results[name]
    for key in ("loss", "mtp1_loss", "mtp2_loss", "indexer_kl", "load_max"):
        values = [[numbers[key] for numbers in result["numbers"]] for result in (one, other)]
        assert values[1] == pytest.approx(values[0], abs=1e-4), key
    for tensor, numbers in one["export"].items():
        assert other["export"][tensor] == pytest.approx(numbers, rel=1e-3, abs=1e-3), tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_eight_ranks_choose_as_one(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    """A step with sparse attention and routing: the same experts, and gradients that need the same keys."""
    equal_gradients(results["one"][1], results[name][1])


@pytest.mark.long
def test_gradients_with_stages_and_context_groups(job: Any, start: Callable[..., str]) -> None:
    path = start()
    equal_gradients(job(1, gradients(path))[0], job(4, gradients(path, pp=2, cp=2))[0])


def equal_gradients(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5) and found["loads"] == expected["loads"]
    for name, gradient in expected["gradients"].items():
        whole = torch.tensor(gradient)
        torch.testing.assert_close(
            torch.tensor(found["gradients"][name]), whole, rtol=0, atol=1e-4 * float(whole.abs().max())
        )
