"""A run's connection to its Ray cluster, and the leases of its actors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Mapping
from logging import WARNING
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from glm5 import __version__
from glm5.errors import EngineError
from glm5.obs.logs import get_logger
from glm5.rollout.ray_actors import LEASE_SECONDS, code_digest

log = get_logger("rollout")
T = TypeVar("T")

OLDEST = (2, 60)
"""The first version of Ray whose own clusters have a token by default."""
CONNECT_SECONDS = 10.0
BEAT_SECONDS = 10.0
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The frame with which each side of HTTP/2 begins, without settings."""
NO_TOKEN = "Ray would start a cluster without authentication for this run; unset RAY_AUTH_MODE, or set it to token."


def join(address: str) -> None:
    """Connect to the cluster at an address, see `Launch.ray_address`. Raises EngineError if that is not possible, and
    for a cluster of our own that would have no authentication."""
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < OLDEST:
        raise EngineError(f"Ray {ray.__version__} is too old: pip install 'glm5[ray]' brings {OLDEST[0]}.{OLDEST[1]}.")
    named = address or os.environ.get("RAY_ADDRESS", "")
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        if named == "local":
            raise EngineError(NO_TOKEN)
        address = address or "auto"  # starts none
    host, _, port = named.rpartition(":")
    try:
        if port.isdigit():
            _probe(host.strip("[]"), int(port))
        # Ray puts the present folder on the path of the actors. This one has the package, also on nodes with the same
        # disk.
        with contextlib.chdir(Path(__file__).parents[2]):
            ray.init(address=address or None, include_dashboard=False, logging_level=WARNING)
    except SystemExit:  # Ray's way to say that it has tried for long
        raise EngineError(f"Cannot connect to the Ray cluster {named}: its head does not answer.") from None
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        if address == "auto" and not named:
            raise EngineError(f"No Ray cluster runs on this machine. {NO_TOKEN}") from None
        told = first_sentence(error)
        if isinstance(error, ConnectionError) and error.errno is None:  # Ray's own, which names no cause
            told += "; if it runs, its token may be another one (RAY_AUTH_TOKEN)."
        where = "of this machine" if named == "auto" else named
        raise EngineError(f"Cannot connect to the Ray cluster {where}: {told}") from None
    found = ray.cluster_resources()
    log.warning("Ray: %d nodes, %g CPUs, %g GPUs.", nodes(), found.get("CPU", 0), found.get("GPU", 0))


def _probe(host: str, port: int) -> None:
    """Raises OSError unless something listens there that speaks HTTP/2, as Ray's head does (gRPC). Ray itself would try
    for two minutes."""
    with socket.create_connection((host, port), CONNECT_SECONDS) as trial:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        trial.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
        with trial.makefile("rb") as answer:
            if answer.read(len(SETTINGS))[3:4] != SETTINGS[3:4]:
                raise OSError("what listens there is no Ray head.")


def nodes() -> int:
    """Number of nodes, as far as Ray knows."""
    return sum(node["Alive"] for node in ray.nodes())


def check_code(node: Mapping[str, str]) -> None:
    """Raises EngineError for a `node` of an actor whose copy of this package differs from ours."""
    if node["glm5"] != __version__:
        raise EngineError(f"The node {node['host']} has glm5 {node['glm5']}, this one {__version__}.")
    if node["code"] != code_digest():
        raise EngineError(f"The node {node['host']} has glm5 {__version__} as well, but with other source files.")


class Silent(EngineError):
    """An actor does not answer, or was ended."""


class Pulse:
    """Renews the lease of an actor, until `stop`. What waits for the actor with `unless` gives up if it is silent for
    as long as the lease, or if it is stopped."""

    def __init__(self, actor: Any, what: str) -> None:
        self.silent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._what = what
        self._beating = asyncio.ensure_future(self._beat(actor))

    def stop(self) -> None:
        self._beating.cancel()
        if not self.silent.done():
            self.silent.set_result(None)

    async def unless(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises Silent."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self.silent), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Silent(f"The actor of {self._what} does not answer.")
            return task.result()
        finally:
            task.cancel()

    async def _beat(self, actor: Any) -> None:
        try:
            while True:
                async with asyncio.timeout(LEASE_SECONDS):
                    await actor.beat.remote()
                await asyncio.sleep(BEAT_SECONDS)
        except RayError:
            return  # so will the others' calls
        except TimeoutError:
            log.warning("The actor of %s has not answered for %g seconds; it is replaced.", self._what, LEASE_SECONDS)
            self.stop()


async def result(reference: Any) -> Any:
    """The result of an actor's method."""
    return await reference


def short(error: BaseException) -> str:
    """The cause of an error of Ray, in a line."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return f"{type(error.cause).__name__}: {error.cause}"[:300]
    return (_lines(error) or [type(error).__name__])[-1][:300]


def first_sentence(error: BaseException) -> str:
    """The first sentence of a message whose others are advice."""
    return (_lines(error) or [type(error).__name__])[0].split(". ")[0][:300]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]
