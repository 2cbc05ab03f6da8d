"""Statistics of policy updates against plain Python over lists of tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from glm5.rl.losses import PPO, DoubleSided, IcePop, Objective, PolicyGradient, Tokens, policy_loss
from glm5.rl.losses.measure import BINS, RATIO_EDGES

F64 = torch.float64


def case(seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> torch.Tensor:
        return scale * torch.randn(5, 40, generator=generator, dtype=F64)

    rollout = -draw(1.5).abs()
    old = rollout + draw(0.9)
    return Tokens(
        logprobs=old + draw(0.4), old_logprobs=old, rollout_logprobs=rollout, advantages=draw(1.0),
        mask=torch.rand(5, 40, generator=generator) < 0.7, fresh=torch.rand(5, 40, generator=generator) < 0.5,
        entropy=draw(1.0).abs(),
    )  # fmt: skip


def listed(tokens: Tokens, *names: str) -> list[list[float]]:
    return [getattr(tokens, name)[tokens.mask].tolist() for name in names]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("seed", range(3))
def test_against_brute_force(seed: int) -> None:
    tokens = case(seed)
    new, old, rollout, advantages, fresh, entropy = listed(
        tokens, "logprobs", "old_logprobs", "rollout_logprobs", "advantages", "fresh", "entropy"
    )
    n = len(new)
    ratios = {"old": [math.exp(x - y) for x, y in zip(new, old)], "r": [math.exp(x - y) for x, y in zip(new, rollout)]}
    rho = [math.exp(x - y) for x, y in zip(old, rollout)]
    gap = [abs(x - y) for x, y, f in zip(old, rollout, fresh) if f]
    k3 = [math.exp(x - y) - 1 - (x - y) for x, y, f in zip(old, rollout, fresh) if f]
    cases: list[tuple[Objective, str, list[float], list[bool], float, float]] = [
        (IcePop(1.6, 0.15, 0.3), "old", rho, [1 / 1.6 <= x <= 1.6 for x in rho], 0.15, 0.3),
        (PPO(0.2, 0.4, "rollout"), "r", [1.0] * n, [True] * n, 0.2, 0.4),
        (DoubleSided(0.4, 0.9), "r", [1.0] * n, [0.6 < x < 1.9 for x in ratios["r"]], math.inf, math.inf),
        (PolicyGradient(), "r", [1 / x for x in ratios["r"]], [True] * n, math.inf, math.inf),
    ]
    for objective, which, factor, kept, low, high in cases:
        ratio = ratios[which]
        numbers = policy_loss(objective, tokens, "token")[1].numbers()
        clipped = [(a > 0 and r > 1 + high) or (a < 0 and r < 1 - low) for a, r in zip(advantages, ratio)]
        limited = [min(max(r, 1 - low), 1 + high) if c else r for r, c in zip(ratio, clipped)]
        weight = [k * f * r for k, f, r in zip(kept, factor, limited)]
        expected = {
            "tokens": n,
            "masked_share": 1 - mean([float(k) for k in kept]),
            "clipped_share": mean([float(c) for c in clipped]),
            "ratio_mean": mean(ratio),
            "ess_share": math.fsum(weight) ** 2 / math.fsum(w * w for w in weight) / n,
            "mismatch_mean": mean(gap),
            "mismatch_max": max(gap),
            "mismatch_kl": mean(k3),
            "entropy": mean(entropy),
        }
        assert {key: numbers[key] for key in expected} == pytest.approx(expected, abs=1e-9), objective
        edges = [-math.inf, *RATIO_EDGES, math.inf]
        counts = [sum(a < r <= b for r in ratios["r"]) for a, b in itertools.pairwise(edges)]
        assert [numbers[name] for name in BINS] == counts and min(counts[1:-1]) > 0
        assert sum(counts) == n
        assert set(numbers) == {*expected, *BINS, "loss"}


def test_edges() -> None:
    assert len(BINS) == len(RATIO_EDGES) + 1
    steps = [math.log(b / a) for a, b in itertools.pairwise(RATIO_EDGES)]
    assert steps == pytest.approx([2 / 3 * math.log(2)] * len(steps))
    assert {0.5, 2.0, 0.125, 8.0} <= {round(edge, 12) for edge in RATIO_EDGES}
    ones = torch.zeros(1, 3)
    tokens = Tokens(logprobs=ones, rollout_logprobs=ones, advantages=ones, mask=torch.ones(1, 3, dtype=torch.bool))
    numbers = policy_loss(IcePop(), tokens, "token")[1].numbers()
    assert numbers[BINS[len(BINS) // 2]] == 3 and sum(numbers[name] for name in BINS) == 3
    assert numbers["ess_share"] == 1.0


def test_effective_sample_size_by_hand() -> None:
    """Weights 1, 1, 0 (masked): (1 + 1)^2 / (1 + 1) = 2 of 3. One weight that dwarfs the others: 1 of 3."""
    zeros, mask = torch.zeros(1, 3, dtype=F64), torch.ones(1, 3, dtype=torch.bool)
    off = torch.tensor([[0.0, 0.0, 3.0]], dtype=F64)
    tokens = Tokens(logprobs=off, rollout_logprobs=zeros, advantages=zeros, mask=mask)
    assert policy_loss(DoubleSided(), tokens, "token")[1].numbers()["ess_share"] == pytest.approx(2 / 3)
    far = PPO(0.2, 0.2)
    share = policy_loss(far, replace(tokens, logprobs=20 * off), "token")[1].numbers()["ess_share"]
    assert share == pytest.approx(1 / 3, abs=1e-9)
    nothing = policy_loss(DoubleSided(), replace(tokens, logprobs=off + 3), "token")[1].numbers()
    assert nothing["ess_share"] == 0.0 and nothing["masked_share"] == 1.0


def test_a_nan_is_not_hidden() -> None:
    tokens = case(0)
    broken = tokens.logprobs.clone()
    broken[tokens.mask.nonzero()[0][0], tokens.mask.nonzero()[0][1]] = math.nan
    loss, statistics = policy_loss(IcePop(), replace(tokens, logprobs=broken), "token")
    assert loss.isnan() and math.isnan(statistics.numbers()["loss"])
