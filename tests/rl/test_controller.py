"""The controller under random events: pacing, staleness, pushes and states, without a model."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.config.optim import OptimConfig
from glm5.config.recipe import AgenticStage, FamilyConfig, ReasoningStage
from glm5.errors import RolloutError
from glm5.records import Outcome, Trajectory, Turn
from glm5.rl.buffer import staleness
from glm5.rl.controller import Controller

FAMILIES = [FamilyConfig(name="arithmetic")]


def stage_of(**fields: Any) -> AgenticStage:
    steps, save_every = fields.pop("steps", 8), fields.pop("save_every", 3)
    optim = OptimConfig(steps=steps, lr=1e-3, save_every=save_every)
    return AgenticStage(kind="agentic", name="rl", optim=optim, families=FAMILIES, **fields)


def ended(rollout: tuple[int, int], version: int, outcome: Outcome = Outcome.SOLVED) -> Trajectory:
    turn = Turn((1,), (2,), (-1.0,), (version,), "stop")
    return Trajectory(f"p/{rollout[0]}", "p", rollout[0], [turn], 1.0, outcome)


class Simulation:
    """A stage in which a random choice says what happens next; holds the machine to its promises at every step."""

    def __init__(self, stage: AgenticStage, rng: random.Random, failing: float = 0.0) -> None:
        self.stage, self.rng, self.failing = stage, rng, failing
        self.controller = Controller(stage)
        self.running: list[tuple[tuple[int, int], int]] = []
        self.trained: list[int] = []
        self.saves: list[int] = []

    def run(self) -> None:
        idle = 0
        while not self.controller.finished:
            assert not self.controller.stuck or self.may_start()
            before = self.progress()
            self.rng.choice((self.start, self.end, self.end, self.train, self.push))()
            idle = 0 if before != self.progress() else idle + 1
            assert idle < 1000, "nothing happens any more"

    def progress(self) -> tuple[int, int, bool]:
        return len(self.running), self.controller.version, self.controller.pushing

    def may_start(self) -> bool:
        before = len(self.running)
        self.start()
        return len(self.running) > before

    def start(self) -> None:
        controller, stage = self.controller, self.stage
        rollout = controller.start()
        if rollout is None:
            return
        assert rollout not in [running for running, _ in self.running] and rollout[0] not in self.trained
        assert rollout[0] < (controller.pushed + 1 + stage.max_staleness) * stage.prompts + controller.buffer.dropped
        self.running.append((rollout, controller.pushed))
        assert len(self.running) == controller.in_flight <= controller.concurrency

    def end(self) -> None:
        if self.running:
            rollout, version = self.running.pop(self.rng.randrange(len(self.running)))
            failed = self.rng.random() < self.failing
            self.controller.ended(ended(rollout, version, Outcome.ENV_ERROR if failed else Outcome.SOLVED))

    def train(self) -> None:
        controller, stage = self.controller, self.stage
        pushing = controller.pushing
        groups = controller.batch()
        if groups is None:
            return
        assert not pushing and len(groups) == stage.prompts
        for group in groups:
            assert len(group) == stage.group
            assert all(staleness(t, controller.version) <= stage.max_staleness for t in group)
            assert group[0].group not in self.trained
            self.trained.append(group[0].group)
        controller.updated()
        assert controller.pushing == (controller.version % stage.push_every == 0)
        if controller.saves():
            assert not self.running and controller.version < stage.optim.steps
            if controller.pushed < controller.version:
                controller.weights_arrived()
            self.saves.append(controller.version)
            state = controller.state()
            controller.saved()
            if self.rng.random() < 0.5:  # another process goes on
                self.controller = Controller(stage)
                self.controller.restore(controller.version, state)

    def push(self) -> None:
        if self.controller.pushing:
            self.controller.weights_arrived()
            assert self.controller.pushed == self.controller.version


@given(
    prompts=st.integers(1, 4),
    group=st.integers(1, 4),
    staleness=st.integers(0, 4),
    push_every=st.integers(1, 5),
    concurrency=st.none() | st.integers(1, 20),
    save_every=st.integers(0, 4),
    failing=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_any_order_of_events_ends_the_stage(
    prompts: int, group: int, staleness: int, push_every: int, concurrency: int | None, save_every: int, failing: float,
    seed: int,
) -> None:  # fmt: skip
    stage = stage_of(
        prompts=prompts, group=group, max_staleness=staleness, push_every=min(push_every, staleness + 1),
        concurrency=concurrency, save_every=save_every,
    )  # fmt: skip
    played = Simulation(stage, random.Random(seed), failing)
    played.run()
    assert len(played.trained) == len(set(played.trained)) == 8 * prompts
    assert bool(played.saves) <= bool(save_every)


def test_a_state_is_saved_at_rest_and_due_ones_are_not_forgotten() -> None:
    stage = stage_of(prompts=1, group=2, max_staleness=2, save_every=2, steps=20)
    for seed in range(20):
        played = Simulation(stage, random.Random(seed))
        played.run()
        # After a state is due, at most the groups that had started are still trained on.
        assert len(played.saves) >= 20 // (2 + stage.max_staleness + 1)


def test_synchronous_training_waits_for_the_push() -> None:
    """max_staleness 0: all rollouts of a batch come from the weights that it updates."""
    stage = ReasoningStage(
        kind="reasoning", name="rl", optim=OptimConfig(steps=2, lr=1e-3, save_every=0), families=FAMILIES, prompts=2,
        group=2,
    )  # fmt: skip
    controller = Controller(stage)
    assert controller.concurrency == 4
    first = [controller.start() for _ in range(5)]
    assert first == [(0, 0), (0, 1), (1, 0), (1, 1), None]
    for rollout in first[:4]:
        assert rollout is not None and controller.batch() is None
        controller.ended(ended(rollout, 0))
    assert controller.batch() is not None
    controller.updated()
    assert controller.pushing and controller.start() is None and not controller.stuck
    controller.weights_arrived()
    assert controller.start() == (2, 0)


def test_environments_that_only_fail_end_the_stage() -> None:
    stage = stage_of(prompts=1, group=1, max_staleness=0)
    with pytest.raises(RolloutError, match="failed in 9 groups in a row, most recently in p/8: no reason given"):
        Simulation(stage, random.Random(0), failing=1.0).run()
