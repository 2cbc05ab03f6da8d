"""Pre-training and context extension: packed rows, MTP, loss-free balance; retrieval documents where asked for (§2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.config.recipe import DsaStage, PretrainStage
from glm5.data.loader import StreamLoader
from glm5.data.packing import Batch
from glm5.data.shards import Shard
from glm5.model.context import ForwardContext
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.seeds import derive_seed
from glm5.tasks.needle import needle_text
from glm5.train.loop import StageIO, train
from glm5.train.losses import balance_loss, language_loss


def batches(shard: Shard, tokenizer: Tokenizer, stage: PretrainStage | DsaStage, seed: int) -> Callable[[int], Batch]:
    """Step -> batch: corpus rows, of which the first `needle_share` are replaced by rows of retrieval documents."""
    loader = StreamLoader(
        shard, rows=stage.rows, row_length=stage.row_length, seed=derive_seed(seed, "corpus", stage.name)
    )
    needles = round(stage.needle_share * stage.rows)

    def batch(step: int) -> Batch:
        rows = loader.batch(step)
        for row in range(needles):
            _needle_row(rows, row, tokenizer, derive_seed(seed, "needles", stage.name), step * needles + row)
        return rows

    return batch


def _needle_row(batch: Batch, row: int, tokenizer: Tokenizer, seed: int, index: int) -> None:
    """Fill a row with retrieval documents of random length. Every token is a target, as in any pre-training text."""
    length = batch.ids.shape[1]
    at, number = 0, 0
    while at < length:
        draw = torch.Generator().manual_seed(derive_seed(seed, "needle", index, number))
        target = int(torch.randint(48, max(64, 2 * length), (1,), generator=draw))
        depth = float(torch.rand((), generator=draw))
        prompt, answer = needle_text(derive_seed(seed, "text"), index * 1000 + number, target, depth)
        ids = [*tokenizer.encode(prompt), *tokenizer.encode(answer)][: length - at]
        batch.ids[row, at : at + len(ids)] = torch.tensor(ids)
        batch.documents[row, at : at + len(ids)] = number
        at, number = at + len(ids), number + 1


def run(
    model: GLM5ForCausalLM, stage: PretrainStage, shard: Shard, tokenizer: Tokenizer, io: StageIO, seed: int
) -> dict[str, float]:
    """Train all parameters. The router bias moves after every step by the sign of each expert's load."""

    def loss_of(batch: Batch, ctx: ForwardContext) -> tuple[Tensor, dict[str, float]]:
        loss, numbers = language_loss(model, batch, ctx, mtp_weight=stage.mtp_weight, mtp_depths=stage.mtp_depths)
        if stage.balance_weight and ctx.router_stats:
            balance = balance_loss(ctx.router_stats, batch.documents, model.config.n_routed_experts)
            loss = loss + stage.balance_weight * balance
        return loss, numbers

    return train(model, stage.optim, io, batches(shard, tokenizer, stage, seed), loss_of, bias_rate=stage.bias_rate)
