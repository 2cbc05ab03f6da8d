"""Asks a rollout process regularly what it does, in a thread, for the view of a live run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from glm5.rl.drivers.rollout_client import RolloutClient

WATCH_SECONDS, ANSWER_SECONDS = 1.0, 5.0


class StatusWatch:
    """A context manager: calls `take` with a status every `seconds`, or with None if the process does not answer."""

    def __init__(
        self, client: RolloutClient, take: Callable[[Mapping[str, Any] | None], None], seconds: float = WATCH_SECONDS
    ) -> None:
        self._client, self._take, self._seconds = client, take, seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="glm5-status", daemon=True)

    def __enter__(self) -> StatusWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(ANSWER_SECONDS)

    def _run(self) -> None:
        with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS) as http:
            while not self._end.is_set():
                self._take(self._ask(http))
                self._end.wait(self._seconds)

    def _ask(self, http: httpx.Client) -> Mapping[str, Any] | None:
        url, key = self._client.address  # changes if another process takes over
        try:
            answer = http.get(f"{url}/trainer/status", headers={"authorization": f"Bearer {key}"})
            found = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None
        return found if isinstance(found, dict) else None
