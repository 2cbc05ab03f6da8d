"""Operators `torch.ops.glm5.*`: each is one call that a device's own kernel can replace.

The torch form of an operator runs on every device that has no kernel for it (the CPU's are in `glm5.ops.native`). To
fake tensors and `torch.compile` an operator is one node. A torch form must not wait for its device: shapes may depend
on shapes only, and no number is read back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEVICE_ELEMENTS = 1 << 28
"""Elements of the largest block that a torch form makes on an accelerator: 1 GiB in fp32."""
DEVICE_QUERIES = 512
"""Most queries per block on an accelerator: a block [queries, keys] stays linear in the length."""

LIBRARY = torch.library.Library("glm5", "DEF")
TORCH_FORMS: dict[str, Callable[..., Any]] = {}
"""The torch form of every operator that has one, by name."""

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

Function = Callable[..., Any]


def define(schema: str, fake: Function) -> Function:
    """Define the operator `schema` and return it. `fake` takes the arguments and returns empty results of the right
    shapes."""
    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=_TAGS)
    torch.library.register_fake(f"glm5::{name}", fake, lib=LIBRARY)
    operator: Function = getattr(torch.ops.glm5, name).default
    return operator


def torch_form(name: str) -> Callable[[Function], Function]:
    """Register the decorated function as the torch form of an operator, and return it. It runs without autograd and
    returns new tensors."""

    def decorate(function: Function) -> Function:
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        TORCH_FORMS[name] = function
        return function

    return decorate


def operator(schema: str, fake: Function) -> Callable[[Function], Function]:
    """Define an operator with the decorated function as its torch form, and return the operator."""

    def decorate(function: Function) -> Function:
        defined = define(schema, fake)
        torch_form(schema[: schema.index("(")])(function)
        return defined

    return decorate


def queries_per_block(x: Tensor, cpu_elements: int, elements_per_query: int) -> int:
    """Queries whose work fits into one block: `cpu_elements` on a CPU, `DEVICE_ELEMENTS` elsewhere."""
    if x.is_cpu:
        return max(1, cpu_elements // max(1, elements_per_query))
    return min(DEVICE_QUERIES, block_length(elements_per_query))


def block_length(elements_each: int) -> int:
    """Things of so many elements that fit into one block on an accelerator."""
    return max(1, DEVICE_ELEMENTS // max(1, elements_each))
