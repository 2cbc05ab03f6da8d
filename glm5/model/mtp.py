"""Multi-token prediction (MTP): one layer, applied at every depth with the same parameters (§2.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.model.context import ForwardContext
from glm5.model.fused_decode import FusedDecode
from glm5.model.layers import RMSNorm, final_norm, linear


class SharedHead(nn.Module):
    """Only a norm: embedding and output matrix belong to the trunk."""

    def __init__(self, config: GLM5Config) -> None:
        super().__init__()
        self.norm = final_norm(config)


class MTPLayer(nn.Module):
    """h^k = norm(block(eh_proj[enorm(embedding of token i + k) ; hnorm(h^(k-1))])) with its own indexer.

    The hidden state passed on is the one after the norm; at depth 0 it is the trunk's, after its final norm. With the
    state before the norm, later drafts become useless without any error.
    """

    def __init__(self, config: GLM5Config, block: nn.Module) -> None:
        super().__init__()
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = linear(2 * config.hidden_size, config.hidden_size)
        self.block = block
        self.fused_decode = FusedDecode(config, [block])
        self.shared_head = SharedHead(config)

    def forward(self, embedded: Tensor, ctx: ForwardContext, hidden: Tensor) -> Tensor:
        """embedded and hidden [M, D] flat -> hidden state of the next depth [M, D], after the norm."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1), ctx.exact)
        fused = self.fused_decode(x, ctx)
        return self.shared_head.norm(self.block(x, ctx, None)[0] if fused is None else fused)
