"""DSA adaptation: from dense MLA to sparse attention in two stages (§2.1.1)."""

from __future__ import annotations

from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.config.recipe import DsaStage
from glm5.data.packing import Batch
from glm5.data.shards import Shard
from glm5.model.context import ForwardContext
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.train.loop import StageIO, train
from glm5.train.losses import IndexerLoss, language_loss
from glm5.train.pretrain import batches
from glm5.train.tally import Tally

INDEXER = ".indexer."


def add_indexer(model: GLM5ForCausalLM, seed: int, index_topk: int) -> GLM5ForCausalLM:
    """A DSA model with the weights of a dense one and freshly initialised indexers."""
    return model.clone(model.config.replace(use_dsa=True, index_topk=index_topk), seed=seed)


def run(
    model: GLM5ForCausalLM, stage: DsaStage, shard: Shard, tokenizer: Tokenizer, io: StageIO, seed: int
) -> dict[str, float]:
    """`dsa_warmup`: dense attention, only indexers learn, from their KL. `dsa_sparse`: attention over the selected
    keys; the backbone learns from the language loss alone, the indexers from their KL alone (their inputs are
    detached)."""
    topk = model.config.index_topk or 0
    warmup = stage.kind == "dsa_warmup"

    def loss_of(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, Tally]:
        tally = Tally()
        watch = IndexerLoss(batch, topk, tally)
        ctx.observer, ctx.attend_dense = watch, warmup
        if warmup:
            hidden = model.model(batch.ids, ctx)
            if model.mtp is not None:
                model.mtp_hidden(batch.targets()[0], hidden, ctx)
            return watch.total(), tally
        loss, numbers = language_loss(model, batch, ctx, mtp_weight=stage.mtp_weight, mtp_depths=stage.mtp_depths)
        return loss + stage.indexer_weight * watch.total(), numbers.merge([tally])

    return train(
        model,
        stage,
        io,
        batches(shard, tokenizer, stage, seed),
        loss_of,
        trainable=lambda name: not warmup or INDEXER in name,
        bias_rate=0.0 if warmup else stage.bias_rate,
    )
