"""`glm5 plan` and the trainer refuse the same recipes and layouts, and both what is worked out here by hand."""

from __future__ import annotations

from itertools import accumulate, pairwise, product
from math import lcm
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5.config.layout_rules import node_of
from glm5.config.parallel import Layout
from glm5.config.pipeline import divide
from glm5.config.recipe import RunRecipe
from glm5.config.trained_models import trained_models
from glm5.errors import ConfigError
from glm5.launch.layouts import STAGES, candidates, legal_layouts
from glm5.launch.pipeline import _check
from glm5.launch.plan import plan

OPTIM = {"steps": 1, "lr": 1e-3}
FAMILY = [{"name": "arithmetic"}]
STAGE_KINDS: dict[str, dict[str, Any]] = {
    "tokenizer": {"vocab_size": 512},
    "pretrain": {"optim": OPTIM, "row_length": 64},
    "dsa_warmup": {"optim": OPTIM, "row_length": 64},
    "dsa_sparse": {"optim": OPTIM, "row_length": 64},
    "sft": {"optim": OPTIM, "families": FAMILY},
    "reasoning": {"optim": OPTIM, "families": FAMILY},
    "distill": {"optim": OPTIM, "families": FAMILY, "teachers": {"arithmetic": "/a/teacher"}},
}
LEARNERS = ("reasoning", "distill")
few = st.sampled_from([1, 1, 1, 2, 3, 4])
seldom = st.integers(0, 11).map(lambda number: number == 0)


@st.composite
def recipes(draw: st.DrawFn) -> tuple[RunRecipe, int]:
    """A recipe of one to three stages, and a number of processes. About a third is legal; the others mostly have one
    problem."""
    layers = draw(st.integers(2, 5))
    model = {
        "num_hidden_layers": layers,
        "n_routed_experts": draw(st.sampled_from([6, 12, 12])),
        "num_nextn_predict_layers": draw(st.integers(0, 1)),
    }
    pp, cp, ep = draw(few), draw(st.sampled_from([1, 1, 1, 2, 3, 4, 12, 12])), draw(few)
    chunks = draw(st.sampled_from([1, 1, 2])) if pp > 1 or draw(seldom) else 1
    kinds = draw(st.lists(st.sampled_from(list(STAGE_KINDS)), min_size=1, max_size=3, unique=True))
    learns = pp == cp == 1 or draw(seldom)
    kinds = [kind for kind in STAGE_KINDS if kind in kinds and (learns or kind not in LEARNERS)] or ["pretrain"]
    stages: list[dict[str, Any]] = [{"kind": kind, "name": kind, **STAGE_KINDS[kind]} for kind in kinds]
    if "dsa_warmup" in kinds and draw(st.booleans()):
        shared = "F" + "".join(draw(st.sampled_from("FS")) for _ in range(layers - 1))
        next(stage for stage in stages if stage["kind"] == "dsa_warmup")["share_indexers"] = shared
    for stage in stages:
        if "optim" in stage and stage["kind"] not in LEARNERS:
            stage["compile"] = draw(seldom) or (pp == 1 and draw(st.booleans()))
            if draw(st.booleans()):
                stage["recompute"] = "auto"
            elif draw(st.booleans()):
                count = layers + model["num_nextn_predict_layers"] + draw(seldom)
                stage["recompute"] = tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    layout: dict[str, Any] = {"pp": pp, "pp_stages_per_rank": chunks, "cp": cp, "ep": ep}
    layout["pp_deferred"] = int((pp > 1 and draw(st.booleans())) or draw(seldom))
    if (pp > 1 and draw(st.booleans())) or draw(seldom):
        cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=pp * chunks - 1, max_size=pp * chunks - 1)))
        layout["pp_layers"] = [b - a for a, b in pairwise([0, *cuts, layers])]
    launch = None if draw(seldom) else {}
    recipe = {"name": "x", "preset": "nano", "model": model, "stages": stages, "parallel": layout, "launch": launch}
    world = draw(st.integers(1, 24)) if draw(seldom) else pp * lcm(cp, ep) * draw(st.integers(1, 2))
    return RunRecipe.model_validate(recipe), world


def refused(recipe: RunRecipe, world: int, node: int) -> bool:
    """By hand."""
    p = recipe.parallel
    if world % p.pp or (world // p.pp) % p.ep or (world // p.pp) % p.cp or (p.cp > node and p.cp % node):
        return True
    if p.pp == 1 and (p.pp_stages_per_rank > 1 or p.pp_layers or p.pp_deferred):
        return True
    for stage in recipe.stages:
        if stage.kind in LEARNERS and (p.pp > 1 or p.cp > 1 or (world > 1 and recipe.launch is None)):
            return True
        if p.pp > 1 and getattr(stage, "compile", False):
            return True
    for stage, config in trained_models(recipe):
        layers, mtp = config.num_hidden_layers, config.num_nextn_predict_layers
        modes = getattr(stage, "recompute", False)
        if config.n_routed_experts % p.ep or (isinstance(modes, tuple) and len(modes) != layers + mtp):
            return True
        if p.pp == 1:
            continue
        pieces = p.pp * p.pp_stages_per_rank
        if p.pp_layers:
            filled = [count > 0 for count in p.pp_layers]
            empty = filled[::-1].index(True) if any(filled) else pieces
            if sum(p.pp_layers) != layers or empty > 1 + mtp or not all(filled[: pieces - empty]):
                return True
            starts = [0, *accumulate(p.pp_layers)][:-1]
        elif pieces > layers + mtp + 1:
            return True
        else:
            starts = [span.layers.start for span in divide(config, pieces)]
        if stage.kind.startswith("dsa") and any(0 < s < layers and not config.computes_topk(s) for s in starts):
            return True
    return False


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whether the trainer begins a job on nodes of eight."""

    def check(recipe: RunRecipe, world: int) -> bool:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node_of(world, 8)))
        try:
            _check(recipe, world)
        except ConfigError:
            return False
        return True

    return check


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(recipes())
def test_the_plan_and_the_trainer_refuse_the_same(accepted: Any, drawn: tuple[RunRecipe, int]) -> None:
    recipe, world = drawn
    found = plan(recipe, world, "b200")
    problems = [*found["problems"], *(problem for stage in found["stages"] for problem in stage["problems"])]
    assert not any("does not fit" in problem for problem in problems)
    assert accepted(recipe, world) == found["fits"] == (not refused(recipe, world, node_of(world, 8))), problems


@pytest.mark.parametrize("gpus", [6, 16, 24])
@pytest.mark.parametrize(
    "stage",
    [
        {"kind": "pretrain", "rows": 48, "row_length": 8192, "compile": True},
        {"kind": "sft", "rows": 48, "row_length": 4096, "recompute": (True, False, True, False, True)},
        {"kind": "dsa_warmup", "rows": 48, "row_length": 8192, "share_indexers": "FSFS"},
    ],
    ids=lambda stage: stage["kind"],
)
def test_layouts_that_are_listed_are_those_that_the_trainer_takes(
    accepted: Any, stage: dict[str, Any], gpus: int
) -> None:
    optim = {**STAGE_KINDS[stage["kind"]], "name": "stage"}
    recipe = RunRecipe.model_validate({"name": "x", "preset": "nano", "stages": [{**optim, **stage}]})
    [(own, config)] = trained_models(recipe)
    listed = list(legal_layouts(config, own, gpus, node_of(gpus, 8)))
    numbers = range(1, gpus + 1)
    every = [
        Layout(pp=pp, pp_stages_per_rank=chunks, cp=cp, ep=ep)
        for pp, chunks, cp, ep in product(numbers, STAGES, numbers, numbers)
        if gpus % pp == gpus % cp == gpus % ep == 0  # any other number is refused at once, above
    ]
    taken = [one for one in every if accepted(recipe.model_copy(update={"parallel": one}), gpus)]
    assert len(taken) > 5 and {repr(one) for one in listed} == {repr(one) for one in taken}
    compared = list(candidates(config, own, gpus, node_of(gpus, 8)))
    for layout in {repr(one.layout): one.layout for one in compared}.values():
        assert accepted(recipe.model_copy(update={"parallel": layout}), gpus)
    for one in compared:
        assert one.pp * one.dp * one.cp == gpus and one.dp * one.micro_rows * one.parts == 48
