"""Triton kernels for NVIDIA and AMD GPUs: one file each in `kernels/`.

An operator of `glm5.ops` names its kernel beside its torch form (`glm5.ops.operators`); tensors on a GPU take it, CPU
tensors never do. Triton is imported when a kernel first runs or is compiled: importing this package, and fake tensors
of a GPU, do without it. Every kernel has a launcher of the same name, which allocates the results, and `case`, which
says how to compile the kernel for a target and a model's shape without a GPU (`glm5.ops.triton.compiled`,
`glm5 kernels`). Under TRITON_INTERPRET=1 the launchers take CPU tensors; the tests compare them with the references
that way.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Target:
    """What kernels are compiled for. `shared_limit` is the shared memory (LDS) of one program in bytes, `tensor_limit`
    the columns of tensor memory."""

    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int
    tensor_limit: int = 0


TARGETS: Mapping[str, Target] = {
    "sm_90": Target("cuda", 90, 32, 232_448),
    "sm_100": Target("cuda", 100, 32, 232_448, tensor_limit=512),
    "gfx942": Target("hip", "gfx942", 64, 65_536),
}


@functools.cache
def target_of(device: torch.device) -> str:
    """The target whose launch options serve a device. The interpreter (CPU tensors) uses those of sm_90."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    return "sm_100" if torch.cuda.get_device_capability(device)[0] >= 10 else "sm_90"


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that kernels are compiled for, and the workload that bytes and FLOPs refer to: `queries` of
    one prefill chunk over `context` cached tokens, or one query each of `sequences` in decoding. `bits` are those of
    activations and weights."""

    heads: int
    latent: int
    rope: int
    topk: int
    index_heads: int
    index_dim: int
    nope: int
    value: int
    query_latent: int
    hidden: int
    inner: int
    experts: int
    experts_per_token: int
    expert_inner: int
    vocabulary: int
    bits: int = 16
    queries: int = 4096
    context: int = 131_072
    sequences: int = 64

    @property
    def head_dim(self) -> int:
        """Width of a head of expanded attention."""
        return self.nope + self.rope


@dataclass(frozen=True)
class Case:
    """One kernel at one shape for one target: arguments of a compilation, and the work of one launch.

    `types` has Triton's name of every argument that is no constant, in order. `bytes` counts what must cross the memory
    bus at least once, `flops` the multiplications and additions of the matrix products. `tensor_cores` says whether
    there are any, `aligned` names integers that are multiples of 16, as strides of rows are.
    """

    name: str
    function: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    flops: int
    bytes: int
    tensor_cores: bool = True
    aligned: tuple[str, ...] = ()
    rate: int = 1


SMALL = {"num_warps": 4, "num_stages": 1}
"""Launch options for fp32 with tiles of 16: operands take twice the room, and nothing runs on tensor cores."""


def bits_of(x: torch.Tensor) -> int:
    return 8 * x.element_size()


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least `n` and `least` (matrix units need 16)."""
    return max(least, 1 << (n - 1).bit_length())


def unit_rows(x: Tensor) -> Tensor:
    """`x` with the elements of a row side by side; its rows may be apart."""
    return x if x.stride(-1) == 1 else x.contiguous()
