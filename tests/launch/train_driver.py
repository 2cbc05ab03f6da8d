"""Trains a small model in a process that a test may kill: `train_driver.py FOLDER DTYPE`.

It goes on with what an earlier one left in the folder. On stdout comes a word for everything that it is about to do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import glm5.train.loop as loop
from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.config.recipe import PretrainStage
from glm5.data.loader import Row, RowLoader
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsWriter
from glm5.train.losses import backbone_loss, language_loss
from glm5.train.pretrain import StageRows

STEPS = 30
SMALL = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    n_routed_experts=4, index_n_heads=4, index_head_dim=8, index_topk=4, initializer_range=0.1,
)  # fmt: skip


def say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


def announced(word: str, function: Callable[..., Any], pause: float = 0.0) -> Callable[..., Any]:
    """The function, announced; the pause gives a signal time to arrive before it. A number follows the word where the
    only argument is one."""

    def call(*args: Any, **options: Any) -> Any:
        say(f"{word} {args[0]}" if isinstance(args[0] if args else None, int) else word)
        time.sleep(pause)
        return function(*args, **options)

    return call


class Rows(RowLoader):
    """One of 21 rows: two documents, one, or one and padding."""

    def fill(self, index: int, row: Row) -> None:
        ids = torch.randint(0, 40, (12,), generator=torch.Generator().manual_seed(1000 + index % 21)).numpy()
        for number, (start, end) in enumerate(([(0, 7), (7, 12)], [(0, 12)], [(0, 9)])[index % 3]):
            row.put(start, ids[start:end], number)


def stage_of(dtype: str) -> PretrainStage:
    """Rows per step, MTP's weight and the rate of the biases all change within it."""
    optim = OptimConfig(steps=STEPS, lr=1e-2, save_every=2, evaluate_every=3, warmup=3, monitor_every=5)
    return PretrainStage(
        kind="pretrain", name="stage", optim=optim, micro_rows=1, dtype=dtype, rows=3, row_length=12, mtp_depths=1,
        balance_weight=1e-3, mtp_weight=[[0, 0.3], [250, 0.1]], bias_rate=[[0, 1e-2], [500, 0.0]],
        ramp={"rows": 1, "tokens": 300},
    )  # fmt: skip


def evaluate(model: GLM5ForCausalLM, step: int) -> dict[str, float]:
    batch = Rows(3, 12).batch(99)
    return {"held_out_loss": float(language_loss(model, batch, model.context(batch.ids))[0])}


def run(folder: Path, dtype: str) -> None:
    """Five micro-steps of every kind happen between two states: batches, losses, evaluations, saves, renames."""
    torch.set_num_threads(1)
    os.fsync = announced("sync", os.fsync)  # type: ignore[assignment]
    os.rename = announced("rename", os.rename, 0.002)  # type: ignore[assignment]
    os.replace = announced("rename", os.replace, 0.002)  # type: ignore[assignment]
    loop.StateSaver.save = announced("save", loop.StateSaver.save)  # type: ignore[method-assign]
    stage = stage_of(dtype)
    model = GLM5ForCausalLM(GLM5Config.preset("nano", **SMALL), seed=1)
    build = loop.build_optimizer

    def build_announced(*args: Any) -> Any:
        optimizer = build(*args)
        optimizer.step = announced("update", optimizer.step)  # type: ignore[method-assign]
        return optimizer

    loop.build_optimizer = build_announced
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        io = loop.StageIO("stage", folder / "stage", metrics, lambda steps, numbers: None)
        batch_at, loss = StageRows(Rows(3, 12), stage), partial(backbone_loss, stage=stage)
        loop.train(
            model, stage, io, announced("batch", batch_at), announced("loss", loss), bias_rate=stage.bias_rate,
            evaluate=announced("evaluation", evaluate),
        )  # fmt: skip
    save_file(dict(model.state_dict()), str(folder / "final.safetensors"))


if __name__ == "__main__":
    try:
        run(Path(sys.argv[1]), sys.argv[2])
    except KeyboardInterrupt:
        sys.exit(1)
