"""Predicted bytes of layouts, beside those of a lone rank whose steps are real (see `lone_rank`): the most bytes of
tensors within 5 %, bytes of collectives to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from glm5.config.activations import Forward
from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.config.step_memory import RankStep, Setting
from glm5.config.traffic import step_traffic
from glm5.ops.narrow import CPU_HAS_BF16
from tests.config.lone_rank import measure, stage_of

LENGTH = 256
MODELS = {
    # The vocabulary and the experts decide where the peak is.
    "words": GLM5Config.preset("tiny", use_dsa=False, num_hidden_layers=3),
    "experts": GLM5Config.preset("tiny", use_dsa=False, num_hidden_layers=4, vocab_size=512, n_routed_experts=32),
}


class Case(NamedTuple):
    model: str
    world: int
    ep: int
    rows: int
    parts: int
    changes: dict[str, Any] = {}

    def __str__(self) -> str:
        changes = "-".join(f"{k}={v}" for k, v in self.changes.items())
        return f"{self.model}-{self.world}-ep{self.ep}-{self.rows}x{self.parts}-{changes}"


FAST = [Case("words", 4, 1, 1, 1, {"recompute": True}), Case("experts", 8, 4, 1, 2, {"reduce_once": False})]
CASES = [
    Case("words", 8, 1, 2, 1),
    Case("words", 8, 4, 2, 1),
    Case("words", 8, 8, 1, 2),
    Case("words", 2, 2, 4, 1, {"recompute": "selective"}),
    Case("words", 8, 1, 1, 2, {"dtype": "bfloat16"}),
    Case("words", 8, 2, 1, 1, {"dtype": "bfloat16", "recompute": True}),
    Case("words", 16, 1, 4, 1, {"recompute": True}),
    Case("words", 64, 8, 1, 1),
    Case("words", 8, 4, 1, 2, {"reduce_once": False}),
    Case("experts", 8, 1, 1, 1),
    Case("experts", 8, 8, 1, 1),
    Case("experts", 16, 4, 1, 1, {"recompute": "selective"}),
    Case("experts", 8, 4, 2, 1, {"dtype": "bfloat16"}),
    Case("experts", 32, 8, 1, 1),
    Case("experts", 8, 1, 1, 1, {"depths": 3}),
    Case("experts", 8, 1, 4, 1),
    Case("experts", 4, 4, 2, 1, {"recompute": True}),
    Case("experts", 4, 2, 4, 1, {"dtype": "bfloat16"}),
    Case("experts", 64, 32, 1, 1, {"recompute": True}),
    Case("experts", 2, 1, 2, 2, {"reduce_once": False}),
    Case("experts", 8, 2, 2, 1, {"depths": 2}),
]


def check(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = dict(case.changes)
    depths, once = changes.pop("depths", 1), changes.pop("reduce_once", True)
    config, layout = MODELS[case.model], Layout(ep=case.ep, reduce_once=once, device="cpu")
    stage = stage_of(case.rows * case.parts * case.world, LENGTH, micro_rows=case.rows, **changes)
    peak, sent = measure(config, layout, case.world, stage, folder, monkeypatch, depths)
    item = 2 if stage.dtype == "bfloat16" else 4
    told = dict(recompute=stage.recompute, depths=depths, balance=False, cpu=True, bf16_products=CPU_HAS_BF16)
    forward = Forward(case.rows, LENGTH, item, **told)
    step = RankStep(config, Setting(forward, case.parts, case.world, case.ep, reduce_once=once))
    predicted: dict[str, int] = {}
    for one in step_traffic(step):
        name = "to experts" if one.what == "rows of experts" else one.kind
        predicted[name] = predicted.get(name, 0) + (0 if "Muon" in one.what else one.bytes)
    assert predicted["all-gather"] == sent["_allgather_base_"]
    assert predicted["reduce-scatter"] == sent["_reduce_scatter_base_"]
    assert predicted.get("to experts", 0) == sent["to experts"]
    assert step.peak().bytes == pytest.approx(peak, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("case", FAST, ids=str)
def test_bytes(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_of_more_layouts(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, tmp_path, monkeypatch)
