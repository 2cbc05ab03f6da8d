"""`recompute = "auto"`: the same losses as with and without recomputation, and no more bytes than are given."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config.devices import DEVICES, RESERVED, similar_device
from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.parallel import Layout
from glm5.config.recipe import DsaStage, PretrainStage
from glm5.config.step_memory import RankStep
from glm5.config.step_setting import gradient_setting, planned_setting
from glm5.data.packing import Batch
from glm5.device import memory_of
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import NullMetrics
from glm5.parallel.ranks import Ranks
from glm5.train import auto_recompute
from glm5.train.loop import StageIO, Trainer
from glm5.train.losses import language_loss

Alive: Any = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "_alive.py"))["Alive"]
CONFIG = GLM5Config.preset("nano", use_dsa=False, vocab_size=256)
ROWS, LENGTH = 8, 256


def trained(folder: Path, recompute: Any, memory: str | None = None, steps: int = 2) -> tuple[list[float], int, Any]:
    """Losses of the steps, the most bytes of tensors in them, and what was recomputed."""
    optim = OptimConfig(steps=9, lr=1e-2, schedule="constant", monitor_every=0)
    shape = {"rows": ROWS, "row_length": LENGTH, "mtp_depths": 1, "balance_weight": 0.0}
    stage = PretrainStage(kind="pretrain", name="stage", optim=optim, recompute=recompute, **shape)
    ids = torch.randint(0, CONFIG.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    ranks = Ranks("cpu", Layout(memory=memory))
    io = StageIO("stage", folder, NullMetrics(), lambda steps, numbers: None, ranks)

    def loss_of(model: Any, part: Any, ctx: Any) -> Any:
        return language_loss(model, part, ctx, mtp_weight=0.3, mtp_depths=1)

    with Alive() as alive:
        trainer = Trainer(GLM5ForCausalLM(CONFIG), stage, io, loss_of, lambda name: True, 0.0)
        alive.phase()
        losses = [trainer.step(step, batch)["loss"] for step in range(steps)]
        return losses, alive.phase()["peak"], trainer.recompute


@pytest.mark.long
def test_losses_are_equal_and_the_bytes_are_within_the_bound(tmp_path: Path) -> None:
    everything, most, _ = trained(tmp_path, False)
    inputs, least, _ = trained(tmp_path, True)
    assert everything == inputs and least < 0.7 * most
    seen = set()
    for share in (0.25, 0.5, 0.75):
        usable = least + share * (most - least)
        losses, peak, modes = trained(tmp_path, "auto", f"{round(usable / (1 - RESERVED) / 1000)}KB")
        assert losses == everything and least <= peak <= usable
        assert len(modes) == CONFIG.num_hidden_layers + 1 and len(set(modes)) > 1
        seen.add(modes)
    assert len(seen) == 3


def test_without_a_bound_it_is_the_device_s_memory(tmp_path: Path) -> None:
    assert memory_of(torch.device("cpu")) > 1e8
    assert set(trained(tmp_path, "auto", steps=0)[2]) == {False}
    assert all(set(trained(tmp_path, "auto", memory, steps=0)[2]) == {True} for memory in ("1KB", "0KB"))


def test_units_and_names() -> None:
    sizes = {"70GiB": 70 * 2**30, "64 GB": 64e9, "1.5MiB": 1.5 * 2**20, "200MB": 2e8, "7KB": 7e3}
    assert {text: Layout(memory=text).memory_bytes for text in sizes} == sizes
    assert Layout().memory_bytes is None
    for text in ("70", "GiB", "-1GB", "1TB", "1e3GB"):
        with pytest.raises(ValueError, match="memory"):
            Layout(memory=text)
    for name, key in {"NVIDIA A100-SXM4-80GB": "a100", "Ascend910B2": "ascend-910b", "Other": "h100"}.items():
        assert similar_device(name, 5.0).flops == DEVICES[key].flops


@pytest.mark.parametrize("pp", [1, 2])
def test_more_memory_recomputes_less(pp: int) -> None:
    """Eight processes, in stages or not: never more layers with more memory, and the fullest process within it."""
    config = GLM5Config.preset("base", use_dsa=False)
    optim = OptimConfig(steps=1, lr=1e-3)
    shape = {"rows": 64, "micro_rows": 8, "row_length": 4096, "dtype": "bfloat16", "recompute": "auto"}
    stage = PretrainStage(kind="pretrain", name="s", optim=optim, **shape)
    again = []
    for memory in (30e9, 40e9, 60e9, 120e9, 400e9):
        device = similar_device("h100", memory)
        setting, peak = planned_setting(stage, config, Layout(pp=pp), 8, device)
        modes = setting.forward.recompute
        assert isinstance(modes, tuple) and peak is not None and (peak <= device.usable or set(modes) == {True})
        again.append(modes.count(True))
    assert again == sorted(again, reverse=True) and again[-1] == 0 < again[0]


class Mixed(Ranks):
    """A rank of two with devices of two makers."""

    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA H200")

    def gather(self, value: Any) -> list[Any]:
        return [(80e9, name) for name in self.names] if isinstance(value, tuple) else [80e9, 80e9]


def test_ranks_with_other_devices_plan_for_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal memory too: what is cheap to compute again depends on the device's rates."""
    stage = PretrainStage(kind="pretrain", name="s", optim=OptimConfig(steps=1, lr=1e-3), recompute="auto")
    seen: list[Any] = []

    def record(stage: Any, config: Any, layout: Any, world: int, device: Any, **options: Any) -> Any:
        seen.append(device)
        return planned_setting(stage, config, layout, world, device, **options)

    monkeypatch.setattr(auto_recompute, "planned_setting", record)
    for name in Mixed.names:
        monkeypatch.setattr(auto_recompute, "name_of", lambda device, name=name: name)
        auto_recompute.recompute_of(stage, CONFIG, Mixed("cpu", Layout(memory="80GB")))
    assert seen[0] == seen[1]


def test_what_stays_on_a_cpu_is_counted() -> None:
    """`offload` does nothing there."""
    shape = {"rows": ROWS, "row_length": LENGTH, "recompute": "auto"}
    stage = PretrainStage(kind="pretrain", name="s", optim=OptimConfig(steps=1, lr=1e-3), **shape)
    away, device = stage.model_copy(update={"offload": True}), similar_device("cpu", 30e6)
    plans = [planned_setting(one, CONFIG, Layout(), 1, device, cpu=True) for one in (stage, away)]
    assert plans[0] == plans[1] != planned_setting(away, CONFIG, Layout(), 1, device)


def test_a_stage_with_the_output_head_alone_has_a_plan() -> None:
    """Two layers and MTP in four stages; while the indexers learn, the last one has nothing to keep."""
    config = GLM5Config.preset("nano", num_hidden_layers=2, index_topk_pattern="FF")
    stage = DsaStage(kind="dsa_warmup", name="s", optim=OptimConfig(steps=1, lr=1e-3), row_length=64, recompute="auto")
    setting, peak = planned_setting(stage, config, Layout(pp=4), 4, similar_device("h100", 80e9))
    assert set(setting.forward.recompute) == {False} and peak  # type: ignore[arg-type]


def test_what_fits_without_recomputation_is_not_recomputed() -> None:
    config, layout = GLM5Config.preset("nano", num_hidden_layers=2), Layout(pp=2, ep=3, pp_deferred=3)
    config = config.replace(n_routed_experts=6, use_dsa=False, index_topk=None)
    shape = {"rows": 8, "micro_rows": 4, "row_length": 64}
    stage = PretrainStage(kind="pretrain", name="s", optim=OptimConfig(steps=1, lr=1e-3), recompute="auto", **shape)
    whole = gradient_setting(stage.model_copy(update={"recompute": False}), config, layout, 6)
    needed = max(RankStep(config, whole, rank).peak().bytes for rank in range(2))
    device = similar_device("h100", 1.001 * needed / (1 - RESERVED))
    setting, peak = planned_setting(stage, config, layout, 6, device)
    assert set(setting.forward.recompute) == {False} and peak == needed  # type: ignore[arg-type]
