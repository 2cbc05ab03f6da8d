"""Losses of all gradient stages before RL: next token, MTP, and the indexer's KL (§2.1, §2.1.1)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from glm5.config.layout_rules import NO_INDEXER
from glm5.config.recipe import CorpusStage
from glm5.data.packing import Batch
from glm5.device import put, widened
from glm5.errors import ConfigError
from glm5.model.context import AllKeys, ForwardContext
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.pipeline_stage import StagePass
from glm5.ops import ROW_TILE, round_up
from glm5.ops.cross_entropy import CHUNK_ROWS, token_logprobs
from glm5.ops.indexer import topk_mask
from glm5.ops.indexer_kl import selected_kl
from glm5.optim.schedules import by_tokens
from glm5.train.router_balance import balance_loss
from glm5.train.step_metrics import StepMetrics


def target_logprobs(
    model: GLM5ForCausalLM, hidden: Tensor, targets: Tensor, wanted: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the wanted targets only, in row-major order: two tensors [number wanted].

    hidden [M, D] flat, targets and wanted [B, T], best on the CPU: an accelerator would have to be asked for the number
    of wanted ones. Rows are padded to `ROW_TILE`: each value is bit-identical to what the engine reports for the same
    token.
    """
    index = wanted.flatten().nonzero().squeeze(1)
    count = index.numel()
    padded = torch.nn.functional.pad(index, (0, round_up(count, ROW_TILE) - count))
    chosen = put(targets.flatten()[padded], hidden.device)
    logprobs, entropy = token_logprobs(
        hidden.index_select(0, put(padded, hidden.device)), model.lm_head.weight, chosen, temperature
    )
    return logprobs[:count], entropy[:count]


def summed_logprobs(
    model: GLM5ForCausalLM, hidden: Tensor, targets: Tensor, wanted: Tensor, sparse: bool = False
) -> Tensor:
    """Sum of `target_logprobs`. An accelerator computes all targets and masks the others, because it would have to be
    asked for the number of wanted ones; not if they are `sparse`, and best on the CPU."""
    if hidden.is_cpu or sparse:
        return target_logprobs(model, hidden, targets, wanted)[0].sum()
    logprobs, _ = token_logprobs(hidden[: targets.numel()], model.lm_head.weight, targets.flatten())
    return torch.where(wanted.flatten(), logprobs, 0.0).sum()


def hidden_states(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext, depths: int) -> list[Tensor]:
    """Hidden states after the final norm of the trunk and of `depths` MTP depths: 1 + depths tensors [M, D]. A pipeline
    stage without the output head computes its part and returns none."""
    if ctx.stage_pass is not None:
        return ctx.stage_pass.hidden_states(model, lambda n: batch.targets(n)[0] if n else batch.ids, depths, ctx)
    states = [model.model(batch.ids, ctx)]
    for depth in range(1, depths + 1):
        states.append(model.mtp_hidden(batch.targets(depth)[0], states[-1], ctx))
    return states


def language_loss(
    model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext, *, mtp_weight: float = 0.0, mtp_depths: int = 0
) -> tuple[Tensor, StepMetrics]:
    """Mean next-token cross-entropy in nats plus `mtp_weight` / depths * sum over MTP depths (one parameter set).

    Means are over the whole optimizer step (`Batch.counts`), so micro-batches and ranks add up. On monitored steps
    (`ctx.max_logits` is set), greedy accuracy is also measured for every depth. Pipeline stages without the output head
    have loss 0.
    """
    drafting = mtp_weight and model.has_mtp and not batch.sparse_targets
    states = hidden_states(model, batch, ctx, mtp_depths if drafting else 0)
    metrics = StepMetrics()
    if not states:
        return torch.zeros((), device=batch.ids.device), metrics
    counts = batch.counts().targets
    targets, wanted = batch.targets()
    known = (batch.on_host or batch).targets() if batch.sparse_targets else (targets, wanted)
    loss = -summed_logprobs(model, states[0], *known, batch.sparse_targets) / max(1, counts[0])
    metrics.add("loss", loss)
    metrics.add("tokens", wanted.sum())
    _count_hits(metrics, "accuracy", model, states[0], targets, wanted, ctx)
    for depth, hidden in enumerate(states[1:], start=1):
        targets, wanted = batch.targets(depth + 1)
        drafted = -summed_logprobs(model, hidden, targets, wanted) / max(1, counts[depth])
        loss = loss + mtp_weight / mtp_depths * drafted
        metrics.add(f"mtp{depth}_loss", drafted)
        _count_hits(metrics, f"mtp{depth}_accuracy", model, hidden, targets, wanted, ctx)
    return loss, metrics


def backbone_loss(
    model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext, stage: CorpusStage
) -> tuple[Tensor, StepMetrics]:
    """Loss of all weights except the indexers', in every stage over a corpus: next token, MTP, and balanced expert load
    for a context with `router_stats`. The MTP weight follows the stage's schedule."""
    weight = by_tokens(stage.mtp_weight, batch.before)
    loss, metrics = language_loss(model, batch, ctx, mtp_weight=weight, mtp_depths=stage.mtp_depths)
    if stage.balance_weight and ctx.router_stats:
        layers = ctx.stage_pass.routers if ctx.stage_pass is not None else None
        balance = balance_loss(ctx.router_stats, batch, model.config.n_routed_experts, layers)
        loss = loss + stage.balance_weight * balance
    return loss, metrics


@torch.no_grad()
def _count_hits(
    metrics: StepMetrics,
    name: str,
    model: GLM5ForCausalLM,
    hidden: Tensor,
    targets: Tensor,
    wanted: Tensor,
    ctx: ForwardContext,
) -> None:
    """On monitored steps, count correct greedy predictions: one more projection, in chunks."""
    if ctx.max_logits is None:
        return
    if hidden.is_cpu:
        index = wanted.flatten().nonzero().squeeze(1)
    else:  # all targets; the number of wanted ones is not known without asking the device
        index = torch.arange(wanted.numel(), device=wanted.device)
    hits = sum(
        (
            (model.lm_head(hidden.index_select(0, rows)).argmax(-1) == targets.flatten()[rows]) & wanted.flatten()[rows]
        ).sum()
        for rows in index.split(CHUNK_ROWS)
    )
    metrics.mean(name, hits, index.numel() if hidden.is_cpu else wanted.sum())


@dataclass
class IndexerLoss:
    """Observer that sums the indexer's KL over layers and measures the attention mass that its top k would keep.

    The loss is the mean over the step's real tokens and over layers (our choice of scale: the paper sums over queries).
    An indexer that other layers share learns from the attention of all of them, as if from their mean.
    """

    batch: Batch
    topk: int
    metrics: StepMetrics = field(default_factory=StepMetrics)
    losses: list[Tensor] = field(default_factory=list)
    _index: tuple[Tensor | None, Tensor | None, Tensor | None] = field(default=(None, None, None), init=False)
    _scores: Tensor | None = field(default=None, init=False)

    def dense(self, layer: int, keys: AllKeys) -> None:
        """See `Observer`. Also measures the recall of `topk`, over the real queries that have more than `topk` keys."""
        if keys.index_q is not None:
            self._index = keys.index_q, keys.index_k, keys.index_w
        index_q, index_k, index_w = self._index
        if index_q is None:
            raise ConfigError(NO_INDEXER.format(layer))
        keys = replace(keys, index_q=index_q, index_k=index_k, index_w=index_w)
        real = self.batch.documents >= 0

        def look(part: slice, scores: Tensor, target: Tensor, valid: Tensor) -> None:
            crowded = real[:, part] & (valid.sum(-1) > self.topk)
            if not crowded.is_cpu or crowded.any():  # an accelerator is not asked
                self.measure(layer, scores, target, valid, crowded)

        self.losses.append(keys.kl(self._weight(), look))

    def selected(self, layer: int, scores: Tensor | None, target: Tensor, valid: Tensor) -> None:
        """See `Observer`. No recall: attention over the selected keys does not cover the others."""
        self._scores = scores = self._scores if scores is None else scores
        if scores is None:
            raise ConfigError(NO_INDEXER.format(layer))
        self.losses.append(selected_kl(scores, target, valid, self._weight()))

    def noop(self) -> NoopObserver:
        """See `Observer`."""
        return NoopObserver()

    def measure(self, layer: int, scores: Tensor, target: Tensor, valid: Tensor, crowded: Tensor) -> None:
        """Record the share of attention mass on the best `topk` scores: a mean over `crowded` queries."""
        share = kept_mass(scores, target, valid, self.topk)
        kept = (share[crowded] if share.is_cpu else share.where(crowded, 0.0)).sum()
        for name in ("indexer_recall", f"indexer_recall/L{layer}"):
            self.metrics.mean(name, kept, crowded.sum())

    def total(self, stage_pass: StagePass | None = None) -> Tensor:
        """Mean over layers; with `stage_pass` the stage's part of the mean over the layers of all pipeline stages.
        Recorded as `indexer_kl`, with `indexer_recall`, the share of attention mass in the indexer's top k (dense
        stages). Raises ValueError if no layer reported."""
        if stage_pass is not None and not self.losses:
            return torch.zeros((), device=self.batch.ids.device)
        if not self.losses:
            raise ValueError("no indexer was observed; does the model use DSA?")
        total = torch.stack(self.losses).sum() / (len(self.losses) if stage_pass is None else stage_pass.indexers)
        self._index, self._scores = (None, None, None), None  # memory: no layer follows
        self.metrics.add("indexer_kl", total)
        return total

    def _weight(self) -> Tensor:
        real = self.batch.documents >= 0
        return widened(real) / max(1, self.batch.counts().tokens)


class NoopObserver:
    """An observer that ignores all calls."""

    def dense(self, layer: int, keys: AllKeys) -> None:
        pass

    def selected(self, layer: int, scores: Tensor | None, target: Tensor, valid: Tensor) -> None:
        pass

    def noop(self) -> NoopObserver:
        return self


def kept_mass(scores: Tensor, target: Tensor, valid: Tensor, k: int) -> Tensor:
    """Share of each query's attention mass on its k best scores: [B, T, S] each -> [B, T]."""
    kept = target.masked_fill(~topk_mask(scores, valid, k), 0.0).sum(-1)
    return kept / target.sum(-1).clamp_min(1e-20)
