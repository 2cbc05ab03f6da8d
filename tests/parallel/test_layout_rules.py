"""Layouts that the rules accept can be built: a trainer of rank 0, without the other ranks (see `lone_rank`)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from glm5.config.layout_rules import job_problems, training_problems
from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.parallel import Layout
from glm5.config.recipe import PretrainStage
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import NullMetrics
from glm5.parallel.pipeline_ranks import PipelineRanks
from glm5.train.loop import StageIO, Trainer
from glm5.train.losses import language_loss
from tests.config.lone_rank import LoneRanks, Watch, fake_job

DENSE = {"num_nextn_predict_layers": 0, "n_routed_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0}


class LoneStages(PipelineRanks):
    """Rank 0 of pipeline stages."""

    gather, sum, wait = LoneRanks.gather, LoneRanks.sum, LoneRanks.wait  # type: ignore[assignment]


def drawn(seed: int) -> tuple[GLM5Config, Layout, int]:
    """A model, one without experts among them, a layout that may train it, and a number of ranks."""
    rng = random.Random(seed)
    while True:
        layers = rng.randint(1, 5)
        model: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": 64, "use_dsa": rng.random() < 0.5}
        if rng.random() < 0.2:
            model |= {**DENSE, "first_k_dense_replace": layers, "n_shared_experts": 0}
        else:
            model |= {"n_routed_experts": rng.choice([4, 6, 8]), "first_k_dense_replace": rng.randint(0, layers)}
            model |= {"num_nextn_predict_layers": rng.randint(0, 1)}
        pp = rng.choice([1, 1, 2, 3, 4])
        layout = Layout(
            pp=pp,
            pp_stages_per_rank=rng.choice([1, 2]) if pp > 1 else 1,
            pp_deferred=rng.choice([0, 1]) if pp > 1 else 0,
            cp=rng.choice([1, 1, 2, 4]),
            ep=rng.choice([1, 1, 2, 4]),
            device="cpu",
        )
        config, world = GLM5Config.preset("nano", **model), pp * rng.choice([1, 2, 4, 8])
        problems = [*job_problems(layout, world), *training_problems(stage(rng), config, layout)]
        if world > 1 and not problems:
            return config, layout, world


def stage(rng: random.Random) -> PretrainStage:
    how = rng.choice([False, True, "auto"])
    shape = {"rows": rng.choice([1, 4, 16]), "row_length": 16, "mtp_depths": rng.randint(0, 2), "recompute": how}
    return PretrainStage(kind="pretrain", name="stage", optim=OptimConfig(steps=1, lr=1e-3), **shape)


@pytest.mark.long
def test_accepted_layouts_can_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = set()
    for seed in range(24):
        config, layout, world = drawn(seed)
        kinds.add((layout.pp > 1, layout.cp > 1, layout.ep > 1, config.n_routed_experts > 0))
        with fake_job(world, monkeypatch, Watch()):
            ranks = (LoneStages if layout.pp > 1 else LoneRanks)(layout)
            io = StageIO("stage", tmp_path, NullMetrics(), lambda steps, numbers: None, ranks)
            own = stage(random.Random(seed))
            trainer = Trainer(GLM5ForCausalLM(config), own, io, language_loss, lambda name: True, 0.0)  # type: ignore[arg-type]
            assert trainer.optimizer.param_groups and trainer.recompute != "auto"
    assert len(kinds) > 6
