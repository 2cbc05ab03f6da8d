"""A short stage that gets stuck in a phase of its third step: `python stuck_stage.py FOLDER PHASE`."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import glm5.train.loop as loop
from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.recipe import GradientStage
from glm5.data.packing import Batch
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsWriter
from glm5.train import watchdog
from glm5.train.losses import language_loss

LIMIT = 1.0
watchdog.GRACE_SECONDS = 1.5


def stuck_loss() -> None:
    time.sleep(60)


def stuck_data() -> None:
    time.sleep(60)


def stuck_evaluation() -> None:
    time.sleep(60)


def stuck_save() -> None:
    time.sleep(60)


def stuck_interpreter() -> None:
    ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the lock that every Python thread needs


def another_thread() -> None:
    time.sleep(60)


def run(folder: Path, phase: str) -> None:
    threading.Thread(target=another_thread, daemon=True).start()
    torch.set_num_threads(1)
    step = 0

    def batch_at(index: int) -> Batch:
        nonlocal step
        step = index + 1
        if phase == "data" and step == 3:
            stuck_data()
        ids = torch.arange(16).view(2, 8)
        return Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))

    def loss_of(model: Any, batch: Batch, ctx: Any) -> Any:
        if phase in ("loss", "interpreter") and step == 3:
            stuck_loss() if phase == "loss" else stuck_interpreter()
        return language_loss(model, batch, ctx)

    def evaluate(model: Any, step_number: int) -> dict[str, float]:
        if phase == "evaluation" and step == 3:
            stuck_evaluation()
        return {}

    def save_state(*args: Any, **options: Any) -> None:
        if phase == "save" and step == 3:
            stuck_save()

    small = dict(vocab_size=40, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2)

    def stage(name: str, **options: Any) -> None:
        model = GLM5ForCausalLM(GLM5Config.preset("nano", **small))
        config = GradientStage(kind="pretrain", name=name, optim=OptimConfig(lr=1e-3, evaluate_every=1, **options))
        with MetricsWriter(folder / "metrics.jsonl") as metrics:
            io = loop.StageIO(name, folder / name, metrics, lambda steps, numbers: None)
            loop.train(model, config, io, batch_at, loss_of, evaluate=evaluate)

    loop.StateSaver.save = save_state  # type: ignore[assignment, method-assign]
    stage("warmup", steps=1)  # so that no first call of anything counts
    stage("stage", steps=4, save_every=1, stall_seconds=LIMIT)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
