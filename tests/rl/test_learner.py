"""The learner: exact log-probabilities, gradients that do not depend on micro-batches, honest comparison."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm5.config.optim import OptimConfig
from glm5.engine.engine import Engine
from glm5.errors import DataError, EngineError
from glm5.optim import clip_gradients
from glm5.records import SamplingParams, TrainSample
from glm5.rl import learner as learner_module
from glm5.rl.learner import Learner, PolicyBatch, split_groups, spread_groups_over
from glm5.rl.losses import (
    PPO,
    DoubleSided,
    IcePop,
    KLPenalty,
    Objective,
    PolicyGradient,
    Statistics,
    policy_loss,
)
from glm5.rl.weight_sync import publish, tensor_hashes

OPTIM = OptimConfig(steps=5, lr=1e-2)


def rollouts(model: Any, count: int = 9, temperature: float = 1.0) -> list[TrainSample]:
    """Two sampled turns per row with something of the environment between them."""
    generator = torch.Generator().manual_seed(3)
    engine = Engine(model)
    samples = []
    for i in range(count):
        row = TrainSample([], [], [], [], [], group=i, domain="toy")
        for _turn in range(2):
            length = int(torch.randint(1, 9, (), generator=generator))
            given = torch.randint(0, 40, (length,), generator=generator).tolist()
            params = SamplingParams(max_tokens=2 + (5 * i) % 7, temperature=temperature, ignore_eos=True)
            done = engine.generate([row.ids + given], params)[0]
            n = len(done.token_ids)
            row.ids += given + done.token_ids
            row.loss_mask += [False] * length + [True] * n
            row.rollout_logprobs += [0.0] * length + done.logprobs
            row.advantages += [0.0] * length + [1.0 - 0.3 * i] * n
            row.weight_versions += [-1] * length + done.weight_versions
        samples.append(row)
    return samples


@pytest.fixture(scope="module")
def of_small(small: Any) -> list[TrainSample]:
    return rollouts(small())


@pytest.fixture
def samples(of_small: list[TrainSample]) -> list[TrainSample]:
    """Rollouts of `small()`, which a test may change."""
    return copy.deepcopy(of_small)


def grpo(batch: PolicyBatch) -> Any:
    return policy_loss(IcePop(), batch, "sequence")


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_logprobs_are_the_engines_bit_for_bit(small: Any, temperature: float) -> None:
    model = small()
    samples = rollouts(model, temperature=temperature)
    learner = Learner(model, OPTIM, row_length=64, temperature=temperature)
    batch = learner.forward(samples)
    assert torch.equal(batch.logprobs.detach(), batch.rollout_logprobs)
    for i, sample in enumerate(samples):
        picked = [k for k, m in enumerate(sample.loss_mask) if m]
        n = len(picked)
        assert batch.mask[i].tolist() == [True] * n + [False] * (batch.mask.shape[1] - n)
        assert batch.rollout_logprobs[i, :n].tolist() == torch.tensor(sample.rollout_logprobs)[picked].tolist()
        assert batch.advantages[i, :n].tolist() == pytest.approx([sample.advantages[k] for k in picked])
        assert batch.versions[i, :n].tolist() == [sample.weight_versions[k] for k in picked]
        assert not batch.logprobs[i, n:].any()
    learner.step(samples, grpo, 1e-3)
    tokens = sum(sum(s.loss_mask) for s in samples)
    assert vars(learner.agreement) == {"tokens": tokens, "mismatches": 0, "max_abs_diff": 0.0}
    # After the update the same samples are off-policy: nothing may be compared any more.
    learner.step(samples, grpo, 1e-3)
    assert learner.agreement.tokens == tokens and learner.version == 2


def test_a_mismatch_is_counted(small: Any, samples: list[TrainSample]) -> None:
    model = small()
    at = samples[1].loss_mask.index(True)
    samples[1].rollout_logprobs[at] += 0.25
    learner = Learner(model, OPTIM, row_length=64, temperature=1.0)
    learner.step(samples[:3], grpo, 1e-3)
    assert learner.agreement.mismatches == 1
    assert learner.agreement.max_abs_diff == pytest.approx(0.25, abs=1e-5)


# --------------------------------------------------------------------------------------------------------- minibatches


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12), st.integers(1, 14))
def test_minibatches_hold_whole_groups_in_order(rows: list[int], count: int) -> None:
    samples = [TrainSample([k], [True], [0.0], [0.0], [0], group=g) for g, n in enumerate(rows) for k in range(n)]
    parts = split_groups(samples, count)
    assert [s for part in parts for s in part] == samples and len(parts) == min(count, len(rows))
    sizes = [len({s.group for s in part}) for part in parts]
    assert sum(sizes) == len(rows) and max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 6))
def test_groups_may_be_spread_over_all_minibatches(rows: list[int], count: int) -> None:
    samples = [TrainSample([i], [], [], [], [], group=group) for group, n in enumerate(rows) for i in range(n)]
    parts = spread_groups_over(samples, count)
    assert sorted((s.group, s.ids[0]) for part in parts for s in part) == [(s.group, s.ids[0]) for s in samples]
    assert len(parts) == min(count, len(samples))
    for group, n in enumerate(rows):  # each minibatch has as equal a part of the group as numbers allow
        have = [sum(s.group == group for s in part) for part in parts]
        assert sum(have) == n and max(have) - min(have) <= 1


def test_one_minibatch_is_one_plain_step_bit_for_bit(small: Any, samples: list[TrainSample]) -> None:
    """Written out: zero the gradients, backward over the whole batch, clip, step."""
    one, plain = (Learner(small(), OPTIM, row_length=64, temperature=1.0) for _ in range(2))
    one.step(samples, grpo, 1e-2)
    batch = plain.forward(samples)
    loss, statistics = grpo(batch)
    plain.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    clip_gradients(plain.model, OPTIM.clip)  # torch's own sums the squares in another order
    for group in plain.optimizer.param_groups:
        group["lr"] = 1e-2
    plain.optimizer.step()
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, one.model.state_dict()[name]), name
    again = Learner(small(), OPTIM, row_length=64, temperature=1.0, minibatches=1)
    assert again.step(samples, grpo, 1e-2).items() >= statistics.numbers().items()


@pytest.mark.parametrize("rows_per_step", [1, 100])
def test_clipping_acts_from_the_second_minibatch_on(
    small: Any, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch, rows_per_step: int
) -> None:
    monkeypatch.setattr(learner_module, "ROWS_PER_STEP", rows_per_step)
    learner = Learner(small(), OPTIM, row_length=40, temperature=1.0, minibatches=3)
    seen: list[tuple[PolicyBatch, dict[str, float]]] = []

    def watched(batch: PolicyBatch) -> Any:
        loss, statistics = grpo(batch)
        seen.append((batch, statistics.numbers()))
        return loss, statistics

    numbers = learner.step(samples, watched, 3e-2)
    assert learner.version == 1 and {id(s) for batch, _ in seen for s in batch.samples} == {id(s) for s in samples}
    for batch, _ in seen:  # the old policy is the one that sampled, in every minibatch
        assert torch.equal(batch.old[batch.mask], batch.rollout_logprobs[batch.mask])
    first = [found for batch, found in seen if batch.samples[0].group < 3]
    later = [found for batch, found in seen if batch.samples[0].group >= 3]
    assert all(found["clipped_share"] == 0 and found["ratio_mean"] == 1 for found in first)
    assert max(found["clipped_share"] for found in later) > 0 and numbers["clipped_share"] > 0
    assert numbers["tokens"] == sum(sum(s.loss_mask) for s in samples)
    assert learner.agreement.mismatches == 0 and learner.agreement.tokens == numbers["tokens"]
    # A clipped token has no gradient, so a batch of clipped tokens only moves nothing.
    batch = next(batch for batch, found in seen if found["clipped_share"] > 0)
    terms = IcePop()(batch.cleaned())
    gradient = torch.autograd.grad(terms.objective.sum(), batch.logprobs)[0]
    assert terms.clipped[batch.mask].any() and not gradient[terms.clipped & batch.mask].any()


# -------------------------------------------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize(
    ("average", "objective"),
    [("sequence", IcePop()), ("token", DoubleSided()), ("sequence", PPO(against="old")), ("token", PolicyGradient())]
    + [
        pytest.param(average, objective, marks=pytest.mark.slow)
        for average, objective in [
            ("token", IcePop()), ("sequence", DoubleSided()), ("token", PPO(against="old")),
            ("sequence", PolicyGradient()),
        ]
    ],
    ids=repr,
)  # fmt: skip
def test_micro_batches_add_up_to_one_batch(
    small: Any, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch, objective: Objective, average: Any
) -> None:
    penalty = KLPenalty(0.3)

    def loss_of(batch: PolicyBatch) -> Any:
        return policy_loss(objective, batch, average, penalty)

    found = {}
    for rows in (2, 100):
        monkeypatch.setattr(learner_module, "ROWS_PER_STEP", rows)
        learner = Learner(
            small(), OPTIM.model_copy(update={"clip": 1e9}), row_length=40, temperature=1.0, reference=small(seed=3)
        )
        parts = learner._split(samples)
        assert [s for part in parts for s in part] == samples
        assert (len(parts) == 1) == (rows == 100) and all(parts)
        numbers = learner.step(samples, loss_of, 0.0)
        found[rows] = numbers, {n: p.grad for n, p in learner.model.named_parameters() if p.grad is not None}
    whole_numbers, whole = found[100]
    numbers, gradients = found[2]
    assert gradients.keys() == whole.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, whole[name], rtol=1e-4, atol=1e-6), name
    assert numbers == pytest.approx(whole_numbers, abs=1e-5)
    assert any(float(g.abs().max()) > 1e-3 for g in whole.values())


def test_the_gradient_is_that_of_naive_logits(small: Any) -> None:
    """Packing, masks and positions checked against one plain forward pass per sample."""
    model = small(seed=2)
    samples = rollouts(model, 5)
    learner = Learner(model, OPTIM.model_copy(update={"clip": 1e9}), row_length=64, temperature=1.0)
    learner.step(samples, grpo, 0.0)
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for sample in samples:
        logp = torch.log_softmax(model(torch.tensor([sample.ids])).logits[0], -1)
        picked = [i for i, m in enumerate(sample.loss_mask) if m]
        chosen = torch.stack([logp[i - 1, sample.ids[i]] for i in picked])
        advantages = torch.tensor([sample.advantages[i] for i in picked])
        total = total - (advantages * chosen).mean() / len(samples)  # on-policy: r = 1, pop = 1
    total.backward()
    for name, parameter in model.named_parameters():
        if name in ours:
            assert torch.allclose(ours[name], parameter.grad, rtol=1e-3, atol=1e-5), name  # type: ignore[arg-type]


def test_indexers_and_mtp_are_frozen(small: Any, samples: list[TrainSample]) -> None:
    model, before = small(), small()
    learner = Learner(model, OPTIM, row_length=64, temperature=1.0)
    learner.step(samples[:4], grpo, 1e-2)
    for name, tensor in model.state_dict().items():
        frozen = ".indexer." in name or name.startswith("mtp.") or name.endswith("e_score_correction_bias")
        assert torch.equal(tensor, before.state_dict()[name]) == frozen, name


def test_reset_forgets_the_momentum(small: Any, samples: list[TrainSample]) -> None:
    samples = samples[:4]
    ends = []
    for reset in (True, False):
        learner = Learner(small(), OPTIM, row_length=64, temperature=1.0)
        learner.step(samples, grpo, 1e-2)
        if reset:
            learner.reset_optimizer()
            assert not learner.optimizer.state
        learner.step(samples, grpo, 1e-2)
        ends.append(learner.model.lm_head.weight.detach())
    assert not torch.equal(*ends)


def test_a_gradient_that_is_not_finite_is_an_error(small: Any, samples: list[TrainSample]) -> None:
    learner = Learner(small(), OPTIM, row_length=64, temperature=1.0)

    def broken(batch: PolicyBatch) -> Any:
        return batch.logprobs.sum() * float("inf"), Statistics()

    with pytest.raises(DataError, match=r"update 1 is not finite; lower optim\.lr"):
        learner.step(samples[:2], broken, 1e-2)
    assert learner.version == 0


def test_statistics_of_micro_batches_merge(
    small: Any, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "ROWS_PER_STEP", 1)
    learner = Learner(small(), OPTIM, row_length=30, temperature=1.0)
    calls: list[int] = []

    def loss_of(batch: PolicyBatch) -> Any:
        statistics = Statistics()
        calls.append(int(batch.mask.sum()))
        statistics.peak("x_max", float(len(calls)))
        statistics.mean("y", float(len(calls) * calls[-1]), float(calls[-1]))
        statistics.add("z", 1.0)
        return batch.logprobs.sum() * 0, statistics

    numbers = learner.step(samples[:6], loss_of, 1e-3)
    assert len(calls) > 1 and numbers["x_max"] == numbers["z"] == len(calls)
    assert numbers["y"] == pytest.approx(sum((i + 1) * n for i, n in enumerate(calls)) / sum(calls))


def test_entropy_is_the_mean_over_sampled_tokens(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(initializer_range=0.2)
    samples = rollouts(model, 6, temperature=0.8)
    entropies = []
    for sample in samples:
        logp = torch.log_softmax(model(torch.tensor([sample.ids])).logits[0].detach().double() / 0.8, -1)
        entropies += [float(-(logp[i - 1].exp() * logp[i - 1]).sum()) for i, m in enumerate(sample.loss_mask) if m]
    for rows in (1, 100):
        monkeypatch.setattr(learner_module, "ROWS_PER_STEP", rows)
        numbers = Learner(model, OPTIM, row_length=40, temperature=0.8).step(samples, grpo, 0.0)
        assert numbers["entropy"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-5)
        assert numbers["tokens"] == len(entropies)


def test_reference_logprobs_are_those_of_the_reference(small: Any, samples: list[TrainSample]) -> None:
    samples = samples[:5]
    reference = small(seed=7)
    learner = Learner(small(), OPTIM, row_length=64, temperature=0.9, reference=reference)
    batch = learner.forward(samples)
    alone = Learner(reference, OPTIM, row_length=64, temperature=0.9).forward(samples)
    assert batch.ref_logprobs is not None and not batch.ref_logprobs.requires_grad
    assert torch.equal(batch.ref_logprobs[batch.mask], alone.logprobs[batch.mask])
    assert not torch.equal(batch.ref_logprobs[batch.mask], batch.logprobs[batch.mask])


def test_a_batch_without_sampled_tokens_changes_nothing(small: Any, samples: list[TrainSample]) -> None:
    samples = samples[:3]
    for sample in samples:
        sample.loss_mask = [False] * len(sample.ids)
    learner = Learner(small(), OPTIM.model_copy(update={"weight_decay": 0.0}), row_length=64, temperature=1.0)
    numbers = learner.step(samples, grpo, 1e-2)
    assert numbers["loss"] == numbers["grad_norm"] == numbers["entropy"] == numbers["tokens"] == 0.0


# ------------------------------------------------------------------------------------------------------- weight sync


def test_publish_copies_everything(small: Any) -> None:
    model, engine = small(seed=1), Engine(small(seed=2))
    assert tensor_hashes(model) != tensor_hashes(engine.model)
    publish(model, engine, 5)
    assert tensor_hashes(model) == tensor_hashes(engine.model)
    assert engine.weight_version == 5
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert tensor_hashes(model) != tensor_hashes(engine.model)  # the engine has copies, not views


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"])
def test_publish_detects_a_corrupted_copy(small: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, engine = small(seed=1), Engine(small(seed=2))
    real = engine.update_weights

    def corrupting(tensors: Any, version: int) -> None:
        real(tensors, version)
        flat = engine.model.state_dict()[name].view(torch.int32)
        flat[-1] ^= 1  # one bit

    monkeypatch.setattr(engine, "update_weights", corrupting)
    with pytest.raises(EngineError, match=f'Weight push 3: tensor "{name}" differs'):
        publish(model, engine, 3)
