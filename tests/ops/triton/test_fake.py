"""The operations on fake tensors of a GPU: they choose the kernels' operators, and need neither a GPU nor Triton."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from glm5.ops.attention import sparse_attention
from glm5.ops.indexer import select_keys, selected_scores
from glm5.ops.indexer_kl import dense_kl
from glm5.ops.pages import Pages

pytestmark = pytest.mark.long


class Called(TorchDispatchMode):
    """Names of our operators, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "glm5":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_a_gpu_gets_the_kernels() -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    with torch.no_grad(), FakeTensorMode(), Called() as called:
        q, latents, indices = empty(2, 3, 64, 576), empty(2, 100, 576), empty(2, 3, 32, dtype=torch.long)
        out, target = sparse_attention(q, latents, indices, value_dim=512, scale=1.0, want_probs=True)
        assert out.shape == (2, 3, 64, 512) and out.dtype == torch.bfloat16 and out.is_cuda
        assert target is not None and target.shape == (2, 3, 32) and target.dtype == torch.float32
        table, rows = empty(2, 4, dtype=torch.long), empty(6, dtype=torch.long)
        out, target = sparse_attention(
            q, empty(9, 64, 576), indices, value_dim=512, scale=1.0, pages=Pages(table, rows, 64, 6)
        )
        assert out.shape == (2, 3, 64, 512) and target is None
        index_q, index_k, index_w = empty(2, 3, 32, 128), empty(2, 100, 128), empty(2, 3, 32, dtype=torch.float32)
        start, end = (empty(2, 3, dtype=torch.long) for _ in range(2))
        found = select_keys(index_q, index_k, index_w, start, end, 32)
        assert found.shape == (2, 3, 32) and found.dtype == torch.long and found.is_cuda
        assert selected_scores(index_q, index_k, index_w, indices).dtype == torch.float32
        keys, weight = empty(2, 4, 100, 64), empty(2, 3, dtype=torch.float32)
        value = dense_kl(index_q, index_k, index_w, empty(2, 4, 3, 64), keys, start, end, 0.1, weight)
        assert value.shape == () and value.dtype == torch.float32
    assert called.names == ["attend", "attend", "select", "selected", "indexer_kl"]
