"""Drives the controller with real asynchrony: engines and rollouts are other processes and go on during updates.

The learner takes finished rollouts from the rollout process, trains, reports every update, pushes weights. A state is
saved every `save_every` updates; what a later run needs besides is in the store of the rollout process (§4.1).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from glm5.chat import Tokenizer
from glm5.config.families import family_labels
from glm5.config.launch import Launch
from glm5.config.recipe import DistillStage, PolicyStage
from glm5.engine.weight_group import backend_of
from glm5.errors import RolloutError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.live_view import LiveView
from glm5.records import Trajectory
from glm5.rl.algos import Algorithm
from glm5.rl.drivers.common import Driver, policy_id
from glm5.rl.drivers.rollout_client import RolloutClient
from glm5.rl.drivers.timing import TimeSpent
from glm5.rl.drivers.watch import StatusWatch
from glm5.rl.drivers.weight_sender import WeightSender
from glm5.rl.prompts import PASS_RATES, PromptStream
from glm5.rl.rollout_process import RolloutJob
from glm5.rl.update import rollout_numbers
from glm5.rollout.live import MOST_RESULTS
from glm5.rollout.text_history import mismatch
from glm5.rollout.timeline import FILE as TRACE
from glm5.rollout.timeline import Trace
from glm5.tasks.trajectory_json import decode, encode
from glm5.train.loop import StageIO
from glm5.train.stop import TerminationAsInterrupt

STORE = "sessions.db"
"""File in a stage's folder with all sessions of a live stage."""
POLL_SECONDS = 1.0
SHARED_MEMORY, LOCK = Path("/dev/shm"), "lock"
WORK = ("start", "wait", "update", "publish", "save")
"""What the learner does; "wait" is for rollouts, "start" for the processes at the beginning."""
OWN_PROCESS = 1 << 40
"""Bytes of a trajectory's JSON: results come from our own process, so their size needs no limit."""


class LiveDriver(Driver):
    """Runs one stage live. The arguments are those of `LogicalDriver`, and the recipe's `launch`.

    With several ranks (`io.ranks`) all run the same loop. Rank 0 alone talks to the rollout process, decides what comes
    next and writes files; the others get its batches and compute their share of every update.
    """

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
        super().__init__(model, tokenizer, stage, algorithm, io)
        self.launch, self.seed = launch, seed
        self._labels = family_labels(stage.families)
        self._cursor = 0
        self._allowed = -1
        self._time = TimeSpent(WORK)
        self._seconds: dict[str, float] = {}
        self._engines: dict[str, float] = {}
        self._measured: dict[str, float] = {}
        self._trace: Trace | None = None

    def run(self) -> dict[str, float]:
        """Run all updates of the stage, from its last state if there is one. Returns the last update's metrics. All
        processes that it started have ended when this returns or raises."""
        threads = torch.get_num_threads()
        cores = max(1, threads // (1 + self.launch.engines))
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, threads)
            quiet = stack.enter_context(TerminationAsInterrupt())
            policy = self._measure()
            torch.set_num_threads(self.launch.learner_threads or cores)
            done, numbers = self._load()
            self.ranks.on_main(
                partial(self._start, stack, self.ranks.plain_copy(self.learner.model), done, policy, cores)
            )
            stack.callback(quiet.ignore)  # while the processes are ended
            return self._run(numbers)

    def _start(self, stack: ExitStack, model: GLM5ForCausalLM, done: int, policy: str, cores: int) -> None:
        """Start the rollout process with the weights of `model`, after `done` updates; `stack` ends it."""
        self._weights = stack.enter_context(_WeightFolders(self.io.folder, self.launch.transport))
        self._sender: WeightSender | None = None
        if self.launch.transport == "distributed":
            backend = backend_of(self.learner.model)
            self._sender = stack.enter_context(WeightSender(self.launch.host, backend))
        job = RolloutJob(
            stage=self.stage.model_dump(mode="json"),
            launch=self.launch.model_dump(mode="json"),
            seed=self.seed,
            folder=str(self._weights.write(model, self.tokenizer, done)),
            weights=done,
            version=done,
            store=str(self.io.folder / STORE),
            port=0,
            pass_rates=str(self.io.folder / PASS_RATES),
            policy=policy,
            sender=None if self._sender is None else asdict(self._sender.address),
            parts=() if self._sender is None else self._sender.write(model, done),
        )
        self._trace = Trace(self.io.folder / TRACE, "learner", 1)
        stack.callback(self._trace.close)
        with self._time.on("start"):
            self._client = stack.enter_context(RolloutClient(job, self.launch.engine_threads or cores))
        view = LiveView()
        stack.enter_context(StatusWatch(self._client, view.update))
        stack.callback(self.io.show, None)
        self.io.show(view)

    def _run(self, numbers: dict[str, float]) -> dict[str, float]:
        controller = self.controller
        while not controller.finished:
            with self._spent("wait"):
                groups = self._next()
            numbers = self._update(groups)
            if controller.pushing:
                with self._spent("publish"):
                    self.ranks.on_main(partial(self._push, self.ranks.plain_copy(self.learner.model)))
                controller.weights_arrived()
                if self.stage.reset_optimizer:
                    self.learner.reset_optimizer()
            # Before the state: a run that goes on from there removes later rows, and writes them again.
            row = numbers | self._time.spent() | self._noted()
            with self._time.on("save"):
                self.io.metrics.write(self.io.name, controller.version, row)
            every = self.stage.optim.save_every
            if every and controller.version % every == 0 and not controller.finished:
                with self._spent("save"):
                    self._save(numbers)
            self.io.advance(1, numbers)
        return numbers

    def _push(self, model: GLM5ForCausalLM) -> None:
        version, mode, sender = self.controller.version, self.launch.push_mode, self._sender
        if sender is not None:  # engines still start from the folder of the first weights
            self._client.weights(version, self._weights.latest, mode, sender.write(model, version))
            sender.keep(version)
            return
        folder = self._weights.write(model, self.tokenizer, version)
        self._client.weights(version, folder, mode)
        self._weights.keep(folder)

    def _next(self) -> list[list[Trajectory]]:
        """The groups of the next update, on every rank; waits for them."""
        if self.ranks.world == 1:
            return self._batch()
        found: list[list[list[Trajectory]]] = []

        def batch() -> str:
            found.append(self._batch())
            return json.dumps([[encode(trajectory) for trajectory in group] for group in found[0]])

        text = self.ranks.on_main(batch)
        if self.ranks.main:
            return found[0]
        return [[decode(row, "the batch of rank 0", OWN_PROCESS) for row in group] for group in json.loads(text)]

    def _batch(self) -> list[list[Trajectory]]:
        """The groups of the next update. What of the time is no wait for a result is that of fetching: results are read
        from the store, sent, decoded and put into groups."""
        began, known = time.perf_counter(), self._waited()
        client, seconds = self._client, 0.0
        while True:
            if (budget := self.controller.budget) != self._allowed:
                client.allow(budget)
                self._allowed = budget
            found = self._results(seconds)
            for row in found:
                self._arrive(row)
            if len(found) < MOST_RESULTS and (groups := self.controller.batch()) is not None:
                spent = time.perf_counter() - began
                self._note("waits", {}, {"transfer": spent - (self._waited() - known)})
                return groups
            seconds = POLL_SECONDS
            if not self._weights.latest.is_dir():
                raise RolloutError(
                    f"{self.io.name}: the weights in {self._weights.latest} have been deleted, so no engine could be "
                    'replaced. Run the same command again; launch.transport = "disk" keeps them in the stage\'s folder.'
                )

    def _results(self, seconds: float) -> list[dict[str, Any]]:
        """New results; waits up to `seconds` for one, and notes what the rollouts in flight waited for meanwhile."""
        lost = self._client.restart_seconds
        found = self._client.results(self._cursor, seconds)
        self._engines = found.engines
        self._note("waits", {}, found.waits | {"restart": self._client.restart_seconds - lost})
        return found.results

    def _waited(self) -> float:
        return sum(seconds for name, seconds in self._seconds.items() if name.startswith("waits/"))

    def _note(self, name: str, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Add up the seconds since `before` for the metrics NAME/CAUSE. A new rollout process counts from 0 again."""
        for cause, seconds in after.items():
            key = f"{name}/{cause}"
            self._seconds[key] = self._seconds.get(key, 0.0) + max(0.0, seconds - before.get(cause, 0.0))

    @contextmanager
    def _spent(self, work: str) -> Iterator[None]:
        """Count the block's time as `work`, and show it in the trace."""
        began = time.time()
        with self._time.on(work):
            yield
        if self._trace is not None:
            self._trace.span(work, began, time.time(), version=self.controller.version)

    def _arrive(self, row: Mapping[str, Any]) -> None:
        self._cursor = int(row["id"])
        if "turns" not in row:  # an earlier run of the stage has used or dropped it
            return
        trajectory = decode(row, f"result {self._cursor}", OWN_PROCESS)
        config = self.stage.families[row["family"]]
        if isinstance(self.stage, DistillStage):
            trajectory.teacher = self.stage.teacher_of(config) or ""
        self.env_errors.add(self._labels[row["family"]], trajectory, self.controller.version)
        self.controller.arrived(trajectory)

    def _update(self, groups: list[list[Trajectory]]) -> dict[str, float]:
        with self._time.on("save"):
            self._keep(groups)
        with self._spent("update"):
            if self.launch.simulate_learner is not None:
                numbers = rollout_numbers([t for group in groups for t in group], self.learner.version)
                time.sleep(self.launch.simulate_learner)
                self.learner.version += 1
            else:
                numbers = self._learn(groups)
        self.controller.updated()
        with self._spent("publish"):
            return numbers | self.ranks.on_main(partial(self._report, groups))

    def _report(self, groups: list[list[Trajectory]]) -> dict[str, float]:
        """Report an update to the rollout process. Returns the metrics of the rollouts."""
        client = self._client
        gone, self.controller.buffer.gone = self.controller.buffer.gone, []
        sessions = sorted({str(t.detail["session"]) for group in groups for t in group})
        engines = client.updated(self.controller.version, sessions, [group[0].group for group in groups], gone)
        self._note("engines_during_update", self._engines, engines)
        own = mismatch([t for group in groups for t in group]) | {"restarts": float(client.restarts)}
        return self._counts() | self._measured | own

    def _noted(self) -> dict[str, float]:
        """The metrics of `_note` since the last call."""
        found, self._seconds = self._seconds, {}
        return {name: seconds for name, seconds in sorted(found.items()) if seconds}

    def _measure(self) -> str:
        """Measure pass rates of the starting policy if a family asks for them, with an engine of this process. Returns
        the policy's id."""
        if not any(family.difficulty for family in self.stage.families):
            return ""
        return self.ranks.on_main(partial(self._measure_on_main, self.ranks.plain_copy(self.learner.model)))

    def _measure_on_main(self, model: GLM5ForCausalLM) -> str:
        policy = policy_id(self.stage, model)
        prompts = PromptStream(self.stage, self.seed)
        prompts.measure(self._make_engine(model), self.tokenizer, self.io.folder / PASS_RATES, policy)
        self._measured = prompts.numbers
        return policy


def weights_prefix(folder: Path) -> str:
    """How the names of the folders begin in which a stage with this folder keeps weights for pushes."""
    return f"glm5-weights-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}-"


class _WeightFolders:
    """Checkpoint directories for pushes: in shared memory or in the stage's folder. Only the latest is kept."""

    def __init__(self, folder: Path, transport: str) -> None:
        self._parent = SHARED_MEMORY if transport == "memory" and SHARED_MEMORY.is_dir() else folder
        self._prefix = weights_prefix(folder)

    def __enter__(self) -> _WeightFolders:
        for left in self._parent.glob(self._prefix + "*"):  # by a run of this stage that was killed
            with suppress(OSError), (left / LOCK).open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails for a living one, in another container
                shutil.rmtree(left, ignore_errors=True)
        self._folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))  # mode 0700
        self._lock = (self._folder / LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def write(self, model: GLM5ForCausalLM, tokenizer: Tokenizer, version: int) -> Path:
        """A new checkpoint directory with the model's weights."""
        path = self._folder / f"v{version}"
        shutil.rmtree(path, ignore_errors=True)
        model.save_pretrained(path)
        tokenizer.save(path)
        self.latest = path
        return path

    def keep(self, latest: Path) -> None:
        """Delete all directories but this one."""
        for path in self._folder.iterdir():
            if path.is_dir() and path != latest:
                shutil.rmtree(path, ignore_errors=True)
