"""The indexer's KL against a whole writing in float64, block by block, and by how much memory it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.ops import indexer_kl
from glm5.ops.indexer_kl import dense_kl, selected_kl

B, T, J, D, N, H = 2, 11, 3, 5, 2, 4
F64 = torch.float64


def randn(*shape: int, seed: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def selected_case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores, target = randn(2, 5, 9, seed=1).requires_grad_(), randn(2, 5, 9, seed=2).abs()
    valid = torch.rand(2, 5, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    valid[..., 0] = True
    valid[0, 0] = False  # a padding query without any key
    target[1, 1] = 0.0  # a query whose attention mass was not recorded
    target[1, 2, 4:] = 0.0  # keys that attention does not look at
    return scores, target, valid, randn(2, 5, seed=4).abs()


def test_selected_kl_equals_torch() -> None:
    scores, target, valid, weight = selected_case()
    expected = torch.zeros((), dtype=F64)
    for b in range(2):
        for t in range(5):
            keys = valid[b, t]
            if not keys.any() or target[b, t][keys].sum() == 0:
                continue
            p = target[b, t][keys] / target[b, t][keys].sum()
            expected = expected + weight[b, t] * F.kl_div(scores[b, t][keys].log_softmax(-1), p, reduction="sum")
    found = selected_kl(scores, target, valid, weight)
    assert abs(float((found - expected).detach())) < 1e-13
    ours, theirs = (torch.autograd.grad(3 * x, scores)[0] for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda s: selected_kl(s, target, valid, weight), (scores,), eps=1e-6, atol=1e-8)
    assert not ours[~valid].any() and not ours[0, 0].any() and not ours[1, 1].any()


def test_kl_is_zero_exactly_where_the_scores_reproduce_attention() -> None:
    target, one = torch.softmax(randn(1, 3, 6, seed=4), -1), torch.ones(1, 3, dtype=F64)
    valid = torch.ones(1, 3, 6, dtype=torch.bool)
    assert abs(float(selected_kl(target.log() + 2.5, 4 * target, valid, one))) < 1e-14
    assert float(selected_kl(randn(1, 3, 6, seed=5), target, valid, one)) > 0.01


def dense_case(dtype: torch.dtype = F64) -> tuple[list[Tensor], list[Tensor]]:
    """(index_q, index_k, index_w), (q, k, start, end, weight): two documents and padding in row 0, one in row 1."""
    index = [randn(B, T, J, D, seed=1, dtype=dtype), randn(B, T, D, seed=2, dtype=dtype)]
    wide = F64 if dtype == F64 else torch.float32
    index.append(randn(B, T, J, seed=3, dtype=wide))
    slots = torch.arange(T)
    start = torch.stack((torch.where(slots >= 9, slots, torch.where(slots >= 4, 4, 0)), torch.zeros_like(slots)))
    weight = torch.ones(B, T, dtype=F64) / 7
    weight[0, 9:] = 0.0
    q, k = randn(B, N, T, H, seed=4, dtype=dtype), randn(B, N, T, H, seed=5, dtype=dtype)
    return [x.requires_grad_() for x in index], [q, k, start, slots.expand(B, T) + 1, weight]


def whole(index: list[Tensor], rest: list[Tensor], scale: float) -> Tensor:
    """Everything at once, by autograd."""
    q, k, start, end, weight = rest
    valid = (torch.arange(T) >= start.unsqueeze(-1)) & (torch.arange(T) < end.unsqueeze(-1))
    logits = (torch.einsum("bnth,bnsh->bnts", q, k) * scale).masked_fill(~valid.unsqueeze(1), -torch.inf)
    p = logits.softmax(-1).mean(1)
    dots = torch.einsum("btjd,bsd->btjs", index[0], index[1]) / D**0.5
    scores = torch.einsum("btj,btjs->bts", index[2], dots.relu()).masked_fill(~valid, -1e300)
    kl = torch.where(p > 0, p * (p.clamp_min(1e-300).log() - scores.log_softmax(-1)), 0.0).sum(-1)
    return (kl * weight).sum()


@pytest.mark.parametrize("elements", [1, 100, 1 << 21], ids=["query by query", "some queries", "at once"])
def test_dense_kl_equals_the_whole(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_kl, "BLOCK_ELEMENTS", elements)
    index, rest = dense_case()
    *attention, weight = rest
    seen = torch.zeros(B, T, T, dtype=F64)

    def look(part: slice, scores: Tensor, target: Tensor, valid: Tensor) -> None:
        first = int(attention[2][:, part].min())
        seen[:, part, first : first + valid.shape[-1]] = target * valid

    ours = dense_kl(*index, *attention, 0.6, weight, look)
    theirs = whole(index, rest, 0.6)
    assert float(theirs.detach()) > 0.5 and abs(float((ours - theirs).detach())) < 1e-12
    for a, b in zip(torch.autograd.grad(2 * ours, index), torch.autograd.grad(2 * theirs, index), strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch.testing.assert_close(seen.sum(-1), torch.full((B, T), float(N), dtype=F64))  # every query was looked at
    if elements > 100:  # the others have the gradients of `theirs` too, and take seconds each
        assert torch.autograd.gradcheck(lambda *x: dense_kl(*x, *attention, 0.6, weight), index, eps=1e-6, atol=1e-8)


def test_bf16_is_computed_in_fp32() -> None:
    index, rest = dense_case(torch.bfloat16)
    double = [x.detach().double().requires_grad_() for x in index]
    *attention, weight = rest
    ours = dense_kl(*index, *attention, 0.6, weight)
    exact = whole(double, [x.double() if x.is_floating_point() else x for x in rest], 0.6)
    assert ours.dtype == torch.float32 and abs(float(ours.detach()) - float(exact.detach())) < 1e-6
    found, wanted = torch.autograd.grad(ours, index), torch.autograd.grad(exact, double)
    assert [g.dtype for g in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=1e-5)


def test_without_gradients_nothing_is_kept() -> None:
    index, rest = dense_case()
    *attention, weight = rest
    with torch.no_grad():
        value = dense_kl(*index, *attention, 0.6, weight)
    assert not value.requires_grad and float(value) == pytest.approx(float(whole(index, rest, 0.6).detach()), abs=1e-12)


PEAK = """
import sys, torch
from pathlib import Path
from glm5.config.model import GLM5Config
from glm5.data.packing import Batch
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.train.losses import IndexerLoss

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))

def run(length):
    ids = torch.zeros(1, length, dtype=torch.long)
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    ctx = packed_context(batch.documents)
    ctx.observer, ctx.attend_dense = (watch := IndexerLoss(batch, 64)), True
    model.model(ids, ctx)
    watch.total().backward()

config = GLM5Config.preset("nano", num_hidden_layers=2, index_n_heads=4, num_nextn_predict_layers=0)
model = GLM5ForCausalLM(config)
for name, parameter in model.named_parameters():
    parameter.requires_grad_(".indexer." in name)
run(512)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
run(int(sys.argv[1]))
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured through /proc")
def test_warmup_memory_is_linear_in_the_length() -> None:
    """Two layers at 4096 and 8192 tokens. One [8192, 8192] tensor in fp32 alone would be 256 MiB."""
    peaks = []
    for length in (4096, 8192):
        done = subprocess.run([sys.executable, "-c", PEAK, str(length)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        peaks.append(int(done.stdout))
    assert peaks[1] < 2.4 * peaks[0] and peaks[1] < 8192 * 8192 * 4, peaks
