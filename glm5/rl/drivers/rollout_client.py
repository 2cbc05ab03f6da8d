"""The learner's side of a rollout process: starts it, talks to it, starts it again if it ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from glm5.errors import RolloutError
from glm5.obs.logs import get_logger
from glm5.process import python_path
from glm5.rl.rollout_process import RolloutJob
from glm5.rollout.weight_push import Parts

_log = get_logger(__name__)

START_SECONDS = 900.0
ANSWER_SECONDS, PUSH_SECONDS = 120.0, 1800.0
"""Longest time for one answer, and for a push of weights."""
STOP_SECONDS = 10.0
BUSY_SECONDS = 0.5
"""Pause after an answer that the process has too many requests."""
MOST_STARTS = 5
"""The run ends when the process has ended this often without a new result."""


_RANK = {f"{kind}{what}" for kind in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")}


def _of_torchrun(name: str) -> bool:
    """Whether torchrun set this environment variable for a rank: its place in the job, and one thread unless the user
    said otherwise. The rollout process and its engines are no ranks."""
    own = name in _RANK or name in ("MASTER_ADDR", "MASTER_PORT", "ROLE_NAME", "OMP_NUM_THREADS")
    return "TORCHELASTIC_RUN_ID" in os.environ and (own or name.startswith("TORCHELASTIC_"))


class _Ended(Exception):
    """The process ended before it was ready, without a reason."""


@dataclass(frozen=True)
class Results:
    """Finished rollouts, what the rollouts in flight waited for until the first of them came (seconds by cause), and
    what the engines have done so far (seconds, see `waits.Waits`)."""

    results: list[dict[str, Any]]
    waits: dict[str, float]
    engines: dict[str, float]


@dataclass
class RolloutClient:
    """A context manager around one rollout process. Every request may be sent twice: once to a process that died before
    it answered, and again to the next one."""

    job: RolloutJob
    threads: int
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    restart_seconds: float = 0.0
    address: tuple[str, str] = ("", "")
    """URL of the process, and its admin key."""
    _http: httpx.Client | None = None
    _ends: int = 0  # of the process, since the last result

    def __enter__(self) -> RolloutClient:
        try:
            self._start()
        except _Ended as error:
            self._restart(str(error))
        return self

    def __exit__(self, *_: object) -> None:
        self._close_http()
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            _log.warning("The rollout process did not stop within %g seconds; it is killed.", STOP_SECONDS)
        self._kill()

    def results(self, after: int, seconds: float) -> Results:
        """Finished rollouts with ids above `after`; waits up to `seconds` for the first one."""
        found = Results(**self._call("GET", f"/trainer/results?after={after}&seconds={seconds}"))
        if found.results:
            self.job = replace(self.job, taken=int(found.results[-1]["id"]))
            self._ends = 0
        return found

    def allow(self, groups: int) -> None:
        """Set the maximum number of groups started since the beginning of the run."""
        self.job = replace(self.job, allowed=groups)
        self._call("POST", "/trainer/allow", {"groups": groups})

    def updated(self, version: int, sessions: list[str], trained: list[int], dropped: list[int]) -> dict[str, float]:
        """Report an update; it is in the store when this returns. Returns the seconds of the engines when it arrived
        (see `Results`)."""
        body = {"version": version, "sessions": sessions, "trained": trained, "dropped": dropped}
        answer = self._call("POST", "/trainer/updated", body, PUSH_SECONDS)  # it may wait for room on the disk
        self.job = replace(self.job, version=version)
        engines: dict[str, float] = answer["engines"]
        return engines

    def weights(self, version: int, folder: Path, mode: str, parts: Parts = ()) -> float:
        """Have all engines load weights, from a folder or in parts from this process; returns the seconds."""
        self.job = replace(self.job, folder=str(folder), weights=version, parts=parts)
        body = {"version": version, "folder": str(folder), "mode": mode, "parts": parts}
        seconds: float = self._call("POST", "/trainer/weights", body, PUSH_SECONDS)["seconds"]
        return seconds

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float = ANSWER_SECONDS
    ) -> dict[str, Any]:
        """The answer to a request. A process that takes longer than `seconds` hangs, and is replaced."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            assert self._http is not None and self.process is not None
            if self.process.poll() is not None:  # another process may listen at its address now
                self._restart(f"it ended with code {self.process.returncode}")
                continue
            try:
                answer = self._http.request(method, path, json=body, timeout=httpx.Timeout(seconds, connect=5.0))
            except httpx.TransportError as error:
                self._restart(f"{type(error).__name__} {error}")
                continue
            if answer.status_code in (429, 503) and time.monotonic() < deadline:  # agents have all its attention
                time.sleep(BUSY_SECONDS)
                continue
            try:
                found: dict[str, Any] = answer.json()
            except ValueError:
                found = {"error": {"message": f"status {answer.status_code} without JSON"}}
            if answer.status_code != 200:
                said = found.get("error")
                text = said.get("message", "") if isinstance(said, dict) else str(found)
                raise RolloutError(f"The rollout process refused {path}: {text:.500}")
            return found

    def _restart(self, why: str) -> None:
        """Start the process until it answers. The old one is killed: it may hang; what it stored is not lost."""
        began = time.monotonic()
        while True:
            self._kill()
            self._ends += 1
            if self._ends > MOST_STARTS:
                raise RolloutError(
                    f"The rollout process ended {self._ends} times without a new result ({why}); log.txt has its "
                    "messages."
                )
            _log.warning("The rollout process was lost (%s); a new one is started.", why)
            try:
                self._start()
                break
            except _Ended as error:
                why = str(error)
        self.restarts += 1
        self.restart_seconds += time.monotonic() - began

    def _start(self) -> None:
        inherited = {name: value for name, value in os.environ.items() if not _of_torchrun(name)}
        environment = {
            "OMP_NUM_THREADS": str(self.threads), **inherited, "PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "glm5.rl.rollout_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the learner, which ends this process in order
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(self.job.to_json().encode() + b"\n")
                self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], START_SECONDS)[0]:
                raise _Ended(f"it was not ready within {START_SECONDS:g} seconds")
            line = self.process.stdout.readline()
            if not line:
                raise _Ended(f"it ended with code {self.process.wait()} before it was ready")
            news = json.loads(line)
            if "error" in news:
                raise RolloutError(f"The rollout process did not start: {news['error']}")
        except BaseException:
            self._kill()
            raise
        self.job = replace(self.job, port=int(news["port"]))
        file = news["admin_key_file"]
        key = Path(file).read_text().strip() if file else os.environ["GLM5_ADMIN_KEY"]
        self.address = (news["url"], key)
        self._close_http()
        self._http = httpx.Client(
            base_url=news["url"],
            headers={"authorization": f"Bearer {key}"},
            trust_env=False,
        )

    def _close_http(self) -> None:
        if self._http is not None:
            self._http.close()

    def _kill(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
