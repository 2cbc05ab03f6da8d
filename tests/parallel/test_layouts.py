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


@pytest.fixture(scope="module")
def start(small: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("start") / "model"
    small(seed=1, n_routed_experts=6, num_hidden_layers=4).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def results(job: Any, start: str) -> dict[str, Any]:
    def task(**layout: Any) -> dict[str, Any]:
        options = {"micro_rows": 1, "recompute": True}
        layout = {"ep": 1, **layout}
        return {
            "kind": "follow",
            "start": start,
            "steps": STEPS,
            "layout": layout,
            "ep": layout["ep"],
            "options": options,
        }

    found = job(WORLD, *(task(**layout) for layout in LAYOUTS.values()), timeout=1800)
    return {"one": job(1, task())[0], **dict(zip(LAYOUTS, found, strict=True))}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_eight_ranks_follow_one(results: dict[str, Any], name: str) -> None:
    """With MTP at two depths, expert balance, router biases and the indexers' loss, over 20 steps."""
    one, other = results["one"], results[name]
    for key in ("loss", "mtp1_loss", "mtp2_loss", "indexer_kl", "load_max"):
        values = [[numbers[key] for numbers in result["numbers"]] for result in (one, other)]
        assert values[1] == pytest.approx(values[0], abs=1e-4), key
    for tensor, numbers in one["export"].items():
        assert other["export"][tensor] == pytest.approx(numbers, rel=1e-3, abs=1e-3), tensor


@pytest.mark.long
def test_gradients_with_stages_and_context_groups(job: Any, start: str) -> None:
    def task(**layout: Any) -> dict[str, Any]:
        return {"kind": "gradients", "start": start, "layout": layout, "options": {"micro_rows": 1}}

    (expected,), (found,) = job(1, task()), job(4, task(pp=2, cp=2))
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5) and found["loads"] == expected["loads"]
    for name, gradient in expected["gradients"].items():
        whole = torch.tensor(gradient)
        torch.testing.assert_close(
            torch.tensor(found["gradients"][name]), whole, rtol=0, atol=1e-4 * float(whole.abs().max())
        )
