"""Mixing of rules, reward model and judge; disagreement between them; and General RL that uses all three."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from pydantic import ValidationError

from glm5.chat import render_chat
from glm5.config.families import FamilyConfig
from glm5.config.optim import OptimConfig
from glm5.config.recipe import GeneralStage
from glm5.config.reward_model import JudgeConfig, RewardMix, RewardModelConfig
from glm5.errors import ConfigError, DataError, GradingError
from glm5.preferences.rows import Preferred
from glm5.records import Message, Outcome, Trajectory, Turn
from glm5.rl.advantages import group_normalised
from glm5.rl.algos.general import GeneralRL
from glm5.rl.disagreement import LEAST, LIMIT, RewardWatch
from glm5.rl.reward_mix import FLOOR, Parts, combine, mix_of
from glm5.rl.reward_models import RewardModel
from glm5.rl.reward_models.learned import calibration_error, fit_temperature
from glm5.rl.reward_models.pairs import PairSource, TrainingPair, length_weights

OPTIM = OptimConfig(steps=1, lr=1e-3)
BOTH = RewardMix(orm=1.0, grm=1.0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_weights_and_gate() -> None:
    group = [Parts(1.0, 0.0, 1.0), Parts(1.0, 2.0, 0.25), Parts(0.0, 9.0, None)]
    assert combine(group, BOTH, "sigmoid") == pytest.approx([0.75, (sigmoid(2) + 0.25) / 2, 0.0])
    assert combine(group, BOTH, "minmax") == pytest.approx([(FLOOR + 1) / 2, (1 + FLOOR) / 2, 0.0])
    open_ = RewardMix(rules=2.0, orm=1.0, gate=False)
    assert combine(group, open_, "sigmoid") == pytest.approx([2.5 / 3, (2 + sigmoid(2)) / 3, sigmoid(9) / 3])
    assert combine([Parts(1.0), Parts(0.5), Parts(0.0)], BOTH, "sigmoid") == [1.0, 0.5, 0.0]  # no model knows them
    assert combine([Parts(1.0, 3.0), Parts(1.0, 3.0)], RewardMix(orm=1.0), "minmax") == [(1 + FLOOR) / 2] * 2


@pytest.mark.parametrize(
    ("group", "mix", "scale", "rewards"),
    [
        # no model knows the family: its grader's reward stays, below 0 too
        ([Parts(-1.0), Parts(0.5)], {"orm": 1.0}, "sigmoid", [-1.0, 0.5]),
        # a broken answer takes no part in the scale, whatever its score
        ([Parts(0.0, -50.0), Parts(1.0, 1.0), Parts(1.0, 2.0), Parts(1.0, 3.0)], {"orm": 1.0}, "minmax",
         [0.0, FLOOR, (1 + FLOOR) / 2, 1.0]),
        # with an open gate all take part
        ([Parts(0.0, -1.0), Parts(1.0, 1.0)], {"orm": 1.0, "gate": False}, "minmax", [FLOOR, 1.0]),
    ],
)  # fmt: skip
def test_rewards_at_the_edges(group: list[Parts], mix: dict[str, Any], scale: Any, rewards: list[float]) -> None:
    assert combine(group, RewardMix(**mix), scale) == pytest.approx(rewards)


def test_a_failed_judge_gives_no_reward_where_it_counts() -> None:
    failed = Parts(1.0, 2.0, None, failed=True)
    assert combine([failed, Parts(1.0, 2.0, 0.5)], BOTH, "sigmoid") == [None, pytest.approx((sigmoid(2) + 0.5) / 2)]
    assert combine([failed], RewardMix(orm=1.0), "sigmoid") == [pytest.approx(sigmoid(2))]
    assert combine([replace(failed, rules=0.0)], BOTH, "sigmoid") == [0.0]  # the gate needs no judge


def test_the_most_special_name_counts() -> None:
    names = ("emotion/listen", "emotion", "assistant", "default")
    mixes = {name: RewardMix(orm=float(i + 1)) for i, name in enumerate(names)}
    fallback = RewardMix(rules=1.0)
    for i in range(4):
        left = dict(list(mixes.items())[i:])
        assert mix_of(left, "emotion/listen", "assistant", fallback) is mixes[names[i]]
    assert mix_of({"emotion": BOTH}, "quality/role", "assistant", fallback) is fallback
    assert mix_of({"default": BOTH}, "", "general", fallback) is BOTH


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "needs a `reward_model`, a `judge` or both"),
        ({"judge": {"model": "start"}, "mix": {"default": {"orm": 1.0}}}, "mix.default.orm has a weight"),
        ({"reward_model": {"optim": OPTIM}, "mix": {"emotion": {"grm": 1.0}}}, "mix.emotion.grm has a weight"),
        ({"judge": {"model": "start"}, "mix": {"default": {}}}, "needs a weight above 0"),
        ({"judge": {"model": "start", "samples": 3}}, "is odd"),
        ({"judge": {"model": "start", "template": "short", "rubric": "Be kind."}}, '"short" has no instructions'),
        ({"judge": {"model": "start", "template": "short", "rubrics": {"emotion": "x"}}}, '"short" has no instr'),
    ],
)
def test_recipes_that_cannot_work_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        GeneralStage(kind="general", name="g", optim=OPTIM, families=[], **keys)


@pytest.mark.parametrize(("name", "near"), [("emotoin", "emotion"), ("emotion/lissen", "emotion/listen"), ("math", "")])
def test_a_mix_names_classes_that_the_stage_has(name: str, near: str) -> None:
    families = [FamilyConfig(name="assistant", options={"dimensions": ["emotion"]}), FamilyConfig(name="general")]
    good = dict.fromkeys(("default", "emotion", "emotion/listen", "assistant", "general"), BOTH)
    assert GeneralRL.of(stage(families=families, mix=good)).reward_model is not None
    with pytest.raises(ConfigError, match=f'no prompt of this stage has the class "{name}" of mix.*{near}'):
        GeneralRL.of(stage(families=families, mix=good | {name: RewardMix(orm=1.0)}))
    with pytest.raises(ConfigError, match=f'no prompt of this stage has the class "{name}" of judge.rubrics.*{near}'):
        GeneralRL.of(stage(families=families, judge=JudgeConfig(model="start", rubrics={name: "x"})))


@pytest.mark.parametrize(
    ("families", "mix", "asked"),
    [
        (["arithmetic"], {}, False),  # of a domain that no model scores
        (["assistant"], {"default": {"orm": 1.0}}, False),
        (["assistant"], {"default": {"orm": 1.0}, "emotion/listen": {"grm": 1.0}}, True),
        (["arithmetic", "general"], {"default": {"orm": 1.0}, "arithmetic": {"grm": 1.0}}, False),
        (["arithmetic", "general"], {}, True),
    ],
)
def test_a_judge_that_nothing_asks_is_refused(families: list[str], mix: dict[str, Any], asked: bool) -> None:
    config = stage(families=[FamilyConfig(name=name) for name in families], mix=mix)
    if families == ["arithmetic"]:
        config = config.model_copy(update={"reward_model": None})
    if asked:
        assert GeneralRL.of(config).judge is None  # not opened yet
    else:
        with pytest.raises(ConfigError, match="the judge is never asked"):
            GeneralRL.of(config)


# ------------------------------------------------------------------------------------------------ disagreement


def batch(
    rng: random.Random, prompts: int, against: float
) -> tuple[list[list[Parts]], list[list[float]], list[RewardMix]]:
    """Groups of four on the reward model alone; a pair of answers is ordered against the rules with probability
    `against`."""
    groups, advantages = [], []
    for _ in range(prompts):
        flip = -1.0 if rng.random() < against else 1.0
        groups.append([Parts(float(i % 2), orm=float(i % 2) * flip) for i in range(4)])
        advantages.append([flip if i % 2 else -flip for i in range(4)])
    return groups, advantages, [RewardMix(orm=1.0, gate=False)] * prompts


def test_disagreement_and_drift_are_what_they_say() -> None:
    groups = [[Parts(1.0, 3.0, 0.5), Parts(0.0, 5.0, 0.5), Parts(1.0, 1.0, 0.9)]]
    numbers, alarms = RewardWatch().add(groups, [[1.0, -1.0, 0.0]], [BOTH])
    # rules and reward model: (1, 2) and (2, 3) are decided by both, both against
    assert numbers["disagreement/rules_orm"] == 1.0 and numbers["disagreement/trained_rules"] == 0.0
    # reward model and judge decide (1, 3) and (2, 3): both against
    assert numbers["disagreement/orm_grm"] == 1.0 and "disagreement/rules_grm" in numbers
    # rules: mean 2/3, spread sqrt(2)/3; cov = (1 * 1/3 + -1 * -2/3 + 0) / 3 = 1/3
    assert numbers["drift/rules"] == pytest.approx((1 / 3) / (math.sqrt(2) / 3))
    assert alarms == [] and numbers["reward_alarms/rules"] == 0.0
    # of the reward model, 1 and 3 pass the gate: it prefers 1, and so does training
    assert numbers["disagreement/trained_orm"] == 0.0 and numbers["drift/orm"] > 0


@pytest.mark.parametrize("together", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_of_the_mix_of_the_docs_raises_nothing(together: float, seed: int) -> None:
    """Correctness by rules, manner by reward model and judge, which agree more or less. That the reward model does not
    know what is correct is no reason for an alarm."""
    mixes = {"correctness": RewardMix(rules=1.0), "emotion": BOTH, "quality": RewardMix(orm=0.5, grm=0.5)}
    rng, watch = random.Random(seed), RewardWatch()
    for _ in range(20):
        groups, drawn = [], [rng.choice(list(mixes)) for _ in range(64)]
        for name in drawn:
            group = []
            for _ in range(8):
                good, own = rng.gauss(0, 1), (1 - together) ** 0.5
                orm, grm = (together**0.5 * good + own * rng.gauss(0, 1) for _ in range(2))
                right = float(rng.random() < 0.6)
                group.append(Parts(right, orm, sigmoid(grm) if right and name != "correctness" else None))
            groups.append(group)
        rewards = [combine(group, mixes[name], "sigmoid") for group, name in zip(groups, drawn)]
        advantages = [group_normalised([float(r) for r in own if r is not None]) for own in rewards]
        assert watch.add(groups, advantages, [mixes[name] for name in drawn])[1] == []


@pytest.mark.parametrize(("mix", "alarmed"), [({"orm": 1.0, "grm": 1.0}, True), ({"grm": 1.0}, False)])
def test_a_model_with_a_weight_that_training_overrules_raises_the_alarm(mix: dict[str, float], alarmed: bool) -> None:
    """Training follows the judge against the reward model, among answers that pass the gate."""
    group = [Parts(1.0, -float(i), i / 3) for i in range(4)] + [Parts(0.0, 9.0)]
    advantages = [[-0.5, 0.0, 0.5, 1.0, -1.0]] * LEAST
    _, alarms = RewardWatch().add([group] * LEAST, advantages, [RewardMix(**mix)] * LEAST)
    assert {alarm.part for alarm in alarms} == ({"orm"} if alarmed else set())


@pytest.mark.parametrize(("against", "alarmed"), [(0.0, False), (0.1, False), (0.5, True), (0.9, True)])
def test_the_alarm_tells_a_reward_that_is_not_kept(against: float, alarmed: bool) -> None:
    rng, watch = random.Random(1), RewardWatch()
    raised = [alarm for _ in range(8) for alarm in watch.add(*batch(rng, 16, against))[1] if alarm.part == "rules"]
    kinds = {alarm.kind for alarm in raised}
    assert ("disagreement" in kinds) == alarmed and ("drift" in kinds) == (against > 0.5)
    assert len(raised) == len(kinds)  # each once
    assert all("%" in str(a) or "drift" in str(a) for a in raised)


def test_false_alarms_are_rare() -> None:
    """At the bound itself, an update raises an alarm about once in a thousand; here in 300 updates of six watches."""
    rng = random.Random(2)
    count = 0
    for _ in range(6):
        watch = RewardWatch()
        for _ in range(50):
            count += len([a for a in watch.add(*batch(rng, 12, LIMIT))[1] if a.part == "rules"])
    assert count <= 4


def test_few_prompts_raise_nothing_and_an_alarm_may_come_again() -> None:
    rng, watch = random.Random(3), RewardWatch()
    assert watch.add(*batch(rng, LEAST - 1, 1.0))[1] == []
    assert watch.add(*batch(rng, LEAST, 1.0))[1]
    for _ in range(12):
        watch.add(*batch(rng, LEAST, 0.0))
    again = [a for _ in range(8) for a in watch.add(*batch(rng, LEAST, 1.0))[1]]
    assert {a.kind for a in again if a.part == "rules"} == {"disagreement", "drift"}
    numbers, _ = watch.add(*batch(rng, LEAST, 1.0))
    assert numbers["reward_alarms/rules"] == 4.0


def test_a_restored_watch_goes_on() -> None:
    one, other = RewardWatch(), RewardWatch()
    for seed in range(3):
        one.add(*batch(random.Random(seed), 6, 0.5))
    other.restore(json.loads(json.dumps(one.state)))
    for seed in range(3, 9):
        assert one.add(*batch(random.Random(seed), 6, 0.5)) == other.add(*batch(random.Random(seed), 6, 0.5))


def test_groups_without_contrast_say_nothing() -> None:
    numbers, alarms = RewardWatch().add([[Parts(1.0, 2.0)] * 3, [Parts(0.0)]], [[0.0] * 3, [0.0]], [BOTH] * 2)
    assert numbers == {} and alarms == []


# ------------------------------------------------------------------------------------------------- General RL


class Fixed(RewardModel):
    domains = ("assistant",)

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        return [float(len(answer)) for _, answer in pairs]


class FakeJudge:
    """Prefers answers with fewer letters; fails on those with "boom"."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def compare(self, comparisons: Any) -> list[float | None]:
        self.asked += comparisons
        return [None if "boom" in c.answer + c.other else float(len(c.answer) < len(c.other)) for c in comparisons]

    def take_counts(self) -> dict[str, float]:
        return {"judge/failed": 0.0}


def stage(**keys: Any) -> GeneralStage:
    given = {"reward_model": RewardModelConfig(optim=OPTIM), "judge": JudgeConfig(model="start"), "families": []}
    return GeneralStage(kind="general", name="g", optim=OPTIM, **given | keys)


def said(tokenizer: Any, answer: str, reward: float, group: int, prompt_class: str = "emotion/listen") -> Trajectory:
    opening = render_chat([Message("user", "Ada: hm.")], tokenizer=tokenizer, enable_thinking=False).ids
    output = [*tokenizer.encode(answer), tokenizer.special["<|user|>"]]
    turn = Turn(tuple(opening), tuple(output), (-1.0,) * len(output), (0,) * len(output), "stop")
    outcome = Outcome.SOLVED if reward else Outcome.FAILED
    return Trajectory("p", "assistant", group, [turn], reward, outcome, {"class": prompt_class})


def general(tokenizer: Any, **keys: Any) -> tuple[GeneralRL, FakeJudge]:
    judge = FakeJudge()
    algorithm = GeneralRL(stage(**keys), Fixed(), judge)  # type: ignore[arg-type]
    algorithm.tokenizer = tokenizer
    return algorithm, judge


def test_rewards_are_mixed_by_class(tokenizer: Any) -> None:
    mix = {"emotion": RewardMix(grm=1.0), "default": RewardMix(rules=1.0, orm=1.0)}
    algorithm, judge = general(tokenizer, mix=mix, scale="minmax")
    groups = [
        [said(tokenizer, "a", 1.0, 0), said(tokenizer, "bbb", 1.0, 0), said(tokenizer, "cc", 0.0, 0)],
        [said(tokenizer, "a", 1.0, 1, "quality/role"), said(tokenizer, "bbb", 1.0, 1, "quality/role")],
    ]
    rows, numbers = algorithm.samples(groups)
    assert {c.group for c in judge.asked} == {"emotion/listen"}
    assert all("cc" not in (c.answer, c.other) for c in judge.asked)
    assert numbers["combined_reward"] == pytest.approx((1 + FLOOR + 0 + (1 + FLOOR) / 2 + (1 + 1) / 2) / 5)
    assert numbers["grm_score"] == 0.5 and numbers["disagreement/orm_grm"] == 1.0
    assert len(rows) == 5 and "judge/failed" in numbers


def test_what_the_judge_failed_on_is_not_trained_on(tokenizer: Any) -> None:
    algorithm, _ = general(tokenizer)
    ring = [said(tokenizer, "x" * (i + 1), 1.0, 0) for i in range(7)] + [said(tokenizer, "boom", 1.0, 0)]
    lost = [said(tokenizer, "boom", 1.0, 1), said(tokenizer, "a", 1.0, 1)]
    rows, numbers = algorithm.samples([ring, lost])
    # In the ring only the answer that failed is left out, for its neighbours have other comparisons.
    assert len(rows) == 7 and numbers["judge/dropped_groups"] == 1.0
    assert not any("boom" in tokenizer.decode(row.ids) for row in rows)


def test_an_update_without_any_verdict_ends_the_stage(tokenizer: Any) -> None:
    algorithm, _ = general(tokenizer)
    lost = [said(tokenizer, "boom", 1.0, 0), said(tokenizer, "a", 1.0, 0)]
    with pytest.raises(GradingError, match="gave no verdict for any prompt"):
        algorithm.samples([lost])


def test_anchors_are_what_the_judge_compares_with(tokenizer: Any) -> None:
    algorithm, judge = general(tokenizer, mix={"default": RewardMix(grm=1.0)})
    algorithm._anchors = {"Ada: hm.": ["xx"]}
    _, numbers = algorithm.samples([[said(tokenizer, "a", 1.0, 0), said(tokenizer, "bbb", 1.0, 0)]])
    assert {c.other for c in judge.asked} == {"xx"} and numbers["combined_reward"] == 0.5


def test_one_answer_behind_the_gate_is_neither_good_nor_bad(tokenizer: Any) -> None:
    algorithm, _ = general(tokenizer, mix={"default": RewardMix(grm=1.0)})
    _, numbers = algorithm.samples([[said(tokenizer, "a", 1.0, 0), said(tokenizer, "bbb", 0.0, 0)]])
    assert numbers["combined_reward"] == 0.25


# --------------------------------------------------------------------------------------- pairs and calibration


def test_people_and_families_share_the_pairs() -> None:
    class Family:
        def preference_pair(self, index: int, split: str = "train") -> tuple[str, str, str]:
            return f"family {split} {index}", "good", "bad!"

    people = [Preferred(f"p{i}", "better", "worse answer") for i in range(200)]
    source = PairSource([Family()], people, share=0.25, seed=1)
    drawn = [source.pair(i) for i in range(2000)]
    human = [pair for pair in drawn if pair.prompt.startswith("p")]
    assert 0.2 < len(human) / len(drawn) < 0.3 and source.pair(7) == PairSource([Family()], people, 0.25, seed=1).pair(
        7
    )
    held = {pair.prompt for pair in source.held_out(400)}
    assert not {pair.prompt for pair in human} & held and not source.balanced
    assert PairSource([], people, share=0.1).pair(0).prompt.startswith("p")
    with pytest.raises(DataError, match="no preference pairs"):
        PairSource([], [])
    with pytest.raises(DataError, match="people only 1"):
        PairSource([], people[:1])


@pytest.mark.parametrize("per_step", [1, 2, 4, 8, 32])
def test_the_longer_answer_wins_half_of_the_loss_of_any_batch_size(per_step: int) -> None:
    """Counted from the texts: 900 votes for the longer answer, 100 for the shorter. Every pair counts alike in the loss
    (a mean), so the share of the loss is that of the pairs, step by step."""
    people = [Preferred(f"p{i}", "a long answer", "short") for i in range(900)]
    people += [Preferred(f"q{i}", "short", "a long answer") for i in range(100)]
    source, steps = PairSource([], people), 6000 // per_step
    batches = [[source.pair(step * per_step + i) for i in range(per_step)] for step in range(steps)]
    share = fmean(fmean(len(p.better) > len(p.worse) for p in batch) for batch in batches)
    assert share == pytest.approx(0.5, abs=0.02)
    plain = PairSource([], people, length_debias=False)
    assert fmean(len(p.better) > len(p.worse) for p in map(plain.pair, range(3000))) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(("families", "people", "asked"), [(0, 60, 200), (1, 60, 200), (2, 60, 20), (1, 0, 30)])
def test_held_out_pairs_are_distinct(families: int, people: int, asked: int) -> None:
    class Family:
        def preference_pair(self, index: int, split: str = "train") -> tuple[str, str, str]:
            return f"family {split} {index % 25}", "good", "bad!"

    votes = [Preferred(f"p{i % 50}", f"better {i}", "worse answer") for i in range(people)]
    source = PairSource([Family()] * families, votes, share=0.25)
    held = source.held_out(asked)
    human = [pair for pair in held if pair.prompt.startswith("p")]
    assert len(set(held)) == len(held) <= asked
    assert held == PairSource([Family()] * families, votes, share=0.25).held_out(asked)
    assert not {pair.prompt for pair in map(source.pair, range(500))} & {pair.prompt for pair in held}
    assert not families or len(human) <= asked / 4
    assert bool(people) == bool(human) and len(held) == min(asked, len(human) + 25 * bool(families))


def test_length_is_balanced_by_weights() -> None:
    pairs = (
        [TrainingPair("p", "x" * 9, "y")] * 30
        + [TrainingPair("p", "x", "y" * 9)] * 10
        + [TrainingPair("p", "x", "y")] * 5
    )
    weights, balanced = length_weights(pairs)
    longer = sum(w for w, p in zip(weights, pairs) if len(p.better) > len(p.worse))
    shorter = sum(w for w, p in zip(weights, pairs) if len(p.better) < len(p.worse))
    assert balanced and longer == pytest.approx(shorter) and sum(weights) == pytest.approx(45)
    assert length_weights(pairs[:30]) == ([1.0] * 30, False) and length_weights(pairs[40:]) == ([1.0] * 5, True)


def test_the_temperature_is_that_of_the_data() -> None:
    """Gaps drawn as 4 times the true log-odds: the fitted temperature is near 4, and the calibration error falls."""
    import torch

    generator = torch.Generator().manual_seed(0)
    odds = torch.randn(4000, generator=generator, dtype=torch.float64) * 1.5
    right = torch.rand(4000, generator=generator, dtype=torch.float64) < torch.sigmoid(odds)
    gaps = torch.where(right, odds, -odds) * 4.0
    temperature = fit_temperature(gaps)
    assert temperature == pytest.approx(4.0, rel=0.1)
    assert calibration_error(gaps / temperature) < 0.03 < 0.08 < calibration_error(gaps)
    assert fit_temperature(torch.zeros(3)) == 1.0 and fit_temperature(torch.zeros(0)) == 1.0
    assert calibration_error(torch.tensor([100.0, 100.0])) == pytest.approx(0.0)


def test_the_recipe_of_the_docs_is_valid(tmp_path: Path) -> None:
    import tomllib

    text = (Path(__file__).parents[2] / "docs" / "post-training.md").read_text(encoding="utf-8")
    blocks = [b.split("```")[0] for b in text.split("```toml\n")[1:] if 'kind = "general"' in b.split("```")[0]]
    assert blocks
    for block in blocks:
        for one in tomllib.loads(block)["stages"]:
            GeneralStage.model_validate(one)
