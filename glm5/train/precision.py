"""Mixed precision in one process: fp32 master weights for the optimizer, and a bf16 copy that computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from glm5.model.glm5 import GLM5ForCausalLM


class LowPrecisionCopy:
    """A copy of a model in `dtype` that follows the owner's weights and hands its gradients over to it.

    Each gradient is added to the owner's in fp32 and freed as soon as backward has finished it. Micro-batches therefore
    add up in fp32, and there is no second set of gradients.
    """

    def __init__(self, owner: GLM5ForCausalLM, dtype: torch.dtype) -> None:
        self.owner = owner
        self.model = owner.clone(dtype=dtype)
        own = dict(owner.named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(own[name].requires_grad)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_hand_over(own[name]))

    @torch.no_grad()
    def follow(self) -> None:
        """Copy the owner's weights and router biases."""
        own = self.owner.state_dict()
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(own[name])


@contextmanager
def tf32(allowed: bool, device: torch.device) -> Iterator[None]:
    """Inside, a CUDA device may compute matrix products of fp32 tensors in TF32. Other devices do not change."""
    if not allowed or device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _hand_over(owner: nn.Parameter) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if owner.grad is None:
            owner.grad = parameter.grad.to(owner.dtype)
        else:
            owner.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
