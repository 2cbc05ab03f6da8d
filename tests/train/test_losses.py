"""Every loss against an independent writing in float64: value, and gradient by autograd and by finite differences."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.data.packing import Batch, pack_batch
from glm5.model.context import AllKeys, RouterStats, packed_context
from glm5.ops.indexer_kl import selected_kl
from glm5.train.losses import (
    IndexerLoss,
    language_loss,
    target_logprobs,
)
from glm5.train.router_balance import balance_loss, expert_loads, update_router_bias

F64 = torch.float64


def random(*shape: int, seed: int = 0, **options: Any) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).requires_grad_(
        options.get("grad", False)
    )


def rows_of(documents: Tensor) -> Batch:
    """A batch of which only the document numbers matter."""
    return Batch(torch.zeros_like(documents, dtype=torch.long), documents, torch.ones_like(documents, dtype=torch.bool))


def packed(seed: int = 0) -> Batch:
    """Five documents in two rows with padding; about a third of the tokens are no targets."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [13, 9, 6, 4, 7]
    documents = [torch.randint(0, 40, (n,), generator=generator).tolist() for n in lengths]
    masks = [(torch.rand(n, generator=generator) < 0.7).tolist() for n in lengths]
    return pack_batch(list(zip(documents, masks, strict=True)), 22)[0]


def naive_language_loss(model: Any, batch: Batch, weight: float, depths: int) -> Tensor:
    """Each document alone through the model, whole logits, F.cross_entropy; the MTP layer sees only real tokens."""
    sums = [torch.zeros((), dtype=F64) for _ in range(depths + 1)]
    counts = [0] * (depths + 1)
    for row in range(batch.ids.shape[0]):
        for number in range(int(batch.documents[row].max()) + 1):
            span = batch.documents[row] == number
            ids, mask = batch.ids[row, span].unsqueeze(0), batch.loss_mask[row, span]
            ctx = model.context(ids)
            hidden = ctx.rows(model.model(ids, ctx))
            for depth in range(depths + 1):
                if depth:
                    keep = ids.shape[1] - depth
                    if keep < 1:
                        break
                    ctx = model.context(ids[:, :keep])
                    hidden = ctx.rows(model.mtp_hidden(ids[:, depth:], ctx.flat(hidden[:, :keep]), ctx))
                logits = (hidden @ model.lm_head.weight.T)[0, : ids.shape[1] - depth - 1]
                wanted = mask[depth + 1 :]
                sums[depth] = sums[depth] + F.cross_entropy(
                    logits[wanted], ids[0, depth + 1 :][wanted], reduction="sum"
                )
                counts[depth] += int(wanted.sum())
    loss = sums[0] / counts[0]
    for depth in range(1, depths + 1):
        loss = loss + weight / depths * sums[depth] / counts[depth]
    return loss


@pytest.mark.parametrize("use_dsa", [False, True])
@pytest.mark.parametrize("depths", [0, 1, 3])
def test_language_loss_equals_a_naive_writing(small: Any, use_dsa: bool, depths: int) -> None:
    model = small(dtype=F64, use_dsa=use_dsa, index_topk=4 if use_dsa else None)
    batch = packed()
    loss, metrics = language_loss(model, batch, packed_context(batch.documents), mtp_weight=0.3, mtp_depths=depths)
    numbers = metrics.numbers()
    expected = naive_language_loss(model, batch, 0.3, depths)
    assert abs(float(loss.detach() - expected.detach())) < 1e-12
    assert numbers["tokens"] == int(batch.targets()[1].sum())
    drafted = sum(numbers[f"mtp{depth}_loss"] for depth in range(1, depths + 1))
    assert float(loss.detach()) == pytest.approx(numbers["loss"] + (0.3 / depths * drafted if depths else 0), abs=1e-12)
    named = [(n, p) for n, p in model.named_parameters() if ".indexer." not in n and (depths or "mtp" not in n)]
    ours = torch.autograd.grad(loss, [p for _, p in named])
    theirs = torch.autograd.grad(expected, [p for _, p in named])
    for (name, _), a, b in zip(named, ours, theirs, strict=True):
        assert float((a - b).abs().max()) < 1e-11, name
        assert float(b.abs().max()) > 1e-9, name


@pytest.mark.parametrize("use_dsa", [False, True])
def test_language_loss_gradient_by_finite_differences(small: Any, use_dsa: bool) -> None:
    """Along random directions through all parameters; routing and key selection are locally constant."""
    model = small(dtype=F64, use_dsa=use_dsa, index_topk=4 if use_dsa else None)
    batch = packed(1)
    parameters = list(model.parameters())

    def value() -> Tensor:
        return language_loss(model, batch, packed_context(batch.documents), mtp_weight=0.5, mtp_depths=2)[0]

    gradients = torch.autograd.grad(value(), parameters, allow_unused=True)
    for seed in range(3):
        direction = [random(*p.shape, seed=100 * seed + i) for i, p in enumerate(parameters)]
        slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True) if g is not None)
        ends = []
        with torch.no_grad():
            for step in (1e-6, -2e-6):
                for p, d in zip(parameters, direction, strict=True):
                    p += step * d
                ends.append(float(value()))
            for p, d in zip(parameters, direction, strict=True):
                p += 1e-6 * d
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_target_logprobs_value_order_and_gradient(temperature: float) -> None:
    weight, hidden = random(11, 5, seed=1, grad=True), random(32, 5, seed=2, grad=True)
    targets = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(3))
    wanted = torch.rand(4, 8, generator=torch.Generator().manual_seed(4)) < 0.5
    expected = torch.log_softmax(hidden @ weight.T / temperature, -1).view(4, 8, 11)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        head = SimpleNamespace(lm_head=SimpleNamespace(weight=w))
        return target_logprobs(head, h, targets, wanted, temperature)[0]  # type: ignore[arg-type]

    value = ours(hidden, weight)
    picked = expected.gather(-1, targets.unsqueeze(-1)).squeeze(-1)[wanted]
    assert value.shape == (int(wanted.sum()),)
    assert torch.allclose(value, picked, rtol=0, atol=1e-13)
    head: Any = SimpleNamespace(lm_head=SimpleNamespace(weight=weight))
    entropy = target_logprobs(head, hidden, targets, wanted, temperature)[1]
    assert torch.allclose(entropy, -(expected.exp() * expected).sum(-1)[wanted], rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(ours, (hidden, weight), eps=1e-6, atol=1e-8)


def router_stats(seed: int, tokens: int, experts: int, top_k: int, layer: int = 1) -> RouterStats:
    scores = torch.sigmoid(random(tokens, experts, seed=seed)).requires_grad_()
    return RouterStats(layer, scores, scores.detach().topk(top_k).indices)


def test_balance_loss_equals_a_loop() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0], [0, -1, -1, -1, -1, -1]])
    stats = [router_stats(seed, 18, 4, 2, layer) for layer, seed in enumerate((5, 6))]

    def loop(*scores: Tensor) -> Tensor:
        total = torch.zeros((), dtype=F64)
        for layer, s in zip(stats, scores, strict=True):
            for row in range(3):
                tokens = [row * 6 + i for i in range(6) if documents[row, i] >= 0]
                for expert in range(4):
                    chosen = sum(int((layer.experts[t] == expert).any()) for t in tokens)
                    f = 4 / (2 * len(tokens)) * chosen
                    p = sum((s[t, expert] / s[t].sum() for t in tokens), torch.zeros((), dtype=F64)) / len(tokens)
                    total = total + f * p / 3 / 2
        return total

    def ours(*scores: Tensor) -> Tensor:
        replaced = [RouterStats(s.layer, x, s.experts) for s, x in zip(stats, scores, strict=True)]
        return balance_loss(replaced, rows_of(documents), 4)

    scores = tuple(s.scores for s in stats)
    assert float((ours(*scores) - loop(*scores)).detach().abs()) < 1e-14
    for a, b in zip(torch.autograd.grad(ours(*scores), scores), torch.autograd.grad(loop(*scores), scores)):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(ours, scores, eps=1e-6, atol=1e-8)
    # A perfectly even router has loss 1, whatever the number of experts: sum_e 1 * 1/E.
    even = RouterStats(0, torch.full((8, 4), 0.5, dtype=F64), torch.tensor([[0, 1], [2, 3]] * 4))
    assert float(balance_loss([even], rows_of(torch.zeros(1, 8)), 4)) == pytest.approx(1.0, abs=1e-14)


def test_router_bias_moves_against_the_load(small: Any) -> None:
    model = small()  # MoE layers: 1, and 2 which is the MTP layer
    assert [layer for layer, _ in model.routers()] == [1, 2]
    scores = torch.zeros(6, 4)
    documents = torch.tensor([[0, 0, 0, 0, 1, -1]])
    # Layer 1: expert loads 5, 3, 2, 0 of 10, mean 2.5; padding would have made them 5, 3, 2, 2.
    first = RouterStats(1, scores, torch.tensor([[0, 1], [0, 1], [0, 1], [0, 2], [0, 2], [3, 3]]))
    # The MTP layer was applied twice: 5 + 0, 5 + 0, 0 + 5, 0 + 5, which is even, so nothing moves.
    one = RouterStats(2, scores, torch.tensor([[0, 1]] * 6))
    two = RouterStats(2, scores, torch.tensor([[2, 3]] * 6))
    loads = expert_loads([first, one, two], documents, 4)
    assert {layer: load.tolist() for layer, load in loads.items()} == {1: [5, 3, 2, 0], 2: [5, 5, 5, 5]}
    update_router_bias(model, loads, 0.125)
    bias = {layer: router.e_score_correction_bias.tolist() for layer, router in model.routers()}
    assert bias == {1: [-0.125, -0.125, 0.125, 0.125], 2: [0.0] * 4}
    update_router_bias(model, expert_loads([first], documents, 4), 0.125)
    assert model.routers()[0][1].e_score_correction_bias.tolist() == [-0.25, -0.25, 0.25, 0.25]


def test_router_bias_evens_out_a_skewed_router(small: Any) -> None:
    model = small(seed=3)
    router = model.routers()[0][1]
    x = random(256, 32, seed=8).float() + 1.0
    documents = torch.zeros(1, 256, dtype=torch.long)
    shares = []
    for _ in range(200):
        _, experts, scores = router(x)
        loads = expert_loads([RouterStats(1, scores, experts)], documents, 4)
        shares.append(float(loads[1].max() / loads[1].mean()))
        update_router_bias(model, loads, 0.01)
    assert shares[0] > 1.5 and shares[-1] < 1.15


def test_indexer_recall_by_hand() -> None:
    watch = IndexerLoss(rows_of(torch.tensor([[0, 0, 0, -1]])), topk=2)
    # One attention head whose logits are the logarithms of the target, one index head whose dots are the scores.
    target = torch.tensor([[4.0, 1, 1, 1], [1.0, 2, 1, 1], [0.5, 0.5, 3, 2], [1.0, 1, 1, 1]], dtype=F64)
    scores = torch.tensor([[0.0, 9, 9, 9], [3.0, 1, 2, 9], [4.0, 3, 2, 1], [1.0, 2, 3, 4]], dtype=F64)
    keys, ones = torch.eye(4, dtype=F64).unsqueeze(0), torch.ones(1, 4, 1, dtype=F64)
    start, end = torch.zeros(1, 4, dtype=torch.long), torch.tensor([[1, 2, 3, 4]])
    view = AllKeys(2 * scores.view(1, 4, 1, 4), keys, ones, target.log().unsqueeze(0).unsqueeze(0), keys.unsqueeze(1),
                   start, end, 1.0)  # fmt: skip
    watch.dense(0, view)
    # Only query 2 is real and has more than two keys; it keeps keys 0 and 1: (0.5 + 0.5) / 4.
    assert watch.metrics.numbers()["indexer_recall"] == pytest.approx(0.25)
    assert watch.metrics.numbers()["indexer_recall/L0"] == pytest.approx(0.25)
    causal = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    weight = torch.tensor([[1.0, 1, 1, 0]], dtype=F64) / 3  # the mean over the real tokens
    kl = selected_kl(scores.unsqueeze(0), target.unsqueeze(0), causal, weight)
    assert float(watch.total()) == pytest.approx(float(kl), abs=1e-14)
    watch.selected(1, scores.unsqueeze(0) * 0, target.unsqueeze(0), causal)
    other = selected_kl(scores.unsqueeze(0) * 0, target.unsqueeze(0), causal, weight)
    assert float(watch.total()) == pytest.approx(float(kl + other) / 2, abs=1e-14)
    # In the sparse stage the axis runs over the selected keys: there is nothing to recall.
    sparse = IndexerLoss(rows_of(torch.tensor([[0]])), topk=2)
    sparse.selected(0, torch.zeros(1, 1, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 2, dtype=torch.bool))
    assert "indexer_recall" not in sparse.metrics.numbers()
    assert math.isclose(float(sparse.total()), 0.0, abs_tol=1e-7)
    with pytest.raises(ValueError, match="no indexer was observed"):
        IndexerLoss(rows_of(torch.tensor([[0]])), topk=2).total()
    quiet, before = watch.noop(), watch.metrics.numbers()
    for observer in (quiet, quiet.noop()):
        observer.dense(0, view)
        observer.selected(1, scores.unsqueeze(0), target.unsqueeze(0), causal)
    assert len(watch.losses) == 2 and watch.metrics.numbers() == before
