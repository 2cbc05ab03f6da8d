"""Decides what an RL stage does next: which rollout starts, which batch is trained on, when to push weights or save.

A pure state machine without clock, threads, files or models. A driver (`glm5/rl/drivers`) reports events and carries
out the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm5.config.recipe import PolicyStage
from glm5.errors import RolloutError
from glm5.records import Trajectory
from glm5.rl.buffer import Buffer


class Controller:
    """Schedules one stage. `max_staleness = 0` is synchronous RL.

    A rollout is (group, member): sample `member` of prompt `group`. Group g may start only if
    g < (pushed + 1 + max_staleness) * prompts + dropped groups. Responses that are too stale when an update
    would use them are dropped (§4.1).
    """

    def __init__(self, stage: PolicyStage) -> None:
        self._stage = stage
        self._most_lost = max(8, 2 * stage.prompts)
        self.buffer = Buffer(stage.group, stage.max_staleness)
        self.version = 0
        """Number of updates so far, which is the version of the learner's weights."""
        self.pushed = 0
        """Version of the engine's weights."""
        self.in_flight = 0
        """Rollouts that have started and not ended."""
        self.pushing = False
        """Whether a weight push to the engine is running; no update is computed meanwhile."""
        self._next = (0, 0)
        self._landing: int | None = None
        """While a state waits to be saved, the value that `pushed` had when saving became due: `start` uses it in place
        of `pushed` to limit the number of groups. Otherwise None."""

    @property
    def concurrency(self) -> int:
        """Maximum number of rollouts in flight."""
        return self._stage.concurrency or self._stage.prompts * self._stage.group

    @property
    def budget(self) -> int:
        """How many groups may have been started in all."""
        pushed = self.pushed if self._landing is None else self._landing
        return (pushed + 1 + self._stage.max_staleness) * self._stage.prompts + self.buffer.dropped

    @property
    def finished(self) -> bool:
        return self.version >= self._stage.optim.steps

    @property
    def stuck(self) -> bool:
        """Whether no rollout and no push is running, and no batch is complete. Check it after `start` has returned
        None."""
        return not self.in_flight and not self.pushing and self.buffer.ready < self._stage.prompts

    def start(self) -> tuple[int, int] | None:
        """The rollout to start now, or None."""
        group, member = self._next
        if self.in_flight >= self.concurrency or group >= self.budget:
            return None
        self._next = (group, member + 1) if member + 1 < self._stage.group else (group + 1, 0)
        self.in_flight += 1
        return group, member

    def ended(self, trajectory: Trajectory) -> None:
        """Report the end of a rollout of `start`. Raises RolloutError as `arrived` does."""
        self.in_flight -= 1
        self.arrived(trajectory)

    def arrived(self, trajectory: Trajectory) -> None:
        """Take a finished rollout. Raises RolloutError after failures of the environment in too many
        groups in a row."""
        self.buffer.add(trajectory)
        if self.buffer.lost_in_a_row > self._most_lost:
            raise RolloutError(
                f"{self._stage.name}: the environment failed in {self.buffer.lost_in_a_row} groups in a row, most "
                f"recently in {trajectory.problem}: {trajectory.detail.get('error', 'no reason given')}"
            )

    def batch(self) -> list[list[Trajectory]] | None:
        """The groups of the next update, without responses that are now too stale; None while the update cannot
        begin."""
        if self.pushing:
            return None
        self.buffer.drop_stale(self.version)
        return self.buffer.take(self._stage.prompts) if self.buffer.ready >= self._stage.prompts else None

    def updated(self) -> None:
        """Report that the learner finished the update. Sets `pushing` if the new weights must go to the engine."""
        self.version += 1
        self.pushing = self.version % self._stage.push_every == 0

    def weights_arrived(self) -> None:
        """Report that the engine uses the learner's weights from now on."""
        self.pushed, self.pushing = self.version, False

    def saves(self) -> bool:
        """Whether to save a state now. Call it once after every update. If a push can happen at once, push first.

        A state is due every `save_every` updates. A state contains no rollouts. So while a state is due, a
        push allows no further groups to start, and the state is saved after all started groups were used or dropped.
        Runs with and without an interruption wait in the same way, so they end with the same numbers.
        """
        every = self._stage.optim.save_every
        if every and self.version % every == 0 and self._landing is None:
            self._landing = self.pushed
        waiting = self.in_flight or self.buffer.ready or self._next[1]
        return self._landing is not None and not self.finished and not waiting

    def saved(self) -> None:
        """Report that the state was saved; sampling continues."""
        self._landing = None

    def state(self) -> dict[str, Any]:
        """What a resumed stage needs. It is complete only after `saves` has returned True."""
        return {"next_group": self._next[0], "buffer": self.buffer.counts}

    def restore(self, version: int, state: Mapping[str, Any]) -> None:
        """Continue from a `state` that was taken at `version`."""
        self.version = self.pushed = version
        self._next = (int(state["next_group"]), 0)
        self.buffer.restore(state["buffer"])
