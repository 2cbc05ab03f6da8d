"""The policy losses against scalar loops in plain Python floats: value, gradient, masks, averages and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glm5.rl.advantages import group_normalised, mean_centred
from glm5.rl.losses import average_over, double_sided_is_loss, icepop_grpo_loss

F64 = torch.float64
LOG2 = math.log(2.0)
Rows = list[list[float]]


def weights(mask: list[list[bool]], average: str) -> Rows:
    """How much each token counts: 1 / tokens, or 1 / (non-empty sequences * tokens of its sequence)."""
    total = sum(map(sum, mask))
    sequences = sum(any(row) for row in mask)
    return [
        [(1 / total if average == "token" else 1 / sequences / sum(row)) if m else 0.0 for m in row] for row in mask
    ]


def counted(mask: list[list[bool]], average: str) -> Iterator[tuple[int, int, float]]:
    """Row, position and weight of every token that counts."""
    for i, row in enumerate(weights(mask, average)):
        yield from ((i, t, weight) for t, weight in enumerate(row) if mask[i][t])


def icepop_loop(
    new: Rows, old: Rows, rollout: Rows, advantages: Rows, mask: Any, average: str, beta: float, low: float, high: float
) -> tuple[float, Rows]:
    """Eq. 1 for one token after the other, and its derivative by hand."""
    loss, gradient = 0.0, [[0.0] * len(row) for row in new]
    for i, t, weight in counted(mask, average):
        rho = math.exp(old[i][t] - rollout[i][t])
        if not 1 / beta <= rho <= beta:
            continue
        r, a = math.exp(new[i][t] - old[i][t]), advantages[i][t]
        clipped = min(max(r, 1 - low), 1 + high)
        loss -= weight * rho * min(r * a, clipped * a)
        if r * a <= clipped * a:  # the unclipped branch is the minimum: d r / d log pi = r
            gradient[i][t] = -weight * rho * r * a
    return loss, gradient


def double_sided_loop(
    new: Rows, rollout: Rows, advantages: Rows, mask: Any, average: str, low: float, high: float
) -> tuple[float, Rows]:
    """Eqs. 3-5: the weight of log pi is a constant of the gradient."""
    loss, gradient = 0.0, [[0.0] * len(row) for row in new]
    for i, t, weight in counted(mask, average):
        r = math.exp(new[i][t] - rollout[i][t])
        if 1 - low < r < 1 + high:
            loss -= weight * r * advantages[i][t] * new[i][t]
            gradient[i][t] = -weight * r * advantages[i][t]
    return loss, gradient


def case(seed: int, rows: int = 4, length: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """new, old and rollout log-probabilities whose ratios fall on every side of every bound, advantages, mask."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(rows, length, generator=generator, dtype=F64)

    rollout = -draw(1.5).abs()
    old = rollout + draw(0.6)
    new = old + draw(0.4)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[1] = False  # a row without any sampled token
    return new, old, rollout, draw(1.0), mask


def check(ours: Callable[[Tensor], Tensor], new: Tensor, expected: float, gradient: Rows) -> None:
    leaf = new.clone().requires_grad_()
    loss = ours(leaf)
    assert abs(float(loss.detach()) - expected) < 1e-9
    (found,) = torch.autograd.grad(loss, leaf)
    assert float((found - torch.tensor(gradient, dtype=F64)).abs().max()) < 1e-9


@pytest.mark.parametrize("average", ["sequence", "token"])
@pytest.mark.parametrize("seed", range(4))
def test_icepop_equals_the_loop(seed: int, average: Any) -> None:
    new, old, rollout, advantages, mask = case(seed)
    bounds = dict(beta=1.6, clip_low=0.15, clip_high=0.3)
    plain = [x.tolist() for x in (new, old, rollout, advantages, mask)]
    expected, gradient = icepop_loop(*plain, average, 1.6, 0.15, 0.3)  # type: ignore[call-arg, arg-type]
    check(
        lambda x: icepop_grpo_loss(x, old, rollout, advantages, mask, average=average, **bounds)[0],
        new, expected, gradient,
    )  # fmt: skip
    # The loop's own derivative, by finite differences of the loop's own value.
    for i, t in ((0, 2), (2, 0), (3, 5)):
        ends = []
        for step in (1e-6, -1e-6):
            moved = [list(row) for row in plain[0]]
            moved[i][t] += step
            ends.append(icepop_loop(moved, *plain[1:], average, 1.6, 0.15, 0.3)[0])  # type: ignore[call-arg, arg-type]
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(gradient[i][t], abs=1e-9)
    # Every kind of token occurred.
    rho, r = (old - rollout).exp()[mask], (new - old).exp()[mask]
    assert (rho > 1.6).any() and (rho < 1 / 1.6).any() and (r > 1.3).any() and (r < 0.85).any()


@pytest.mark.parametrize("average", ["sequence", "token"])
@pytest.mark.parametrize("seed", range(4))
def test_double_sided_equals_the_loop(seed: int, average: Any) -> None:
    new, _, rollout, advantages, mask = case(seed)
    expected, gradient = double_sided_loop(
        new.tolist(), rollout.tolist(), advantages.tolist(), mask.tolist(), average, 0.4, 0.9
    )
    check(
        lambda x: double_sided_is_loss(x, rollout, advantages, mask, eps_low=0.4, eps_high=0.9, average=average)[0],
        new, expected, gradient,
    )  # fmt: skip
    ratio = (new - rollout).exp()[mask]
    assert (ratio > 1.9).any() and (ratio < 0.6).any()


def test_defaults_are_the_papers() -> None:
    new, old, rollout, advantages, mask = case(9)
    a = icepop_grpo_loss(new, old, rollout, advantages, mask)[0]
    plain = [x.tolist() for x in (new, old, rollout, advantages, mask)]
    assert float(a) == pytest.approx(icepop_loop(*plain, "sequence", 2.0, 0.2, 0.28)[0], abs=1e-12)  # type: ignore[call-arg, arg-type]
    b = double_sided_is_loss(new, rollout, advantages, mask)[0]
    plain = [x.tolist() for x in (new, rollout, advantages, mask)]
    assert float(b) == pytest.approx(double_sided_loop(*plain, "token", 0.5, 1.0)[0], abs=1e-12)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("log_rho", "kept"),
    [(LOG2, True), (-LOG2, True), (0.0, True), (LOG2 + 1e-9, False), (-LOG2 - 1e-9, False), (50.0, False)],
)
def test_icepop_keeps_its_bounds(log_rho: float, kept: bool) -> None:
    rollout = torch.zeros(1, 1, dtype=F64)  # a difference to 0 has no rounding
    old = (rollout + log_rho).requires_grad_()
    assert math.exp(LOG2) == 2.0 and math.exp(-LOG2) == 0.5
    new = old.detach().clone().requires_grad_()
    loss, stats = icepop_grpo_loss(new, old, rollout, torch.ones(1, 1, dtype=F64), torch.ones(1, 1, dtype=torch.bool))
    assert float(loss.detach()) == pytest.approx(-math.exp(log_rho) if kept else 0.0, abs=1e-12)
    assert stats["masked_share"] == float(not kept)
    assert stats["mismatch_max"] == pytest.approx(abs(log_rho))
    loss.backward()
    assert old.grad is None  # pop and the denominator of r belong to old policies
    assert float(new.grad) == pytest.approx(-math.exp(log_rho) if kept else 0.0, abs=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("log_ratio", "kept"),
    [(LOG2, False), (-LOG2, False), (LOG2 - 1e-9, True), (-LOG2 + 1e-9, True), (0.0, True), (5.0, False)],
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_double_sided_bounds_are_strict_for_both_signs(log_ratio: float, kept: bool, advantage: float) -> None:
    # 0 + log_ratio has no rounding, so that exp of the difference is exactly 2 or 0.5 at the bounds.
    new = torch.tensor([[log_ratio]], dtype=F64, requires_grad=True)
    rollout = torch.zeros(1, 1, dtype=F64)
    advantages, mask = torch.tensor([[advantage]], dtype=F64), torch.ones(1, 1, dtype=torch.bool)
    loss, stats = double_sided_is_loss(new, rollout, advantages, mask)
    loss.backward()
    assert float(new.grad) == pytest.approx(-math.exp(log_ratio) * advantage if kept else 0.0, abs=1e-12)  # type: ignore[arg-type]
    assert stats["masked_share"] == float(not kept)


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_on_policy_gradient_is_the_policy_gradient(average: Any) -> None:
    """r = 1: clipping is inactive, and the gradient is pop * A * grad log pi through whatever computes log pi."""
    _, old, rollout, advantages, mask = case(5)
    theta = torch.randn(4, 7, 3, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    logp = torch.log_softmax(theta, -1)[..., 0]
    loss, stats = icepop_grpo_loss(
        logp, logp.detach(), logp.detach() + (rollout - old), advantages, mask, average=average
    )
    (ours,) = torch.autograd.grad(loss, theta, retain_graph=True)
    rho = (old - rollout).exp()
    pop = torch.where((rho >= 0.5) & (rho <= 2.0), rho, 0.0)
    share = torch.tensor(weights(mask.tolist(), average), dtype=F64)
    (expected,) = torch.autograd.grad(-(share * pop * advantages * logp).sum(), theta)
    assert float((ours - expected).abs().max()) < 1e-12
    assert stats["ratio_mean"] == 1.0 and stats["clipped_share"] == 0.0


def test_statistics_by_hand() -> None:
    new = torch.tensor([[0.0, math.log(1.5), math.log(0.5), 9.0]], dtype=F64) - 3
    old = torch.full((1, 4), -3.0, dtype=F64)
    rollout = torch.tensor([[-3.0, -3.0, -3.0 - math.log(4.0), 4.0]], dtype=F64)
    advantages = torch.tensor([[1.0, 1.0, 1.0, 1.0]], dtype=F64)
    mask = torch.tensor([[True, True, True, False]])
    _, stats = icepop_grpo_loss(new, old, rollout, advantages, mask)
    expected = {"masked_share": 1 / 3, "clipped_share": 1 / 3, "ratio_mean": 1.0, "mismatch_max": math.log(4.0)}
    assert {key: stats[key] for key in expected} == pytest.approx(expected)
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    for loss, numbers in (
        icepop_grpo_loss(new, old, rollout, advantages, nothing),
        double_sided_is_loss(new, rollout, advantages, nothing),
    ):
        assert float(loss) == 0.0 and not any(numbers.values())


def test_values_outside_the_mask_do_not_matter() -> None:
    new, old, rollout, advantages, mask = case(3)
    for average in ("sequence", "token"):
        clean = icepop_grpo_loss(new, old, rollout, advantages, mask, average=average)[0]  # type: ignore[arg-type]
        dirty = icepop_grpo_loss(
            new.where(mask, 7.0), old.where(mask, -7.0), rollout.where(mask, 2.0), advantages.where(mask, 1e9), mask,
            average=average,  # type: ignore[arg-type]
        )[0]  # fmt: skip
        assert torch.equal(clean, dirty)


@given(st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=3, max_size=3), min_size=1, max_size=5))
def test_averages(rows: list[list[tuple[float, bool]]]) -> None:
    values = torch.tensor([[v for v, _ in row] for row in rows], dtype=F64)
    mask = torch.tensor([[m for _, m in row] for row in rows])
    kept = [[v for v, m in row if m] for row in rows]
    flat = [v for row in kept for v in row]
    means = [sum(row) / len(row) for row in kept if row]
    assert float(average_over(values, mask, "token")) == pytest.approx(sum(flat) / len(flat) if flat else 0, abs=1e-12)
    expected = sum(means) / len(means) if means else 0
    assert float(average_over(values, mask, "sequence")) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20))
def test_advantages_against_statistics(rewards: list[float]) -> None:
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    assert mean_centred(rewards) == pytest.approx([r - mean for r in rewards], abs=1e-9)
    if std > 1e-3:
        assert group_normalised(rewards) == pytest.approx([(r - mean) / std for r in rewards], abs=1e-9)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("size", [1, 3, 7, 16])
def test_equal_rewards_teach_nothing(reward: float, size: int) -> None:
    """Although the mean of n equal floats may differ from them by rounding."""
    assert group_normalised([reward] * size) == [0.0] * size
    assert group_normalised([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3**0.5] + [-(3**-0.5)] * 3)
    assert mean_centred([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]
