"""Task services play rollouts: their contract, and the service for the families of this package (§4.1)."""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.errors import EnvironmentTimeout, Glm5Error, RequestFailed
from glm5.obs.logs import get_logger
from glm5.records import Completion, Message, Outcome, SamplingParams, Turn
from glm5.rollout.engines import UNSEEN, EnginePool
from glm5.rollout.history import Node
from glm5.rollout.orchestrator import Rollout
from glm5.rollout.store import Store
from glm5.rollout.store_reader import StoreError
from glm5.seeds import derive_seed
from glm5.serve.errors import ApiError
from glm5.tasks.contract import Problem
from glm5.tasks.env_threads import EnvThreadPool
from glm5.tasks.episode import open_episode_async

log = get_logger("rollout")

RETRY_SECONDS, TELL_SECONDS = 1.0, 30.0
"""Pause before a failed write to the store is repeated, and between two messages about it."""
_told = -TELL_SECONDS


@dataclass
class Job:
    """One running rollout. `stage` is what it waits for now: "start", "model", "environment", "store" or a word of its
    service. `oldest` is the weight version of its first sampled token."""

    rollout: Rollout
    session: str
    stage: str = "start"
    since: float = field(default_factory=time.monotonic)
    oldest: int | None = None
    past: list[tuple[str, float]] = field(default_factory=list)
    """Earlier stages with their durations in seconds."""
    row: int = 0
    """Its row in the timeline."""
    task: asyncio.Task[None] | None = None
    stopped: str = ""
    """Why the task was cancelled; empty for the end of the process."""
    stale_at: int | None = None
    """The weight version at whose push the rollout was too old and stopped."""

    def enter(self, stage: str) -> None:
        """Wait for something else from now on."""
        now = time.monotonic()
        self.past.append((self.stage, now - self.since))
        self.stage, self.since = stage, now


@dataclass(frozen=True)
class Result:
    """How a rollout ended. With `Outcome.ENV_ERROR` there is no reward, and `detail` has `cause` and `error`."""

    problem: str
    domain: str
    outcome: Outcome
    reward: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)


class LostRollout(Glm5Error):
    """A task service has lost a rollout; the rollout may start again."""


class TaskService(ABC):
    """Plays the rollouts of one or several task families."""

    capacity: int | None = None
    """Maximum number of its rollouts in flight; None: no limit."""
    offered: bool = True
    """Whether its families can be played now, if perhaps not at once."""
    options: Mapping[str, Any] = MappingProxyType({})
    """`SessionOptions` of its sessions; only sessions of agents use them."""

    def oldest(self, job: Job) -> int | None:
        """The weight version of a rollout's first token; None before it."""
        return job.oldest

    def stage(self, job: Job) -> str:
        """What a rollout does now (see `waits.CAUSES`)."""
        return job.stage

    def check_offered(self) -> None:  # noqa: B027
        """Log it if its families have not been offered for long. Called again and again."""

    @abstractmethod
    async def run(self, job: Job) -> Result:
        """Play a rollout to its end. Its turns are in the store before this returns. A cancelled run must stop what it
        started. Raises LostRollout for one that must start again."""


class FamilyService(TaskService):
    """Plays this package's task families in threads of this process, token-in/token-out without a chat API.

    `problem_of(family, place)` returns a problem and the options of its `Episode`. `params` are the sampling parameters
    of a turn; its `seed` is the seed of the run.
    """

    def __init__(
        self,
        problem_of: Callable[[int, int], tuple[Problem, Mapping[str, Any]]],
        tokenizer: Tokenizer,
        params: SamplingParams,
        pool: EnginePool,
        store: Store,
        threads: EnvThreadPool,
    ) -> None:
        self._problem_of, self._tokenizer, self._params = problem_of, tokenizer, params
        self._pool, self._store, self._threads = pool, store, threads

    async def run(self, job: Job) -> Result:
        rollout = job.rollout
        problem, options = self._problem_of(rollout.family, rollout.place)
        job.enter("environment")
        episode = await open_episode_async(problem, self._tokenizer, self._threads, group=rollout.group, **options)
        last: Node | None = None
        read = 0  # messages of the episode that are stored
        while (context := episode.pending()) is not None:
            job.enter("model")
            completion = await self._generate(job, context, len(episode.turns), episode.room)
            if job.oldest is None and completion.weight_versions:
                job.oldest = completion.weight_versions[0]
            told = len(episode.messages)
            job.enter("environment")
            try:
                await self._threads.result(self._threads.submit(episode.accept, completion))
            except EnvironmentTimeout as error:
                episode.fail(error)
            if completion.finish_reason not in ("abort", "error"):
                job.enter("store")
                said = (*episode.messages[told : told + 1], Message("assistant"))[0]
                last = await self._keep(job, episode.turns, last, (*episode.messages[read:told], said))
                read = told + 1
        trajectory = episode.trajectory()
        detail = {name: value for name, value in trajectory.detail.items() if name != "text"}  # the store has the ids
        return Result(problem.id, problem.domain, trajectory.outcome, trajectory.reward, detail)

    async def _generate(self, job: Job, context: list[int], turn: int, room: int) -> Completion:
        seed = derive_seed(self._params.seed or 0, "turn", job.rollout.group, job.rollout.member, turn)
        params = replace(self._params, max_tokens=min(self._params.max_tokens, room), seed=seed)
        found = Completion(finish_reason="error")
        try:
            async for delta in self._pool.generate(context, params, job.session, every=UNSEEN):
                found.token_ids += delta.token_ids
                found.logprobs += delta.logprobs
                found.weight_versions += delta.weight_versions
                found.finish_reason = delta.finish_reason or found.finish_reason
        except ApiError as error:
            log.warning("%s: no engine answered: %s", job.session, error)
            found.finish_reason = "abort"
        except RequestFailed as error:
            log.warning("%s: an answer cannot be used: %s", job.session, error)
            found.finish_reason = "error"
        return found

    async def _keep(self, job: Job, turns: Sequence[Turn], last: Node | None, messages: Sequence[Message]) -> Node:
        """Store the last of an episode's turns, which continues `last`. `messages` are the new ones, with the answer at
        the end."""
        turn = turns[-1]
        known = 0 if last is None else len(turns[-2].context_ids) + len(turns[-2].output_ids)
        node = Node(
            last,
            array("i", turn.context_ids[known:]),
            array("i", turn.output_ids),
            array("f", turn.logprobs),
            array("i", turn.weight_versions),
            tuple(messages[:-1]),
            messages[-1],
            b"",
        )
        digest = hashlib.blake2b(f"{job.session} {len(turns)}".encode(), digest_size=16).digest()
        asked = {"temperature": self._params.temperature, "max_tokens": self._params.max_tokens}
        await insist(lambda: self._store.add_turn(job.session, node, turn.finish_reason, digest, asked))
        return node


async def insist(write: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a write to the store until the disk takes it: what was sampled must not be lost."""
    global _told
    while True:
        try:
            return await write()
        except StoreError as error:
            if time.monotonic() > _told + TELL_SECONDS:
                _told = time.monotonic()
                log.error("%s It is tried again until there is room.", error)
            await asyncio.sleep(RETRY_SECONDS)
