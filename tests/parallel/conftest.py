"""Jobs of several ranks on this machine, connected by gloo over the loopback."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.parallel.ranks import Ranks
from tests.forks import FSDP

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "worker.py"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **LOOPBACK}


class Job:
    """Runs tasks of `worker.py` in a world of some size; a world of one is this process."""

    def __init__(self, folder: Path, forks: Any) -> None:
        self.folder, self.forks = folder, forks
        self.count = 0
        spec = importlib.util.spec_from_file_location("parallel_worker", WORKER)
        assert spec is not None and spec.loader is not None
        self.module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def _place(self, task: dict[str, Any]) -> dict[str, Any]:
        """Give a task places for its result and its files."""
        self.count += 1
        task["result"] = str(self.folder / f"result-{self.count}.json")
        task.setdefault("out", str(self.folder / f"out-{self.count}"))
        return task

    def start(self, world: int, tasks: list[dict[str, Any]], missing: int = 0) -> list[Any]:
        tasks = [self._place(task) for task in tasks]
        path = self.folder / f"tasks-{self.count}.json"
        path.write_text(json.dumps(tasks), encoding="utf-8")
        return self.ranks(world, WORKER, path, missing=missing)

    def ranks(self, world: int, script: str | Path, *arguments: object, missing: int = 0) -> list[Any]:
        """A script as `world` processes that find each other under torchrun; the last ones may be missing."""
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world), **LOOPBACK}
        ranks = map(str, range(world - missing))
        return [self.forks.start(script, *arguments, load=FSDP, RANK=r, LOCAL_RANK=r, **shared) for r in ranks]

    def __call__(self, world: int, *tasks: dict[str, Any], timeout: float = 240) -> list[Any]:
        """Results of the tasks, as rank 0 wrote them. Every rank must end well and say nothing."""
        if world == 1:
            return [json.loads(self.module.work(self._place(task), Ranks())) for task in tasks]
        ranks = self.start(world, list(tasks))
        deadline = time.monotonic() + timeout
        try:
            codes = [rank.wait(max(1, deadline - time.monotonic())) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        said = [rank.err for rank in ranks]
        assert codes == [0] * world, "\n".join(said)
        assert not any("Traceback" in text for text in said), said
        return [json.loads(Path(task["result"]).read_text(encoding="utf-8")) for task in tasks]


@pytest.fixture(scope="session")
def job(forks: Any, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"), forks)


@pytest.fixture(scope="session")
def start(small: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose six experts divide unevenly over the ranks that share them."""
    path = tmp_path_factory.mktemp("start") / "model"
    small(seed=1, n_routed_experts=6).save_pretrained(path)
    return str(path)


@pytest.fixture
def worker_environment() -> dict[str, str]:
    """For processes that start ranks themselves."""
    return environment()
