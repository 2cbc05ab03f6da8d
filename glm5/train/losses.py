"""Losses of all gradient stages before RL: next token, MTP, expert balance, and the indexer's KL (§2.1, §2.1.1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.data.packing import Batch
from glm5.model.context import ForwardContext, RouterStats
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops import ROW_TILE, round_up
from glm5.ops.cross_entropy import token_logprobs


def target_logprobs(
    model: GLM5ForCausalLM, hidden: Tensor, targets: Tensor, wanted: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the wanted targets only, in row-major order: two tensors [number wanted].

    hidden [M, D] flat, targets and wanted [B, T]. Rows are padded to `ROW_TILE`, so each value has the bits that the
    engine reports for the same token.
    """
    index = wanted.flatten().nonzero().squeeze(1)
    count = index.numel()
    padded = torch.nn.functional.pad(index, (0, round_up(count, ROW_TILE) - count))
    logprobs, entropy = token_logprobs(
        hidden.index_select(0, padded), model.lm_head.weight, targets.flatten()[padded], temperature
    )
    return logprobs[:count], entropy[:count]


def language_loss(
    model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext, *, mtp_weight: float = 0.0, mtp_depths: int = 0
) -> tuple[Tensor, dict[str, float]]:
    """Mean next-token cross-entropy in nats plus `mtp_weight` / depths * sum of the MTP depths' (one parameter set)."""
    hidden = model.model(batch.ids, ctx)
    targets, wanted = batch.targets()
    logprobs, _ = target_logprobs(model, hidden, targets, wanted)
    loss = -logprobs.mean()
    numbers = {"loss": float(loss.detach()), "tokens": float(wanted.sum())}
    drafting = mtp_weight and model.mtp is not None and not batch.sparse_targets
    for depth in range(1, mtp_depths + 1 if drafting else 1):
        following, _ = batch.targets(depth)
        hidden = model.mtp_hidden(following, hidden, ctx)
        targets, wanted = batch.targets(depth + 1)
        drafted = -target_logprobs(model, hidden, targets, wanted)[0].mean()
        loss = loss + mtp_weight / mtp_depths * drafted
        numbers[f"mtp{depth}_loss"] = float(drafted.detach())
    return loss, numbers


def balance_loss(stats: list[RouterStats], documents: Tensor, experts: int) -> Tensor:
    """Sequence-level balance: sum over experts of f_e P_e per row, mean over rows and layers (§3 of GLM-4.5).

    f_e = E / (K T) * times e was chosen, P_e = mean normalised score of e. Padding tokens do not count.
    """
    real = (documents >= 0).flatten()
    rows, length = documents.shape
    count = real.view(rows, length).sum(1).clamp_min(1).unsqueeze(1)
    total = torch.zeros((), dtype=stats[0].scores.dtype)
    for layer in stats:
        chosen = torch.zeros_like(layer.scores).scatter_(1, layer.experts, 1.0) * real.unsqueeze(1)
        shares = layer.scores / layer.scores.sum(-1, keepdim=True) * real.unsqueeze(1)
        per_row = chosen.view(rows, length, -1).sum(1) * experts / (layer.experts.shape[1] * count)
        total = total + (per_row * shares.view(rows, length, -1).sum(1) / count).sum(-1).mean()
    return total / len(stats)


@torch.no_grad()
def update_router_bias(model: GLM5ForCausalLM, stats: list[RouterStats], documents: Tensor, rate: float) -> float:
    """Loss-free balance: bias += rate * sign(mean load - load) per MoE layer; returns the worst load over the mean."""
    real = (documents >= 0).flatten()
    experts = model.config.n_routed_experts
    loads: dict[int, Tensor] = {}
    for layer in stats:
        load = torch.bincount(layer.experts[real].flatten(), minlength=experts).float()
        loads[layer.layer] = loads.get(layer.layer, torch.zeros(experts)) + load
    worst = 0.0
    for layer_index, router in model.routers():
        if layer_index in loads:
            load = loads[layer_index]
            worst = max(worst, float(load.max() / load.mean()))
            router.e_score_correction_bias += rate * torch.sign(load.mean() - load)
    return worst


def indexer_kl(scores: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """KL(p || softmax(I)) per query in nats, p = target normalised to 1 over the valid keys: [B, T, S] each -> [B, T].

    A query without a valid key, and one without attention mass, has KL 0.
    """
    mass = torch.where(valid, target, torch.zeros_like(target)).to(scores.dtype)
    p = mass / mass.sum(-1, keepdim=True).clamp_min(1e-20)
    logq = torch.log_softmax(scores.masked_fill(~valid, torch.finfo(scores.dtype).min), dim=-1)
    safe = torch.where(p > 0, p, torch.ones_like(p)).log()
    return torch.where(p > 0, p * (safe - logq), torch.zeros_like(p)).sum(-1)


@dataclass
class IndexerLoss:
    """Observer that sums the indexer's KL over layers and measures how much attention mass its top k would keep.

    `documents` [B, T] excludes padding queries. The loss is the mean over queries and layers (the scale is a choice:
    the paper sums over queries).
    """

    documents: Tensor
    topk: int
    losses: list[Tensor] = field(default_factory=list)
    recalls: list[float] = field(default_factory=list)

    def indexer(self, layer: int, scores: Tensor, target: Tensor, valid: Tensor) -> None:
        real = self.documents >= 0
        self.losses.append(indexer_kl(scores, target, valid)[real].mean())
        with torch.no_grad():
            if scores.shape[-1] > self.topk:
                kept = scores.masked_fill(~valid, float("-inf")).topk(self.topk, dim=-1).indices
                share = target.gather(-1, kept).sum(-1) / target.sum(-1).clamp_min(1e-20)
                crowded = real & (valid.sum(-1) > self.topk)
                self.recalls.append(float(share[crowded].mean()) if bool(crowded.any()) else 1.0)

    def total(self) -> Tensor:
        """Mean over layers; raises ValueError when no layer reported."""
        if not self.losses:
            raise ValueError("no indexer was observed; does the model use DSA?")
        return torch.stack(self.losses).mean()

    def numbers(self) -> dict[str, float]:
        """Metrics: the KL, and `indexer_recall` = share of attention mass inside the indexer's top k (dense stages)."""
        found = {"indexer_kl": float(self.total().detach())}
        if self.recalls:
            found["indexer_recall"] = sum(self.recalls) / len(self.recalls)
        return found
