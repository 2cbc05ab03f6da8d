"""What the drivers share: learner and controller of a stage, one update, and the state of a stage."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from glm5.chat import Tokenizer
from glm5.config.recipe import PolicyStage
from glm5.engine.engine import Engine
from glm5.errors import RolloutError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.logs import get_logger
from glm5.quant.in_place import quantise_in_place
from glm5.records import Trajectory
from glm5.rl import replay
from glm5.rl.algos import Algorithm
from glm5.rl.controller import Controller
from glm5.rl.env_errors import EnvErrors
from glm5.rl.learner import Agreement, Learner
from glm5.rl.rollout_trace import RolloutTrace, is_due
from glm5.rl.update import update
from glm5.rl.weight_sync import tensor_hashes
from glm5.tasks.slides.record import write_pages
from glm5.train.checkpoint import load_state, save_state
from glm5.train.loop import StageIO

_log = get_logger(__name__)


class Driver:
    """Base of the drivers. No state of the stage may be loaded into `model` yet: its present weights are the reference
    of a KL penalty."""

    def __init__(
        self,
        model: GLM5ForCausalLM,
        tokenizer: Tokenizer,
        stage: PolicyStage,
        algorithm: Algorithm,
        io: StageIO,
    ) -> None:
        stage = _fitted(stage, model)
        self.stage, self.algorithm, self.io, self.tokenizer, self.ranks = stage, algorithm, io, tokenizer, io.ranks
        self.controller = Controller(stage)
        self.learner = Learner(
            model,
            stage.optim,
            row_length=stage.row_length,
            temperature=stage.temperature,
            reference=model.clone() if algorithm.penalty else None,
            exact=stage.rollouts == "exact",
            minibatches=stage.minibatches,
            spread_groups=stage.spread_groups,
            ranks=io.ranks,
        )
        self.record = io.folder.parent / replay.FILE if stage.record else None
        self.env_errors = EnvErrors(stage.name, stage.env_error_share, stage.env_error_window)

    def _make_engine(self, model: GLM5ForCausalLM) -> Engine:
        """An engine in this process, with a copy of the weights of `model`."""
        own = model.clone(dtype=getattr(torch, self.stage.engine_dtype))
        if self.stage.engine_rounding is not None:
            quantise_in_place(own, self.stage.engine_rounding)
        return Engine(
            own,
            self.tokenizer,
            max_batch=self.controller.concurrency,
            max_length=self.stage.max_context + 1,
            exact=self.stage.rollouts == "exact",
        )

    def _load(self) -> tuple[int, dict[str, float]]:
        """Load the stage's last state: its number of updates and its last metrics."""
        found = load_state(self.io.state, self.learner.model, self.learner.optimizer, ranks=self.ranks)
        done, extra = found or (0, {})
        if done:
            self._restore(done, extra)
        self.io.metrics.rewind(self.io.name, done)
        if self.record is not None:
            self.ranks.on_main(partial(replay.rewind, self.record, self.io.name, done))
        self.io.advance(done, {})
        return done, dict(extra.get("numbers", {}))

    def _save(self, numbers: dict[str, float]) -> None:
        """Save the stage's state; `numbers` are the last metrics."""
        learner, state = self.learner, self._state(numbers)
        version, ranks = self.controller.version, self.ranks
        save_state(self.io.state, learner.model, learner.optimizer, version, state, ranks=ranks)

    def _keep(self, groups: list[list[Trajectory]]) -> None:
        """Write down the batch of the next update, if the recipe says so."""
        if self.record is not None:
            step = self.controller.version + 1
            self.ranks.on_main(partial(replay.write, groups, self.record, self.io.name, step))

    def _learn(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """The next update; writes the trace of a rollout when it is due. Returns the metrics."""
        due = is_due(self.controller.version + 1, self.stage.optim)
        trace = RolloutTrace(type(self.algorithm.objective).__name__) if due else None
        numbers = update(self.learner, self.algorithm, self.stage, groups, trace)
        if trace is not None:
            trace.write(self.io.folder, self.learner, groups, self.tokenizer)
        if self.ranks.main and (due or self.controller.version == 0):
            write_pages(self.io.folder, self.controller.version + 1, groups)
        return numbers

    def _counts(self) -> dict[str, float]:
        """Metrics: dropped groups and responses, and failures of environments."""
        counts = {name: float(count) for name, count in self.controller.buffer.counts.items()}
        return {"dropped_groups": float(self.controller.buffer.dropped)} | counts | self.env_errors.row()

    def _state(self, numbers: Mapping[str, float]) -> dict[str, Any]:
        """What a state has besides weights and optimizer; `numbers` are the last metrics."""
        own = {"agreement": vars(self.learner.agreement), "env_errors": self.env_errors.state}
        own["algorithm"] = self.algorithm.state
        return {**self.controller.state(), "numbers": dict(numbers), **own}

    def _restore(self, done: int, state: Mapping[str, Any]) -> None:
        """Continue from a `_state` that was saved after `done` updates. Raises RolloutError for one of another
        version."""
        if not all(isinstance(state.get(key), dict) for key in ("agreement", "buffer", "env_errors")):
            raise RolloutError(
                f"{self.io.name}: the state in {self.io.folder} was written by an earlier version; delete it to start "
                "this stage again."
            )
        self.learner.version = done
        self.learner.agreement = Agreement(**state["agreement"])
        self.controller.restore(done, state)
        self.env_errors.restore(state["env_errors"])
        self.algorithm.restore(state.get("algorithm", {}))


def _fitted(stage: PolicyStage, model: GLM5ForCausalLM) -> PolicyStage:
    """The stage with a `max_context` that the model's positions allow."""
    positions = model.config.max_position_embeddings
    if stage.max_context <= positions:
        return stage
    _log.warning("%s: episodes end at the model's %d positions, before max_context.", stage.name, positions)
    return stage.model_copy(update={"max_context": positions})


def policy_id(stage: PolicyStage, model: GLM5ForCausalLM) -> str:
    """An id of the stage and the model's weights, for measured pass rates."""
    hashes = sorted(tensor_hashes(model).items())
    return f"{stage.name} {hashlib.sha256(repr(hashes).encode()).hexdigest()[:16]}"
