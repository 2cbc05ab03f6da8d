"""Run Triton kernels on CPU tensors. Triton's interpreter treats bf16 as bit patterns in `tl.dot` and truncates where
GPUs round to nearest, so both are replaced here by torch's arithmetic."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from glm5.ops import native
from glm5.ops.operators import TRITON_KERNELS
from glm5.ops.triton.compiled import KERNELS

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not 1", allow_module_level=True)

import triton.language as tl
from triton.runtime import interpreter


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(values: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16).reshape(np.shape(values))


def _repair() -> None:
    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_widen(src.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(_round(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(_widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return dot(self, a, b, d, *rest)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(builder, name, lambda self, src, dst_type: self.cast_impl(src, dst_type))
    builder.create_fp_to_fp = lambda self, src, dst_type, mode: self.cast_impl(src, dst_type)


_repair()
for _name in KERNELS:  # kernels are interpreted or compiled as the environment says when they are imported
    importlib.import_module(f"glm5.ops.triton.kernels.{_name}")


def examples(*strategies: Any, fast: int = 10, slow: int = 100) -> Callable[[Any], tuple[Any, Any]]:
    """Two tests of one property: a few examples for `make test`, and ten times as many marked slow."""

    def make(check: Any) -> tuple[Any, Any]:
        def few(values: Any) -> None:
            check(*values)

        def many(values: Any) -> None:
            check(*values)

        drawn = st.tuples(*strategies)
        phases = (Phase.explicit, Phase.generate)  # to shrink a failure would take minutes in the interpreter
        return (
            settings(max_examples=fast, phases=phases)(given(drawn)(few)),
            pytest.mark.slow(settings(max_examples=slow, phases=phases)(given(drawn)(many))),
        )

    return make


class OnKernels(TorchDispatchMode):
    """Inside, our operators run their Triton kernels, in the interpreter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = TRITON_KERNELS.get(func._opname) if func.namespace == "glm5" else None
        return (own or func)(*args, **(kwargs or {}))


needs_compiled = pytest.mark.skipif(not native.available(), reason="no compiled kernels: CPU tensors take no operator")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def error(found: Tensor, exact: Tensor) -> float:
    """Largest difference relative to the largest exact value; where nothing is expected, nothing may be found."""
    found, exact = found.detach().double(), exact.detach().double()
    assert found.shape == exact.shape and bool(found.isfinite().all())
    away, size = (float(x.abs().max()) if x.numel() else 0.0 for x in (found - exact, exact))
    return away / size if size else away


def spread(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference."""
    return float((found.detach().double() - exact.detach().double()).pow(2).mean().sqrt())


def picks(batch: int, queries: int, keys: int, slots: int, seed: int) -> Tensor:
    """Ascending distinct indices with -1 at the end, some rows empty or full: int64 [B, T, slots]."""
    source = generator(seed)
    counts = torch.randint(0, min(slots, keys) + 1, (batch, queries, 1), generator=source)
    counts = torch.where(torch.rand(counts.shape, generator=source) < 0.2, 0, counts)
    order = torch.rand(batch, queries, keys, generator=source).argsort(-1)
    order = torch.nn.functional.pad(order[..., :slots], (0, max(0, slots - keys)), value=keys)
    chosen = torch.where(torch.arange(slots) < counts, order, keys).sort(-1).values
    return torch.where(chosen == keys, -1, chosen)
