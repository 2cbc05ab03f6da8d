"""Plays the tasks of a family "agent": each agent, and each grading command, runs in a room of the sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from glm5.errors import EnvironmentTimeout, GradingError
from glm5.obs.logs import get_logger
from glm5.records import Outcome, StepResult
from glm5.rollout.agent_service import SessionTaskService, ended
from glm5.rollout.gateway import Gateway
from glm5.rollout.services import Job, Result
from glm5.rollout.session import Session, SessionOptions, key_of
from glm5.sandbox.agent_room import mechanism
from glm5.sandbox.agent_workers import IMPORT_S
from glm5.sandbox.cancel import CURRENT, CancelToken
from glm5.sandbox.clock import MOST_STRETCH, START_S
from glm5.tasks.agents import AgentProgram, AgentTask
from glm5.tasks.env_threads import EnvThreadPool
from glm5.tasks.episode import MOST_ERROR_TEXT, checked

log = get_logger("rollout")


class RoomService(SessionTaskService):
    """The agents of one `program`; each gets a session of `gateway` with `limits`, which its room reaches by the Unix
    socket `path` alone. A context manager.

    Whatever the agent does within its own limits is its result; at a limit it gets reward 0. If the room, the grading
    or the engines failed, there is no reward. Raises GradingError if this machine cannot build rooms, or not
    this program's, and ConfigError if they lack the program.
    """

    def __init__(
        self,
        problem_of: Callable[[int, int], tuple[Any, Mapping[str, Any]]],
        program: AgentProgram,
        gateway: Gateway,
        limits: SessionOptions,
        path: str,
    ) -> None:
        mechanism()
        self._workers = program.workers(path)
        program.check(self._workers)
        self._problem_of, self._gateway, self._path = problem_of, gateway, path
        self.capacity, self.options = program.capacity, asdict(limits)
        longest = (1 + MOST_STRETCH) * max(program.limits.wall_s, program.grade_limits.wall_s)
        self._threads = EnvThreadPool(program.capacity, longest + IMPORT_S + 2 * START_S)
        self._tokens = set[CancelToken]()  # of what runs

    def close(self) -> None:
        """End all rooms, also those at work."""
        for token in self._tokens:
            token.cancel()
        self._threads.close()
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> RoomService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def run(self, job: Job) -> Result:
        task: AgentTask = self._problem_of(job.rollout.family, job.rollout.place)[0]
        session = await self._gateway.session(job.session)
        return await ended(self._gateway, session, job, task.id, task.domain, self._play(job, session, task))

    async def _play(self, job: Job, session: Session, task: AgentTask) -> StepResult:
        key = key_of(self._gateway.admin_key, job.session)
        job.enter("agent")
        try:
            run = await self._in_thread(task.play, self._path, f"/sessions/{job.session}/v1", key, self._workers)
            waiting = any(not call.deltas for call in session.calls.values())
            if waiting and run.killed_reason == "wall":
                return _failed("engine", "the agent's last request could not be answered")
            job.enter("judge")
            return checked(await self._in_thread(task.grade, run))
        except (GradingError, EnvironmentTimeout) as error:
            log.warning("%s: there is no verdict on %s: %s", job.session, task.id, error)
            return _failed("grading", str(error))

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of work in rooms. They end at once if this is cancelled."""
        token = CancelToken()
        self._tokens.add(token)
        future = self._threads.submit(_with, token, work, *arguments)
        try:
            return await self._threads.result(future)
        finally:
            token.cancel()
            self._tokens.discard(token)
            if future.cancelled():  # it never began
                token.close()


def _with(token: CancelToken, work: Callable[..., Any], *arguments: Any) -> Any:
    before = CURRENT.set(token)
    try:
        return work(*arguments)
    finally:
        CURRENT.reset(before)
        token.close()


def _failed(cause: str, error: str) -> StepResult:
    detail = {"cause": cause, "error": error[:MOST_ERROR_TEXT]}
    return StepResult(done=True, outcome=Outcome.ENV_ERROR, detail=detail)
