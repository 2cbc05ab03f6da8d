"""Balance of the experts: loss-free bias update, sequence-level loss, and the expert loads for both (§2.1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glm5.data.packing import Batch, TokenPart
from glm5.model.context import RouterStats
from glm5.model.glm5 import GLM5ForCausalLM


def balance_loss(stats: list[RouterStats], batch: Batch, experts: int, layers: int | None = None) -> Tensor:
    """Sequence-level balance (GLM-4.5, §3): sum over experts of f_e P_e per row, mean over the step's rows and layers:
    `layers` of them, if `stats` are only those of a pipeline stage (`StagePass.routers`).

    f_e = E / (K T) * number of tokens that chose e, P_e = mean normalised score of e. Padding tokens do not count.
    """
    if batch.part is not None:
        return _balance_of_part(stats, batch, batch.part, experts) / (layers or len(stats))
    real = (batch.documents >= 0).flatten()
    rows, length = batch.documents.shape
    count = real.view(rows, length).sum(1).clamp_min(1).unsqueeze(1)
    total = torch.zeros((), dtype=stats[0].scores.dtype, device=stats[0].scores.device)
    for layer in stats:
        scores, chosen_experts = layer.scores[: real.numel()], layer.experts[: real.numel()]
        chosen = torch.zeros_like(scores).scatter_(1, chosen_experts, 1.0) * real.unsqueeze(1)
        shares = scores / scores.sum(-1, keepdim=True) * real.unsqueeze(1)
        per_row = chosen.view(rows, length, -1).sum(1) * experts / (chosen_experts.shape[1] * count)
        total = total + (per_row * shares.view(rows, length, -1).sum(1) / count).sum() / batch.counts().rows
    return total / (layers or len(stats))


def _balance_of_part(stats: list[RouterStats], batch: Batch, part: TokenPart, experts: int) -> Tensor:
    """This rank's part of `balance_loss`, summed over layers: f_e is that of the whole row, P_e the sum over the tokens
    of this rank."""
    documents = part.whole.documents
    row, real = part.cells.squeeze(0) // documents.shape[1], (batch.documents >= 0).squeeze(0)
    count = (documents >= 0).sum(1).clamp_min(1)
    chosen = stats[0].scores.new_zeros(len(stats), len(documents) * experts)
    for number, layer in enumerate(stats):
        places = (row.unsqueeze(1) * experts + layer.experts).flatten()
        chosen[number].scatter_add_(0, places, real.unsqueeze(1).expand_as(layer.experts).flatten().to(chosen.dtype))
    part.add_up(chosen)
    total = chosen.new_zeros(())
    for layer, own in zip(stats, chosen.view(len(stats), -1, experts)):
        per_row = own * experts / (layer.experts.shape[1] * count.unsqueeze(1))
        shares = layer.scores / layer.scores.sum(-1, keepdim=True)
        weights = per_row[row] * (real / count[row]).unsqueeze(1)
        total = total + (shares * weights).sum() / batch.counts().rows
    return total


@torch.no_grad()
def expert_loads(stats: list[RouterStats], documents: Tensor, experts: int) -> dict[int, Tensor]:
    """Tokens per expert [E] of every MoE layer, without padding. The depths of the MTP layer are summed."""
    real = (documents >= 0).flatten()
    loads: dict[int, Tensor] = {}
    for layer in stats:
        chosen = layer.experts[: real.numel()]
        if chosen.is_cpu:
            load = torch.bincount(chosen[real].flatten(), minlength=experts).float()
        else:  # neither a mask as index nor `bincount`: both would wait for the device
            ones = real.float().unsqueeze(1).expand_as(chosen)
            load = torch.zeros(experts, device=real.device).scatter_add_(0, chosen.flatten(), ones.flatten())
        loads[layer.layer] = loads[layer.layer] + load if layer.layer in loads else load
    return loads


@torch.no_grad()
def update_router_bias(model: GLM5ForCausalLM, loads: Mapping[int, Tensor], rate: float) -> None:
    """Loss-free balance: bias += rate * sign(mean load - load) per MoE layer, from the loads of the whole step."""
    for layer_index, router in model.routers():
        if layer_index in loads:
            load = loads[layer_index].to(router.e_score_correction_bias.device)
            router.e_score_correction_bias += rate * torch.sign(load.mean() - load)
