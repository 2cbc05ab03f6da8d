"""Norm, activation, rotation and token log-probabilities against float64 formulas and finite differences."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from glm5.ops import cross_entropy, round_up
from glm5.ops.cross_entropy import distribution, token_logprobs
from glm5.ops.elementwise import rms_norm, sigmoid, swiglu
from glm5.ops.rope import apply_rope, rope_table


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_rms_norm() -> None:
    x, weight = randn(3, 6), randn(6, seed=1)
    expected = torch.stack([row / math.sqrt(float((row**2).sum()) / 6 + 0.01) * weight for row in x])
    torch.testing.assert_close(rms_norm(x, weight, 0.01), expected, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 0.01), (x.requires_grad_(), weight.requires_grad_()))


def test_rms_norm_with_a_weight_that_is_a_strided_view(backend: str) -> None:
    x, wide = torch.randn(3, 8), torch.randn(16)
    expected = x / (x.double().square().mean(-1, keepdim=True) + 0.01).sqrt() * wide[::2]
    torch.testing.assert_close(rms_norm(x, wide[::2], 0.01).double(), expected, rtol=0, atol=1e-6)


def test_rms_norm_of_half_precision_takes_its_statistics_in_fp32() -> None:
    x = torch.full((1, 8), 300.0, dtype=torch.float16)  # the square overflows fp16
    assert rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5).tolist() == [[1.0] * 8]


def test_swiglu() -> None:
    x = randn(4, 6)
    expected = torch.nn.functional.silu(x[:, :3]) * x[:, 3:]
    torch.testing.assert_close(swiglu(x), expected, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(swiglu, (x.requires_grad_(),))


@pytest.mark.parametrize("value", [-1e4, -90.0, 90.0, 1e4])
def test_saturated_activations_stay_finite(value: float) -> None:
    x = torch.tensor([[value, 2.0]], requires_grad=True)
    out = swiglu(x)
    out.sum().backward()
    assert out.item() == pytest.approx(2 * max(value, 0.0), abs=1e-30)
    assert x.grad is not None and x.grad.isfinite().all()
    assert float(sigmoid(torch.tensor(value))) == pytest.approx(float(value > 0), abs=1e-30)


def test_rope_rotates_adjacent_pairs_like_complex_numbers() -> None:
    dim, theta = 8, 1e4
    positions = torch.tensor([[0, 1, 77], [4000, 2, 5]])
    x = randn(2, 3, dim)
    found = apply_rope(x, *rope_table(positions, dim, theta))
    for b in range(2):
        for t in range(3):
            for i in range(dim // 2):
                angle = int(positions[b, t]) * theta ** (-2 * i / dim)
                z = complex(x[b, t, 2 * i], x[b, t, 2 * i + 1]) * cmath.exp(1j * angle)
                assert abs(complex(found[b, t, 2 * i], found[b, t, 2 * i + 1]) - z) < 1e-3 * (1 + abs(z))
    torch.testing.assert_close(found[0, 0], x[0, 0])  # position 0 is the identity


def test_rope_scores_depend_on_distance_alone() -> None:
    q, k = randn(1, 16, seed=1), randn(1, 16, seed=2)

    def score(i: int, j: int) -> float:
        at = [apply_rope(v, *rope_table(torch.tensor([p]), 16, 100.0)) for v, p in ((q, i), (k, j))]
        return float((at[0] * at[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-5)
    assert abs(score(9, 4) - score(4, 9)) > 1e-3


@pytest.mark.parametrize("chunk", [2, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs(monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ROWS", chunk)
    hidden, weight, targets = randn(5, 4), randn(7, 4, seed=1), torch.tensor([0, 6, 3, 3, 1])
    logp, entropy = token_logprobs(hidden, weight, targets, temperature)
    for i in range(5):
        logits = [float(weight[v] @ hidden[i]) / temperature for v in range(7)]
        total = math.log(sum(math.exp(x) for x in logits))
        assert float(logp[i]) == pytest.approx(logits[int(targets[i])] - total, abs=1e-12)
        assert float(entropy[i]) == pytest.approx(-sum(math.exp(x - total) * (x - total) for x in logits), abs=1e-12)
    assert not entropy.requires_grad
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, temperature)[0], inputs)


def test_engine_and_learner_share_the_distribution() -> None:
    hidden, weight = randn(16, 8).float(), randn(12, 8, seed=1).float()
    targets = torch.arange(16) % 12
    for scale in (1.0, 1 / 0.7):
        logp, _ = token_logprobs(hidden, weight, targets, 1 / scale)
        table = distribution(hidden, weight, 1.0 / (1 / scale))
        assert torch.equal(table.gather(-1, targets.unsqueeze(-1)).squeeze(-1), logp)
    assert distribution(hidden.bfloat16(), weight.bfloat16()).dtype == torch.float32


def test_round_up() -> None:
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
