"""Drivers: how to run a language's tests in a room and read the outcome of every test.

A driver needs `run` and `name`; other languages are added by `register_driver`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from glm5.errors import GradingError
from glm5.sandbox.container import open_environment
from glm5.sandbox.environment import ExecResult, NamespaceEnvironment, RoomFileError, RoomLimits
from glm5.sandbox.programs import Room
from glm5.sandbox.room import interpreter, python_packages
from glm5.tasks.swe.candidate import Repository
from glm5.tasks.swe.in_room import grade

APP, TESTS, LOGS = "/app", "/tests", "/logs/verifier"
IN_ROOM = Path(__file__).parent / "in_room"
LIMITS = RoomLimits(memory_mb=2048, processes=128, disk_mb=256, cpu_s=600, output_kb=16 * 1024)
MOST_CACHE = 128 << 20  # bytes
WRITTEN = "/logs/bytecode"  # where the run that fills `Repository.bytecode` writes it
PYTHON = (interpreter(), "-I", "-S", "-B")
ENVIRONMENT = {"LANG": "C.UTF-8", "TZ": "UTC", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class TestRun:
    """One run of test files. `outcomes`: test id to passed, failed, error or skipped; ids that were collected and not
    reported are missing. `messages` are exceptions of the tests that did not pass, `seconds` the time of each test;
    `stopped` is None, "exit" for a run that ended early, or the limit that ended it. `calls`, if traced: test file to
    the "path:function" that it calls, "" for what an import calls. `log` is the end of
    what the runner printed."""

    __test__ = False

    collected: tuple[str, ...]
    outcomes: Mapping[str, str]
    messages: Mapping[str, str]
    seconds: Mapping[str, float]
    wall_s: float
    stopped: str | None
    calls: Mapping[str, Sequence[str]] | None = None
    log: str = ""

    @property
    def passed(self) -> set[str]:
        return {name for name, outcome in self.outcomes.items() if outcome == "passed"}


class Driver(Protocol):
    """Runs tests of one language. The report may be forged by the code under test, so it serves to build tasks from
    code that is not the agent's; agents are graded by `grading.grade`."""

    @property
    def name(self) -> str: ...

    def run(
        self,
        repository: Repository,
        changes: Mapping[str, str | None],
        files: Sequence[str],
        timeout_s: float,
        select: Collection[str] | None = None,
    ) -> TestRun:
        """Run the tests of `files`, or those of them that `select` names, with a candidate's changes."""

    def calls(
        self, repository: Repository, timeout_s: float, select: Collection[str] | None = None
    ) -> Mapping[str, Sequence[str]] | None:
        """Which functions the fixed state's tests call; see `TestRun.calls`. None if the driver cannot tell."""


DRIVERS: dict[str, Driver] = {}


def register_driver(driver: Driver) -> Driver:
    DRIVERS[driver.name] = driver
    return driver


def open_room(root: Path, site: Sequence[str], limits: RoomLimits = LIMITS) -> NamespaceEnvironment:
    """A room with a copy-on-write view of a repository at /app and the test dependencies read-only. The machine's
    Python packages are hidden, for one of them may be the repository's, with the fix in it."""
    shown = [*site, IN_ROOM]
    return open_environment({APP: root}, read_only=shown, writable=["/logs"], hidden=python_packages(), limits=limits)


def change(room: Room, changes: Mapping[str, str | None], root: str = APP) -> None:
    """Write a candidate's files in a room."""
    room.upload({f"{root}/{path}": text.encode() for path, text in changes.items() if text is not None})
    absent = [f"{root}/{path}" for path, text in changes.items() if text is None]
    if absent:
        room.exec(["/bin/rm", "-f", "--", *absent])


def spec_of(repository: Repository) -> dict[str, Any]:
    """The part of `tests.json` that says how tests run."""
    if repository.framework not in ("pytest", "unittest"):
        more: dict[str, Any] = {"args": list(repository.args), "runner": "suite.py", "language": repository.language}
        more |= {"build": dict(repository.build)} if repository.build else {}
        return {**_common(repository), **more}
    arguments = ["addopts=", "filterwarnings=", "xfail_strict=false", "required_plugins=", "testpaths="]
    options = [part for option in arguments for part in ("-o", option)] if repository.framework == "pytest" else []
    return {**_common(repository), "args": options, "runner": "runner.py", "language": "python"}


def _common(repository: Repository) -> dict[str, Any]:
    return {
        "framework": repository.framework, "root": APP, "paths": list(repository.paths),
        "site": list(repository.site), "reload": list(repository.reload),
    }  # fmt: skip


def read_run(done: ExecResult, nonce: str) -> TestRun:
    """Read the runner's report."""
    events = grade.parse(done.stdout, nonce)
    collected = [name for event in events for name in event.get("collected", [])]
    messages: dict[str, str] = {}
    times: dict[str, float] = {}
    for event in events:
        if "id" in event:
            times[event["id"]] = times.get(event["id"], 0.0) + event["seconds"]
            if event["message"]:
                messages.setdefault(event["id"], event["message"])
    ended = any("end" in event for event in events)
    stopped = done.stopped or (None if ended and done.exit_code in (0, 1, 2) else "exit")
    log = done.stderr[-500:].decode(errors="replace")
    calls = next((event["calls"] for event in events if "calls" in event), None)
    return TestRun(tuple(collected), grade.outcomes(events), messages, times, done.seconds, stopped, calls, log)


def fill_cache(repository: Repository) -> dict[str, bytes]:
    """Build a repository's fixed state in a room; the files of ccache's folder by relative path."""
    cache = "/tmp/ccache"
    spec, run = {**spec_of(repository), "site": [cache]}, {"files": list(repository.test_files), "select": None}
    with open_room(repository.root, ()) as room:
        request = json.dumps(grade.request(spec, run, None, secrets.token_hex(16))).encode()
        room.exec([*PYTHON, str(IN_ROOM / spec["runner"])], cwd=APP, env=ENVIRONMENT, timeout_s=600, stdin=request)
        kept = f"{APP}/.ccache"
        room.exec(f"mkdir -p {cache} && cp -r {cache} {kept}")
        return room.download_tree(kept, MOST_CACHE)


def keep_bytecode(room: Room, folder: Path) -> None:
    """Store the byte code that a run of the fixed state wrote, unless another thread was faster. Later runs of the same
    repository load it instead of compiling again; Python compiles again what a candidate changes, for its time of
    change is another."""
    part = folder.with_name(f"{folder.name}.part{os.getpid()}.{threading.get_ident()}")
    try:
        part.mkdir(parents=True)
        for path, data in room.download_tree(WRITTEN, MOST_CACHE).items():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).write_bytes(data)
        part.replace(folder)
    except (OSError, RoomFileError):  # none was written, or too much
        shutil.rmtree(part, ignore_errors=True)


@dataclass(frozen=True)
class RoomDriver:
    """Our own runners, shown read-only: `in_room/runner.py` for pytest and unittest, `in_room/suite.py` for the
    frameworks of other languages."""

    name: str

    def run(
        self,
        repository: Repository,
        changes: Mapping[str, str | None],
        files: Sequence[str],
        timeout_s: float,
        select: Collection[str] | None = None,
        *,
        trace: bool = False,
    ) -> TestRun:
        nonce = secrets.token_hex(16)
        spec = spec_of(repository)
        run = {"files": list(files), "select": None if select is None else sorted(select)}
        kept = Path(repository.bytecode) if repository.bytecode else None
        known = kept is not None and kept.is_dir()
        fills = kept is not None and not known and not changes
        python = [*PYTHON, *(["-X", f"pycache_prefix={kept if known else WRITTEN}"] if known or fills else [])]
        if fills:
            python.remove("-B")
        with open_room(repository.root, [*repository.site, *([str(kept)] if known else [])]) as room:
            change(room, changes)
            request = json.dumps({**grade.request(spec, run, None, nonce), "trace": trace}).encode()
            command = [*python, str(IN_ROOM / spec["runner"])]
            done = room.exec(command, cwd=APP, env=ENVIRONMENT, timeout_s=timeout_s, stdin=request)
            if kept is not None and fills and done.stopped is None:
                keep_bytecode(room, kept)
        if done.exit_code == 127 and done.stopped is None:
            raise GradingError(f"the test runner could not be started: {done.stderr[-300:].decode(errors='replace')}")
        return read_run(done, nonce)

    def calls(
        self, repository: Repository, timeout_s: float, select: Collection[str] | None = None
    ) -> Mapping[str, Sequence[str]] | None:
        if self.name != "python":
            return None
        run = self.run(repository, {}, repository.test_files, timeout_s, select, trace=True)
        return None if run.stopped else run.calls


for _language in ("python", "javascript", "typescript", "go", "php", "ruby", "c", "cpp", "rust", "java"):
    register_driver(RoomDriver(_language))
