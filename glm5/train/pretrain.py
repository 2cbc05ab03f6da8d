"""Pre-training and context extension: packed rows, MTP, loss-free balance (§2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.config.recipe import DsaStage, PretrainStage
from glm5.data.mixture import make_loader
from glm5.data.packing import Batch
from glm5.data.shards import Shard
from glm5.model.context import ForwardContext
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.train.loop import Evaluate, StageIO, train
from glm5.train.losses import balance_loss, language_loss
from glm5.train.tally import Tally


def batches(
    shards: Shard | Mapping[str, Shard], tokenizer: Tokenizer, stage: PretrainStage | DsaStage, seed: int
) -> Callable[[int], Batch]:
    """Step -> whole batch of a stage, a function of the seed, the stage's name and the step alone."""
    named = {"corpus": shards} if isinstance(shards, Shard) else shards
    loader = make_loader(
        stage.corpus, named, tokenizer, rows=stage.rows, row_length=stage.row_length, seed=seed, name=stage.name
    )
    return loader.batch


def run(
    model: GLM5ForCausalLM,
    stage: PretrainStage,
    shards: Shard | Mapping[str, Shard],
    tokenizer: Tokenizer,
    io: StageIO,
    seed: int,
    evaluate: Evaluate | None = None,
) -> dict[str, float]:
    """Train all parameters. The router bias moves after every step by the sign of each expert's load."""

    def loss_of(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, Tally]:
        loss, tally = language_loss(model, batch, ctx, mtp_weight=stage.mtp_weight, mtp_depths=stage.mtp_depths)
        if stage.balance_weight and ctx.router_stats:
            balance = balance_loss(ctx.router_stats, batch, model.config.n_routed_experts)
            loss = loss + stage.balance_weight * balance
        return loss, tally

    batch_at = batches(shards, tokenizer, stage, seed)
    return train(model, stage, io, batch_at, loss_of, bias_rate=stage.bias_rate, evaluate=evaluate)
