"""The learner's side of a rollout process, without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from glm5.errors import RolloutError
from glm5.rl.drivers import rollout_client
from glm5.rl.drivers.rollout_client import Results, RolloutClient
from glm5.rl.rollout_process import RolloutJob
from glm5.serve.connection import FULL


class Alive:
    """A process that never ends."""

    returncode = None

    def poll(self) -> None:
        return None


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RolloutClient]:
    monkeypatch.setattr(rollout_client, "BUSY_SECONDS", 0.0)

    def make(*answers: httpx.Response | Exception) -> RolloutClient:
        left = list(answers)

        def answer(request: httpx.Request) -> httpx.Response:
            found = left.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        job = RolloutJob({}, {}, 0, "w", 3, 3, "s", 0, "", "")
        made = RolloutClient(job, 1)
        process: Any = Alive()
        made.process, made._http = process, httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x")
        return made

    return make


def full() -> httpx.Response:
    return httpx.Response(int(FULL.split()[1]), content=b"")


def test_a_busy_process_is_asked_again(client: Callable[..., RolloutClient]) -> None:
    busy = httpx.Response(429, json={"error": {"message": "at its limit"}})
    told = {"results": [], "waits": {"engine": 0.5}, "engines": {"busy": 2.0}}
    assert client(full(), busy, httpx.Response(200, json=told)).results(0, 0.0) == Results(**told)
    with pytest.raises(RolloutError, match="status 408 without JSON"):
        client(httpx.Response(408)).results(0, 0.0)


def test_what_a_new_process_is_told(client: Callable[..., RolloutClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last result that arrived, and an update only once it is stored."""
    one = client(
        httpx.Response(200, json={"results": [{"id": 7}, {"id": 9}], "waits": {}, "engines": {}}),
        httpx.Response(200, json={"results": [], "waits": {}, "engines": {}}),
        httpx.ReadError("gone"),
        httpx.Response(200, json={"engines": {}}),
    )
    one.results(0, 0.0)
    one.results(9, 0.0)
    assert one.job.taken == 9
    told: list[int] = []
    monkeypatch.setattr(RolloutClient, "_restart", lambda self, why: told.append(self.job.version))
    one.updated(4, [], [], [])
    assert told == [3] and one.job.version == 4
