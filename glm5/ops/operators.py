"""Operators `torch.ops.glm5.*`: each is one call that a device's own kernel can replace.

The torch form of an operator runs on every device that has no kernel for it: the CPU's are in `glm5.ops.native`, those
of GPUs in `glm5.ops.triton`. To fake tensors and `torch.compile` an operator is one node. A torch form must not wait
for its device: shapes may depend on shapes only, and no number is read back.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glm5.errors import MissingExtraError

DEVICE_ELEMENTS = 1 << 28
"""Elements of the largest block that a torch form makes on an accelerator: 1 GiB in fp32."""
DEVICE_QUERIES = 512
"""Most queries per block on an accelerator: a block [queries, keys] stays linear in the length."""

log = logging.getLogger("glm5.kernels")
LIBRARY = torch.library.Library("glm5", "DEF")
TORCH_FORMS: dict[str, Callable[..., Any]] = {}
"""The torch form of every operator that has one, by name."""
TRITON_KERNELS: dict[str, Callable[..., Any]] = {}
"""What computes an operator on a GPU, by its name; takes the operator's arguments."""

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

Function = Callable[..., Any]


def define(schema: str, fake: Function) -> Function:
    """Define the operator `schema` and return it. `fake` takes the arguments and returns empty results of the right
    shapes."""
    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=_TAGS)
    torch.library.register_fake(f"glm5::{name}", _contiguous(fake), lib=LIBRARY)
    operator: Function = getattr(torch.ops.glm5, name).default
    return operator


def _contiguous(function: Function) -> Function:
    """With contiguous results, as those of the kernels are, whatever the layout of the arguments."""

    def run(*arguments: Any, **options: Any) -> Any:
        found = function(*arguments, **options)
        return found.contiguous() if isinstance(found, Tensor) else tuple(x.contiguous() for x in found)

    return run


def torch_form(name: str, triton: str = "") -> Callable[[Function], Function]:
    """Register the decorated function as the torch form of an operator, and return it. It runs without autograd and
    returns new tensors. `triton` names the function in `glm5.ops.triton.kernels` that computes the same on a GPU, as
    "module.function", or "module" if both have one name."""

    def decorate(function: Function) -> Function:
        form = _contiguous(function)
        LIBRARY.impl(name, form, "CompositeExplicitAutograd")
        TORCH_FORMS[name] = function
        if triton:
            TRITON_KERNELS[name] = kernel = _triton_kernel(*triton.rpartition(".")[::2])
            LIBRARY.impl(name, _on_gpu(kernel, form), "CUDA")
        return function

    return decorate


def cpu_form(name: str) -> Callable[[Function], Function]:
    """Register the decorated function as what an operator computes on a CPU instead of its torch form, and return it.
    It may read numbers of its tensors."""

    def decorate(function: Function) -> Function:
        LIBRARY.impl(name, function, "CPU")
        return function

    return decorate


def shapes_only(x: Tensor) -> bool:
    """Whether no shape may depend on the numbers in tensors like `x`: on an accelerator, which would have to be waited
    for, and inside of `torch.compile`, which does not know them."""
    return not x.is_cpu or torch.compiler.is_compiling()


def _triton_kernel(module: str, function: str) -> Function:
    """Triton is imported with the first call."""

    def run(*arguments: Any, **options: Any) -> Any:
        try:
            kernels = importlib.import_module(f"glm5.ops.triton.kernels.{module or function}")
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise MissingExtraError("triton", "triton") from None
        return getattr(kernels, function)(*arguments, **options)

    return run


def _on_gpu(kernel: Function, form: Function) -> Function:
    """By the kernel, unless the tensors are empty or in fp64, or the GPU is too small for it."""
    too_large: set[tuple[torch.dtype, ...]] = set()

    def run(*arguments: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        dtypes = tuple(x.dtype for x in tensors)
        if dtypes in too_large or not all(x.numel() and x.dtype != torch.float64 for x in tensors):
            return form(*arguments)
        try:
            with torch.cuda.device(tensors[0].device):  # Triton launches on the current GPU, wherever the tensors are
                return kernel(*arguments)
        except Exception as error:
            if type(error).__name__ != "OutOfResources":  # of Triton, which is not imported here
                raise
            too_large.add(dtypes)
            log.warning(
                "A kernel for %s does not fit this GPU; torch computes instead, more slowly: %s", dtypes[0], error
            )
            return form(*arguments)

    return run


def operator(schema: str, fake: Function, triton: str = "") -> Callable[[Function], Function]:
    """Define an operator with the decorated function as its torch form (see `torch_form`), and return the operator."""

    def decorate(function: Function) -> Function:
        defined = define(schema, fake)
        torch_form(schema[: schema.index("(")], triton)(function)
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
