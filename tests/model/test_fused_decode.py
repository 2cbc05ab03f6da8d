"""A handful of tokens through all blocks in one compiled call, beside the blocks themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from glm5.config.model import GLM5Config
from glm5.model.context import ForwardContext, LatentCache, RouterStats, cache_context, paged_context
from glm5.model.fused_decode import FusedDecode
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops.cross_entropy import output_logits
from glm5.ops.fused_blocks import fused_blocks
from glm5.ops.native import available
from glm5.ops.pages import Pages

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
    monkeypatch.setattr(FusedDecode, "__call__", lambda self, x, ctx: None)


@pytest.mark.parametrize("changes", [{}, SHARED, {"n_shared_experts": 2}], ids=["sparse", "IndexShare", "two shared"])
@pytest.mark.parametrize("counts", [[1] * 6, [4, 1, 16]], ids=["one by one", "several"])
def test_equals_the_blocks(changes: dict[str, Any], counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    call = FusedDecode.__call__

    def watched(self: FusedDecode, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        before = x.clone()
        out = call(self, x, ctx)
        used.append(out is not None and torch.equal(x, before))
        return out

    model = build(**changes)
    fast = Decoding(model)
    with monkeypatch.context() as patch:
        patch.setattr(FusedDecode, "__call__", watched)
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


@torch.no_grad()
def test_replaced_tensors_count() -> None:
    """Weights are checked again after a parameter has got other memory, or a module another parameter."""
    model, other = build(), build()
    fast = Decoding(model)
    fast.step(1)
    for p, source in zip(model.model.layers[1].parameters(), other.model.layers[1].parameters()):
        source.mul_(0.5)
        p.data = source.clone()
    late, norm = model.model.layers[2].self_attn, other.model.layers[2].self_attn.q_a_layernorm
    norm.weight.mul_(2)
    late.q_a_layernorm.weight = torch.nn.Parameter(norm.weight.clone())
    assert torch.equal(Decoding(model).step(1)[0], Decoding(other).step(1)[0])
    late.o_proj.weight.data = late.o_proj.weight.T.contiguous().T
    with pytest.raises(ValueError, match="contiguous tensors"):
        fast.step(1)


def test_equals_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain tensors go to the kernel without the dispatcher."""
    model = build()
    found = Decoding(model).step(1)
    monkeypatch.setattr("glm5.model.fused_decode.kernels", lambda x: None)
    expected = Decoding(model).step(1)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_another_type_is_noticed() -> None:
    model = build()
    wide = Decoding(model).step(1)[0]
    narrow = Decoding(model.cast(torch.bfloat16)).step(1)[0]
    assert narrow.dtype == torch.bfloat16
    errors = (narrow.float() - wide).pow(2).mean(-1).sqrt()  # of the longest sequence, rounding may select other keys
    assert errors.median() < 0.02 * wide.pow(2).mean().sqrt()


def test_whoever_watches_sees_the_blocks_run() -> None:
    stats: list[RouterStats] = []
    Decoding(build()).step(1, stats)
    assert len(stats) == sum(1 for _ in build().routers())


def arguments(model: GLM5ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the operator in a step of three tokens."""
    names = ("x", "latents", "index_keys", "weights", "biases", "view", "layers", "sizes", "numbers")
    found: list[tuple[Any, ...]] = []
    with monkeypatch.context() as patch:
        patch.setattr("glm5.model.fused_decode.kernels", lambda x: None)
        patch.setattr("glm5.model.fused_decode.fused_blocks", lambda *a: found.append(a) or fused_blocks(*a))
        Decoding(model).step(1)
    return dict(zip(names, found[0], strict=True))


def test_dense_attention_has_none() -> None:
    model = build(use_dsa=False)
    decoding = Decoding(model)
    ctx = cache_context(decoding.cache, torch.arange(3), decoding.at, 1, exact=False)
    with torch.no_grad():
        assert FusedDecode(model.config, model.model.layers)(torch.zeros(3, 128), ctx) is None


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The structure's counts are checked before anything is read or written."""
    given = arguments(build(), monkeypatch)
    latents, weights, view, sizes = given["latents"].clone(), given["weights"], given["view"], given["sizes"]
    replaced = {name: i for i, name in enumerate(("cos", "sin", "places", "rows", "table", "start", "end"))}

    def refused(why: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=why), torch.no_grad():
            fused_blocks(*(given | changes).values())
        assert torch.equal(given["latents"], latents)

    def seen(name: str, tensor: Tensor) -> list[Tensor]:
        return [tensor if i == replaced[name] else old for i, old in enumerate(view)]

    refused("number of elements", weights=[*weights[:-1], weights[-1][:-1]])
    refused("number of elements", weights=weights[:-1])
    refused("number of elements", weights=[*weights, weights[-1]])
    refused("number of elements", x=given["x"][:-1])
    refused("number of elements", view=seen("places", view[2][:-1]))
    refused("number of elements", latents=given["latents"][:1])
    refused("number of elements", index_keys=given["index_keys"][:1])
    refused("number of elements", layers=[0, 5, *given["layers"][2:]])
    refused("a size", sizes=sizes._replace(rope=7))
    refused("a size", sizes=sizes._replace(experts_per_token=99))
    refused("a size", sizes=sizes._replace(hidden=-1))
    refused("number of elements", sizes=sizes._replace(tokens=2))
    refused("no indexer", layers=[0, -1, *given["layers"][2:]], weights=[*weights[:9], *weights[14:]])
    for name, value in (("places", 1 << 30), ("places", -1), ("rows", 3), ("table", 4), ("start", -1), ("end", 65)):
        refused("outside the cache", view=seen(name, torch.full_like(view[replaced[name]], value)))
    refused("contiguous tensors", weights=[w.bfloat16() for w in weights])
    refused("contiguous tensors", view=seen("rows", view[3].int()))
    refused("contiguous tensors", x=given["x"].T.contiguous().T)
    refused("fields of Sizes", sizes=sizes[:-1])


def test_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(build(), monkeypatch)
    monkeypatch.setattr("glm5.ops.fused_blocks.VERSION", 1)
    with pytest.raises(ValueError, match="layout"), torch.no_grad():
        fused_blocks(*given.values())


def test_is_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake tensors and tracing, as `torch.library` checks them."""
    given = arguments(build(), monkeypatch)
    given = {name: list(v) if isinstance(v, tuple | list) else v.clone() for name, v in given.items()}
    with torch.no_grad():
        torch.library.opcheck(fused_blocks, tuple(given.values()))


def test_a_step_runs_on_fake_tensors() -> None:
    """Without memory and without arithmetic: shapes and dtypes of a whole step."""
    with FakeTensorMode(), torch.no_grad():
        model = GLM5ForCausalLM(GLM5Config.preset("nano", index_topk=8, num_nextn_predict_layers=1)).eval()
        cache = LatentCache(model.config, 4, 64)
        pages = Pages(torch.arange(3).unsqueeze(1), torch.arange(3), cache.capacity)
        ctx = paged_context(cache, pages, torch.tensor([[20], [9], [0]]), longest=21, exact=False)
        used = model.model.fused_decode(torch.empty(3, 128), ctx)
        hidden = model.model(torch.empty(3, 1, dtype=torch.long), ctx)
        logits = output_logits(hidden, model.lm_head.weight, exact=False)
    assert isinstance(used, FakeTensor) and isinstance(hidden, FakeTensor)
    assert (used.shape, hidden.shape, logits.shape) == ((3, 128), (3, 128), (3, 512))
