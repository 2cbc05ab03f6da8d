"""Attention masks: ones change nothing, padding at either end changes no token, nothing of size [B, T, T] exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops import attention, indexer

Build = Callable[..., GLM5ForCausalLM]
KINDS: dict[str, dict[str, Any]] = {
    "sparse": {},
    "dense": {"use_dsa": False, "index_topk": None},
    "window": {"use_dsa": False, "index_topk": None, "attention_pattern": "SFS", "efficient_attention": "swa",
               "sliding_window": 9},
}  # fmt: skip


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.size = max(self.size, leaf.numel() * leaf.element_size())
        return out


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_mask_of_ones_is_no_mask(build: Build, tokens: Callable[..., Tensor], kind: str, backend: str) -> None:
    model, ids = build(7, **KINDS[kind]), tokens(2, 40, seed=7)
    expected = model(ids).logits
    for dtype in (torch.long, torch.bool, torch.float32):
        assert torch.equal(model(ids, torch.ones_like(ids, dtype=dtype)).logits, expected)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_at_the_ends_changes_no_token(
    build: Build, tokens: Callable[..., Tensor], kind: str, backend: str
) -> None:
    """Rows padded on the left, on the right, on both sides and not at all, against each row alone."""
    model, ids = build(7, **KINDS[kind]), tokens(4, 50, seed=7)
    spans = [(13, 50), (0, 31), (5, 44), (0, 50)]
    mask = torch.zeros_like(ids)
    for row, (first, last) in enumerate(spans):
        mask[row, first:last] = 1
    found = model(ids, mask).logits
    assert not found.isnan().any()
    for row, (first, last) in enumerate(spans):
        alone = model(ids[row : row + 1, first:last]).logits[0]
        torch.testing.assert_close(found[row, first:last], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@torch.no_grad()
def test_masks_take_no_quadratic_memory(
    build: Build, tokens: Callable[..., Tensor], kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 1024
    for module in (attention, indexer):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1 << 16)
    model, ids = build(7, num_hidden_layers=2, **KINDS[kind]), tokens(1, length, seed=7)
    padded = torch.ones_like(ids)
    padded[:, :5] = 0
    for mask in (torch.ones_like(ids), padded):
        with LargestTensor() as seen:
            model(ids, mask)
        assert 0 < seen.size < length * length, f"a tensor of {seen.size} bytes"


def test_masks_that_make_no_sense_are_refused(build: Build, tokens: Callable[..., Tensor]) -> None:
    model, ids = build(7), tokens(2, 6, seed=7)
    gap = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1]])
    with pytest.raises(ValueError, match="between the tokens of row 1"):
        model(ids, gap)
    with pytest.raises(ValueError, match=r"attention_mask is \[2, 5\], input_ids is \[2, 6\]"):
        model(ids, gap[:, :5])
