"""What distinguishes the RL stages: advantages, losses, the reward model and the teachers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from glm5.chat import Tokenizer, render_chat
from glm5.config.recipe import (
    AgenticStage,
    DistillStage,
    FamilyConfig,
    GeneralStage,
    OptimConfig,
    ReasoningStage,
    RewardModelConfig,
)
from glm5.engine.engine import Engine
from glm5.errors import ConfigError
from glm5.obs.metrics import MetricsWriter, read_metrics
from glm5.records import Message, Outcome, SamplingParams, Trajectory, Turn
from glm5.rl.algos.agentic import AgenticRL
from glm5.rl.algos.distill import Distillation, domain_teachers
from glm5.rl.algos.general import GeneralRL
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.learner import Learner, PolicyBatch
from glm5.rl.reward_model import RewardModel, train_reward_model
from glm5.tasks import families

OPTIM = OptimConfig(steps=3, lr=1e-2)


def trajectory(group: int, reward: float, turns: int = 1, domain: str = "toy") -> Trajectory:
    context: tuple[int, ...] = (1, 2, 3)
    played = []
    for t in range(turns):
        output = (10 + t, 11, 12)
        played.append(Turn(context, output, (-1.0, -2.0, -3.0), (4, 4, 4), "stop"))
        context = (*context, *output, 5, 6)
    outcome = Outcome.SOLVED if reward else Outcome.FAILED
    return Trajectory(f"p{group}", domain, group, played, reward, outcome)


def policy_batch(seed: int = 0) -> PolicyBatch:
    """Tokens whose rollout was sampled with other weights than the learner's."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(3, 5, generator=generator, dtype=torch.float64) - 0.1
    mask = torch.rand(3, 5, generator=generator) < 0.8
    noise = 0.8 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    advantages = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    zero = torch.zeros(())
    return PolicyBatch(
        logprobs=torch.where(mask, logprobs, zero).requires_grad_(),
        rollout_logprobs=torch.where(mask, logprobs + noise, zero),
        advantages=torch.where(mask, advantages, zero),
        mask=mask,
        versions=torch.zeros(3, 5),
    )


def gradient_of(algorithm: Any, batch: PolicyBatch) -> torch.Tensor:
    return torch.autograd.grad(algorithm.loss(batch)[0], batch.logprobs)[0]


def test_reasoning_normalises_by_group() -> None:
    stage = ReasoningStage(kind="reasoning", name="r", optim=OPTIM, families=[], beta=1.5)
    groups = [[trajectory(0, r) for r in (1.0, 0.0, 0.0, 0.0)], [trajectory(1, 1.0) for _ in range(4)]]
    rows, _ = ReasoningRL(stage).samples(groups)
    found = [sorted(set(row.advantages)) for row in rows]
    assert found[0] == [0.0, pytest.approx(math.sqrt(3))]
    assert found[1:4] == [[pytest.approx(-math.sqrt(1 / 3)), 0.0]] * 3
    assert found[4:] == [[0.0]] * 4
    assert rows[0].loss_mask == [False] * 3 + [True] * 3 and rows[0].advantages[:3] == [0.0] * 3
    batch = policy_batch()
    rho = (batch.logprobs.detach() - batch.rollout_logprobs).exp()
    pop = rho.where((rho >= 1 / 1.5) & (rho <= 1.5), torch.zeros(()))
    share = batch.mask / batch.mask.sum(1, keepdim=True) / 3
    assert torch.allclose(gradient_of(ReasoningRL(stage), batch), -share * pop * batch.advantages, atol=1e-14)


def test_agentic_centres_and_leaves_the_environment_out() -> None:
    stage = AgenticStage(kind="agentic", name="a", optim=OPTIM, families=[], eps_low=0.3, eps_high=0.6)
    algorithm = AgenticRL(stage)
    rows, numbers = algorithm.samples([[trajectory(0, 1.0, turns=3), trajectory(0, 0.0, turns=1)]])
    assert numbers == {"turns": 2.0}
    assert rows[0].ids == [1, 2, 3, 10, 11, 12, 5, 6, 11, 11, 12, 5, 6, 12, 11, 12]
    sampled = [False] * 3 + ([True] * 3 + [False] * 2) * 2 + [True] * 3
    assert rows[0].loss_mask == sampled
    assert rows[0].advantages == [0.5 * s for s in sampled]
    assert set(rows[1].advantages) == {0.0, -0.5}
    batch = policy_batch(1)
    ratio = (batch.logprobs.detach() - batch.rollout_logprobs).exp()
    kept = ratio.where((ratio > 0.7) & (ratio < 1.6), torch.zeros(()))
    share = batch.mask / batch.mask.sum(1, keepdim=True) / 3
    assert torch.allclose(gradient_of(algorithm, batch), -share * kept * batch.advantages, atol=1e-14)


# ------------------------------------------------------------------------------------------------------ distillation


def distill_stage(**options: Any) -> DistillStage:
    return DistillStage(
        kind="distill", name="d", optim=OPTIM, teachers={}, row_length=32, temperature=0.9, **{"families": []} | options
    )


def played(student: Any, count: int = 6, domain: str = "toy") -> list[list[Trajectory]]:
    """Groups of one, sampled from the student."""
    prompts = [[(7 * i + k) % 40 for k in range(i % 6 + 2)] for i in range(count)]
    params = [SamplingParams(max_tokens=4 + i % 3, temperature=0.9, ignore_eos=True) for i in range(count)]
    groups = []
    for i, done in enumerate(Engine(student).generate(prompts, params)):
        turn = Turn(tuple(prompts[i]), tuple(done.token_ids), tuple(done.logprobs), tuple(done.weight_versions), "stop")
        groups.append([Trajectory("p", domain, i, [turn], 0.0, Outcome.FAILED)])
    return groups


def test_a_teacher_equal_to_the_student_changes_nothing(small: Any) -> None:
    student = small()
    algorithm = Distillation(distill_stage(), {"toy": student.clone()})
    rows, _ = algorithm.samples(played(student))
    batch = Learner(student, OPTIM, row_length=32, temperature=0.9).forward(rows)
    loss, stats = algorithm.loss(batch)
    loss.backward()
    assert stats.numbers()["reverse_kl"] == 0.0  # bit for bit: the advantages are differences of equal numbers
    assert all(p.grad is None or not p.grad.any() for p in student.parameters())


def test_distillation_loss_and_gradient(small: Any) -> None:
    student, first, second = small(seed=0), small(seed=5), small(seed=6)
    groups = played(student, 4, "one") + played(student, 3, "two")
    algorithm = Distillation(distill_stage(), {"one": first, "two": second})
    rows, _ = algorithm.samples(groups)
    assert [row.teacher for row in rows] == ["one"] * 4 + ["two"] * 3
    batch = Learner(student, OPTIM, row_length=32, temperature=0.9).forward(rows)
    student_lp = batch.logprobs.detach()
    # The teachers' own view of the same tokens, one engine call per row, at the temperature of the rollout.
    teacher_lp = torch.zeros_like(student_lp)
    for i, row in enumerate(rows):
        scores = Engine(first if i < 4 else second).score([row.ids], 0.9)[0]
        picked = [scores[k - 1] for k, m in enumerate(row.loss_mask) if m]
        teacher_lp[i, : len(picked)] = torch.tensor(picked)
    assert torch.equal(batch.advantages, teacher_lp)
    advantage = teacher_lp - student_lp
    loss, stats = algorithm.loss(batch)
    share = batch.mask / batch.mask.sum(1, keepdim=True) / 7
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    assert torch.allclose(gradient, -share * advantage, atol=1e-6)  # on-policy: r = rho = 1
    assert float(loss.detach()) == pytest.approx(float(-(share * advantage).sum()), abs=1e-5)
    assert stats.numbers()["reverse_kl"] == pytest.approx(float(-advantage[batch.mask].mean()), abs=1e-5)


def test_a_domain_without_teacher_is_refused(small: Any) -> None:
    student = small()
    algorithm = Distillation(distill_stage(), {"one": student})
    groups = played(student, 2, "one") + played(student, 1, "two")
    with pytest.raises(ConfigError, match=r'no teacher for the domain "two" \(domains with one: one\)'):
        algorithm.samples(groups)


def test_each_domain_has_one_teacher(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "toy2", families.FAMILIES["toy"])  # type: ignore[arg-type]
    names = ("toy", "arithmetic", "toy2")
    stage = distill_stage(families=[FamilyConfig(name=name) for name in names])
    same = stage.model_copy(update={"teachers": {"toy": "rl", "arithmetic": "sft", "toy2": "rl"}})
    assert domain_teachers(same) == {"toy": "rl", "reasoning": "sft"}
    two = stage.model_copy(update={"teachers": {"toy": "rl", "arithmetic": "sft", "toy2": "sft"}})
    with pytest.raises(ConfigError, match=r'toy and toy2 are both of the domain "toy", .* "rl" and "sft"'):
        domain_teachers(two)
    none = stage.model_copy(update={"teachers": {"toy": "rl", "toy2": "rl"}})
    with pytest.raises(ConfigError, match=r"no teacher for arithmetic: set teachers\.arithmetic"):
        domain_teachers(none)


def test_the_expected_advantage_is_minus_the_reverse_kl(small: Any) -> None:
    student, teacher = small(seed=0), small(seed=5)
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        p, q = (torch.log_softmax(m(prompt).logits[0, -1] / 0.9, -1) for m in (student, teacher))
    kl = float((p.exp() * (p - q)).sum())
    params = SamplingParams(max_tokens=1, temperature=0.9, ignore_eos=True, n=1500, seed=1)
    drawn = [c.token_ids[0] for c in Engine(student).generate(prompt.tolist(), params)]
    mean = sum(float(q[t] - p[t]) for t in drawn) / len(drawn)
    spread = float((p.exp() * (q - p) ** 2).sum() - kl**2) ** 0.5 / len(drawn) ** 0.5
    assert kl > 0.05 and abs(mean + kl) < 4 * spread


def test_distillation_pulls_the_student_to_its_teacher(small: Any) -> None:
    student, teacher = small(seed=0, initializer_range=0.1), small(seed=5, initializer_range=0.1)
    algorithm = Distillation(distill_stage(), {"toy": teacher})
    learner = Learner(student, OPTIM, row_length=64, temperature=0.9)
    kls = []
    for _ in range(6):
        rows, _ = algorithm.samples(played(student, 24))
        kls.append(learner.step(rows, algorithm.loss, 5e-3)["reverse_kl"])
    assert kls[-1] < 0.75 * kls[0]


# -------------------------------------------------------------------------------------------------------- general RL


class Fixed:
    """A reward model that likes long answers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.asked: list[tuple[str, str]] = []

    def score(self, pairs: Any) -> list[float]:
        self.asked = list(pairs)
        return [0.1 * len(answer) - 1.0 for _, answer in pairs]


def general_stage() -> GeneralStage:
    return GeneralStage(
        kind="general", name="g", optim=OPTIM, families=[], reward_model=RewardModelConfig(optim=OPTIM)
    )  # fmt: skip


def said(tokenizer: Any, prompt: str, answer: str, reward: float, group: int) -> Trajectory:
    """What an episode without thinking leaves behind."""
    opening = render_chat(
        [Message("user", prompt)], tokenizer=tokenizer, enable_thinking=False, clear_thinking=False
    ).ids
    output = [*tokenizer.encode(answer), tokenizer.special["<|user|>"]]
    turn = Turn(tuple(opening), tuple(output), (-1.0,) * len(output), (0,) * len(output), "stop")
    return Trajectory("p", "general", group, [turn], reward, Outcome.SOLVED if reward else Outcome.FAILED)


@pytest.mark.parametrize("version", ["5.0", "5.1", "5.2"])
def test_rules_are_the_gate_of_the_learned_reward(tokenizer: Any, version: str) -> None:
    spoken = Tokenizer.byte_level(version)
    model = Fixed(spoken)
    texts = ["Hello Ann, nice to see you.", "hi Ann", "a very long text that breaks a rule and is liked all the same"]
    group = [said(spoken, "greet Ann, loud", text, reward, 0) for text, reward in zip(texts, (1.0, 1.0, 0.0))]
    algorithm = GeneralRL(general_stage(), model)  # type: ignore[arg-type]
    rows, numbers = algorithm.samples([group])
    assert model.asked == [("greet Ann, loud", texts[0]), ("greet Ann, loud", texts[1])]
    scores = [0.1 * len(text) - 1.0 for text in texts[:2]]
    rewards = [1 / (1 + math.exp(-scores[0])), 1 / (1 + math.exp(-scores[1])), 0.0]
    mean = sum(rewards) / 3
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
    for row, reward in zip(rows, rewards):
        assert row.advantages[-1] == pytest.approx((reward - mean) / std)
    assert numbers == pytest.approx({"combined_reward": mean, "orm_score": sum(scores) / 2})
    assert [t.reward for t in group] == [1.0, 1.0, 0.0]  # the record keeps what the rules said

    failed = [said(spoken, "greet Ann", "x", 0.0, 0) for _ in range(2)]
    rows, numbers = algorithm.samples([failed])
    assert numbers == {"combined_reward": 0.0} and not any(a for row in rows for a in row.advantages)


def test_extreme_scores_do_not_overflow(tokenizer: Any) -> None:
    model = Fixed(tokenizer)
    model.score = lambda pairs: [-2000.0, 2000.0]  # type: ignore[method-assign]
    group = [said(tokenizer, "greet Ann", "hi Ann", 1.0, 0) for _ in range(2)]
    rows, numbers = GeneralRL(general_stage(), model).samples([group])  # type: ignore[arg-type]
    assert numbers["combined_reward"] == pytest.approx(0.5)
    assert [row.advantages[-1] for row in rows] == pytest.approx([-1.0, 1.0])


class Shouting:
    """A preference that one token decides: capitals are better."""

    def preference_pair(self, index: int, split: str = "train") -> tuple[str, str, str]:
        word = f"{'ok' if split == 'train' else 'no'}{index % 10}"
        return f"say {index % 5}", word.upper(), word


def test_the_reward_model_learns_a_separable_preference(small: Any, tokenizer: Any, tmp_path: Any) -> None:
    policy = small(vocab_size=tokenizer.vocab_size, initializer_range=0.05)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    config = RewardModelConfig(optim=OptimConfig(steps=20, lr=2e-2), pairs=8, held_out_pairs=20)
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        model, accuracy = train_reward_model(policy, tokenizer, Shouting(), config, metrics, "orm")  # type: ignore[arg-type]
    rows = read_metrics(tmp_path / "metrics.jsonl", "orm")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and rows[0]["accuracy"] == 0.0
    assert rows[-1]["loss"] < 0.25 and len(rows) == 20
    assert accuracy == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    # The score of a pair does not depend on its neighbours.
    pairs = [("say 1", "OK3"), ("say 2", "ok"), ("say 3", "a much longer answer")]
    together, alone = model.score(pairs), [model.score([pair])[0] for pair in pairs]
    assert together == pytest.approx(alone, abs=1e-5)
    assert together[0] > together[1]


def test_the_reward_model_sees_whole_conversations(small: Any, tokenizer: Any) -> None:
    model = RewardModel(small(vocab_size=tokenizer.vocab_size), tokenizer)
    ids = model.ids("hi", "ho")
    assert tokenizer.decode(ids) == "[gMASK]<sop><|user|>hi<|assistant|></think>ho<|user|>"
    assert model.score([("hi", "ho")]) == [0.0]  # an untrained head has no opinion
