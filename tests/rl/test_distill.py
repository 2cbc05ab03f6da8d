"""Distillation: Eq. 2 by hand, teachers by prompt, and whichever way the teachers' probabilities come."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import DistillStage, FamilyConfig, RunRecipe
from glm5.engine.engine import Engine
from glm5.errors import ConfigError
from glm5.obs.metrics import read_metrics
from glm5.records import Outcome, SamplingParams, Trajectory, Turn
from glm5.rl import replay
from glm5.rl.algos import distill as distill_module
from glm5.rl.algos.distill import Distillation, EngineTeacher, ModelTeacher
from glm5.rl.drivers.logical import LogicalDriver
from glm5.rl.learner import Learner, PolicyBatch
from glm5.tasks.episode import to_samples

OPTIM = OptimConfig(steps=3, lr=1e-2)
ROW = 32


def distill_stage(**options: Any) -> DistillStage:
    fields: dict[str, Any] = {"families": [], "row_length": ROW, "temperature": 0.9} | options
    return DistillStage(kind="distill", name="d", optim=OPTIM, **fields)


def played(student: Any, count: int = 6, teacher: str = "one") -> list[list[Trajectory]]:
    """Groups of one, sampled from the student."""
    prompts = [[(7 * i + k) % 40 for k in range(i % 6 + 2)] for i in range(count)]
    params = [SamplingParams(max_tokens=4 + i % 3, temperature=0.9, ignore_eos=True) for i in range(count)]
    groups = []
    for i, done in enumerate(Engine(student).generate(prompts, params)):
        turn = Turn(tuple(prompts[i]), tuple(done.token_ids), tuple(done.logprobs), tuple(done.weight_versions), "stop")
        groups.append([Trajectory("p", "toy", i, [turn], 0.0, Outcome.FAILED, teacher=teacher)])
    return groups


def test_the_papers_group_is_one() -> None:
    assert distill_stage().group == 1 and distill_stage().teachers == {}


def test_a_teacher_equal_to_the_student_changes_nothing(small: Any) -> None:
    student = small()
    algorithm = Distillation(distill_stage(), {"one": ModelTeacher(student.clone(), ROW)})
    rows, _ = algorithm.samples(played(student))
    batch = Learner(student, OPTIM, row_length=ROW, temperature=0.9).forward(rows)
    loss, stats = algorithm.loss(batch)
    loss.backward()
    assert stats.numbers()["reverse_kl"] == 0.0  # bit for bit: the advantages are differences of equal numbers
    assert stats.numbers()["reverse_kl/one"] == 0.0
    assert all(p.grad is None or not p.grad.any() for p in student.parameters())


@pytest.mark.parametrize("way", ["model", "engine"])
def test_loss_and_gradient_with_two_teachers(small: Any, way: str) -> None:
    student, first, second = small(seed=0), small(seed=5), small(seed=6)
    mixed = [*played(student, 4, "one"), *played(student, 3, "two")]
    groups = [mixed[i] for i in (0, 4, 1, 5, 2, 3, 6)]  # the teachers' rows are not in one piece
    teachers: dict[str, Any] = {"one": ModelTeacher(first, ROW), "two": ModelTeacher(second, ROW)}
    if way == "engine":
        teachers = {"one": EngineTeacher(Engine(first)), "two": EngineTeacher(Engine(second))}
    algorithm = Distillation(distill_stage(), teachers)
    rows, _ = algorithm.samples(groups)
    owners = ["one", "two", "one", "two", "one", "one", "two"]
    assert [row.teacher for row in rows] == owners
    batch = Learner(student, OPTIM, row_length=ROW, temperature=0.9).forward(rows)
    student_lp = batch.logprobs.detach()
    # The teachers' own view of the same tokens from the full distributions, at the temperature of the rollout.
    teacher_lp = torch.zeros_like(student_lp)
    for i, row in enumerate(rows):
        with torch.no_grad():
            logits = (first if owners[i] == "one" else second)(torch.tensor([row.ids])).logits[0] / 0.9
        all_lp = torch.log_softmax(logits.double(), -1)
        picked = [all_lp[k - 1, row.ids[k]] for k, m in enumerate(row.loss_mask) if m]
        teacher_lp[i, : len(picked)] = torch.stack(picked).float()
    assert torch.allclose(batch.teacher_logprobs, teacher_lp, atol=2e-6)
    advantage = teacher_lp - student_lp
    loss, stats = algorithm.loss(batch)
    share = batch.mask / batch.mask.sum(1, keepdim=True) / 7
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    assert torch.allclose(gradient, -share * advantage, atol=1e-5)  # on-policy: r = rho = 1
    assert float(loss.detach()) == pytest.approx(float(-(share * advantage).sum()), abs=1e-5)
    numbers = stats.numbers()
    assert numbers["reverse_kl"] == pytest.approx(float(-advantage[batch.mask].mean()), abs=1e-5)
    for name in ("one", "two"):
        own = batch.mask & torch.tensor([owner == name for owner in owners])[:, None]
        assert numbers[f"reverse_kl/{name}"] == pytest.approx(float(-advantage[own].mean()), abs=1e-5)
    assert abs(numbers["reverse_kl/one"] - numbers["reverse_kl/two"]) > 1e-3


def test_both_ways_agree_bit_for_bit(small: Any) -> None:
    student, teacher = small(seed=0), small(seed=5)
    rows = [row for group in played(student, 9) for t in group for row in to_samples(t)]
    assert ModelTeacher(teacher, ROW).score(rows, 0.9) == EngineTeacher(Engine(teacher)).score(rows, 0.9)


def test_scores_do_not_depend_on_the_cut(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than `row_length`, several per packed row, and several packed rows per forward pass."""
    student, teacher = small(seed=0), small(seed=5)
    rows = [row for group in played(student, 9) for t in group for row in to_samples(t)]
    whole = ModelTeacher(teacher, 64).score(rows, 0.9)
    monkeypatch.setattr(distill_module, "ROWS_PER_STEP", 2)
    assert ModelTeacher(teacher, 4).score(rows, 0.9) == whole
    assert ModelTeacher(teacher, 14).score(rows, 0.9) == whole
    assert [len(scores) for scores in whole] == [sum(row.loss_mask) for row in rows]


def test_eq2_off_policy() -> None:
    """After a gradient step the current policy is not the old one: the advantage takes the current one's
    log-probabilities and passes no gradient, ratio and mask take the old one's."""
    generator = torch.Generator().manual_seed(3)

    def draw(scale: float) -> torch.Tensor:
        return -scale * torch.rand(3, 6, generator=generator, dtype=torch.float64)

    mask = torch.rand(3, 6, generator=generator) < 0.8
    current, teacher = draw(1.0).requires_grad_(), draw(2.0)
    old = current.detach() + 0.1 * torch.randn(3, 6, generator=generator, dtype=torch.float64)
    rollout = old + 0.6 * torch.randn(3, 6, generator=generator, dtype=torch.float64)
    batch = PolicyBatch(
        logprobs=current, old_logprobs=old, rollout_logprobs=rollout, advantages=torch.zeros(3, 6),
        teacher_logprobs=teacher, mask=mask, versions=torch.zeros(3, 6),
    )  # fmt: skip
    loss, stats = Distillation(distill_stage(beta=1.6), {}).loss(batch)
    (gradient,) = torch.autograd.grad(loss, current)
    advantage = teacher - current.detach()
    ratio, rho = (current.detach() - old).exp(), (old - rollout).exp()
    pop = torch.where((rho >= 1 / 1.6) & (rho <= 1.6), rho, 0.0)
    clipped = torch.where(advantage > 0, ratio > 1.28, ratio < 0.8)  # where the minimum takes the constant
    share = mask / mask.sum(1, keepdim=True) / 3
    assert torch.allclose(gradient, torch.where(clipped, 0.0, -share * pop * ratio * advantage), atol=1e-12)
    assert 0 < int((pop[mask] == 0).sum()) < int(mask.sum()) and gradient.abs().max() > 0.01
    assert stats.numbers()["reverse_kl"] == pytest.approx(float(-advantage[mask].mean()), abs=1e-12)


def test_a_tag_without_teacher_is_refused(small: Any) -> None:
    student = small()
    algorithm = Distillation(distill_stage(), {"one": ModelTeacher(student, ROW)})
    with pytest.raises(ConfigError, match=r'domain "toy" has the teacher "two", .*; its teachers are: one'):
        algorithm.samples(played(student, 2) + played(student, 1, "two"))


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
    algorithm = Distillation(distill_stage(), {"one": ModelTeacher(teacher, ROW)})
    learner = Learner(student, OPTIM, row_length=64, temperature=0.9)
    kls = []
    for _ in range(6):
        rows, _ = algorithm.samples(played(student, 24))
        kls.append(learner.step(rows, algorithm.loss, 5e-3)["reverse_kl"])
    assert kls[-1] < 0.75 * kls[0]


# -------------------------------------------------------------------------------------------------- teachers' memory


def loads_of(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Any]]:
    """What is read from disk, and weak references to it."""
    read: list[str] = []
    alive: list[Any] = []
    real = distill_module.GLM5ForCausalLM.from_pretrained

    def reading(path: Path, *args: Any, **options: Any) -> Any:
        gc.collect()
        read.append(f"{path.name} {sum(ref() is not None for ref in alive)}")
        model = real(path, *args, **options)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(distill_module.GLM5ForCausalLM, "from_pretrained", reading)
    return read, alive


@pytest.mark.parametrize("keep", [True, False])
def test_teachers_are_read_when_they_are_needed(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    student = small()
    for seed, name in enumerate(("one", "two", "three"), 4):
        small(seed=seed).save_pretrained(tmp_path / name)
    read, _ = loads_of(monkeypatch)
    teachers = {name: ModelTeacher(tmp_path / name, ROW, keep=keep) for name in ("one", "two", "three")}
    algorithm = Distillation(distill_stage(), teachers)
    groups = [*played(student, 3, "two"), *played(student, 2, "one")]
    first, again = ([row.teacher_logprobs for row in algorithm.samples(groups)[0]] for _ in range(2))
    assert first == again
    other = Distillation(distill_stage(), {n: ModelTeacher(small(seed=s), ROW) for n, s in (("one", 4), ("two", 5))})
    assert [row.teacher_logprobs for row in other.samples(groups)[0]] == first
    # Name, and how many others are in memory: the third is never needed.
    assert read == (["two 0", "one 1"] if keep else ["two 0", "one 0"] * 2)


# ------------------------------------------------------------------------------------------------ tags and recipes


def recipe_of(stages: list[dict[str, Any]], **fields: Any) -> RunRecipe:
    return RunRecipe.model_validate({"name": "r", "start": "/tmp/model", "stages": stages} | fields)


def stage_data(name: str, kind: str, families: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "optim": {"steps": 1, "lr": 1e-3}, "families": families} | fields


SUMS = [{"name": "arithmetic"}]


def test_a_family_may_name_its_teacher() -> None:
    levels = [{"name": "arithmetic", "options": {"levels": [n]}, "teacher": t} for n, t in ((1, "a"), (2, "b"))]
    families = [*levels, {"name": "general"}, {"name": "toolcall", "teacher": "runs/old/final"}]
    teachers = {"general": "start", "arithmetic": "b"}
    recipe = recipe_of(
        [stage_data("a", "reasoning", SUMS), stage_data("b", "agentic", SUMS),
         stage_data("d", "distill", families, teachers=teachers)]
    )  # fmt: skip
    stage = recipe.stages[-1]
    assert isinstance(stage, DistillStage)
    assert [stage.teacher_of(family) for family in stage.families] == ["a", "b", "start", "runs/old/final"]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([stage_data("d", "distill", SUMS)], "d has no teacher for arithmetic: set teachers.arithmetic to an earlier"),
        ([stage_data("d", "distill", SUMS, teachers={"arithmetic": "d"})], "not to 'd'"),
        (
            [stage_data("later", "reasoning", SUMS), stage_data("d", "distill", SUMS, teachers={"arithmetic": "latr"})],
            'not to \'latr\' \\(did you mean "later"',
        ),
        (
            [stage_data("d", "distill", SUMS, teachers={"arithmetic": "r"}), stage_data("r", "reasoning", SUMS)],
            "not to 'r'",
        ),
        (
            [{"name": "t", "kind": "tokenizer", "vocab_size": 400},
             stage_data("d", "distill", SUMS, teachers={"arithmetic": "t"})],
            "not to 't'",
        ),
        ([stage_data("r", "reasoning", [{"name": "math", "teacher": "start"}])], 'remove `teacher` from .* in r'),
        ([stage_data("s", "sft", [{"name": "math", "teacher": "start"}])], 'remove `teacher` from .* in s'),
        ([stage_data("s", "sft", [{"name": "math", "difficulty": {"problems": 3}}])], "remove `difficulty` from math"),
        ([stage_data("r", "reasoning", [])], "r has no families"),
        ([stage_data("r", "reasoning", [{"name": "math", "weight": 0}])], "r: all weights of families are 0"),
        ([stage_data("s", "sft", [{"name": "math", "weight": 0}])], "s: all weights of families are 0"),
        ([stage_data("r", "reasoning", [{"name": "math", "weight": -1.0}])], "weight"),
        (
            [stage_data("g", "general", SUMS, reward_model={"optim": {"steps": 1, "lr": 1e-3}})],
            'g needs the family "general"',
        ),
    ],
)  # fmt: skip
def test_families_must_suit_their_stage(stages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_of(stages)


def test_evaluation_takes_neither() -> None:
    for wrong in ({"teacher": "start"}, {"difficulty": {"problems": 3}}):
        with pytest.raises(ValueError, match="math is evaluated on all its problems"):
            recipe_of([], evaluation={"families": [{"name": "math"} | wrong]})


class Both:
    """Two levels of one family, with different teachers; what the loop hands on is looked at."""

    families = [
        FamilyConfig(name="arithmetic", weight=2.0, options={"levels": [1], "thinking": False}, teacher="a/one"),
        FamilyConfig(name="arithmetic", weight=1.0, options={"levels": [3], "thinking": False}, teacher="a/two"),
    ]
    stage = distill_stage(
        families=families, prompts=6, max_tokens=6, max_context=80, row_length=80, temperature=1.0, record=True
    )


def test_prompts_of_one_domain_have_their_own_teachers(talker: Any, tokenizer: Any, stage_io: Any) -> None:
    teachers = {"a/one": ModelTeacher(talker(5), 80), "a/two": ModelTeacher(talker(6), 80)}
    algorithm = Distillation(Both.stage, teachers)
    seen: list[Trajectory] = []
    real = algorithm.samples

    def samples(groups: Any) -> Any:
        seen.extend(t for group in groups for t in group)
        return real(groups)

    algorithm.samples = samples  # type: ignore[method-assign]
    io = stage_io()
    LogicalDriver(talker(), tokenizer, Both.stage, algorithm, io, 0).run()
    assert len(seen) == 18
    for trajectory in seen:
        assert trajectory.domain == "reasoning"
        prompt = tokenizer.decode(trajectory.turns[0].context_ids)
        hard = sum(character.isdigit() for character in prompt) == 4  # two numbers of two digits
        assert trajectory.teacher == ("a/two" if hard else "a/one")
    for at in range(0, 18, 6):
        assert [t.teacher for t in seen[at : at + 6]].count("a/one") == 4
    for row in read_metrics(io.metrics.path):
        assert {"reverse_kl", "reverse_kl/a/one", "reverse_kl/a/two"} <= set(row)
    # The tag is part of the record.
    back = [t for group in replay.read(io.folder.parent / "rollouts.jsonl") for t in group]
    assert [t.teacher for t in back] == [t.teacher for t in seen]


def test_untagged_records_can_still_be_read(tmp_path: Path, small: Any) -> None:
    (((trajectory,), *_)) = played(small(), 1)
    replay.write([[replace(trajectory, teacher="")]], tmp_path / "r.jsonl")
    text = (tmp_path / "r.jsonl").read_text()
    assert '"teacher": ""' in text
    (tmp_path / "r.jsonl").write_text(text.replace('"teacher": "", ', ""))
    assert replay.read(tmp_path / "r.jsonl")[0][0].teacher == ""
