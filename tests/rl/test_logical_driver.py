"""The RL loop: repeatable, resumable, paced, and honest about versions and lost groups."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import AgenticStage, FamilyConfig, PolicyStage, ReasoningStage
from glm5.engine.engine import Engine
from glm5.errors import RolloutError
from glm5.obs.metrics import read_metrics
from glm5.records import Outcome, Trajectory
from glm5.rl.algos.agentic import AgenticRL
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.buffer import staleness
from glm5.rl.drivers.logical import LogicalDriver
from glm5.rl.drivers.timing import TIMES

LIMITS: dict[str, Any] = dict(max_tokens=8, max_context=80, row_length=80, max_turns=4)


def reasoning(steps: int = 4, options: dict[str, Any] | None = None, **changes: Any) -> ReasoningStage:
    fields = LIMITS | dict(prompts=3, group=4, families=[FamilyConfig(name="toy", options=options or {})]) | changes
    optim = OptimConfig(steps=steps, lr=5e-3, schedule="linear", save_every=fields.pop("save_every", 2))
    return ReasoningStage(kind="reasoning", name="rl", optim=optim, **fields)


def agentic(steps: int = 5, **changes: Any) -> AgenticStage:
    fields = LIMITS | dict(
        prompts=2, group=4, concurrency=10, train_ticks=6, max_staleness=2,
        families=[FamilyConfig(name="toy", options={"turns": 3})],
    ) | changes  # fmt: skip
    return AgenticStage(kind="agentic", name="rl", optim=OptimConfig(steps=steps, lr=5e-3, save_every=2), **fields)


class Watched(LogicalDriver):
    """Records what is trained on, and checks pacing at every tick."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batches: list[tuple[int, list[list[Trajectory]]]] = []
        self.started: list[int] = []
        real_samples, real_episode = self.algorithm.samples, self.prompts.episode

        def samples(groups: Sequence[Sequence[Trajectory]]) -> Any:
            self.batches.append((self.learner.version, [list(g) for g in groups]))
            return real_samples(groups)

        def episode(group: int, *rest: Any) -> Any:
            pace = self.engine.weight_version + 1 + self.stage.max_staleness
            allowed = pace * self.stage.prompts + self.controller.buffer.dropped
            assert group < allowed, "a rollout was started too early"
            self.started.append(group)
            return real_episode(group, *rest)

        self.algorithm.samples, self.prompts.episode = samples, episode  # type: ignore[method-assign]

    def _tick(self) -> None:
        super()._tick()
        assert len(self._running) <= self.controller.concurrency


def run(model: Any, tokenizer: Any, stage: PolicyStage, io: Any, seed: int = 0) -> Watched:
    algorithm: Any = AgenticRL(stage) if isinstance(stage, AgenticStage) else ReasoningRL(stage)
    loop = Watched(model, tokenizer, stage, algorithm, io, seed)
    loop.run()
    return loop


def numbers_of(io: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("time", *TIMES)} for row in read_metrics(io.metrics.path)]


def assert_same(a: Any, b: Any) -> None:
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name


# -------------------------------------------------------------------------------------------------------- synchronous


def test_a_synchronous_run_is_on_policy_exact_and_repeatable(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any
) -> None:
    first, second, other = talker(), talker(), talker()
    io = stage_io("one")
    loop = run(first, tokenizer, reasoning(), io)
    rows = numbers_of(io)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert 0 < row["reward"] < 1 and row["reward"] == row["solved"]
        assert row["staleness_max"] == 0 and row["mismatch_max"] == 0 and row["masked_share"] == 0
        assert row["ratio_mean"] == 1.0 and row["grad_norm"] > 0 and 1 < row["length"] <= 8
    assert loop.learner.agreement.mismatches == 0 and loop.learner.agreement.tokens > 100
    assert loop.started == [g for g in range(12) for _ in range(4)]
    assert [version for version, _ in loop.batches] == [0, 1, 2, 3]
    assert [g[0].group for _, groups in loop.batches for g in groups] == list(range(12))
    for version, groups in loop.batches:
        assert {v for g in groups for t in g for v in t.weight_versions} == {version}
    again = stage_io("two")
    run(second, tokenizer, reasoning(), again)
    assert_same(first, second)
    assert numbers_of(again) == rows
    run(other, tokenizer, reasoning(), stage_io("three"), seed=1)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_rollouts_are_those_of_a_fresh_engine(toy: str, talker: Any, tokenizer: Any, stage_io: Any) -> None:
    """What the learner was trained on in the second update came from exactly the weights of the first."""
    model = talker()
    run(model, tokenizer, reasoning(steps=1), stage_io("one"))
    engine = Engine(model)
    loop = run(talker(), tokenizer, reasoning(steps=2), stage_io("two"))
    for group in loop.batches[1][1]:
        for trajectory in group:
            (turn,) = trajectory.turns
            scores = engine.score([turn.context_ids + turn.output_ids])[0]
            assert scores[len(turn.context_ids) - 1 :] == list(turn.logprobs)
        assert len({t.turns[0].output_ids for t in group}) > 1  # members of a group have seeds of their own


def test_arithmetic_family_runs_and_repeats(talker: Any, tokenizer: Any, stage_io: Any) -> None:
    stage = reasoning(steps=2, families=[FamilyConfig(name="arithmetic", options={"levels": [1]})], prompts=2)
    models = [talker(), talker()]
    rows = []
    for i, model in enumerate(models):
        io = stage_io(str(i))
        run(model, tokenizer, stage, io)
        rows.append(numbers_of(io))
    assert rows[0] == rows[1] and len(rows[0]) == 2
    assert_same(*models)


@pytest.mark.long
@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, failing: int
) -> None:
    """With `failing`, every fourth group is lost to its environment, which moves the group numbers of later updates."""
    stage = reasoning(steps=5, options={"failing": failing})
    whole, io = talker(), stage_io("whole")
    loop = run(whole, tokenizer, stage, io)
    assert (loop.controller.buffer.dropped_env > 2) == bool(failing)
    for stops in ([1], [3, 5]):
        folder = f"broken{stops}"
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                run(talker(), tokenizer, stage, stage_io(folder, stop_after=stop))
        resumed, again = talker(0 if max(stops) < 3 else 7), stage_io(folder)
        rest = run(resumed, tokenizer, stage, again)
        assert_same(whole, resumed)
        assert numbers_of(again) == numbers_of(io)
        assert vars(rest.learner.agreement) == vars(loop.learner.agreement)
        assert rest.controller.buffer.dropped_env == loop.controller.buffer.dropped_env
        assert min(rest.started) >= 3 * ((max(stops) - 1) // 2 * 2), "finished updates were repeated"


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_engines_in_low_precision_round_every_version(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, dtype: str
) -> None:
    """A resumed run, whose engine is made of the weights that the other's was sent, ends with the same ones."""
    stage = reasoning(steps=4, rollouts="fast", rollout_dtype=dtype)
    whole, resumed, io = talker(), talker(7), stage_io("whole")
    run(whole, tokenizer, stage, io)
    with pytest.raises(KeyboardInterrupt):
        run(talker(), tokenizer, stage, stage_io("broken", stop_after=3))
    run(resumed, tokenizer, stage, stage_io("broken"))
    assert_same(whole, resumed)
    assert all(0 < row["mismatch_mean"] < 0.2 for row in numbers_of(io))


def test_lost_groups_are_replaced(toy: str, talker: Any, tokenizer: Any, stage_io: Any) -> None:
    loop = run(talker(), tokenizer, reasoning(options={"failing": 4}), stage_io())
    used = [g[0].group for _, groups in loop.batches for g in groups]
    assert len(used) == len(set(used)) == 12
    lost = set(loop.started) - set(used)
    assert len(lost) == loop.controller.buffer.dropped_env == loop.controller.buffer.dropped > 2
    assert all(t.outcome is not Outcome.ENV_ERROR for _, groups in loop.batches for g in groups for t in g)


@pytest.mark.parametrize("kind", ["reasoning", "agentic"])
def test_an_environment_that_always_fails_ends_the_stage(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, kind: str
) -> None:
    options = {"failing": 1}
    stage: Any = reasoning(options=options) if kind == "reasoning" else agentic(
        families=[FamilyConfig(name="toy", options=options)]
    )  # fmt: skip
    with pytest.raises(RolloutError, match=r"failed in 9 groups in a row, .* the toy judge is out of order"):
        run(talker(), tokenizer, stage, stage_io())


@pytest.mark.parametrize(
    ("stop_after", "failing", "end"),
    [(None, 0, None), (2, 0, KeyboardInterrupt), (None, 1, RolloutError), (None, 0, ZeroDivisionError)],
)
def test_no_thread_outlives_the_loop(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, stop_after: int | None, failing: int, end: Any
) -> None:
    before = set(threading.enumerate())
    stage = agentic(families=[FamilyConfig(name="toy", options={"turns": 3, "failing": failing})])
    loop = Watched(talker(), tokenizer, stage, AgenticRL(stage), stage_io(stop_after=stop_after), 0)
    reacted: list[set[threading.Thread]] = []
    continue_ = loop._continue

    def watched(*args: Any) -> None:
        reacted.append(set(threading.enumerate()) - before)
        if end is ZeroDivisionError and len(reacted) > 20:
            raise ZeroDivisionError
        continue_(*args)

    loop._continue = watched  # type: ignore[method-assign]
    with pytest.raises(end) if end else nullcontext():
        loop.run()
    assert any(reacted), "no thread was ever started"
    assert set(threading.enumerate()) <= before


def test_a_state_of_other_settings_is_an_error_and_no_endless_loop(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(talker(), tokenizer, reasoning(), stage_io(stop_after=3))
    with pytest.raises(RolloutError, match="written with other settings"):
        run(talker(), tokenizer, reasoning(prompts=1), stage_io())


# ------------------------------------------------------------------------------------------------------- asynchronous


def test_an_asynchronous_run_mixes_versions_within_its_limit_and_repeats(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any
) -> None:
    first, second = talker(), talker()
    io, again = stage_io("one"), stage_io("two")
    loop = run(first, tokenizer, agentic(), io)
    run(second, tokenizer, agentic(), again)
    assert_same(first, second)
    rows = numbers_of(io)
    assert numbers_of(again) == rows and [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    trained = [(version, t) for version, groups in loop.batches for g in groups for t in g]
    stale = [staleness(t, version) for version, t in trained]
    assert 0 < max(stale) <= 2 and max(row["staleness_max"] for row in rows) == max(stale)
    assert any(len(set(t.weight_versions)) > 1 for _, t in trained), "no trajectory saw a push"
    assert any(len(set(turn.weight_versions)) > 1 for _, t in trained for turn in t.turns), "no push within a turn"
    for _, t in trained:
        assert list(t.weight_versions) == sorted(t.weight_versions)
    assert any(len(t.turns) > 1 for _, t in trained)
    # What was sampled with the learner's own weights is bit for bit what the learner computes, pushes or not.
    assert loop.learner.agreement.mismatches == 0 and loop.learner.agreement.tokens > 20
    assert any(row["ratio_mean"] != 1.0 for row in rows[1:])


def test_tokens_belong_to_the_version_that_they_name(toy: str, talker: Any, tokenizer: Any, stage_io: Any) -> None:
    """Replay: keep every pushed set of weights and score each token with the one it names."""
    pushed: dict[int, Any] = {0: talker()}

    class Keeping(Watched):
        def _push(self) -> None:
            super()._push()
            pushed[self.learner.version] = self.learner.model.clone()

    stage = agentic()
    loop = Keeping(talker(), tokenizer, stage, AgenticRL(stage), stage_io(), 0)
    loop.run()
    engines = {version: Engine(model) for version, model in pushed.items()}
    assert len(engines) >= 4
    for _, groups in loop.batches:
        for turn in (turn for g in groups for t in g for turn in t.turns):
            start = len(turn.context_ids) - 1
            row = turn.context_ids + turn.output_ids
            scores = {v: engines[v].score([row])[0][start:] for v in set(turn.weight_versions)}
            assert list(turn.logprobs) == [scores[v][i] for i, v in enumerate(turn.weight_versions)]


def test_episodes_end_at_the_positions_of_the_model(
    toy: str, small: Any, tokenizer: Any, stage_io: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """`max_context` may be above what the model can place: a long answer of an environment is no reason to end."""
    model = small(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids, max_position_embeddings=24)
    with caplog.at_level("WARNING", "glm5"):
        loop = run(model, tokenizer, agentic(steps=1, max_context=400, max_tokens=12), stage_io())
    trained = [t for _, groups in loop.batches for g in groups for t in g]
    assert max(len(turn.context_ids) + len(turn.output_ids) for t in trained for turn in t.turns) <= 24
    assert "episodes end at the model's 24 positions" in caplog.text


def test_synchronous_is_asynchronous_without_staleness(toy: str, talker: Any, tokenizer: Any, stage_io: Any) -> None:
    loop = run(talker(), tokenizer, agentic(max_staleness=0), stage_io())
    trained = [(version, t) for version, groups in loop.batches for g in groups for t in g]
    assert all(set(t.weight_versions) == {version} for version, t in trained)
    assert len(loop.batches) == 5


DUE = [(1, 1, 4), (2, 1, 40), (3, 2, 0), (2, 3, 4)]


@pytest.mark.parametrize(
    ("push_every", "max_staleness", "train_ticks"),
    [*DUE]
    + [
        pytest.param(push, stale, ticks, marks=pytest.mark.slow)
        for push, stale in [(1, 1), (2, 1), (3, 2), (2, 3)]
        for ticks in (0, 4, 40)
        if (push, stale, ticks) not in DUE
    ],
)
def test_pushes_come_when_they_are_due(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, push_every: int, max_staleness: int, train_ticks: int
) -> None:
    stage = agentic(steps=6, push_every=push_every, max_staleness=max_staleness, train_ticks=train_ticks, concurrency=8)
    versions: list[int] = []

    class Counting(Watched):
        def _push(self) -> None:
            super()._push()
            versions.append(self.engine.weight_version)
            assert not self.learner.optimizer.state, "the optimizer state is reset at every push"

    loop = Counting(talker(), tokenizer, stage, AgenticRL(stage), stage_io(), 0)
    loop.run()
    assert len(loop.batches) == 6
    assert versions == [v for v in range(1, 7) if v % push_every == 0][: len(versions)]
    assert len(versions) >= 6 // push_every - 1  # a push after the last update may be pointless
    for version, groups in loop.batches:
        assert all(staleness(t, version) <= max_staleness for g in groups for t in g)


def test_pushes_that_are_too_rare_are_refused() -> None:
    with pytest.raises(ValueError, match=r"push_every = 3 .* at most max_staleness \+ 1 = 2"):
        agentic(push_every=3, max_staleness=1)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"train_ticks": 0, "env_ticks": 0}, marks=pytest.mark.slow),
        {"train_ticks": 0, "concurrency": 64, "max_tokens": 1, "max_turns": 1},  # groups are ready when it saves
        {"train_ticks": 0, "concurrency": 64, "max_tokens": 2, "prompts": 1, "max_staleness": 1},  # environments busy
    ],
)
def test_an_asynchronous_run_can_be_interrupted_too(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, changes: dict[str, Any]
) -> None:
    """Before there is a state (which is the same for all), and behind one."""
    stage = agentic(steps=6, **changes)
    whole, io = talker(), stage_io("whole")
    run(whole, tokenizer, stage, io)
    for stop in (5,) if changes else (1, 5):
        with pytest.raises(KeyboardInterrupt):
            run(talker(), tokenizer, stage, stage_io(f"broken{stop}", stop_after=stop))
        resumed, again = talker(), stage_io(f"broken{stop}")
        run(resumed, tokenizer, stage, again)
        assert_same(whole, resumed)
        assert numbers_of(again) == numbers_of(io)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"max_staleness": 0},
        pytest.param({"train_ticks": 24, "env_ticks": 8, "concurrency": 48}, marks=pytest.mark.slow),
        {"push_every": 2},
    ],
)
def test_an_asynchronous_stage_saves_states(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, changes: dict[str, Any]
) -> None:
    """Rollouts are nearly always in flight: a state that waits for a moment without any would never come."""
    stage = agentic(steps=6, **changes)
    whole, io = talker(), stage_io("whole")
    run(whole, tokenizer, stage, io)
    with pytest.raises(KeyboardInterrupt):
        run(talker(), tokenizer, stage, stage_io("broken", stop_after=5))
    resumed, again = talker(), stage_io("broken")
    loop = run(resumed, tokenizer, stage, again)
    assert loop.batches[0][0] > 2, "more than half of the updates were repeated"
    assert_same(whole, resumed)
    assert numbers_of(again) == numbers_of(io)


def test_seeds_of_turns_do_not_depend_on_scheduling(toy: str, talker: Any, tokenizer: Any, stage_io: Any) -> None:
    """The first update of runs with other concurrency is the same: company changes nothing, neither bits nor draws."""
    losses = []
    for concurrency in (3, 8, 64):
        stage = agentic(steps=1, concurrency=concurrency, max_staleness=0)
        loop = run(talker(), tokenizer, stage, stage_io(str(concurrency)))
        losses.append(sorted((t.group, t.turns[-1].output_ids) for g in loop.batches[0][1] for t in g))
    assert losses[0] == losses[1] == losses[2]
