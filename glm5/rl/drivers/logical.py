"""Drives the controller on a logical clock: engine and learner alternate in one thread, and runs are reproducible."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from glm5.chat import Tokenizer
from glm5.config.recipe import PolicyStage
from glm5.engine.request import Request
from glm5.errors import RequestFailed, RolloutError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams, Trajectory
from glm5.rl.algos import Algorithm
from glm5.rl.drivers.common import Driver, policy_id
from glm5.rl.drivers.timing import TimeSpent
from glm5.rl.prompts import PASS_RATES, PromptStream
from glm5.rl.weight_sync import publish
from glm5.seeds import derive_seed
from glm5.tasks import Episode
from glm5.tasks.env_threads import EnvThreadPool
from glm5.tasks.episode import settle
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

    With several ranks (`io.ranks`) each plays a part of the rollouts with an engine of its own, which has all weights.
    After every tick all hear which rollouts ended, so all come to the same decisions; updates are divided as in live
    RL.
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
        self.engine = self._make_engine(self._whole())
        self.prompts = PromptStream(self.stage, seed)
        self._running: list[_Running] = []
        self._reacting: list[tuple[int, _Running, Future[None]]] = []  # tick at which the environment's answer is due
        self._ended: list[Trajectory] = []  # of this rank, not reported to the controller yet
        self._playing = [0] * self.ranks.world  # rollouts in flight of every rank
        self._clock = 0
        self._push_in = 0  # ticks until the weights that are being pushed become visible
        self._threads = EnvThreadPool(ENV_THREADS, stage.env_seconds)
        self._time = TimeSpent()

    def weights(self) -> GLM5ForCausalLM:
        """The model whose weights go to the engine: the learner's. Experiments override this."""
        return self.learner.model

    def _whole(self) -> GLM5ForCausalLM:
        """`weights`, which may be sharded, in one piece. All ranks must call."""
        return self.ranks.plain_copy(self.weights(), everywhere=True)

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
            path, policy = self.io.folder / PASS_RATES, policy_id(self.stage, self._whole())
            self.ranks.on_main(partial(self.prompts.measure, self.engine, self.tokenizer, path, policy))
            if not self.ranks.main:
                self.prompts.measure(None, self.tokenizer, path, policy)  # reads what rank 0 found

    def _run(self) -> dict[str, float]:
        controller = self.controller
        _, numbers = self._load()
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
                    self._save(numbers)
        return numbers

    def _tick(self) -> None:
        """One clock tick: start rollouts, advance the engine, collect finished turns, push weights if due."""
        while (rollout := self.controller.start()) is not None:
            self._start(*rollout)
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
        self._report()
        if self.controller.pushing:
            self._push_in = max(0, self._push_in - 1)
            if not self._push_in:
                self._push()

    def _start(self, group: int, member: int) -> None:
        """Play a rollout on the rank that has the fewest."""
        rank = self._playing.index(min(self._playing))
        self._playing[rank] += 1
        if rank == self.ranks.rank:
            self._continue(self.prompts.episode(group, self.tokenizer, self._threads), member)

    def _report(self) -> None:
        """Tell the controllers of all ranks which rollouts ended."""
        with self._time.on("generate"):  # this rank waits for the others here
            found, self._ended = self.ranks.gather(self._ended, patient=True), []  # an environment may take long
        for rank, ended in enumerate(found):
            for trajectory in ended:
                self._playing[rank] -= 1
                self.env_errors.add(self.prompts.label(trajectory.group), trajectory, self.controller.version)
                self.controller.ended(trajectory)

    def _due(self) -> int:
        """For a request that goes to an environment now, the tick at which its answer becomes visible: a multiple of
        `env_ticks`, or now for `env_ticks` 0. So new turns start together and share one prefill, instead of
        interrupting decoding one by one."""
        every = self.stage.env_ticks
        return (self._clock // every + 2) * every if every else self._clock

    def _continue(self, episode: Episode, member: int) -> None:
        """Submit the next turn of an episode, or note that it ended."""
        context = episode.pending()
        if context is None:
            self._ended.append(episode.trajectory())
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
        self._keep(groups)
        with self._time.on("update"):
            numbers = self._learn(groups)
        self.controller.updated()
        self._push_in = self.stage.train_ticks
        return numbers | self._counts() | self.prompts.numbers

    def _push(self) -> None:
        with self._time.on("publish"):
            publish(self._whole(), self.engine, self.learner.version)
        self.controller.weights_arrived()
        if self.stage.reset_optimizer:
            self.learner.reset_optimizer()

    def _save(self, numbers: dict[str, float]) -> None:
        if self.controller.pushed < self.controller.version:
            self._push()
        self._clock = 0  # as in a resumed run
        super()._save(numbers)
        self.controller.saved()

    def _restore(self, done: int, state: Mapping[str, Any]) -> None:
        super()._restore(done, state)
        publish(self._whole(), self.engine, done)
