"""What distinguishes the RL stages: advantages, losses and the reward model."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from glm5.chat import Tokenizer, render_chat
from glm5.config.optim import OptimConfig
from glm5.config.recipe import AgenticStage, GeneralStage, ReasoningStage
from glm5.config.reward_model import RewardModelConfig
from glm5.errors import ConfigError, DataError, GradingError
from glm5.obs.metrics import MetricsWriter, read_metrics
from glm5.records import Message, Outcome, Trajectory, Turn
from glm5.rl.algos.agentic import AgenticRL
from glm5.rl.algos.general import GeneralRL
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.learner import PolicyBatch
from glm5.rl.reward_models import PreferenceModel, RewardModel
from glm5.rl.reward_models.learned import train_preferences
from glm5.rl.reward_models.pairs import PairSource
from glm5.tasks.instructions.general import ACTS, GeneralFamily

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
    share = batch.mask / batch.mask.sum()  # over tokens (Eq. 5)
    assert torch.allclose(gradient_of(algorithm, batch), -share * kept * batch.advantages, atol=1e-14)


def named(group: int, reward: float, trivial: bool = False, **rewards: float) -> Trajectory:
    return replace(trajectory(group, reward), detail={"rewards": rewards, "trivial": trivial})


def test_named_rewards_are_normalised_one_by_one() -> None:
    """Written out: `b` varies a hundredth as much as `a`, and still decides as much."""
    groups = [
        [named(0, 0.5, a=a, b=b, c=0.3) for a, b in ((1.0, 0.50), (0.0, 0.51), (1.0, 0.51), (0.0, 0.50))],
        [named(1, 0.5, a=0.2, b=0.5, c=0.1) for _ in range(4)],
    ]
    stage = ReasoningStage(kind="reasoning", name="r", optim=OPTIM, families=[], normalize="per_reward")
    rows, numbers = ReasoningRL(stage).samples(groups)
    raw = [0.0, 0.0, 2.0, -2.0, 0.0, 0.0, 0.0, 0.0]  # +-1 from `a` and +-1 from `b`
    size = math.sqrt(sum(x * x for x in raw) / 8)
    assert [row.advantages[-1] for row in rows] == pytest.approx([x / size for x in raw])
    assert numbers == pytest.approx({"reward/a": 0.35, "reward/b": 0.5025, "reward/c": 0.2})
    weighted = stage.model_copy(update={"reward_weights": {"b": 3.0, "c": 0.0}})
    rows, _ = ReasoningRL(weighted).samples(groups)
    raw = [-2.0, 2.0, 4.0, -4.0, 0.0, 0.0, 0.0, 0.0]
    size = math.sqrt(sum(x * x for x in raw) / 8)
    assert [row.advantages[-1] for row in rows] == pytest.approx([x / size for x in raw])


def test_per_reward_needs_named_rewards_that_are_numbers() -> None:
    stage = ReasoningStage(kind="reasoning", name="r", optim=OPTIM, families=[], normalize="per_reward")
    for detail in ({}, {"rewards": "many"}, {"rewards": {"a": "1"}}, {"rewards": {"a": math.nan}}):
        with pytest.raises(ConfigError, match="toy"):
            ReasoningRL(stage).samples([[replace(trajectory(0, 1.0), detail=detail) for _ in range(2)]])
    plain = stage.model_copy(update={"normalize": "group"})
    hostile = replace(trajectory(0, 1.0), detail={"rewards": {"a": math.inf, "b": 1e300, "c": [1], "d": 0.5}})
    assert ReasoningRL(plain).samples([[hostile, hostile]])[1] == {"reward/d": 0.5}


def test_trivial_samples_are_dropped_by_chance_and_never_all() -> None:
    stage = ReasoningStage(kind="reasoning", name="r", optim=OPTIM, families=[], drop_trivial=0.5)
    groups = [[named(g, float(i % 2), trivial=i < 50) for i in range(100)] for g in range(4)]
    rows, numbers = ReasoningRL(stage).samples(groups)
    assert len(rows) == 400 - numbers["dropped_trivial"]
    assert 70 <= numbers["dropped_trivial"] <= 130  # half of 200
    assert [row.advantages for row in ReasoningRL(stage).samples(groups)[0]] == [row.advantages for row in rows]
    certain = stage.model_copy(update={"drop_trivial": 0.999999})
    rows, _ = ReasoningRL(certain).samples([[named(0, float(i), trivial=True) for i in range(2)]])
    assert len(rows) == 2  # an update without samples is impossible


# -------------------------------------------------------------------------------------------------------- general RL


class Fixed(RewardModel):
    """A reward model that likes long answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def score(self, pairs: Any) -> list[float]:
        self.asked = list(pairs)
        return [0.1 * len(answer) - 1.0 for _, answer in pairs]


def general_stage() -> GeneralStage:
    return GeneralStage(
        kind="general", name="g", optim=OPTIM, families=[], reward_model=RewardModelConfig(optim=OPTIM)
    )  # fmt: skip


def general_rl(tokenizer: Any, model: RewardModel) -> GeneralRL:
    algorithm = GeneralRL(general_stage(), model)
    algorithm.tokenizer = tokenizer
    return algorithm


def said(tokenizer: Any, prompt: str, answer: str, reward: float, group: int, thinking: bool = False) -> Trajectory:
    """What an episode leaves behind."""
    opening = render_chat(
        [Message("user", prompt)], tokenizer=tokenizer, enable_thinking=thinking, clear_thinking=False
    ).ids
    output = [*tokenizer.encode(answer), tokenizer.special["<|user|>"]]
    turn = Turn(tuple(opening), tuple(output), (-1.0,) * len(output), (0,) * len(output), "stop")
    return Trajectory("p", "general", group, [turn], reward, Outcome.SOLVED if reward else Outcome.FAILED)


@pytest.mark.parametrize("version", ["5.0", "5.1", "5.2"])
def test_rules_are_the_gate_of_the_learned_reward(tokenizer: Any, version: str) -> None:
    spoken = Tokenizer.byte_level(version)
    model = Fixed()
    texts = ["Hello Ann, nice to see you.", "hi Ann", "a very long text that breaks a rule and is liked all the same"]
    group = [said(spoken, "greet Ann, loud", text, reward, 0) for text, reward in zip(texts, (1.0, 1.0, 0.0))]
    algorithm = general_rl(spoken, model)
    rows, numbers = algorithm.samples([group])
    assert model.asked == [("greet Ann, loud", text) for text in texts]  # the last one for the record alone
    scores = [0.1 * len(text) - 1.0 for text in texts[:2]]
    rewards = [1 / (1 + math.exp(-scores[0])), 1 / (1 + math.exp(-scores[1])), 0.0]
    mean = sum(rewards) / 3
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
    for row, reward in zip(rows, rewards):
        assert row.advantages[-1] == pytest.approx((reward - mean) / std)
    assert numbers["combined_reward"] == pytest.approx(mean) and numbers["orm_score"] == pytest.approx(sum(scores) / 2)
    assert numbers["disagreement/rules_orm"] == 1.0  # the text that breaks a rule is liked best
    assert numbers["drift/rules"] > 0  # and yet the gate reinforces the others
    assert [t.reward for t in group] == [1.0, 1.0, 0.0]  # the record keeps what the rules said

    failed = [said(spoken, "greet Ann", "x", 0.0, 0) for _ in range(2)]
    rows, numbers = algorithm.samples([failed])
    assert numbers["combined_reward"] == 0.0 and not any(a for row in rows for a in row.advantages)
    assert "orm_score" not in numbers and "drift/rules" not in numbers


@pytest.mark.parametrize(("version", "thinking"), [("5.0", True), ("5.2", True), ("5.3", False)])
def test_the_reward_model_hears_the_answer_and_not_the_thoughts(version: str, thinking: bool) -> None:
    """In 5.3 every episode thinks, and the prompt has a line on effort."""
    spoken = Tokenizer.byte_level(version)
    model = Fixed()
    one = said(spoken, "greet Ann", "be nice</think>hi Ann", 1.0, 0, thinking)
    general_rl(spoken, model).samples([[one]])
    assert model.asked == [("greet Ann", "hi Ann")]


def test_other_families_keep_their_own_reward(tokenizer: Any) -> None:
    """The reward model has never seen a program or a sum; several turns of tool calls are no answer to a courtesy."""
    model = Fixed()
    sums = [
        replace(said(tokenizer, "2+2", answer, reward, 1), domain="math") for answer, reward in (("4", 1.0), ("5", 0.0))
    ]
    tools = [trajectory(2, reward, turns=3, domain="agentic") for reward in (1.0, 0.25)]
    talk = [said(tokenizer, "greet Ann", text, 1.0, 0) for text in ("hi Ann", "Hello Ann, dear.")]
    rows, numbers = general_rl(tokenizer, model).samples([sums, talk, tools])
    assert model.asked == [("greet Ann", "hi Ann"), ("greet Ann", "Hello Ann, dear.")]
    learned = [1 / (1 + math.exp(-(0.1 * len(text) - 1.0))) for _, text in model.asked]
    assert numbers["combined_reward"] == pytest.approx((1.0 + 0.0 + 1.0 + 0.25 + sum(learned)) / 6)
    assert [row.advantages[-1] for row in rows] == pytest.approx([1.0, -1.0, -1.0, 1.0, 1.0, -1.0], abs=1e-3)


def test_extreme_scores_do_not_overflow(tokenizer: Any) -> None:
    model = Fixed()
    model.score = lambda pairs: [-2000.0, 2000.0]  # type: ignore[method-assign]
    group = [said(tokenizer, "greet Ann", "hi Ann", 1.0, 0) for _ in range(2)]
    rows, numbers = general_rl(tokenizer, model).samples([group])
    assert numbers["combined_reward"] == pytest.approx(0.5)
    assert [row.advantages[-1] for row in rows] == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([0.5], "gave 1 scores for 2 answers, not one each"),
        ([0.5, 1.0, 2.0], "gave 3 scores for 2 answers, not one each"),
        ([0.5, math.nan], "gave the score nan; scores must be finite"),
        (torch.tensor([-math.inf, 0.0]), "gave the score -inf; scores must be finite"),
        (["0.5", "1.0"], "failed: TypeError: must be real number, not str"),
        ([None, None], "failed: TypeError: must be real number, not NoneType"),
        (None, "failed: TypeError: 'NoneType' object is not iterable"),
        (KeyError("x"), "failed: KeyError: 'x'"),
    ],
)
def test_a_reward_model_that_fails_gives_no_reward(tokenizer: Any, scores: Any, message: str) -> None:
    class Broken(Fixed):
        def score(self, pairs: Any) -> Any:
            if isinstance(scores, Exception):
                raise scores
            return scores

    group = [said(tokenizer, "greet Ann", "hi Ann", 1.0, 0) for _ in range(2)]
    with pytest.raises(GradingError) as caught:
        general_rl(tokenizer, Broken()).samples([group])
    assert str(caught.value) == f"the reward model Broken {message}."
    assert all(t.reward == 1.0 for t in group)


def test_a_reward_model_may_score_other_families_and_return_a_tensor(tokenizer: Any) -> None:
    class Length(Fixed):
        domains = ("poems",)

        def score(self, pairs: Any) -> Any:
            self.asked = list(pairs)
            return torch.tensor([0.0, 800.0], dtype=torch.bfloat16)

    poems = [replace(said(tokenizer, "a poem", text, 1.0, 0), domain="poems") for text in ("rose", "red rose")]
    talk = [said(tokenizer, "greet Ann", text, 1.0, 1) for text in ("hi Ann", "Hello Ann, dear.")]
    model = Length()
    _, numbers = general_rl(tokenizer, model).samples([poems, talk])
    assert model.asked == [("a poem", "rose"), ("a poem", "red rose")]
    assert numbers["combined_reward"] == pytest.approx((0.5 + 1.0 + 1.0 + 1.0) / 4)


class Shouting:
    """A preference that one token decides: capitals are better."""

    def preference_pair(self, index: int, split: str = "train") -> tuple[str, str, str]:
        word = f"{'ok' if split == 'train' else 'no'}{index % 10}"
        return f"say {index % 5}", word.upper(), word


def test_the_reward_model_learns_a_separable_preference(small: Any, tokenizer: Any, tmp_path: Any) -> None:
    policy = small(vocab_size=tokenizer.vocab_size, initializer_range=0.05)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    config: dict[str, Any] = dict(optim=OptimConfig(steps=20, lr=2e-2), pairs=8, held_out_pairs=20)
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        source = PairSource([Shouting()])
        model, numbers = train_preferences(policy, tokenizer, source, metrics=metrics, stage="orm", **config)
    rows = read_metrics(tmp_path / "metrics.jsonl", "orm")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and rows[0]["accuracy"] == 0.0
    assert rows[-1]["loss"] < 0.25 and len(rows) == 20
    assert numbers["accuracy"] == 1.0 and numbers["length_accuracy"] == 0.5
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    # The score of a pair does not depend on its neighbours.
    pairs = [("say 1", "OK3"), ("say 2", "ok"), ("say 3", "a much longer answer")]
    together, alone = model.score(pairs), [model.score([pair])[0] for pair in pairs]
    assert together == pytest.approx(alone, abs=1e-5)
    assert together[0] > together[1]


@pytest.mark.long
def test_the_reward_model_hears_what_is_said_not_how_long_it_is(small: Any, tokenizer: Any, tmp_path: Any) -> None:
    """Trained as the recipes do, it prefers the warm text whether that is the shorter or the longer one."""
    shape = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, q_lora_rank=32, qk_nope_head_dim=16)
    policy = small(vocab_size=tokenizer.vocab_size, use_dsa=False, initializer_range=0.02, **shape)
    family = PairSource([GeneralFamily()])
    config: dict[str, Any] = dict(optim=OptimConfig(steps=30, lr=1e-2, warmup=2), pairs=16, held_out_pairs=100)
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        model, numbers = train_preferences(policy, tokenizer, family, metrics=metrics, stage="orm", **config)
    assert numbers["held_out_pairs"] == 100 and 0.4 < numbers["length_accuracy"] < 0.6
    right: dict[int, list[bool]] = {-1: [], 0: [], 1: []}
    for act, phrases in ACTS.items():
        for name in ("Ann", "Zoe"):
            said = [f"{phrases.openings[0]} {name}, {tail}." for tail in (*phrases.warm, *phrases.cold)]
            scores = model.score([(f"{act} {name}", text) for text in said])
            for i, j in itertools.product(range(len(phrases.warm)), range(len(phrases.warm), len(said))):
                longer = (len(said[i]) > len(said[j])) - (len(said[i]) < len(said[j]))
                right[longer].append(scores[i] > scores[j])
    assert all(sum(verdicts) / len(verdicts) >= 0.75 for verdicts in right.values()), right


@pytest.mark.parametrize(
    ("lr", "steps", "what"), [(1e30, 4, "loss or the gradient of step 2"), (1e38, 1, "score of a held-out pair")]
)
def test_a_reward_model_that_broke_is_not_used(
    small: Any, tokenizer: Any, tmp_path: Any, lr: float, steps: int, what: str
) -> None:
    config: dict[str, Any] = dict(optim=OptimConfig(steps=steps, lr=lr), pairs=4, held_out_pairs=4)
    policy = small(vocab_size=tokenizer.vocab_size)
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics, pytest.raises(DataError, match=what):
        train_preferences(policy, tokenizer, PairSource([GeneralFamily()]), metrics=metrics, stage="orm", **config)


def test_a_score_that_is_no_number_is_no_reward(small: Any, tokenizer: Any) -> None:
    model = PreferenceModel(small(vocab_size=tokenizer.vocab_size), tokenizer)
    torch.nn.init.constant_(model.head.weight, float("nan"))
    with pytest.raises(DataError, match="a score is not finite"):
        model.score([("hi", "ho")])


def test_the_reward_model_sees_whole_conversations(small: Any, tokenizer: Any) -> None:
    model = PreferenceModel(small(vocab_size=tokenizer.vocab_size), tokenizer)
    ids = model.ids("hi", "ho")
    assert tokenizer.decode(ids) == "[gMASK]<sop><|user|>hi<|assistant|></think>ho<|user|>"
    assert model.score([("hi", "ho")]) == [0.0]  # an untrained head has no opinion
