"""One engine process of a router: `python -m glm5.serve.router.process`, started only by `workers` and `ray_actors`.

The router writes one line of JSON to stdin and keeps that pipe open. When the router ends for any reason, the pipe
closes and this process ends too. It answers with one line of JSON on stdout: the socket is ready, or an error. Any
client of a Unix socket is trusted: it is in a folder that only the user of this process can enter. On a network address
every request needs the key.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from glm5 import process
from glm5.errors import Glm5Error
from glm5.serve.connection import bind, fitted, url_of
from glm5.serve.options import EngineOptions, Limits, PrefillServers

KEEP_ALIVE_SECONDS = 3600
"""The router decides when an idle connection ends; a server that closes it could race with a new request."""


@dataclass(frozen=True)
class WorkerJob:
    """A worker's input: the model, whose weights have this `version`, and the Unix socket to answer on. With a `host`,
    it is a free port of this address instead, and requests need the `key`. `number` is its place among the workers, by
    which it takes a device. `source` is the directory by whose name the model goes, if the directory is a copy."""

    directory: str
    socket: str
    model_name: str | None
    limits: Limits
    options: EngineOptions
    host: str = ""
    key: str = ""
    version: int = 0
    number: int = 0
    source: str = ""
    prefill: PrefillServers = field(default_factory=PrefillServers)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> WorkerJob:
        fields = json.loads(text)
        limits, options = Limits(**fields.pop("limits")), EngineOptions(**fields.pop("options"))
        given = fields.pop("prefill")
        prefill = PrefillServers(tuple(given["urls"]), given["key"])
        return cls(limits=limits, options=options, prefill=prefill, **fields)


def main() -> None:
    """Serve until stopped, or until the router is gone."""
    process.tune()
    control = process.reserve_stdout()
    line = process.read_job()
    if not line:
        return
    job = WorkerJob.from_json(line)
    process.end_with_parent(lambda: None if job.host else _remove(Path(job.socket)))
    try:
        _serve(job, control)
    except Glm5Error as error:
        process.tell(control, {"error": str(error), "exit_code": error.exit_code})
        sys.exit(error.exit_code)
    except OSError as error:
        process.tell(control, {"error": str(error), "exit_code": 1})
        sys.exit(1)


def _serve(job: WorkerJob, control: TextIO) -> None:
    # torch takes seconds to import. The router may end meanwhile, so the thread that watches it must run already.
    from glm5.device import choose_device, make_current
    from glm5.engine.page_files import own_folder
    from glm5.serve.app import listen, load_app

    # The client of this process is the router, which reads only as fast as its own client. The router disconnects
    # slow clients itself, so the limit here is longer.
    limits = fitted(replace(job.limits, send_seconds=2 * job.limits.send_seconds))
    access: dict[str, Any] = {"api_key": job.key} if job.host else {"trusted": True}
    tp = job.options.tp
    devices = [choose_device(job.options.device, job.number * tp + rank) for rank in range(tp)]
    make_current(devices[0])
    disk = job.options.disk_cache
    if disk:
        own_folder(Path(disk))
        disk = str(Path(disk) / f"engine-{job.number}")
    options = replace(job.options, disk_cache=disk, device=",".join(map(str, devices)), ep_rank=job.number)
    app = load_app(
        Path(job.directory),
        limits,
        options,
        model_name=job.model_name,
        source=Path(job.source or job.directory),
        prefill=job.prefill,
        **access,
    )
    app.state.service.thread.engine.weight_version = job.version
    with bind(job.host, 0) if job.host else socket.socket(socket.AF_UNIX) as listener:
        if not job.host:
            listener.bind(job.socket)
        news = {"ready": True, "url": url_of(listener) if job.host else ""}
        listen(app, listener, lambda _: process.tell(control, news), timeout_keep_alive=KEEP_ALIVE_SECONDS)


def _remove(path: Path) -> None:
    """Remove the socket and its folder, because the router is gone. Other sockets may still be in the folder."""
    for remove in (path.unlink, path.parent.rmdir):
        with contextlib.suppress(OSError):
            remove()


if __name__ == "__main__":
    main()
