"""A handful of tokens through all blocks in one compiled call, beside the blocks themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.model.context import LatentCache, RouterStats, cache_context
from glm5.model.fused_decode import FusedDecode
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops.native import available

pytestmark = pytest.mark.skipif(not available(), reason="needs compiled kernels")
SHARED = {"index_topk_freq": 2, "index_skip_topk_offset": 2}


def build(**changes: Any) -> GLM5ForCausalLM:
    model = GLM5ForCausalLM(GLM5Config.preset("nano", index_topk=8, num_nextn_predict_layers=1, **changes), seed=3)
    with torch.no_grad():
        for _, router in model.routers():
            router.e_score_correction_bias.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    return model.eval()


class Decoding:
    """Three sequences of 20, 9 and 0 tokens, to which `step` adds `count` tokens each."""

    def __init__(self, model: GLM5ForCausalLM) -> None:
        self.model = model
        self.ids = torch.randint(0, 512, (3, 64), generator=torch.Generator().manual_seed(2))
        self.cache = LatentCache(model.config, 4, 64, model.dtype)
        self.at = torch.tensor([20, 9, 0])
        with torch.no_grad():
            for row, length in ((0, 20), (1, 9)):
                ctx = cache_context(self.cache, torch.tensor([row]), torch.tensor([0]), length)
                model.model(self.ids[row : row + 1, :length], ctx)

    @torch.no_grad()
    def step(self, count: int, stats: list[RouterStats] | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states of the trunk and of the MTP layer."""
        at = self.at.unsqueeze(1) + torch.arange(count)
        ctx = cache_context(self.cache, torch.arange(3), self.at, count, exact=False)
        ctx.router_stats = stats
        hidden = self.model.model(self.ids.gather(1, at), ctx)
        later = self.model.mtp_hidden(self.ids.gather(1, at + 1), hidden, ctx)
        self.at = self.at + count
        return hidden, later


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedDecode, "run", lambda self, x, ctx: False)


@pytest.mark.parametrize("changes", [{}, SHARED, {"n_shared_experts": 2}], ids=["sparse", "IndexShare", "two shared"])
@pytest.mark.parametrize("counts", [[1] * 6, [4, 1, 16]], ids=["one by one", "several"])
def test_equals_the_blocks(changes: dict[str, Any], counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    run = FusedDecode.run
    with monkeypatch.context() as patch:
        patch.setattr(FusedDecode, "run", lambda self, x, ctx: used.append(run(self, x, ctx)) or used[-1])
        model = build(**changes)
        fast = Decoding(model)
        found = [fast.step(count) for count in counts]
    assert used == [True] * 2 * len(counts)
    without(monkeypatch)
    slow = Decoding(model)
    for (hidden, later), count in zip(found, counts):
        expected = slow.step(count)
        torch.testing.assert_close(hidden, expected[0], rtol=0, atol=2e-5)
        torch.testing.assert_close(later, expected[1], rtol=0, atol=2e-5)
    torch.testing.assert_close(fast.cache.latents[:, :3], slow.cache.latents[:, :3], rtol=0, atol=2e-5)
    torch.testing.assert_close(fast.cache.index_keys[:, :3], slow.cache.index_keys[:, :3], rtol=0, atol=2e-5)


def test_weights_that_came_in_place_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = build(), build()
    Decoding(model).step(1)  # knows where the weights are
    with torch.no_grad():
        for target, source in ((model, 0.5), (other, 0.5)):
            for p in target.parameters():
                p.mul_(source).add_(0.01)
            for _, router in target.routers():
                router.e_score_correction_bias = torch.linspace(-1, 1, len(router.e_score_correction_bias))
    found = Decoding(model).step(1)
    without(monkeypatch)
    expected = Decoding(other).step(1)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-5)


def test_another_type_is_noticed() -> None:
    model = build()
    wide = Decoding(model).step(1)[0]
    narrow = Decoding(model.cast(torch.bfloat16)).step(1)[0]
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - wide).pow(2).mean().sqrt() < 0.1 * wide.pow(2).mean().sqrt()


def test_whoever_watches_sees_the_blocks_run() -> None:
    stats: list[RouterStats] = []
    Decoding(build()).step(1, stats)
    assert len(stats) == sum(1 for _ in build().routers())


def test_dense_attention_has_none() -> None:
    model = build(use_dsa=False)
    assert FusedDecode.of(model.config, list(model.model.layers)) is None
