"""Basic layers: norms, projections, the dense feed-forward block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.ops import deferred, narrow, small_batch
from glm5.ops.deferred import WeightQueue
from glm5.ops.elementwise import rms_norm, swiglu
from glm5.ops.integers import IntegerWeight, integer_product
from glm5.ops.quantisers import Quantiser, fake_quantise


class RMSNorm(nn.Module):
    """RMSNorm with its own epsilon: public code uses another one for the latent norms."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class RestoringNorm(RMSNorm):
    """RMSNorm at the end of a trunk whose residual stream is rotated (QuaRot, §5): it turns the normed rows back.

    Without it, the gain of the norm would have to move into the output matrix. That changes what the MTP layer reads:
    its own norm divides by the length of the hidden state with the gain.
    """

    rotation: Tensor

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.register_buffer("rotation", torch.eye(dim))

    def forward(self, x: Tensor) -> Tensor:
        """x [M, D] in the rotated basis, a row times `rotation` [D, D] -> normed rows in the basis before."""
        return narrow.linear(rms_norm(x, torch.ones_like(self.weight), self.eps), self.rotation) * self.weight


def final_norm(config: GLM5Config) -> RMSNorm:
    """The norm after the last layer of a trunk or an MTP layer."""
    kind = RestoringNorm if config.rotated_residual else RMSNorm
    return kind(config.hidden_size, config.rms_norm_eps)


class Embedding(nn.Embedding):
    """Embedding without storage costs nothing: torch loads its compiler (1.5 s) to draw numbers for a meta tensor."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Linear(nn.Linear):
    """Linear layer. With `exact=False` few rows may take the small-batch kernel (see `ForwardContext`).

    `activation`, if set, rounds every row of the input, `weight_form` the weight (see `model.rounding`). `integers`
    replace the weight, which then has no memory (see `model.integer_layers`). Backward leaves the weight's gradient to
    `weight_queue`, if set.
    """

    activation: Quantiser | None = None
    weight_form: Quantiser | None = None
    integers: IntegerWeight | None = None
    weight_queue: WeightQueue | None = None

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        if self.weight.numel():  # a model without shared experts has empty ones, of which torch would warn
            super().reset_parameters()

    def forward(self, x: Tensor, exact: bool = True) -> Tensor:
        if self.integers is not None:
            product = integer_product(x, self.integers)
            return product if self.bias is None else product + self.bias
        if not self.plain:
            x = x if self.activation is None else fake_quantise(x, self.activation)
            weight = self.weight if self.weight_form is None else fake_quantise(self.weight, self.weight_form)
            return narrow.linear(x, weight, self.bias)
        if (
            self.weight_queue is not None
            and self.bias is None
            and torch.is_grad_enabled()
            and self.weight.requires_grad
        ):
            return deferred.linear(x, self.weight, self.weight_queue)
        if exact or self.bias is not None:
            return narrow.linear(x, self.weight, self.bias)
        return small_batch.linear(x, self.weight)

    @property
    def plain(self) -> bool:
        """Whether kernels may multiply with the weight as it is."""
        return self.activation is None and self.weight_form is None and self.integers is None


def linear(inputs: int, outputs: int, split: tuple[int, ...] = (), *, bias: bool = False) -> Linear:
    """Linear layer. `split`: heights of the row blocks that Muon orthogonalises one by one (§2.1)."""
    layer = Linear(inputs, outputs, bias)
    declare_split(layer.weight, split or (outputs,))
    return layer


def declare_split(weight: Tensor, blocks: tuple[int, ...]) -> None:
    """Attach Muon Split's row blocks to a matrix, or to every matrix of a stack; their heights add up to its rows."""
    if sum(blocks) != weight.shape[-2]:
        raise ValueError(f"row blocks {blocks[:4]}… do not add up to {weight.shape[-2]} rows")
    weight.muon_split = blocks  # type: ignore[attr-defined]


def remember_splits(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Row blocks by parameter name. Wrappers that replace parameters (`fully_shard`, a deep copy) lose them: call this
    before and `restore_splits` after."""
    return {name: p.muon_split for name, p in model.named_parameters() if hasattr(p, "muon_split")}


def restore_splits(model: nn.Module, splits: dict[str, tuple[int, ...]]) -> None:
    """Declare row blocks again on the parameters of these names; the (global) shapes must still fit."""
    for name, blocks in splits.items():
        declare_split(model.get_parameter(name), blocks)


class MLP(nn.Module):
    """SwiGLU feed-forward. Gate and up projections are one matrix in memory (gate first), two on disk."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = linear(hidden, 2 * intermediate, split=(intermediate, intermediate))
        self.down_proj = linear(intermediate, hidden)

    @property
    def plain(self) -> bool:
        """Whether kernels may multiply with the weights as they are."""
        return self.gate_up_proj.plain and self.down_proj.plain

    def forward(self, x: Tensor, exact: bool = True) -> Tensor:
        up, down = self.gate_up_proj.weight, self.down_proj.weight
        native = None if exact or not self.plain else small_batch.kernels_for(x, up, down)
        if native is not None:
            return small_batch.mlp(native, x, up, down)
        return self.down_proj(swiglu(self.gate_up_proj(x, exact)), exact)
