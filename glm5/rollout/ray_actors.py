"""What runs on the nodes of a Ray cluster: actors that start an engine process there, or host a task service.

Arguments and results of their methods are plain values and references to bytes in Ray's object store.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import ray

from glm5 import __version__
from glm5.errors import EngineError, Glm5Error
from glm5.process import python_path
from glm5.rollout.node_files import Piece, arrived, fingerprint, remove_leftovers
from glm5.serve.router.pool import UPDATE
from glm5.serve.router.workers import COMMAND, ending

AHEAD = 4
"""Pieces that are on their way while one is written."""
Files = tuple[Sequence[Piece], Sequence[Any], str]
"""Pieces of files and the references to their bytes; or none, and the fingerprint of a folder that all nodes see."""


LEASE_SECONDS = 60.0
"""An actor ends if its run does not call `beat` for this long."""
SOURCES = (".py", ".cpp", ".h")


class Leased:
    """An actor whose process ends without its run. Ray ends the actors of a run that ends, but on other nodes not those
    of a run that is lost together with the head of the cluster."""

    def __init__(self) -> None:
        self._beat = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def beat(self) -> None:
        """Renew the lease."""
        self._beat = time.monotonic()

    def node(self) -> dict[str, str]:
        """Where this is, and which code it has."""
        node = ray.get_runtime_context().get_node_id()
        return {"host": ray.util.get_node_ip_address(), "id": node, "glm5": __version__, "code": code_digest()}

    def _watch(self) -> None:
        while time.monotonic() < self._beat + LEASE_SECONDS:
            time.sleep(1.0)
        self._clean()
        os._exit(1)

    def _clean(self) -> None:
        """End what would stay."""


class RayEngine(Leased):
    """One engine process on the node of this actor. The process ends with the actor: its stdin is a pipe from here."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._loading = threading.Lock()
        self._client = httpx.Client(timeout=None, trust_env=False)
        remove_leftovers()

    def start(self, job: str, threads: int, files: Files) -> dict[str, Any]:
        """Start the process for a `WorkerJob`; what it says once it is ready, or `ended` if it said nothing. Like it,
        `error` if its files are not to be had here."""
        fields = json.loads(job)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": python_path()}
        try:
            with self._folder(fields["directory"], files) as directory:
                self._process = subprocess.Popen(
                    COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
                )
                assert self._process.stdin is not None and self._process.stdout is not None
                # The engine goes by the name of the folder that it was told, and not by that of a copy.
                given = fields | {"directory": directory, "source": fields["directory"]}
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.write(json.dumps(given).encode() + b"\n")
                    self._process.stdin.flush()
                line = self._process.stdout.readline()
        except (Glm5Error, OSError) as error:
            return {"error": str(error), "exit_code": 1}
        if not line:
            return {"ended": ending(self._process.wait())}
        self._client.headers["authorization"] = f"Bearer {fields['key']}"
        news: dict[str, Any] = json.loads(line)
        self._client.base_url = news.get("url", "")
        return news | {"pid": self._process.pid}

    def update(self, body: str, files: Files) -> tuple[int, str]:
        """Have the engine load weights; status and text of its answer."""
        fields = json.loads(body)
        try:
            with self._folder(fields["model_path"], files) as directory:
                answer = self._client.post(UPDATE, json=fields | {"model_path": directory})
        except (Glm5Error, OSError) as error:
            return 500, json.dumps({"success": False, "error": {"message": str(error)}})
        return answer.status_code, answer.text

    def wait(self) -> int:
        """The exit code of the process, once it has ended."""
        assert self._process is not None
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill the process, which may be stopped and not see the end of its pipe."""
        self._clean()
        with self._loading:  # its files are removed now
            return

    def _clean(self) -> None:
        self.signal(signal.SIGKILL)

    @contextlib.contextmanager
    def _folder(self, path: str, files: Files) -> Iterator[str]:
        pieces, references, seen = files
        if not pieces:
            self._check(Path(path), seen)
            yield path
            return

        def read(index: int) -> Any:
            ray.wait(list(references[index : index + AHEAD]), timeout=0)  # begins to fetch them
            return ray.get(references[index])

        with self._loading, arrived(self._run, pieces, read) as folder:
            yield str(folder)

    def _check(self, folder: Path, seen: str) -> None:
        """Raise EngineError unless the folder is the same here."""
        with contextlib.suppress(OSError, EngineError):
            if fingerprint(folder) == seen:
                return
        raise EngineError(
            f"The node {ray.util.get_node_ip_address()} does not see the checkpoint {folder}, or has other files "
            "there; every node must see the same folder, or have its files sent."
        )


class RayService(Leased):
    """A task service of families that are registered on the node of this actor."""

    def serve(self, families: Sequence[str], gateway: str, key: str, capacity: int, seconds: float) -> None:
        """Play rollouts for the live run of `gateway` until the run ends."""
        from glm5.rollout.service_host import serve
        from glm5.tasks.families import make_family

        host = ray.util.get_node_ip_address()
        serve(
            {name: make_family(name) for name in families}, gateway, key, capacity=capacity, seconds=seconds, host=host
        )


@functools.cache
def code_digest() -> str:
    """SHA-256 of the source files of this copy of the package."""
    package, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in SOURCES):
        found.update(f"{path.relative_to(package).as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
