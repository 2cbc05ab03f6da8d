"""The losses that a recipe may choose, and the penalty for leaving the starting weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import AgenticStage, DistillStage, FamilyConfig, GeneralStage, ReasoningStage
from glm5.config.reward_model import RewardModelConfig
from glm5.errors import ConfigError
from glm5.obs.metrics import read_metrics
from glm5.rl.algos.agentic import AgenticRL
from glm5.rl.algos.distill import Distillation
from glm5.rl.algos.general import GeneralRL
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.drivers.logical import LogicalDriver
from glm5.rl.drivers.timing import TIMES
from glm5.rl.learner import PolicyBatch
from glm5.rl.losses import GRPO, PPO, DoubleSided, IcePop, PolicyGradient, policy_loss

OPTIM = OptimConfig(steps=4, lr=5e-3, save_every=2)
LIMITS: dict[str, Any] = dict(
    max_tokens=8, max_context=80, row_length=80, max_turns=4, prompts=2, group=4,
    families=[FamilyConfig(name="toy", options={"turns": 3})],
)  # fmt: skip


def reasoning(**changes: Any) -> ReasoningStage:
    return ReasoningStage(kind="reasoning", name="rl", optim=OPTIM, **LIMITS | changes)


def agentic(**changes: Any) -> AgenticStage:
    fields = LIMITS | dict(concurrency=10, train_ticks=6, max_staleness=2) | changes
    return AgenticStage(kind="agentic", name="rl", optim=OPTIM, **fields)


def general(**changes: Any) -> GeneralStage:
    reward_model = RewardModelConfig(optim=OPTIM)
    return GeneralStage(kind="general", name="rl", optim=OPTIM, reward_model=reward_model, **LIMITS | changes)


def batch() -> PolicyBatch:
    generator = torch.Generator().manual_seed(0)
    new, rollout, advantages, ref = (torch.randn(4, 9, generator=generator, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(4, 9, generator=generator) < 0.8
    return PolicyBatch(
        logprobs=new.requires_grad_(), rollout_logprobs=new.detach() + 0.5 * rollout, advantages=advantages, mask=mask,
        ref_logprobs=ref, versions=torch.zeros(4, 9),
    )  # fmt: skip


def test_defaults_are_the_papers() -> None:
    assert (reasoning().loss, agentic().loss, general().loss) == ("icepop", "double_sided", "icepop")
    assert [stage.average for stage in (reasoning(), agentic(), general())] == ["sequence", "token", "sequence"]
    assert all(stage.kl_weight == 0 and stage.minibatches == 1 for stage in (reasoning(), agentic(), general()))
    assert ReasoningRL(reasoning()).objective == IcePop() and AgenticRL(agentic()).objective == DoubleSided()
    assert ReasoningRL(reasoning()).penalty is None


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_every_variant_is_the_loss_it_names(average: Any) -> None:
    bounds: dict[str, Any] = dict(clip_low=0.1, clip_high=0.5, average=average)
    one: Any = GeneralRL(general(loss="ppo", **bounds), None)  # type: ignore[arg-type]
    two = DistillStage(kind="distill", name="d", optim=OPTIM, teachers={}, beta=1.3, **LIMITS | {"clip_low": 0.1})
    algorithms = [
        (ReasoningRL(reasoning(beta=1.5, **bounds)), IcePop(1.5, 0.1, 0.5)),
        (ReasoningRL(reasoning(loss="ppo", **bounds)), PPO(0.1, 0.5, "rollout")),
        (ReasoningRL(reasoning(loss="grpo", **bounds)), GRPO(0.1, 0.5)),
        (ReasoningRL(reasoning(loss="policy_gradient", **bounds)), PolicyGradient()),
        (AgenticRL(agentic(eps_low=0.3, eps_high=0.7, average=average)), DoubleSided(0.3, 0.7)),
        (AgenticRL(agentic(loss="ppo", **bounds)), PPO(0.1, 0.5, "rollout")),
        (AgenticRL(agentic(loss="policy_gradient", **bounds)), PolicyGradient()),
        (one, PPO(0.1, 0.5, "rollout")),
    ]
    for algorithm, objective in algorithms:
        ours, theirs = algorithm.loss(batch()), policy_loss(objective, batch(), average)
        assert torch.equal(ours[0], theirs[0]) and ours[1].numbers() == theirs[1].numbers(), objective
    assert len({float(algorithm.loss(batch())[0].detach()) for algorithm, _ in algorithms[:6]}) >= 4
    assert Distillation(two, {}).objective == IcePop(1.3, 0.1, 0.28)


@pytest.mark.parametrize("make", [reasoning, agentic, general])
@pytest.mark.parametrize(
    "wrong", [{"kl_weight": -1.0}, {"kl_estimator": "k1"}, {"average": "batch"}, {"record": "maybe"}]
)
def test_unknown_variants_are_refused(make: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make(**wrong)


def test_agentic_rl_averages_over_tokens() -> None:
    """Eq. 5: sum of sg(f A) log pi over all sampled tokens, divided by their number."""
    tokens = batch()
    loss, _ = AgenticRL(agentic()).loss(tokens)
    ratio = (tokens.logprobs - tokens.rollout_logprobs).exp().detach()
    kept = tokens.mask & (ratio > 0.5) & (ratio < 2.0)
    assert torch.allclose(loss, -(ratio * tokens.advantages * tokens.logprobs)[kept].sum() / tokens.mask.sum())


def test_more_minibatches_than_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="minibatches = 3 is more than prompts = 2"):
        reasoning(minibatches=3)


def test_any_stage_takes_any_loss_and_an_unknown_one_is_refused() -> None:
    assert ReasoningRL(reasoning(loss="double_sided", eps_low=0.2)).objective == DoubleSided(0.2, 1.0)
    assert AgenticRL(agentic(loss="icepop")).objective == IcePop()
    with pytest.raises(ConfigError, match=r'unknown loss "icepopp" \(did you mean "icepop"'):
        ReasoningRL(reasoning(loss="icepopp"))


@pytest.mark.parametrize(
    ("loss", "make"),
    [("ppo", reasoning), ("policy_gradient", agentic)]
    + [pytest.param(*more, marks=pytest.mark.slow) for more in [("ppo", agentic), ("policy_gradient", reasoning)]],
)
def test_variants_train_and_repeat(toy: str, talker: Any, tokenizer: Any, stage_io: Any, make: Any, loss: str) -> None:
    stage, ends = make(loss=loss, kl_weight=0.02), []
    for folder in ("one", "two"):
        model, io = talker(), stage_io(folder)
        algorithm: Any = AgenticRL(stage) if isinstance(stage, AgenticStage) else ReasoningRL(stage)
        LogicalDriver(model, tokenizer, stage, algorithm, io, 0).run()
        rows = [{k: v for k, v in row.items() if k not in ("time", *TIMES)} for row in read_metrics(io.metrics.path)]
        ends.append((rows, model.lm_head.weight.detach()))
    assert ends[0][0] == ends[1][0] and torch.equal(ends[0][1], ends[1][1])
    rows = ends[0][0]
    assert any(row["grad_norm"] > 0 for row in rows) and all(row["masked_share"] == 0 for row in rows)
    assert rows[0]["kl"] == 0.0 and rows[-1]["kl"] > 0  # the reference is what the stage began with
    assert all(row["mismatch_max"] == 0 for row in rows)


def test_on_policy_the_variants_agree(toy: str, talker: Any, tokenizer: Any, stage_io: Any) -> None:
    """With engine and learner in exact agreement, Eq. 1, PPO and the policy gradient have the same gradient."""
    weights = []
    for loss in ("icepop", "ppo", "policy_gradient"):
        stage, model = reasoning(loss=loss), talker()
        LogicalDriver(model, tokenizer, stage, ReasoningRL(stage), stage_io(loss), 0).run()
        weights.append(model.lm_head.weight.detach())
    assert not torch.equal(weights[0], talker().lm_head.weight)
    assert all(torch.allclose(weights[0], other, atol=1e-5) for other in weights[1:])


def test_a_resumed_run_keeps_its_reference(toy: str, talker: Any, tokenizer: Any, stage_io: Any) -> None:
    stage, found = reasoning(kl_weight=0.5), []
    for folder, stop in (("whole", None), ("broken", 3)):
        if stop:
            with pytest.raises(KeyboardInterrupt):
                LogicalDriver(
                    talker(), tokenizer, stage, ReasoningRL(stage), stage_io(folder, stop_after=stop), 0
                ).run()
        io = stage_io(folder)
        LogicalDriver(talker(), tokenizer, stage, ReasoningRL(stage), io, 0).run()
        rows = read_metrics(io.metrics.path)
        found.append([{k: v for k, v in row.items() if k not in ("time", *TIMES)} for row in rows])
    assert found[0] == found[1] and found[0][-1]["kl"] > 0


def test_the_penalty_holds_the_policy_back(toy: str, talker: Any, tokenizer: Any, stage_io: Any) -> None:
    moved = []
    optim = OptimConfig(steps=8, lr=5e-3, schedule="constant", save_every=0)
    for weight in (1e-9, 10.0):
        stage = reasoning(kl_weight=weight, kl_estimator="k2").model_copy(update={"optim": optim})
        io = stage_io(str(weight))
        LogicalDriver(talker(), tokenizer, stage, ReasoningRL(stage), io, 0).run()
        moved.append(read_metrics(io.metrics.path)[-1]["kl"])
    assert moved[1] < 0.7 * moved[0], moved
