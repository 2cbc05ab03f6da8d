"""PPO, the policy gradient and the KL estimators against scalar loops; what no loss may do at its extremes; and that
micro-batches add up, in value, gradient and statistics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glm5.errors import ConfigError
from glm5.rl.advantages import distillation
from glm5.rl.losses import PPO, Counts, DoubleSided, IcePop, KLPenalty, Objective, PolicyGradient, Tokens, policy_loss
from glm5.rl.losses.kl import ESTIMATORS
from glm5.rl.losses.measure import Statistics

F64 = torch.float64
OBJECTIVES: list[Objective] = [
    IcePop(1.6, 0.15, 0.3), DoubleSided(0.4, 0.9), PPO(0.2, 0.2), PPO(0.15, 0.4, "old"), PolicyGradient(),
]  # fmt: skip


def case(seed: int, rows: int = 4, length: int = 7, dtype: torch.dtype = F64) -> Tokens:
    """Tokens whose ratios fall on every side of every bound; one row is empty."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(rows, length, generator=generator, dtype=dtype)

    rollout = -draw(1.5).abs()
    old = rollout + draw(0.6)
    new = old + draw(0.4)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[min(1, rows - 1)] = False
    return Tokens(
        logprobs=new.requires_grad_(), old_logprobs=old, rollout_logprobs=rollout, advantages=draw(1.0), mask=mask,
        ref_logprobs=new.detach() + draw(0.5), entropy=draw(1.0).abs(),
    )  # fmt: skip


def scalar(objective: Objective, x: float, old: float, rollout: float, a: float, frozen: float) -> float:
    """One token's objective at log pi = x; `frozen` is the log pi of factors that carry no gradient."""
    if isinstance(objective, PolicyGradient):
        return a * x
    if isinstance(objective, DoubleSided):
        r = math.exp(frozen - rollout)
        return r * a * x if 1 - objective.eps_low < r < 1 + objective.eps_high else 0.0
    assert isinstance(objective, IcePop | PPO)
    base = rollout if isinstance(objective, PPO) and objective.against == "rollout" else old
    r = math.exp(x - base)
    value = min(r * a, min(max(r, 1 - objective.clip_low), 1 + objective.clip_high) * a)
    if isinstance(objective, IcePop):
        rho = math.exp(old - rollout)
        value *= rho if 1 / objective.beta <= rho <= objective.beta else 0.0
    return value


def kl_scalar(estimator: str, x: float, ref: float) -> float:
    d = ref - x
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator]


def brute_force(
    objective: Objective, tokens: Tokens, average: str, penalty: KLPenalty | None = None
) -> tuple[float, list[list[float]]]:
    """Loss, and its gradient by central differences, one token after the other in Python floats."""
    new, old, rollout, a, ref = (
        t.detach().tolist()  # type: ignore[union-attr]
        for t in (tokens.logprobs, tokens.old_logprobs, tokens.rollout_logprobs, tokens.advantages, tokens.ref_logprobs)
    )
    mask = tokens.mask.tolist()
    present = sum(any(row) for row in mask)
    loss, gradient = 0.0, [[0.0] * len(row) for row in new]
    for i, row in enumerate(mask):
        for t, counts in enumerate(row):
            if not counts:
                continue
            weight = 1 / sum(map(sum, mask)) if average == "token" else 1 / present / sum(row)

            def term(x: float, i: int = i, t: int = t, weight: float = weight) -> float:
                value = -scalar(objective, x, old[i][t], rollout[i][t], a[i][t], new[i][t])
                if penalty:
                    value += penalty.weight * kl_scalar(penalty.estimator, x, ref[i][t])
                return weight * value

            loss += term(new[i][t])
            gradient[i][t] = (term(new[i][t] + 1e-5) - term(new[i][t] - 1e-5)) / 2e-5
    return loss, gradient


def run(objective: Objective, tokens: Tokens, average: Any, *more: Any) -> tuple[Tensor, Tensor, Statistics]:
    loss, statistics = policy_loss(objective, tokens, average, *more)
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
    return loss.detach(), gradient, statistics


@pytest.mark.parametrize("penalty", [None, KLPenalty(0.3, "k1"), KLPenalty(0.3, "k2"), KLPenalty(0.3)], ids=repr)
@pytest.mark.parametrize("average", ["sequence", "token"])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_value_and_finite_differences(objective: Objective, average: Any, penalty: KLPenalty | None) -> None:
    for seed in range(3):
        tokens = case(seed)
        expected, gradient = brute_force(objective, tokens, average, penalty)
        loss, found, statistics = run(objective, tokens, average, penalty)
        assert abs(float(loss) - expected) < 1e-9
        assert float((found - torch.tensor(gradient, dtype=F64)).abs().max()) < 1e-9
        assert statistics.numbers()["loss"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("against", ["rollout", "old"])
def test_ppo_gradient_in_closed_form(against: Any) -> None:
    tokens = case(4, 6, 30)
    objective = PPO(0.2, 0.35, against)
    _, found, statistics = run(objective, tokens, "token")
    base = tokens.rollout_logprobs if against == "rollout" else tokens.old_logprobs
    r, a = (tokens.logprobs.detach() - base).exp(), tokens.advantages
    limited = ((a > 0) & (r > 1.35)) | ((a < 0) & (r < 0.8))
    expected = torch.where(limited | ~tokens.mask, 0.0, -r * a) / tokens.mask.sum()
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)
    numbers = statistics.numbers()
    assert numbers["clipped_share"] == pytest.approx(float(limited[tokens.mask].double().mean()))
    assert 0 < numbers["clipped_share"] < 1 and numbers["masked_share"] == 0


def test_what_belongs_to_old_policies_gets_no_gradient() -> None:
    for objective in OBJECTIVES:
        tokens = case(0)
        leaves = [t.detach().clone().requires_grad_() for t in (tokens.old, tokens.rollout_logprobs, tokens.old)]
        tokens = replace(tokens, old_logprobs=leaves[0], rollout_logprobs=leaves[1], ref_logprobs=leaves[2])
        policy_loss(objective, tokens, "token", KLPenalty(1.0))[0].backward()
        assert tokens.logprobs.grad is not None and all(leaf.grad is None for leaf in leaves), objective


# ----------------------------------------------------------------------------------------------- extremes and emptiness


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("gap", [50.0, 120.0, 2000.0, math.inf])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_extreme_ratios_are_never_nan(objective: Objective, gap: float, dtype: torch.dtype) -> None:
    """Every combination of a huge, a tiny and an ordinary ratio, old and new, with each sign of the advantage."""
    one = torch.tensor([-gap, 0.0, gap], dtype=dtype).clamp(-1e30, 1e30)
    new = torch.full((27,), -1.0, dtype=dtype)
    old, rollout, advantages = torch.cartesian_prod(one, one, torch.tensor([-1.0, 0.0, 1.0], dtype=dtype)).unbind(1)
    tokens = Tokens(
        logprobs=new[None].clone().requires_grad_(), old_logprobs=new + old[None], rollout_logprobs=new + rollout[None],
        advantages=advantages[None], mask=torch.ones(1, 27, dtype=torch.bool), ref_logprobs=new + old[None],
    )  # fmt: skip
    for penalty in (None, KLPenalty(0.1, "k2"), KLPenalty(0.1)):
        loss, gradient, statistics = run(objective, tokens, "token", penalty)
        assert loss.isfinite() and gradient.isfinite().all()
        assert not any(math.isnan(value) for value in statistics.numbers().values())


def test_a_token_that_became_impossible() -> None:
    tokens = case(0)
    gone = torch.where(tokens.mask, -math.inf, tokens.logprobs.detach()).requires_grad_()
    for objective in (IcePop(), DoubleSided(), PPO(), PPO(against="old")):
        loss, gradient, _ = run(objective, replace(tokens, logprobs=gone), "token")
        assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("rubbish", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_nothing_outside_the_mask_counts(objective: Objective, rubbish: float) -> None:
    tokens, penalty = case(3), KLPenalty(0.2)
    dirty = {
        name: torch.where(tokens.mask, getattr(tokens, name).detach(), rubbish)
        for name in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "ref_logprobs", "entropy")
    }
    dirty["logprobs"].requires_grad_()
    for average in ("sequence", "token"):
        clean = run(objective, tokens, average, penalty)
        other = run(objective, replace(tokens, **dirty), average, penalty)  # type: ignore[arg-type]
        assert torch.equal(clean[0], other[0]) and torch.equal(clean[1], other[1])
        assert clean[2].numbers() == other[2].numbers()


@pytest.mark.parametrize("shape", [(3, 4), (1, 0), (0, 5)])
@pytest.mark.parametrize("average", ["sequence", "token"])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_an_empty_batch_is_zero(objective: Objective, average: Any, shape: tuple[int, int]) -> None:
    values = torch.full(shape, -1.0, dtype=F64)
    tokens = Tokens(
        logprobs=values.clone().requires_grad_(), rollout_logprobs=values, advantages=values, ref_logprobs=values,
        mask=torch.zeros(shape, dtype=torch.bool), entropy=values,
    )  # fmt: skip
    loss, gradient, statistics = run(objective, tokens, average, KLPenalty(1.0))
    assert loss == 0 and not gradient.any() and not any(statistics.numbers().values())


# -------------------------------------------------------------------------------------------------------- micro-batches


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000), st.lists(st.integers(1, 3), min_size=1, max_size=5), st.sampled_from(OBJECTIVES),
    st.sampled_from(["sequence", "token"]),
)  # fmt: skip
def test_micro_batches_add_up(seed: int, parts: list[int], objective: Objective, average: Any) -> None:
    tokens = case(seed, sum(parts), 5)
    penalty = KLPenalty(0.4)
    loss, gradient, statistics = run(objective, tokens, average, penalty)
    whole = Counts.of(tokens.mask.tolist())
    assert whole == Counts.of_mask(tokens.mask)
    losses, gradients, total, start = 0.0, [], Statistics(), 0
    for rows in parts:
        cut = {
            name: getattr(tokens, name)[start : start + rows].detach()
            for name in "logprobs old_logprobs rollout_logprobs advantages mask ref_logprobs entropy".split()
        }
        cut["logprobs"].requires_grad_()
        one, own, some = run(objective, Tokens(**cut, whole=whole), average, penalty)
        losses += float(one)
        gradients.append(own)
        total.merge([some])
        start += rows
    assert losses == pytest.approx(float(loss), abs=1e-12)
    assert torch.allclose(torch.cat(gradients), gradient, rtol=0, atol=1e-12)
    assert total.numbers() == pytest.approx(statistics.numbers(), abs=1e-12)


# ---------------------------------------------------------------------------------------------- expectations by summing


def policies(seed: int, size: int = 9) -> tuple[Tensor, Tensor]:
    """Two distributions over a small vocabulary, as logits of the first (with gradient) and log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator, dtype=F64).requires_grad_()
    return logits, torch.log_softmax(torch.randn(size, generator=generator, dtype=F64), -1)


@pytest.mark.parametrize("seed", range(3))
def test_estimators_are_unbiased_where_they_say_so(seed: int) -> None:
    """Exact expectations: the sum over the vocabulary, weighted by the policy."""
    logits, ref = policies(seed)
    p = torch.log_softmax(logits, -1)
    kl, reverse = (p.exp() * (p - ref)).sum(), (ref.exp() * (ref - p)).sum()
    means = {name: (p.detach().exp() * estimate(ref - p)).sum() for name, estimate in ESTIMATORS.items()}
    assert float(means["k1"].detach()) == pytest.approx(float(kl.detach()), abs=1e-12)
    assert float(means["k3"].detach()) == pytest.approx(float(kl.detach()), abs=1e-12)
    assert abs(float(means["k2"].detach()) - float(kl.detach())) > 1e-3
    gradients = {name: torch.autograd.grad(mean, logits, retain_graph=True)[0] for name, mean in means.items()}
    assert float(gradients["k1"].abs().max()) < 1e-12
    assert torch.allclose(gradients["k2"], torch.autograd.grad(kl, logits, retain_graph=True)[0], rtol=0, atol=1e-12)
    assert torch.allclose(gradients["k3"], torch.autograd.grad(reverse, logits)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_penalty_pulls_towards_its_reference(estimator: Any) -> None:
    logits, ref = policies(1)
    optimizer = torch.optim.SGD([logits], lr=2.0)
    tokens = torch.arange(9)
    for _ in range(300):
        p = torch.log_softmax(logits, -1)
        estimates = KLPenalty(1.0, estimator)(
            Tokens(
                logprobs=p[None, tokens], rollout_logprobs=ref[None], advantages=ref[None], ref_logprobs=ref[None],
                mask=torch.ones(1, 9, dtype=torch.bool),
            )
        )  # fmt: skip
        optimizer.zero_grad()
        (p.detach().exp() * estimates).sum().backward()
        optimizer.step()
    assert torch.allclose(torch.log_softmax(logits.detach(), -1), ref, atol=1e-6)


def test_a_penalty_needs_a_reference() -> None:
    with pytest.raises(ConfigError, match="needs a reference"):
        policy_loss(IcePop(), replace(case(0), ref_logprobs=None), "token", KLPenalty(0.1))
    policy_loss(IcePop(), replace(case(0), ref_logprobs=None), "token", KLPenalty(0.0))


@pytest.mark.parametrize("seed", range(3))
def test_distillation_advantage(seed: int) -> None:
    """Its expectation under the student is minus KL(student || teacher), and its policy gradient is that KL's."""
    logits, teacher = policies(seed)
    student = torch.log_softmax(logits, -1)
    advantage = distillation(teacher, student)
    assert not advantage.requires_grad
    kl = (student.exp() * (student - teacher)).sum()
    p = student.detach().exp()
    assert float((p * advantage).sum()) == pytest.approx(-float(kl.detach()), abs=1e-12)
    (ours,) = torch.autograd.grad((p * advantage * student).sum(), logits, retain_graph=True)
    assert torch.allclose(ours, -torch.autograd.grad(kl, logits)[0], rtol=0, atol=1e-12)
    assert not distillation(student, student).any()
