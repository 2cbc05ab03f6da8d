"""Mixture of experts: fp32 sigmoid router with selection-only bias, stacked experts, one shared expert (§2.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.model.context import ForwardContext
from glm5.model.layers import MLP, declare_split
from glm5.ops import deferred, small_batch
from glm5.ops.deferred import WeightQueue
from glm5.ops.elementwise import swiglu
from glm5.ops.experts import combine, expert_layout, grouped_matmul, permute
from glm5.ops.integers import IntegerWeight, integer_product
from glm5.ops.quantisers import Quantiser, fake_quantise
from glm5.ops.route import route
from glm5.ops.wide import wide_linear


class Router(nn.Module):
    """Chooses experts by score + bias and weights them by score alone. The bias is a buffer and gets no gradient."""

    e_score_correction_bias: Tensor

    def __init__(self, config: GLM5Config) -> None:
        super().__init__()
        self.top_k, self.normalise = config.num_experts_per_tok, config.norm_topk_prob
        self.scaling = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        declare_split(self.weight, (config.n_routed_experts,))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [M, D] -> weights [M, K], experts [M, K] (ascending ids), scores [M, E] in fp32 (or wider)."""
        return route(
            wide_linear(x, self.weight), self.e_score_correction_bias, self.top_k, self.normalise, self.scaling
        )


Shared = Callable[[], Tensor]


class Experts(nn.Module):
    """All routed experts as two stacks of matrices.

    If `dispatch` is set, it replaces `forward`: (module, x, weights, experts, shared) -> [M, D]. Expert and tensor
    parallelism use it; the stacks then contain the local experts only.

    `weight_form` rounds the matrices before they multiply (quantization-aware training), `activation` every row that
    they read (see `model.rounding`). `integers` replace both stacks (see `model.integer_layers`). Backward leaves the
    gradients of plain stacks to `weight_queue`, if set.
    """

    weight_form: Quantiser | None = None
    activation: Quantiser | None = None
    integers: tuple[IntegerWeight, IntegerWeight] | None = None
    weight_queue: WeightQueue | None = None

    def __init__(self, config: GLM5Config) -> None:
        super().__init__()
        self.dispatch: Callable[[Experts, Tensor, Tensor, Tensor, Shared], Tensor] | None = None
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        declare_split(self.gate_up_proj, (inner, inner))
        declare_split(self.down_proj, (hidden,))

    @property
    def plain(self) -> bool:
        """Whether kernels may multiply with the matrices as they are."""
        rounds = self.weight_form is not None or self.activation is not None or self.integers is not None
        return self.dispatch is None and not rounds

    @property
    def multiplies(self) -> bool:
        """Whether kernels may multiply with the matrices, or the integers in their place, as they are."""
        return self.plain or (self.dispatch is None and self.integers is not None)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, shared: Shared) -> Tensor:
        """shared() + weighted sum of each token's experts: x [M, D], weights and experts [M, K] -> [M, D]."""
        if self.dispatch is not None:
            return self.dispatch(self, x, weights, experts, shared)
        slot_of, source, bounds, _ = expert_layout(experts, self.gate_up_proj.shape[0])
        grouped = expert_products(self, permute(x, slot_of, source, experts.shape[1]), bounds)
        return combine(grouped, slot_of, weights) + shared()


def expert_products(module: Experts, rows: Tensor, bounds: Tensor) -> Tensor:
    """Both products of the experts of `module`, with SwiGLU between them: rows [N, D] by expert -> [N, D]."""
    if module.integers is not None:
        inner = swiglu(integer_product(rows, module.integers[0], bounds))
        return integer_product(inner, module.integers[1], bounds)
    gate_up, down, form, activation = module.gate_up_proj, module.down_proj, module.weight_form, module.activation
    if form is not None:
        gate_up, down = fake_quantise(gate_up, form), fake_quantise(down, form)  # type: ignore[assignment]
    queue = module.weight_queue
    if queue is not None and form is None and activation is None and torch.is_grad_enabled() and gate_up.requires_grad:
        inner = swiglu(deferred.grouped_matmul(rows, gate_up, bounds, queue))
        return deferred.grouped_matmul(inner, down, bounds, queue)
    if activation is None:
        return grouped_matmul(swiglu(grouped_matmul(rows, gate_up, bounds)), down, bounds)
    inner = swiglu(grouped_matmul(fake_quantise(rows, activation), gate_up, bounds))
    return grouped_matmul(fake_quantise(inner, activation), down, bounds)


class MoE(nn.Module):
    """y = shared(x) + sum_e weight_e * expert_e(x)."""

    def __init__(self, config: GLM5Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        gate = self.gate
        if not ctx.exact and ctx.router_stats is None and self.experts.plain and self.shared_experts.plain:
            routed = (self.experts.gate_up_proj, self.experts.down_proj)
            shared = (self.shared_experts.gate_up_proj.weight, self.shared_experts.down_proj.weight)
            if small_batch.suits(x, gate.weight, *routed, *shared):
                bias = gate.e_score_correction_bias
                return small_batch.moe(x, gate.weight, bias, routed, shared, gate.top_k, gate.normalise, gate.scaling)
        weights, experts, scores = gate(x)
        if ctx.router_stats is not None:
            ctx.note_routing(self.layer, scores, experts)
        return self.experts(x, weights, experts, lambda: self.shared_experts(x, ctx.exact))
