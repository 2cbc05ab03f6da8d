"""Which problems a stage trains on: ratios of every batch, no problem twice, difficulty measured and cached."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.config.families import DifficultyConfig, FamilyConfig
from glm5.config.optim import OptimConfig
from glm5.config.recipe import ReasoningStage
from glm5.engine.engine import Engine
from glm5.errors import ConfigError, DataError, RolloutError
from glm5.obs.metrics import read_metrics
from glm5.records import Completion, SamplingParams
from glm5.rl import prompts as prompts_module
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.drivers.logical import PASS_RATES, LogicalDriver
from glm5.rl.prompts import SPAN, PromptStream
from glm5.tasks import (
    DistinctProblems,
    PassCount,
    family_key,
    make_family,
    measure_pass_rates,
    read_pass_counts,
    split_of,
)
from glm5.tasks import families as families_module
from glm5.tasks.env_threads import EnvThreadPool

SEED = 5
THREADS = EnvThreadPool(1)
HERE = SEED * SPAN
"""The first problem of the seed."""


def stage_of(families: list[FamilyConfig], steps: int = 3, **changes: Any) -> ReasoningStage:
    fields: dict[str, Any] = dict(max_tokens=8, max_context=80, row_length=80, prompts=3, group=4) | changes
    return ReasoningStage(
        kind="reasoning", name="rl", optim=OptimConfig(steps=steps, lr=5e-3, save_every=1), families=families, **fields
    )


def toy_family(weight: float = 1.0, **fields: Any) -> FamilyConfig:
    return FamilyConfig(name="toy", weight=weight, **fields)


def index_of(problem: str) -> int:
    return int(problem.rpartition("/")[2])


# ------------------------------------------------------------------------------------------------------------- ratios

WEIGHTS = st.lists(st.integers(0, 12) | st.sampled_from([0.1, 0.25, 0.3, 2.5]), min_size=1, max_size=5).filter(any)


@given(WEIGHTS, st.integers(1, 9), st.integers(1, 6))
def test_every_batch_has_the_wanted_ratios(weights: list[float], prompts: int, batches: int) -> None:
    names = ["arithmetic", "general", "toolcall", "math", "instructions"][: len(weights)]
    families = [FamilyConfig(name=name, weight=weight) for name, weight in zip(names, weights, strict=True)]
    stream = PromptStream(stage_of(families, max_context=4000), 0)
    drawn = [stream._mixture.domain(group) for group in range(prompts * batches)]
    total = sum(Fraction(str(weight)) for weight in weights)
    for i, weight in enumerate(weights):
        share = Fraction(str(weight)) / total
        for n in range(1, len(drawn) + 1):
            assert abs(drawn[:n].count(i) - n * share) < 1
        counts = [drawn[at : at + prompts].count(i) for at in range(0, len(drawn), prompts)]
        assert all(abs(count - prompts * share) < 2 for count in counts)
        if (prompts * share).denominator == 1:  # whole numbers: nothing to round
            assert counts == [prompts * share] * batches


def test_families_take_turns_and_skip_nothing(tokenizer: Any) -> None:
    families = [
        FamilyConfig(name="arithmetic", weight=3.0),
        FamilyConfig(name="general", weight=1.0),
        FamilyConfig(name="toolcall", weight=2.0, render_tools=False),
    ]
    stream = PromptStream(stage_of(families, max_context=400), SEED)
    episodes = [stream.episode(group, tokenizer, THREADS) for group in range(60)]
    drawn = [episode.env.problem.split("/") for episode in episodes]
    for at in range(0, 60, 6):
        assert Counter(name for name, *_ in drawn[at : at + 6]) == {"arithmetic": 3, "toolcall": 2, "general": 1}
    for name, count in (("arithmetic", 30), ("general", 10), ("toolcall", 20)):
        found = [(split, int(index)) for other, split, _, index in drawn if other == name]
        family = make_family(name)
        wanted = DistinctProblems(family, "rl", HERE).indices(count)
        assert found == [("rl", index) for index in wanted]  # none skipped, none twice
        assert len({family.problem("rl", index).key for index in wanted}) == count
    # A function of the group number alone: any one can be asked for first.
    again = PromptStream(stage_of(families, max_context=400), SEED)
    for group in (41, 3, 59):
        assert again.episode(group, tokenizer, THREADS).pending() == episodes[group].pending()
    other = PromptStream(stage_of(families, max_context=400), SEED + 1)
    assert other.episode(0, tokenizer, THREADS).env.problem.endswith(f"/{HERE + SPAN}")


def test_a_family_listed_twice_shares_its_problems(tokenizer: Any) -> None:
    families = [
        FamilyConfig(name="toolcall", weight=2.0),
        FamilyConfig(name="arithmetic", options={"levels": [1]}),
        FamilyConfig(name="toolcall", weight=1.0, render_tools=False),
        FamilyConfig(name="arithmetic", options={"levels": [2]}),
    ]
    stream = PromptStream(stage_of(families, max_context=2000), SEED)
    drawn = [stream.episode(group, tokenizer, THREADS).env.problem for group in range(100)]
    calls = [index_of(problem) for problem in drawn if problem.startswith("toolcall")]
    assert len(calls) == len(set(calls)) == 60
    assert set(calls) <= set(DistinctProblems(make_family("toolcall"), "rl", HERE).indices(80))
    sums = [index_of(problem) for problem in drawn if problem.startswith("arithmetic")]
    wanted = [DistinctProblems(make_family("arithmetic", levels=[n]), "rl", HERE).indices(20) for n in (1, 2)]
    assert sorted(sums) == sorted(wanted[0] + wanted[1])  # other options have an order of their own


@pytest.mark.parametrize(
    ("families", "message"),
    [
        ([FamilyConfig(name="arithmetik")], "arithmetik"),
        ([FamilyConfig(name="arithmetic", weight=0.0)], "above 0"),
        (
            [
                FamilyConfig(name="arithmetic", difficulty=DifficultyConfig(problems=4, tries=4)),
                FamilyConfig(name="arithmetic", difficulty=DifficultyConfig(problems=4, tries=8)),
            ],
            "different `difficulty.tries`",
        ),
    ],
)
def test_impossible_mixtures_are_refused(families: list[FamilyConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptStream(stage_of(families), 0)


# --------------------------------------------------------------------------------------------------------- difficulty


class KnownRates:
    """A policy that passes problem i in the first `i % 5` of its tries: an even number of letters passes."""

    def __init__(self, tokenizer: Any, tries: int, stop_after: int = 10**9) -> None:
        self.tokenizer, self.tries, self.stop_after = tokenizer, tries, stop_after
        self.calls: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Completion]:
        if len(self.calls) == self.stop_after:
            raise KeyboardInterrupt
        self.calls.append(len(prompts))
        assert all(p.temperature == 0.7 and p.max_tokens == 8 for p in params)
        assert len({p.seed for p in params}) == len(params)
        found = []
        for number, _ in enumerate(prompts):
            index = self.first + number // self.tries
            text = "aa" if number % self.tries < index % 5 else "a"
            ids = [*self.tokenizer.encode(text), self.tokenizer.special["<|user|>"]]
            found.append(Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop"))
        self.first += len(prompts) // self.tries
        return found

    first = HERE


def test_problems_outside_the_bounds_are_left_out(
    toy: str, tokenizer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "EPISODES", 4 * 7)
    hard = DifficultyConfig(problems=20, tries=4, low=0.2, high=0.6)
    families = [toy_family(2.0, difficulty=hard), toy_family(options={"turns": 2})]
    stage = stage_of(families, temperature=0.7)
    stream = PromptStream(stage, SEED)
    with pytest.raises(ConfigError, match=r"difficulty of toy\.1 was not measured"):
        stream.episode(0, tokenizer, THREADS)
    policy, path = KnownRates(tokenizer, 4), tmp_path / "rates.jsonl"
    stream.measure(policy, tokenizer, path, "start")
    assert policy.calls == [28, 28, 24]
    rates = {HERE + i: PassCount(min(i % 5, 4), 4) for i in range(20)}
    assert read_pass_counts(path, "start", family_key("toy", {})) == rates
    kept = {index for index, count in rates.items() if count.passed in (1, 2)}
    assert stream.numbers == {"pass_rate/toy.1": pytest.approx(0.5), "kept_share/toy.1": 8 / 20}
    drawn = [index_of(stream.episode(group, tokenizer, THREADS).env.problem) for group in range(36)]
    first = [d for group, d in enumerate(drawn) if stream._mixture.domain(group) == 0]
    assert len(first) == 24 and Counter(first) == dict.fromkeys(kept, 3)  # three rounds
    second = [d for group, d in enumerate(drawn) if stream._mixture.domain(group) == 1]
    assert second == list(range(HERE, HERE + 12))  # its neighbour has no filter
    # The same file is not measured again, whatever the policy that is asked; another policy's name is.
    again = PromptStream(stage, SEED)
    again.measure(KnownRates(tokenizer, 4, stop_after=0), tokenizer, path, "start")
    assert [index_of(again.episode(group, tokenizer, THREADS).env.problem) for group in range(36)] == drawn
    with pytest.raises(KeyboardInterrupt):
        PromptStream(stage, SEED).measure(KnownRates(tokenizer, 4, stop_after=0), tokenizer, path, "other")


def test_measuring_goes_on_where_it_was_interrupted(
    toy: str, tokenizer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "EPISODES", 4 * 3)
    stage = stage_of([toy_family(difficulty=DifficultyConfig(problems=10, tries=4))], temperature=0.7)
    with pytest.raises(KeyboardInterrupt):
        PromptStream(stage, SEED).measure(KnownRates(tokenizer, 4, stop_after=2), tokenizer, tmp_path / "a", "start")
    rest = KnownRates(tokenizer, 4)
    rest.first += 6
    PromptStream(stage, SEED).measure(rest, tokenizer, tmp_path / "a", "start")
    assert rest.calls == [12, 4]
    PromptStream(stage, SEED).measure(KnownRates(tokenizer, 4), tokenizer, tmp_path / "b", "start")
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()


def test_sometimes_but_rarely_solved(toy: str, tokenizer: Any, tmp_path: Any) -> None:
    """GLM-4.5's second stage: what eight samples do not solve and many do."""
    rare = DifficultyConfig(problems=15, tries=64, low=1 / 64, high=2 / 64)
    stream = PromptStream(stage_of([toy_family(difficulty=rare)], temperature=0.7), SEED)
    stream.measure(KnownRates(tokenizer, 64), tokenizer, tmp_path / "r", "p")
    drawn = {index_of(stream.episode(group, tokenizer, THREADS).env.problem) - HERE for group in range(20)}
    assert drawn == {1, 2, 6, 7, 11, 12}


def test_nothing_left_and_nothing_played(toy: str, tokenizer: Any, tmp_path: Any) -> None:
    empty = toy_family(difficulty=DifficultyConfig(problems=5, tries=4, low=0.3, high=0.4))
    with pytest.raises(DataError, match=r"rl: toy: none of 5 .* 0\.3 to 0\.4 \(2 have a lower one, 3 a higher one\)"):
        PromptStream(stage_of([empty], temperature=0.7), SEED).measure(
            KnownRates(tokenizer, 4), tokenizer, tmp_path / "a", "p"
        )
    lost = toy_family(options={"failing": 1}, difficulty=DifficultyConfig(problems=5, tries=4))
    with pytest.raises(RolloutError, match=r"failed in every episode .* difficulty of toy"):
        PromptStream(stage_of([lost], temperature=0.7), SEED).measure(
            KnownRates(tokenizer, 4), tokenizer, tmp_path / "b", "p"
        )


def test_lost_samples_do_not_count(toy: str, tokenizer: Any) -> None:
    family = make_family("toy", failing=3)
    policy = KnownRates(tokenizer, 2)
    policy.first = 0
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=3)
    found = measure_pass_rates(policy, tokenizer, family, range(7), 2, params)
    assert found == {i: PassCount(min(i % 5, 2), 2) for i in range(7) if i % 3}


# ---------------------------------------------------------------------------------------------------- in a stage

DIFFICULT = DifficultyConfig(problems=12, tries=4, low=0.2, high=0.8)


def run(model: Any, tokenizer: Any, io: Any, steps: int = 3, **changes: Any) -> LogicalDriver:
    stage = stage_of([toy_family(difficulty=DIFFICULT)], steps, **changes)
    loop = LogicalDriver(model, tokenizer, stage, ReasoningRL(stage), io, SEED)
    started: list[str] = []
    episode = loop.prompts.episode

    def watched(*args: Any) -> Any:
        found = episode(*args)
        started.append(found.env.problem)
        return found

    loop.prompts.episode = watched  # type: ignore[method-assign]
    loop.started = started  # type: ignore[attr-defined]
    loop.run()
    return loop


def test_a_problem_that_could_not_be_measured_is_not_asked_again(
    toy: str, tokenizer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed stage would otherwise train on other problems than the same stage in one piece."""
    real = prompts_module.measure_pass_rates

    def measuring(*args: Any, **options: Any) -> dict[int, PassCount]:
        return {index: count for index, count in real(*args, **options).items() if index % 3}

    monkeypatch.setattr(prompts_module, "measure_pass_rates", measuring)
    asked = DifficultyConfig(problems=12, tries=4, low=0.0, high=1.0)
    stage = stage_of([FamilyConfig(name="toy", difficulty=asked)], temperature=0.7)
    whole, resumed = PromptStream(stage, SEED), PromptStream(stage, SEED)
    whole.measure(KnownRates(tokenizer, 4), tokenizer, tmp_path / "r", "p")
    monkeypatch.setattr(prompts_module, "measure_pass_rates", lambda *_, **__: pytest.fail("measured twice"))
    resumed.measure(KnownRates(tokenizer, 4), tokenizer, tmp_path / "r", "p")
    drawn = [[s.episode(g, tokenizer, THREADS).problem for g in range(12)] for s in (whole, resumed)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 8
    assert whole.numbers == resumed.numbers


@pytest.mark.parametrize("rollouts", ["exact", "fast"])
def test_a_stage_measures_the_policy_that_it_starts_from(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, rollouts: str
) -> None:
    io = stage_io()
    loop = run(talker(), tokenizer, io, rollouts=rollouts)
    rows = [json.loads(line) for line in (io.folder / PASS_RATES).read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(HERE, HERE + 12)) and {row["tries"] for row in rows} == {4}
    kept = {f"toy/{row['index']}" for row in rows if 0.2 <= row["passed"] / 4 <= 0.8}
    assert 0 < len(kept) < 12 and set(loop.started) == kept  # type: ignore[attr-defined]
    for row in read_metrics(io.metrics.path):
        assert row["kept_share/toy"] == len(kept) / 12
        assert row["pass_rate/toy"] == pytest.approx(sum(r["passed"] for r in rows) / 48)
    # The name of the policy has its weights in it, and not those that training made of them.
    (policy,) = {row["policy"] for row in rows}
    other = stage_io("other")
    run(talker(7), tokenizer, other, 1)
    assert policy.startswith("rl ") and policy not in (other.folder / PASS_RATES).read_text()


def test_measured_is_what_a_fresh_engine_does(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measuring(completer: Any, *args: Any, **options: Any) -> dict[int, PassCount]:
        asked.append((args, options))
        return measure_pass_rates(completer, *args, **options)

    monkeypatch.setattr(prompts_module, "measure_pass_rates", measuring)
    io = stage_io()
    run(talker(), tokenizer, io, 1)
    ((args, options),) = asked
    rows = [json.loads(line) for line in (io.folder / PASS_RATES).read_text().splitlines()]
    found = measure_pass_rates(Engine(talker(), tokenizer, max_batch=5), *args, **options)
    assert {row["index"]: PassCount(row["passed"], row["tries"]) for row in rows} == found


@pytest.mark.long
def test_an_interrupted_stage_keeps_its_choice(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(talker(), tokenizer, stage_io("whole"))
    for stop in (1, 2):
        folder = f"broken{stop}"
        with pytest.raises(KeyboardInterrupt):
            run(talker(), tokenizer, stage_io(folder, stop_after=stop))
        with monkeypatch.context() as patch:
            patch.setattr(prompts_module, "measure_pass_rates", lambda *_, **__: pytest.fail("measured twice"))
            rest = run(talker(), tokenizer, stage_io(folder))
        later = rest.started  # type: ignore[attr-defined]
        assert later and whole.started[-len(later) :] == later  # type: ignore[attr-defined]
        assert whole.learner.model.lm_head.weight.equal(rest.learner.model.lm_head.weight)


class NumberedFamily(families_module.Family):
    """As many problems as `size`, over and over."""

    name = domain = "numbered"

    def __init__(self, seed: int = 0, size: int = 7) -> None:
        self.size = size

    def problem(self, split: str, index: int) -> Any:
        assert split == "rl"
        return families_module.FAMILIES["toy"](0).problem(split, index % self.size)


def test_a_small_family_is_measured_once_and_comes_again(
    toy: str, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Seven problems: each is measured once though twenty are asked for, and drawn once before any comes again."""
    monkeypatch.setitem(families_module.FAMILIES, "numbered", NumberedFamily)
    plain = PromptStream(stage_of([FamilyConfig(name="numbered")]), 0)
    drawn = [index_of(plain.episode(group, tokenizer, THREADS).env.problem) for group in range(21)]
    assert drawn == [*range(7)] * 3
    assert caplog.text.count("only 7 distinct problems for rollouts; from here on they repeat") == 1
    asked = DifficultyConfig(problems=20, tries=1, low=0.0, high=1.0)
    stream = PromptStream(stage_of([FamilyConfig(name="numbered", difficulty=asked)], temperature=0.7), 0)
    stream.measure(KnownRates(tokenizer, 1), tokenizer, tmp_path / "r", "p")
    counts = read_pass_counts(tmp_path / "r", "p", family_key("numbered", {}))
    assert list(counts) == [*range(7)] and all(count.tries == 1 for count in counts.values())
    assert "all are measured, instead of 20" in caplog.text
    asked = asked.model_copy(update={"unseen": 0.5})
    greedy = PromptStream(stage_of([FamilyConfig(name="numbered", difficulty=asked)], temperature=0.7), 0)
    with pytest.raises(DataError, match="only 7 distinct problems for rollouts, and all are used to measure"):
        greedy.measure(KnownRates(tokenizer, 1), tokenizer, tmp_path / "r", "p")


@pytest.mark.parametrize("name", ["arithmetic", "general", "instructions", "math", "toolcall"])
@given(seed=st.integers(0, 2000), levels=st.sampled_from([None, [1], [1, 2]]))
@settings(max_examples=6, deadline=None)
def test_prompts_demonstrations_and_evaluation_share_no_content(
    name: str, seed: int, levels: list[int] | None, tokenizer: Any
) -> None:
    """What a stage's prompts, its measurements, fine-tuning and evaluation use of one family, whatever the seed."""
    options = {} if levels is None or name in ("general", "toolcall") else {"levels": levels}
    family = make_family(name, **options)
    stream = PromptStream(stage_of([FamilyConfig(name=name, options=options)], max_context=4000), seed)
    rows = [(stream._index(0, place), "rl") for place in range(60)] + [(i, "train") for i in range(60)]
    rows += [(index, "heldout") for index in DistinctProblems(family, "heldout").indices(40)]
    prompts: dict[str, set[str]] = {"rl": set(), "train": set(), "heldout": set()}
    for index, split in rows:
        problem = family.problem(split, index)
        assert split_of(problem.key) == split
        prompts[split].add(problem.prompt)
    assert not prompts["rl"] & prompts["train"] and not (prompts["rl"] | prompts["train"]) & prompts["heldout"]


def test_rollouts_and_measurements_ask_for_their_split_only(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, tmp_path: Any
) -> None:
    seen: list[tuple[str, int]] = []

    class Watching(families_module.FAMILIES["general"]):  # type: ignore[misc]
        def problem(self, split: str, index: int) -> Any:
            seen.append((split, index))
            return super().problem(split, index)

    monkeypatch.setitem(families_module.FAMILIES, "general", Watching)
    easy = DifficultyConfig(problems=3, tries=1, low=0.0, high=1.0, unseen=0.5)
    families = [FamilyConfig(name="general", difficulty=easy)]
    stream = PromptStream(stage_of(families, temperature=0.7, max_context=400), SEED)
    stream.measure(KnownRates(tokenizer, 1), tokenizer, tmp_path / "r", "p")
    played = {stream.episode(group, tokenizer, THREADS).env.problem for group in range(20)}
    assert {split for split, _ in seen} == {"rl"}
    wanted = DistinctProblems(make_family("general"), "rl", HERE).indices(13)  # 3 measured, then 10 that were not
    assert {index_of(problem) for problem in played} == set(wanted)
