"""Predicted bytes of deferred weight gradients, beside the tensors that a real backward pass leaves."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.config.activations import Forward
from glm5.config.deferred_bytes import deferred_bytes
from glm5.config.keys import MLA_SIZES
from glm5.config.model import PRESETS, GLM5Config
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.layers import Linear
from glm5.model.moe import Experts
from glm5.ops.deferred import WeightQueue
from glm5.train.losses import IndexerLoss, language_loss
from tests.config.lone_rank import Alive
from tests.config.test_step_memory import batch_of


def left_bytes(config: GLM5Config, step: Forward, trains: str) -> int:
    """Bytes that are alive after the first part of backward, without the model and its gradients."""
    model = GLM5ForCausalLM(config).cast(torch.bfloat16 if step.item == 2 else torch.float32)
    left: list[Tensor] = []
    queue = WeightQueue(lambda weight, gradient: left.append(gradient))
    for module in model.modules():
        if isinstance(module, Linear | Experts):
            module.weight_queue = queue
    for name, parameter in model.named_parameters():
        parameter.requires_grad_({"all": True, "backbone": ".indexer." not in name}.get(trains, ".indexer." in name))
    batch = batch_of(config, step.rows, step.length)
    watch = IndexerLoss(batch, config.index_topk or 0)
    ctx = packed_context(batch.documents, exact=False)
    ctx.recompute, ctx.attend_dense = step.recompute, step.attention == "warmup"
    ctx.observer = watch if step.learns_index or trains == "indexers" else None
    with Alive() as alive:
        queue.begin((0, 0))
        if trains == "indexers":
            hidden = model.model(batch.ids, ctx)
            model.mtp_hidden(batch.targets()[0], hidden, ctx)
            loss = watch.total()
            del hidden
        else:
            loss, _ = language_loss(model, batch, ctx, mtp_weight=0.3, mtp_depths=step.depths)
            loss = loss + watch.total() if step.learns_index else loss
        loss.backward()
        del loss, watch
        ctx.observer = None
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
        own = {tensor.untyped_storage()._cdata for tensor in model.state_dict().values()}
        inputs = {tensor.untyped_storage()._cdata for tensor in vars(ctx).values() if isinstance(tensor, Tensor)}
        tables = [t for table in (ctx._rope, ctx._ranges) for pair in table.values() for t in pair]
        inputs |= {tensor.untyped_storage()._cdata for tensor in tables}
        found = sum(size for key, size in alive.sizes.items() if key not in own | inputs)
    queue.compute((0, 0))
    assert left
    return found


CASES: list[dict[str, Any]] = [
    {},
    {"recompute": True, "item": 2},
    {"depths": 2},
    {"attention": "sparse", "learns_index": True, "depths": 1},
    {"attention": "sparse", "trains": "backbone"},
    {"attention": "warmup", "depths": 1, "trains": "indexers"},
    {"depths": 1, "gqa": True},
]
GQA = {"attention_type": "gqa", "num_key_value_heads": 2, "head_dim": 64, "use_qk_norm": True}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_waits(case: dict[str, Any]) -> None:
    case = dict(case)
    trains, grouped = case.pop("trains", "all"), case.pop("gqa", False)
    step = Forward(1, 256, **{"item": 4, **case}, cpu=True)
    shape: dict[str, Any] = {"use_dsa": step.attention != "dense", "num_hidden_layers": 2, "vocab_size": 128}
    if grouped:
        kept = {k: v for k, v in PRESETS["tiny"].items() if k not in MLA_SIZES and not k.startswith("index")}
        config = GLM5Config(**{**kept, **shape, **GQA})
    else:
        config = GLM5Config.preset("tiny", **shape)
    layers = [0, 1, *[2] * step.depths]
    predicted = sum(deferred_bytes(config, step, layer, trains) for layer in layers)
    assert predicted == pytest.approx(left_bytes(config, step, trains), rel=0.05)
