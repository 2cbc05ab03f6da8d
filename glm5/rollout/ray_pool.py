"""The engines of `glm5 serve --ray` on the nodes of a Ray cluster, behind a router on this machine."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from glm5.config.launch import Launch
from glm5.config.model import GLM5Config
from glm5.errors import UsageError
from glm5.rollout.ray_engines import RayEngines
from glm5.serve.options import EngineOptions
from glm5.serve.router.pool import WorkerPool
from glm5.serve.router.process import WorkerJob
from glm5.serve.router.workers import Patience


class RayPool(WorkerPool):
    """Workers on the nodes of a cluster, spread over them. One whose actor or node is lost is replaced on a node that
    has room. Takes requests as soon as one does; the others join when they are ready, and when there is room."""

    def __init__(
        self,
        count: int,
        job: WorkerJob,
        patience: Patience | None = None,
        *,
        launch: Launch,
        prefill: int = 0,
        most: int = 0,
    ) -> None:
        """Raises UsageError for what engines of several machines cannot do, and for a directory without a model."""
        _check(job.options, launch, prefill)
        directory = Path(job.directory).resolve()
        GLM5Config.load(directory)  # an error of this machine is told before the cluster is asked
        template, disk = job.options.chat_template, job.options.disk_cache
        if disk is not None:  # a node has another present folder
            job = replace(job, options=replace(job.options, disk_cache=os.path.abspath(disk)))
        if template is not None and Path(template).is_file():
            job = replace(job, options=replace(job.options, chat_template=str(Path(template).resolve())))
        self._engines = RayEngines(launch, lambda: self.job)
        super().__init__(count, replace(job, directory=str(directory)), patience, self._engines.launch, most=most)

    async def start(self, first: bool = True) -> None:
        before = signal.getsignal(signal.SIGTERM)
        self._engines.join()
        # Ray's own handler prints a stack, and changes the exit code.
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        await super().start(first=first)

    async def close(self, seconds: float = 5.0) -> None:
        await super().close(seconds)
        self._engines.leave()


def settings(address: str, gpus: float | None, threads: int | None, shared: bool) -> Launch:
    """What `--ray` and the options beside it say; "auto" is the cluster of RAY_ADDRESS, or the one of this machine.
    Raises UsageError for a number of GPUs that Ray does not reserve."""
    address = os.environ.get("RAY_ADDRESS") or address if address == "auto" else address
    fields: dict[str, Any] = {"ray_address": address, "engine_gpus": gpus, "engine_threads": threads}
    try:
        return Launch(backend="ray", transport="disk" if shared else "memory", **fields)
    except ValidationError as error:
        raise UsageError(f"--engine-gpus: {error.errors()[0]['msg'].removeprefix('Value error, ')}.") from None


def _check(options: EngineOptions, launch: Launch, prefill: int) -> None:
    if prefill:
        raise UsageError(
            "--prefill-engines hand their pages to engines of the same machine; leave them out with --ray, or name "
            "servers that prefill with --prefill-url."
        )
    if options.ep > 1:
        raise UsageError("--expert-parallel divides the experts among processes of one machine; it goes without --ray.")
    if 0 < (launch.engine_gpus or 0) < options.tp and options.tp > 1:
        raise UsageError(f"--tp {options.tp} needs as many GPUs per engine, or none; set --engine-gpus {options.tp}.")
    if options.chat_template is not None and launch.transport != "disk" and Path(options.chat_template).is_file():
        raise UsageError(
            f"The file {options.chat_template} is not sent to the nodes; put it into the checkpoint as "
            "chat_template.jinja, or give --ray-shared and a path that all nodes see."
        )
