"""`harbor run`, unmodified and in an environment of its own without torch, with our rooms as its environment."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glm5.tasks.swe.candidate import Candidate
from glm5.tasks.swe.driver import DRIVERS
from glm5.tasks.swe.folder import SITE
from glm5.tasks.swe.validate import Rules, baseline, validate
from tests.external.environments import interpreter, newer_python
from tests.rooms import needs_rooms
from tests.tasks.harbor.tasks import TOML, make_task
from tests.tasks.swe.tiny import CLIP, site, tiny

pytestmark = [pytest.mark.slow, needs_rooms]
ROOT = Path(__file__).parents[2]
AGENTS = Path(__file__).parent / "agents"
ROOMS = "glm5.sandbox.harbor_environment:RoomEnvironment"


@dataclass
class Harbor:
    """Harbor's command, with `tmp` as its temporary folder and `sleep_s` as a number that no other process has."""

    python: Path
    folder: Path
    sleep_s: int

    def run(self, path: Path, agent: str, *more: str) -> list[dict[str, Any]]:
        """The results of the trials of a job. Fails if anything of them is left."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "TMPDIR": str(self.folder / "tmp")}
        env |= {"HARBOR_TELEMETRY": "0", "PYTHONPATH": f"{ROOT}:{AGENTS}", "PYTHONDONTWRITEBYTECODE": "1"}
        env["SLEEP_S"] = str(self.sleep_s)
        before, name = mounts(), f"job-{random.getrandbits(32):x}"
        command = [self.python.with_name("harbor"), "run", "--path", path, "--env", ROOMS, "--agent", agent, *more]
        command += ["--jobs-dir", self.folder / "jobs", "--job-name", name, "--yes", "--quiet"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert mounts() <= before and not list((self.folder / "tmp").iterdir())
        deadline = time.monotonic() + 10  # the rooms' keepers end when Harbor is gone
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        return [json.loads(path.read_bytes()) for path in sorted((self.folder / "jobs" / name).glob("*/result.json"))]

    def processes(self) -> list[bytes]:
        """Processes that Harbor or a room has left."""
        marks, found = (f"HOME={self.folder}".encode(), b"sleep\0%d" % self.sleep_s), list[bytes]()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                texts = [(process / name).read_bytes() for name in ("environ", "cmdline")]
            except OSError:
                continue
            if any(mark in text.split(b"\0") or text.startswith(mark) for mark in marks for text in texts):
                found.append(texts[1])
        return found


def mounts() -> set[str]:
    """Mounts in the places where rooms are built, and below the test's folders."""
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {place for place in places if place.startswith(("/mnt", "/media", "/srv", "/sys", "/tmp"))}


def rewards(results: list[dict[str, Any]]) -> list[float]:
    for result in results:
        assert result["exception_info"] is None, result["exception_info"]
    return [result["verifier_result"]["rewards"]["reward"] for result in results]


@pytest.fixture(scope="module")
def harbor(tmp_path_factory: pytest.TempPathFactory) -> Harbor:
    python = interpreter("harbor", python=newer_python((3, 12)))
    missing = "import importlib.util, harbor; print(importlib.util.find_spec('torch'))"
    found = subprocess.run([python, "-c", missing], check=True, capture_output=True, text=True, timeout=120)
    assert found.stdout == "None\n"
    return Harbor(python, tmp_path_factory.mktemp("harbor"), random.randrange(10**6, 10**8))


def test_terminal_tasks(harbor: Harbor, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "glm5", "task", "build", "terminal", "--out", str(tmp_path), "--count", "3"]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    assert rewards(harbor.run(tmp_path, "oracle")) == [1.0] * 3
    assert rewards(harbor.run(tmp_path, "nop")) == [0.0] * 3


def test_an_agent_at_its_time_limit_is_ended_and_judged(harbor: Harbor, tmp_path: Path) -> None:
    limited = TOML.replace("[agent]\ntimeout_sec = 20", "[agent]\ntimeout_sec = 2")
    (result,) = harbor.run(make_task(tmp_path, task_dot_toml=limited), "harbor_sleeper:Sleeper")
    assert result["exception_info"]["exception_type"] == "AgentTimeoutError"
    assert result["verifier_result"]["rewards"]["reward"] == 0.0


def test_a_swe_task(harbor: Harbor, tmp_path: Path) -> None:
    repository, driver = tiny(tmp_path / "tiny"), DRIVERS["python"]
    wrong = CLIP.replace("return high", "return low", 1)
    bug = Candidate(repository, "mutate", {"tiny/ranges.py": wrong}, notes=("by hand in clip",))
    validate(bug, baseline(repository, driver, Rules(clean_runs=1)), driver, Rules(twins=1), tmp_path / "task")
    base = tmp_path / "base"  # its folders stand for the image, with the test dependencies
    shutil.copytree(site(), f"{base}{SITE}")
    image = (tmp_path / "task/environment/Dockerfile").read_text().split()[1]
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        assert rewards(harbor.run(tmp_path / "task", agent, "--ek", f"base={image}={base}")) == [reward]
