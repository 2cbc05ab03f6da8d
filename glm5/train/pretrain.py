"""Pre-training and context extension: packed rows, MTP, loss-free balance; retrieval documents where asked for (§2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from glm5.tasks.needle import recall_text
from glm5.train.loop import StageIO, train
from glm5.train.losses import balance_loss, language_loss
from glm5.train.tally import Tally

SHORTEST_NEEDLE = 32
"""Bytes of the shortest retrieval document."""


def batches(shard: Shard, tokenizer: Tokenizer, stage: PretrainStage | DsaStage, seed: int) -> Callable[[int], Batch]:
    """Step -> batch. A share of the steps, evenly spread, holds retrieval documents instead of the corpus: whole steps,
    because their few answer tokens would drown in the mean over a mixed batch."""
    loader = StreamLoader(
        shard, rows=stage.rows, row_length=stage.row_length, seed=derive_seed(seed, "corpus", stage.name)
    )
    needles = derive_seed(seed, "needles", stage.name)

    def batch(step: int) -> Batch:
        before, after = int(step * stage.needle_share), int((step + 1) * stage.needle_share)
        if after == before:
            return loader.batch(step - before)
        rows = Batch(
            ids=torch.zeros(stage.rows, stage.row_length, dtype=torch.long),
            documents=torch.zeros(stage.rows, stage.row_length, dtype=torch.long),
            loss_mask=torch.zeros(stage.rows, stage.row_length, dtype=torch.bool),
            sparse_targets=True,
        )
        for row in range(stage.rows):
            _needle_row(rows, row, tokenizer, needles, before * stage.rows + row)
        return rows

    return batch


def _needle_row(batch: Batch, row: int, tokenizer: Tokenizer, seed: int, index: int) -> None:
    """Fill a row with retrieval documents of log-uniform length. Only answers are targets: the rest is noise."""
    length = batch.ids.shape[1]
    at, number = 0, 0
    while at < length:
        draw = torch.rand((), generator=torch.Generator().manual_seed(derive_seed(seed, "needle", index, number)))
        target = int(SHORTEST_NEEDLE * (2.0 * length / SHORTEST_NEEDLE) ** float(draw))
        ids, answers = _encode(recall_text(derive_seed(seed, "text"), index * 1000 + number, target), tokenizer)
        ids, answers = ids[: length - at], answers[: length - at]
        batch.ids[row, at : at + len(ids)] = torch.tensor(ids)
        batch.documents[row, at : at + len(ids)] = number
        batch.loss_mask[row, at : at + len(ids)] = torch.tensor(answers)
        at, number = at + len(ids), number + 1


def _encode(pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids of the pieces and, for each, whether it belongs to an answer."""
    ids: list[int] = []
    answers: list[bool] = []
    for text, is_answer in pieces:
        encoded = tokenizer.encode(text)
        ids += encoded
        answers += [is_answer] * len(encoded)
    return ids, answers


def run(
    model: GLM5ForCausalLM, stage: PretrainStage, shard: Shard, tokenizer: Tokenizer, io: StageIO, seed: int
) -> dict[str, float]:
    """Train all parameters. The router bias moves after every step by the sign of each expert's load."""

    def loss_of(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, Tally]:
        loss, tally = language_loss(model, batch, ctx, mtp_weight=stage.mtp_weight, mtp_depths=stage.mtp_depths)
        if stage.balance_weight and ctx.router_stats:
            balance = balance_loss(ctx.router_stats, batch, model.config.n_routed_experts)
            loss = loss + stage.balance_weight * balance
        return loss, tally

    return train(model, stage, io, batches(shard, tokenizer, stage, seed), loss_of, bias_rate=stage.bias_rate)
