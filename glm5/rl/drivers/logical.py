"""Drives the controller on a logical clock: engine and learner alternate in one thread, and runs are reproducible."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.chat import Tokenizer
from glm5.config.recipe import PolicyStage
from glm5.engine.request import Request
from glm5.errors import RequestFailed, RolloutError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams, Trajectory
from glm5.rl import replay
from glm5.rl.algos import Algorithm
from glm5.rl.drivers.common import Driver, policy_id
from glm5.rl.drivers.timing import TimeSpent
from glm5.rl.prompts import PASS_RATES, PromptStream
from glm5.rl.weight_sync import publish
from glm5.seeds import derive_seed
from glm5.tasks import Episode
from glm5.tasks.env_threads import EnvThreadPool
from glm5.tasks.episode import settle
from glm5.train.checkpoint import load_state, save_state
from glm5.train.loop import StageIO

ENV_THREADS = 16
"""Environments that may run at the same time. They mostly wait for the sandbox, which runs several in parallel."""


@dataclass
class _Running:
    """An episode that waits for the engine to generate its next turn."""

    episode: Episode
    member: int
    request: Request


class LogicalDriver(Driver):
    """Keeps the engine busy, hands batches to the learner and pushes weights.

    One clock tick is one engine step. An update's weights become visible `train_ticks` ticks after its batch was taken.
    An environment's answer becomes visible between one and two `env_ticks` after the request. Asynchrony is simulated:
    runs are exactly reproducible, but no time is saved.
    """

    def __init__(
        self,
        model: GLM5ForCausalLM,
        tokenizer: Tokenizer,
        stage: PolicyStage,
        algorithm: Algorithm,
        io: StageIO,
        seed: int,
    ) -> None:
        super().__init__(model, tokenizer, stage, algorithm, io)
        self.seed = derive_seed(seed, "policy", stage.name)
        self.engine = self._make_engine(self.weights())
        self.prompts = PromptStream(self.stage, seed)
        self._running: list[_Running] = []
        self._reacting: list[tuple[int, _Running, Future[None]]] = []  # tick at which the environment's answer is due
        self._clock = 0
        self._push_in = 0  # ticks until the weights that are being pushed become visible
        self._threads = EnvThreadPool(ENV_THREADS, stage.env_seconds)
        self._time = TimeSpent()

    def weights(self) -> GLM5ForCausalLM:
        """The model whose weights go to the engine: the learner's. Experiments override this."""
        return self.learner.model

    def run(self) -> dict[str, float]:
        """Run all updates of the stage, from its last state if there is one. Returns the last update's metrics.

        Call it once: the driver's threads end with this call, also after an error. Pending answers of environments are
        discarded.
        """
        with self._threads:
            self._measure()
            return self._run()

    def _measure(self) -> None:
        """Measure the pass rates of the starting policy for families with a `difficulty`. No state of the stage is
        loaded yet, so learner and engine still have the weights of the starting policy."""
        if any(family.difficulty for family in self.stage.families):
            policy = policy_id(self.stage, self.learner.model)
            self.prompts.measure(self.engine, self.tokenizer, self.io.folder / PASS_RATES, policy)

    def _run(self) -> dict[str, float]:
        state, controller = self.io.folder / "state", self.controller
        done, extra = load_state(state, self.learner.model, self.learner.optimizer) or (0, {})
        numbers: dict[str, float] = dict(extra.get("numbers", {}))
        if done:
            self._restore(done, extra)
        self.io.metrics.rewind(self.io.name, done)
        if self.record is not None:
            replay.rewind(self.record, self.io.name, done)
        self.io.advance(done, {})
        while not controller.finished:
            self._tick()
            groups = controller.batch()
            if groups is not None:
                numbers = self._update(groups)
                self.io.metrics.write(self.io.name, controller.version, numbers | self._time.spent())
                self.io.advance(1, numbers)
                if controller.pushing and not self._push_in and not controller.in_flight:
                    self._push()
                if controller.saves():
                    self._save(state, numbers)
        return numbers

    def _tick(self) -> None:
        """One clock tick: start rollouts, advance the engine, collect finished turns, push weights if due."""
        while (rollout := self.controller.start()) is not None:
            group, member = rollout
            self._continue(self.prompts.episode(group, self.tokenizer, self._threads), member)
        if self.controller.stuck:
            raise RolloutError(
                f"{self.io.name}: no rollout may start and no batch is complete. The state in {self.io.folder} was "
                "written with other settings; delete it to start this stage again."
            )
        with self._time.on("generate"), suppress(RequestFailed):  # logged; the episode ends as ENV_ERROR
            self.engine.step()
        self._clock += 1
        for running in [r for r in self._running if r.request.done]:
            self._running.remove(running)
            answer = self._threads.submit(running.episode.accept, running.request.completion)
            self._reacting.append((self._due(), running, answer))
        while self._reacting and self._reacting[0][0] <= self._clock:
            _, running, answer = self._reacting.pop(0)
            with self._time.on("environment"):
                settle(running.episode, answer, self._threads)
            self._continue(running.episode, running.member)
        if self.controller.pushing:
            self._push_in = max(0, self._push_in - 1)
            if not self._push_in:
                self._push()

    def _due(self) -> int:
        """For a request that goes to an environment now, the tick at which its answer becomes visible: a multiple of
        `env_ticks`, or now for `env_ticks` 0. So new turns start together and share one prefill, instead of
        interrupting decoding one by one."""
        every = self.stage.env_ticks
        return (self._clock // every + 2) * every if every else self._clock

    def _continue(self, episode: Episode, member: int) -> None:
        """Submit the next turn of an episode, or report its end."""
        context = episode.pending()
        if context is None:
            trajectory = episode.trajectory()
            self.env_errors.add(self.prompts.label(trajectory.group), trajectory, self.controller.version)
            self.controller.ended(trajectory)
            return
        params = SamplingParams(
            max_tokens=min(self.stage.max_tokens, episode.room),
            temperature=self.stage.temperature,
            seed=derive_seed(self.seed, "turn", episode.group, member, len(episode.turns)),
            stop_token_ids=self.tokenizer.stop_token_ids,
        )
        (request,) = self.engine.submit(context, params)
        self._running.append(_Running(episode, member, request))

    def _update(self, groups: list[list[Trajectory]]) -> dict[str, float]:
        step = self.controller.version + 1
        if self.record is not None:
            replay.write(groups, self.record, self.io.name, step)
        with self._time.on("update"):
            numbers = self._learn(groups)
        self.controller.updated()
        self._push_in = self.stage.train_ticks
        return numbers | self._counts() | self.prompts.numbers

    def _push(self) -> None:
        with self._time.on("publish"):
            publish(self.weights(), self.engine, self.learner.version)
        self.controller.weights_arrived()
        if self.stage.reset_optimizer:
            self.learner.reset_optimizer()

    def _save(self, state: Path, numbers: dict[str, float]) -> None:
        if self.controller.pushed < self.controller.version:
            self._push()
        self._clock = 0  # as in a resumed run
        extra = self._state(numbers)
        save_state(state, self.learner.model, self.learner.optimizer, self.controller.version, extra)
        self.controller.saved()

    def _restore(self, done: int, state: Mapping[str, Any]) -> None:
        super()._restore(done, state)
        publish(self.weights(), self.engine, done)
