"""Drives the controller with real asynchrony: engines and rollouts are other processes and go on during updates.

The learner takes finished rollouts from the rollout process, trains, reports every update, pushes weights. A state is
saved every `save_every` updates; what a later run needs besides is in the store of the rollout process (§4.1).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from glm5.chat import Tokenizer
from glm5.config.families import family_labels
from glm5.config.launch import Launch
from glm5.config.recipe import DistillStage, PolicyStage
from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import Trajectory
from glm5.rl import replay
from glm5.rl.algos import Algorithm
from glm5.rl.controller import Controller
from glm5.rl.drivers.common import fitted_stage, make_learner, policy_id
from glm5.rl.drivers.rollout_client import RolloutClient
from glm5.rl.drivers.timing import TimeSpent
from glm5.rl.env_errors import EnvErrors
from glm5.rl.learner import Agreement
from glm5.rl.prompts import PASS_RATES, PromptStream
from glm5.rl.rollout_process import RolloutJob
from glm5.rl.rollout_trace import RolloutTrace, is_due
from glm5.rl.update import rollout_numbers, update
from glm5.tasks.trajectory_json import decode
from glm5.train.checkpoint import load_state, save_state
from glm5.train.loop import StageIO

STORE = "sessions.db"
"""File in a stage's folder with all sessions of a live stage."""
POLL_SECONDS = 1.0
SHARED_MEMORY = Path("/dev/shm")
WORK = ("wait", "update", "publish", "save")
"""What the learner does; "wait" is for rollouts."""
OWN_PROCESS = 1 << 40
"""Bytes of a trajectory's JSON: results come from our own process, so their size needs no limit."""


class LiveDriver:
    """Runs one stage live. The arguments are those of `LogicalDriver`, and the recipe's `launch`."""

    def __init__(
        self,
        model: GLM5ForCausalLM,
        tokenizer: Tokenizer,
        stage: PolicyStage,
        algorithm: Algorithm,
        io: StageIO,
        seed: int,
        launch: Launch,
    ) -> None:
        stage = fitted_stage(stage, model)
        self.stage, self.algorithm, self.io, self.tokenizer = stage, algorithm, io, tokenizer
        self.launch, self.seed = launch, seed
        self.controller = Controller(stage)
        self.learner = make_learner(model, stage, algorithm)
        self.record = io.folder.parent / replay.FILE if stage.record else None
        self.env_errors = EnvErrors(stage.name, stage.env_error_share, stage.env_error_window)
        self._labels = family_labels(stage.families)
        self._cursor = 0
        self._allowed = -1
        self._time = TimeSpent(WORK)
        self._waits: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        """Run all updates of the stage, from its last state if there is one. Returns the last update's metrics. All
        processes that it started have ended when this returns or raises."""
        threads = torch.get_num_threads()
        cores = max(1, threads // (1 + self.launch.engines))
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, threads)
            policy = self._measure()
            torch.set_num_threads(self.launch.learner_threads or cores)
            done, numbers = self._load()
            weights = stack.enter_context(_WeightFolders(self.io.folder, self.launch.transport))
            job = RolloutJob(
                stage=self.stage.model_dump(mode="json"),
                launch=self.launch.model_dump(mode="json"),
                seed=self.seed,
                folder=str(weights.write(self.learner.model, self.tokenizer, done)),
                weights=done,
                version=done,
                store=str(self.io.folder / STORE),
                port=0,
                pass_rates=str(self.io.folder / PASS_RATES),
                policy=policy,
            )
            client = stack.enter_context(RolloutClient(job, self.launch.engine_threads or cores))
            return self._run(client, weights, numbers)

    def _run(self, client: RolloutClient, weights: _WeightFolders, numbers: dict[str, float]) -> dict[str, float]:
        controller = self.controller
        while not controller.finished:
            groups = self._batch(client)
            numbers = self._update(client, groups)
            if controller.pushing:
                with self._time.on("publish"):
                    folder = weights.write(self.learner.model, self.tokenizer, controller.version)
                    client.weights(controller.version, folder, self.launch.push_mode)
                    weights.keep(folder)
                controller.weights_arrived()
                if self.stage.reset_optimizer:
                    self.learner.reset_optimizer()
            every = self.stage.optim.save_every
            if every and controller.version % every == 0 and not controller.finished:
                with self._time.on("save"):
                    self._save(numbers)
            self.io.metrics.write(self.io.name, controller.version, numbers | self._time.spent() | self._waited())
            self.io.advance(1, numbers)
        return numbers

    def _batch(self, client: RolloutClient) -> list[list[Trajectory]]:
        """The groups of the next update; waits for them."""
        wait = 0.0
        while True:
            if (budget := self.controller.budget) != self._allowed:
                client.allow(budget)
                self._allowed = budget
            with self._time.on("wait"):
                before = client.clock() if wait else {}
                found = client.results(self._cursor, wait)
                if wait:
                    self._attribute(before, client.clock())
            for row in found:
                self._arrive(row)
            if found:
                wait = 0.0
                continue  # there may be more
            if (groups := self.controller.batch()) is not None:
                return groups
            wait = POLL_SECONDS

    def _arrive(self, row: Mapping[str, Any]) -> None:
        self._cursor = int(row["id"])
        if "turns" not in row:  # an earlier run of the stage has used or dropped it
            return
        trajectory = decode(row, f"result {self._cursor}", OWN_PROCESS)
        config = self.stage.families[row["family"]]
        if isinstance(self.stage, DistillStage):
            trajectory.teacher = self.stage.teacher_of(config) or ""
        self.env_errors.add(self._labels[row["family"]], trajectory)
        self.controller.arrived(trajectory)

    def _update(self, client: RolloutClient, groups: list[list[Trajectory]]) -> dict[str, float]:
        step = self.controller.version + 1
        if self.record is not None:
            replay.write(groups, self.record, self.io.name, step)
        trace = RolloutTrace(type(self.algorithm.objective).__name__) if is_due(step, self.stage.optim) else None
        with self._time.on("update"):
            if self.launch.simulate_learner is not None:
                numbers = rollout_numbers([t for group in groups for t in group], self.learner.version)
                time.sleep(self.launch.simulate_learner)
                self.learner.version += 1
            else:
                numbers = update(self.learner, self.algorithm, self.stage, groups, trace)
                if trace is not None:
                    trace.write(self.io.folder, self.learner, groups, self.tokenizer)
        self.controller.updated()
        gone, self.controller.buffer.gone = self.controller.buffer.gone, []
        sessions = sorted({str(t.detail["session"]) for group in groups for t in group})
        client.updated(self.controller.version, sessions, [group[0].group for group in groups], gone)
        numbers |= {"dropped_groups": float(self.controller.buffer.dropped)}
        numbers |= {name: float(count) for name, count in self.controller.buffer.counts.items()}
        return numbers | self.env_errors.numbers | {"restarts": float(client.restarts)}

    def _attribute(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Add up what the rollouts in flight waited for during a wait of the learner."""
        for cause, seconds in after.items():
            self._waits[cause] = self._waits.get(cause, 0.0) + max(0.0, seconds - before.get(cause, 0.0))

    def _waited(self) -> dict[str, float]:
        waits, self._waits = self._waits, {}
        return {f"waits/{cause}": seconds for cause, seconds in sorted(waits.items())}

    def _measure(self) -> str:
        """Measure pass rates of the starting policy if a family asks for them, with an engine of this process. Returns
        the policy's id."""
        if not any(family.difficulty for family in self.stage.families):
            return ""
        policy = policy_id(self.stage, self.learner.model)
        engine = Engine(
            self.learner.model.clone().cast(getattr(torch, self.stage.rollout_dtype)),
            self.tokenizer,
            max_batch=self.controller.concurrency,
            max_length=self.stage.max_context + 1,
            exact=self.stage.rollouts == "exact",
        )
        prompts = PromptStream(self.stage, self.seed)
        prompts.measure(engine, self.tokenizer, self.io.folder / PASS_RATES, policy)
        return policy

    def _load(self) -> tuple[int, dict[str, float]]:
        """Load the stage's last state: its number of updates and its last metrics."""
        done, extra = load_state(self.io.folder / "state", self.learner.model, self.learner.optimizer) or (0, {})
        if done:
            self.learner.version = done
            self.learner.agreement = Agreement(**extra["agreement"])
            self.controller.restore(done, extra)
            self.env_errors.restore(extra["env_errors"])
        self.io.metrics.rewind(self.io.name, done)
        if self.record is not None:
            replay.rewind(self.record, self.io.name, done)
        self.io.advance(done, {})
        return done, dict(extra.get("numbers", {}))

    def _save(self, numbers: dict[str, float]) -> None:
        extra = self.controller.state() | {"numbers": numbers}
        extra |= {"agreement": vars(self.learner.agreement), "env_errors": self.env_errors.state}
        state = self.io.folder / "state"
        save_state(state, self.learner.model, self.learner.optimizer, self.controller.version, extra)


class _WeightFolders:
    """Checkpoint directories for pushes: in shared memory or in the stage's folder. Only the latest is kept."""

    def __init__(self, folder: Path, transport: str) -> None:
        self._parent = SHARED_MEMORY if transport == "memory" and SHARED_MEMORY.is_dir() else folder

    def __enter__(self) -> _WeightFolders:
        self._folder = Path(tempfile.mkdtemp(prefix="glm5-weights-", dir=self._parent))  # mode 0700
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, model: GLM5ForCausalLM, tokenizer: Tokenizer, version: int) -> Path:
        """A new checkpoint directory with the model's weights."""
        path = self._folder / f"v{version}"
        shutil.rmtree(path, ignore_errors=True)
        model.save_pretrained(path)
        tokenizer.save(path)
        return path

    def keep(self, latest: Path) -> None:
        """Delete all directories but this one."""
        for path in self._folder.iterdir():
            if path != latest:
                shutil.rmtree(path, ignore_errors=True)
