"""Plays `AgentProblem`s: an agent that somebody else wrote runs in a thread and reaches the policy by a session."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from glm5.errors import EnvironmentTimeout, text_of
from glm5.obs.logs import get_logger
from glm5.records import Outcome, StepResult
from glm5.rollout.gateway import Gateway
from glm5.rollout.services import Job, LostRollout, Result, TaskService
from glm5.rollout.session import Session, SessionOptions, key_of
from glm5.tasks.contract import AgentProblem
from glm5.tasks.env_threads import EnvThreadPool
from glm5.tasks.episode import CAUSES, MOST_ERROR_TEXT, play_agent

log = get_logger("rollout")


class SessionTaskService(TaskService):
    """A task service whose agents ask the gateway, each in a session of the name of its job."""

    _gateway: Gateway

    def oldest(self, job: Job) -> int | None:
        session = self._gateway.loaded(job.session)
        first = session.history.nodes[0] if session is not None and session.history.nodes else None
        return first.versions[0] if first is not None and first.versions else None

    def stage(self, job: Job) -> str:
        """ "model" for an agent that waits for the policy."""
        session = self._gateway.loaded(job.session) if job.stage == "agent" else None
        return "model" if session is not None and session.calls else job.stage


class AgentService(SessionTaskService):
    """Runs agents in threads of this process; each gets a session of `gateway` with `limits`.

    `problem_of(family, place)` returns an `AgentProblem`; `base_url()` is the gateway's own URL. An agent that takes
    longer than the limit of `threads` has failed: reward 0.
    """

    def __init__(
        self,
        problem_of: Callable[[int, int], tuple[Any, Mapping[str, Any]]],
        gateway: Gateway,
        limits: SessionOptions,
        threads: EnvThreadPool,
        base_url: Callable[[], str],
    ) -> None:
        self._problem_of, self._gateway, self._threads, self._base_url = problem_of, gateway, threads, base_url
        self.options = asdict(limits)

    async def run(self, job: Job) -> Result:
        problem: AgentProblem = self._problem_of(job.rollout.family, job.rollout.place)[0]
        url, key = f"{self._base_url()}/sessions/{job.session}/v1", key_of(self._gateway.admin_key, job.session)
        session = await self._gateway.session(job.session)
        return await ended(self._gateway, session, job, problem.id, problem.domain, self._play(job, problem, url, key))

    async def _play(self, job: Job, problem: AgentProblem, url: str, key: str) -> StepResult:
        job.enter("agent")
        found: StepResult = await self._threads.result(self._threads.submit(play_agent, problem, url, key))
        return found


async def ended(
    gateway: Gateway, session: Session, job: Job, problem: str, domain: str, play: Awaitable[StepResult]
) -> Result:
    """The result of a session's rollout, once `play` returns or raises; no request of the session is open then.

    An agent that fails after the policy reached a limit of the session, or that takes too long, gets reward 0. Any
    other failure is one of the environment. So is a session in which the policy was never asked, and one that ended
    without success while a request of the agent had no answer because of our engines.
    """
    try:
        step = await play
    except EnvironmentTimeout as error:
        step = StepResult(done=True, outcome=Outcome.TRUNCATED, detail={"cut": "time", "error": text_of(error)})
    except LostRollout:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {text_of(error)}"[:MOST_ERROR_TEXT]
        if session.limited or any(finish == "length" for _, finish in session.stored.values()):
            step = StepResult(done=True, outcome=Outcome.TRUNCATED, detail={"cut": "limit", "error": text})
        else:
            log.warning("The agent of %s failed.", job.session, exc_info=error)
            cause = CAUSES.get(type(error), "crash")
            step = StepResult(done=True, outcome=Outcome.ENV_ERROR, detail={"cause": cause, "error": text})
    finally:
        job.enter("store")
        session.row = replace(session.row, closed=time.time())  # a late request of the agent is refused
        await session.cancel()
    if (session.failing or session.lost) and step.outcome not in (Outcome.SOLVED, Outcome.ENV_ERROR):
        detail = {**step.detail, "cause": "engine", "error": "a request of the agent could not be answered"}
        step = StepResult(done=True, outcome=Outcome.ENV_ERROR, detail=detail)
    if not session.history.nodes and step.outcome is not Outcome.ENV_ERROR:
        detail = {"cause": "empty", "error": "the agent never asked the policy"}
        step = StepResult(done=True, outcome=Outcome.ENV_ERROR, detail=detail)
    return Result(problem, domain, step.outcome, step.reward, step.detail)
