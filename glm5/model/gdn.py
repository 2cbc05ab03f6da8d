"""Linear attention in place of full attention in a GQA model: Gated DeltaNet and SimpleGDN (§2.1.2).

Both keep one matrix per head instead of keys and values per token. They use no RoPE, because the recurrence encodes the
order. Padding does not change the memory. A new document starts from an empty memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from glm5.config.model import GLM5Config
from glm5.model.context import ForwardContext
from glm5.model.gqa import GroupedProjections
from glm5.model.layers import RMSNorm, declare_split, linear
from glm5.ops.delta_rule import delta_rule, short_convolution
from glm5.ops.wide import wide


class SimpleGDN(GroupedProjections):
    """The delta rule on a full-attention layer's own projections: no convolution, no gates, no new parameters.

    Decay and writing strength are configured constants: the paper does not print the recurrence.
    """

    def __init__(self, config: GLM5Config, layer: int) -> None:
        super().__init__(config, layer, qk_norm=config.use_qk_norm)
        self.log_decay, self.beta = math.log(config.simple_gdn_alpha), config.simple_gdn_beta

    def forward(self, x: Tensor, ctx: ForwardContext, indices: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [M, D] flat -> (output [M, D], None)."""
        q, k, v = (ctx.rows(part) for part in self.project(x, ctx.exact))
        present = ctx.present().unsqueeze(-1).expand(-1, -1, self.heads).to(v.dtype)
        memory, _ = ctx.recall(self.layer)
        q, k = unit(q), self.repeat(unit(k))
        out, memory = delta_rule(
            q, k, self.repeat(v), present * self.log_decay, present * self.beta, ctx.documents, memory
        )
        ctx.remember(self.layer, memory, None)
        return self.o_proj(ctx.flat(out.flatten(2)), ctx.exact), None


class GatedDeltaNet(GroupedProjections):
    """Gated DeltaNet: short convolutions, then the delta rule with data-dependent decay and strength, then a gate.

    Decay a = exp(-exp(A_log) * softplus(a_proj x + dt_bias)), strength b = sigmoid(b_proj x), output o_norm(o) *
    silu(g_proj x). The depthwise filter is a matrix with one row per channel; Muon treats it as one.
    """

    def __init__(self, config: GLM5Config, layer: int) -> None:
        super().__init__(config, layer, qk_norm=False)
        c = config
        self.widths = (self.heads * self.dim, self.groups * self.dim, self.groups * self.dim)
        self.conv_weight = nn.Parameter(torch.empty(sum(self.widths), c.gdn_conv_kernel))
        declare_split(self.conv_weight, (1,) * sum(self.widths))
        self.a_proj = linear(c.hidden_size, self.heads)
        self.b_proj = linear(c.hidden_size, self.heads)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.g_proj = linear(c.hidden_size, self.heads * self.dim)
        self.o_norm = RMSNorm(self.dim, c.rms_norm_eps)

    def forward(self, x: Tensor, ctx: ForwardContext, indices: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [M, D] flat -> (output [M, D], None)."""
        mixed = torch.cat([ctx.rows(layer(x, ctx.exact)) for layer in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        memory, history = ctx.recall(self.layer)
        mixed, inputs = short_convolution(mixed, self.conv_weight, ctx.documents, history)
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in silu(mixed).split(self.widths, dim=-1))
        kind = wide(x.dtype)
        rate = softplus(ctx.rows(self.a_proj(x, ctx.exact)).to(kind) + self.dt_bias.to(kind))
        present = ctx.present().unsqueeze(-1)
        log_decay = -self.A_log.to(kind).exp() * rate * present
        beta = ctx.rows(self.b_proj(x, ctx.exact)).to(kind).sigmoid() * present
        out, memory = delta_rule(unit(q), self.repeat(unit(k)), self.repeat(v), log_decay, beta, ctx.documents, memory)
        ctx.remember(self.layer, memory, inputs)
        gate = silu(ctx.rows(self.g_proj(x, ctx.exact))).unflatten(-1, (self.heads, self.dim))
        return self.o_proj(ctx.flat((self.o_norm(out) * gate).flatten(2)), ctx.exact), None


def unit(x: Tensor) -> Tensor:
    """x scaled to length 1 along the last axis, in fp32 or wider."""
    x = x.to(wide(x.dtype))
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def initialise_gate(name: str, parameter: Tensor, std: float, generator: torch.Generator) -> bool:
    """Initialise a Gated DeltaNet parameter that needs more than noise; False for any other `name`.

    Decay rates and time steps cover the usual ranges (1 to 16, 0.001 to 0.1): heads then remember for different spans.
    Filters start near the identity, because a converted layer was trained without them.
    """
    if name.endswith("A_log"):
        parameter.uniform_(1.0, 16.0, generator=generator).log_()
    elif name.endswith("dt_bias"):
        step = parameter.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
        parameter.copy_(step + torch.log(-torch.expm1(-step)))  # inverse softplus of the step
    elif name.endswith("conv_weight"):
        parameter.normal_(0.0, std, generator=generator)
        parameter[:, -1] += 1.0
    else:
        return False
    return True
