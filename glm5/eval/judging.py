"""Runs the jobs of a judge: how many answers are judged at a time, and when a judge is given up."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol, TypeVar

from glm5.agents.connections import AskingThreads
from glm5.agents.endpoint import Endpoint, EndpointError
from glm5.agents.wire import OnDelta

MOST_FAILED = 8
"""Answers in a row without a verdict that end the evaluation."""
Name = TypeVar("Name")
Found = TypeVar("Found")
FoundByJob = TypeVar("FoundByJob", covariant=True)


class Job(Protocol[FoundByJob]):
    """Gives a verdict, or says why there is none."""

    def __call__(self, told: OnDelta) -> FoundByJob | str: ...


def run_jobs(
    jobs: Iterable[tuple[Name, Job[Found]]], concurrency: int, endpoint: Endpoint | None = None
) -> Iterator[tuple[Name, Found | str]]:
    """The results of jobs, `concurrency` at a time. Raises EndpointError after `MOST_FAILED` in a row without a
    verdict; then, and if not all is consumed, the endpoint is closed, so that no request goes on."""
    left, stopped = iter(jobs), threading.Event()
    running: dict[Future[Found | str], Name] = {}
    failed = 0

    def told(kind: str, text: str) -> None:
        if stopped.is_set():
            raise EndpointError("The evaluation was stopped.")

    with AskingThreads(concurrency, "judge", endpoint) as threads:
        try:
            while True:
                while len(running) < concurrency and (following := next(left, None)) is not None:
                    running[threads.submit(following[1], told)] = following[0]
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name, found = running.pop(future), future.result()
                    yield name, found
                    failed = failed + 1 if isinstance(found, str) else 0
                    if failed >= MOST_FAILED:
                        raise EndpointError(f"The judge gave no verdict {failed} times in a row; the last: {found}")
        finally:
            stopped.set()
