"""DSA adaptation in two stages, from dense MLA to sparse attention, and measures of its quality (§2.1.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.config.recipe import DsaStage
from glm5.config.trained_models import with_fewer_indexers
from glm5.data.packing import Batch
from glm5.data.shards import Shard
from glm5.errors import ConfigError, DataError
from glm5.model.context import ForwardContext, packed_context
from glm5.model.dsa import INDEXER
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.weight_source import whole_parts
from glm5.train.loop import Evaluate, LossOf, StageIO, train
from glm5.train.losses import IndexerLoss, backbone_loss, hidden_states, target_logprobs
from glm5.train.pretrain import batches
from glm5.train.step_metrics import StepMetrics

SHARES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Numbers of keys at which attention mass is measured, in multiples of index_topk."""
FEW_TOKENS = 16_384
"""Tokens per forward pass in measurements."""


def add_indexer(
    model: GLM5ForCausalLM, seed: int, index_topk: int, *, heads: int | None = None, dim: int | None = None
) -> GLM5ForCausalLM:
    """A DSA model with the weights of a dense one and new indexers: `heads` heads of width `dim` (None: as configured).
    Raises ConfigError for any but a dense MLA model."""
    config = model.config
    if config.attention_type != "mla" or config.attention_pattern:
        raise ConfigError("DSA needs MLA in every layer; this model has layers with other attention.")
    if config.use_dsa:
        raise ConfigError("This model has sparse attention (DSA) already; there is nothing to adapt.")
    sizes = {"index_n_heads": heads or config.index_n_heads, "index_head_dim": dim or config.index_head_dim}
    if sizes["index_head_dim"] < config.qk_rope_head_dim:
        raise ConfigError(
            f"index_dim is {sizes['index_head_dim']}, but its first {config.qk_rope_head_dim} dimensions are rotary in "
            f"this model; take at least {config.qk_rope_head_dim}."
        )
    return model.clone(config.replace(use_dsa=True, index_topk=index_topk, **sizes), seed=seed)


def share_indexers(model: GLM5ForCausalLM, layers: int | str) -> GLM5ForCausalLM:
    """The same weights without the indexers of some layers (see `DsaStage.share_indexers`). Raises ConfigError for a
    model without sparse attention, or for a layer that would get its indexer back."""
    return model.clone(with_fewer_indexers(model.config, layers))


def untrained_indexers(model: GLM5ForCausalLM) -> bool:
    """Whether the norms of all indexers still have their initial values; training always changes them."""
    norms = dict(whole_parts(model, model.weight_source, lambda name: f"{INDEXER}k_norm." in name))
    return bool(norms) and all(bool((p.rows == float(name.endswith("weight"))).all()) for name, p in norms.items())


def indexer_only(name: str) -> bool:
    """Whether a parameter is trained in the warm-up, by its name."""
    return INDEXER in name


def adaptation_loss(stage: DsaStage, topk: int) -> LossOf:
    """`dsa_warmup`: only the indexers' KL, under dense attention. `dsa_sparse`: attention over the selected keys; the
    backbone learns only from the losses of mid-training, the indexers only from their KL (their inputs are
    detached)."""
    warmup = stage.kind == "dsa_warmup"

    def loss_of(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, StepMetrics]:
        metrics = StepMetrics()
        watch = IndexerLoss(batch, topk, metrics)
        ctx.observer, ctx.attend_dense = watch, warmup
        if warmup:
            hidden_states(model, batch, ctx, int(model.has_mtp))
            return watch.total(ctx.stage_pass), metrics
        loss, numbers = backbone_loss(model, batch, ctx, stage)
        return loss + stage.indexer_weight * watch.total(ctx.stage_pass), numbers.merge([metrics])

    return loss_of


def run_stage(
    model: GLM5ForCausalLM,
    stage: DsaStage,
    batch_at: Callable[[int], Batch],
    io: StageIO,
    evaluate: Evaluate | None = None,
) -> dict[str, float]:
    """Run one of the two stages over any data; the model must have indexers."""
    warmup = stage.kind == "dsa_warmup"
    return train(
        model,
        stage,
        io,
        batch_at,
        adaptation_loss(stage, model.config.index_topk or 0),
        trainable=indexer_only if warmup else lambda name: True,
        bias_rate=0.0 if warmup else stage.bias_rate,
        evaluate=evaluate,
    )


def run_baseline(
    model: GLM5ForCausalLM,
    stage: DsaStage,
    batch_at: Callable[[int], Batch],
    io: StageIO,
    evaluate: Evaluate | None = None,
) -> dict[str, float]:
    """The dense baseline of a sparse stage: same rows, learning rates and backbone losses, but dense attention."""

    def loss_of(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, StepMetrics]:
        return backbone_loss(model, batch, ctx, stage)

    return train(model, stage, io, batch_at, loss_of, bias_rate=stage.bias_rate, evaluate=evaluate)


def run(
    model: GLM5ForCausalLM,
    stage: DsaStage,
    shards: Shard | Mapping[str, Shard],
    tokenizer: Tokenizer,
    io: StageIO,
    seed: int,
    evaluate: Evaluate | None = None,
) -> dict[str, float]:
    """A stage of a recipe, over the same rows as every other stage with this data."""
    return run_stage(model, stage, batches(shards, tokenizer, stage, seed), io, evaluate)


# ---------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class HeldOut:
    """Rows of equal length, each its own document: ids [n, length]. `documents` is the number of files they come from,
    or 0 if no file is long enough and rows are cut from all files, concatenated."""

    ids: Tensor
    documents: int

    def batches(self, model: GLM5ForCausalLM) -> Iterator[Batch]:
        """A few rows at a time, on the model's device."""
        size = max(1, FEW_TOKENS // self.ids.shape[1])
        for ids in self.ids.split(size):
            batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
            yield batch.to(model.device)


def held_out_rows(shard: Shard, length: int, tokens: int) -> HeldOut:
    """Up to `tokens` tokens in rows of `length`, round robin over the documents that are long enough: first the first
    window of each, then the second. Raises DataError for documents that together do not fill one row."""
    lengths = shard.lengths().tolist()
    if max(lengths, default=0) >= length:
        windows = sorted((at, i) for i, n in enumerate(lengths) for at in range(0, n - length + 1, length))
        chosen = windows[: max(1, tokens // length)]
        rows = [shard.document(i)[at : at + length].astype("int64") for at, i in chosen]
        return HeldOut(torch.stack([torch.from_numpy(row) for row in rows]), len({i for _, i in chosen}))
    if len(shard.tokens) < length:
        raise DataError(f"The held-out split has {len(shard.tokens)} tokens, fewer than one row of {length}.")
    count = max(1, min(tokens, len(shard.tokens)) // length)
    line = torch.from_numpy(shard.tokens[: count * length].astype("int64"))
    return HeldOut(line.view(count, length), 0)


def loss_beyond(model: GLM5ForCausalLM, rows: HeldOut) -> float:
    """Mean loss in nats over the tokens with at least index_topk tokens before them: where the selection matters."""
    return float(position_losses(model, rows)[:, model.config.index_topk or 0 :].mean())


@torch.no_grad()
def position_losses(model: GLM5ForCausalLM, rows: HeldOut) -> Tensor:
    """Loss in nats of every target: [n, length - 1]; entry t is that of token t + 1, predicted from t + 1 tokens."""
    found = []
    for batch in rows.batches(model):
        hidden = model.model(batch.ids, packed_context(batch.documents, exact=False))
        targets, wanted = batch.targets()
        logprobs = target_logprobs(model, hidden, targets, wanted)[0]
        found.append(-logprobs.cpu().double().view(batch.ids.shape[0], -1))
    return torch.cat(found)


@dataclass
class MassCurve(IndexerLoss):
    """Measures recall, and the attention mass on the `ks` best scores and on the `ks` most attended keys."""

    ks: tuple[int, ...] = field(default=())

    def measure(self, layer: int, scores: Tensor, target: Tensor, valid: Tensor, crowded: Tensor) -> None:
        """See `IndexerLoss`."""
        super().measure(layer, scores, target, valid, crowded)
        scores, target, valid = scores[crowded], target[crowded], valid[crowded]
        for kind, by in (("indexer", scores), ("oracle", target)):
            # A stable sort breaks ties as `topk_mask` does: higher score first, then lower position.
            order = by.nan_to_num(-torch.inf).masked_fill(~valid, -torch.inf).sort(dim=-1, descending=True, stable=True)
            kept = target.masked_fill(~valid, 0.0).gather(-1, order.indices).cumsum(-1) / target.sum(-1, keepdim=True)
            for k in self.ks:
                share = kept[:, min(k, kept.shape[1]) - 1]
                self.metrics.mean(f"{kind}/{k}", share.sum(), share.numel())


@torch.no_grad()
def attention_mass(model: GLM5ForCausalLM, rows: HeldOut) -> dict[str, float]:
    """Quality of the indexer under dense attention, over the queries with more than index_topk keys. `indexer_recall`
    and `indexer_recall/L{layer}`: share of attention mass on the indexer's index_topk keys. `indexer/{k}` and
    `oracle/{k}`: mass on the k best keys by index score and by attention itself (mean over layers with MTP's). Also
    `indexer_kl`."""
    topk = model.config.index_topk or 0
    ks = tuple(sorted({max(1, round(topk * share)) for share in SHARES} - {0}))
    metrics = StepMetrics()
    tokens = int(rows.ids.numel())
    for batch in rows.batches(model):
        ctx = packed_context(batch.documents, exact=False)
        counts = replace(batch.counts(), tokens=tokens)
        watch = MassCurve(replace(batch, step=counts), topk, metrics, ks=tuple(k for k in ks if k < batch.ids.shape[1]))
        ctx.observer, ctx.attend_dense = watch, True
        hidden = model.model(batch.ids, ctx)
        if model.mtp is not None:
            model.mtp_hidden(batch.targets()[0], hidden, ctx)
        watch.total()
    return metrics.numbers()
