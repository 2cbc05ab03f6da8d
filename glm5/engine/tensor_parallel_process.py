"""One rank of a tensor-parallel engine: `python -m glm5.engine.tensor_parallel_process`, started only by
`tensor_parallel_group`.

Rank 0 writes one line of JSON to stdin and keeps that pipe open; this process ends with it. Everything else comes over
a socket that it has inherited.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from glm5 import process

if TYPE_CHECKING:
    from glm5.engine.tensor_parallel_group import Wire


def main() -> None:
    """Compute with rank 0 until it ends."""
    process.tune()
    line = process.read_job()
    if not line:
        return
    process.end_with_parent()
    _serve(json.loads(line))


def _serve(job: dict[str, Any]) -> None:
    # torch takes seconds to import. Rank 0 may end meanwhile, so the thread that watches it must run already.
    import socket

    import torch

    from glm5.engine.tensor_parallel_group import Wire

    torch.set_num_threads(job["threads"])
    wire = Wire(socket.socket(fileno=job["socket"]))
    try:
        with torch.no_grad():
            _obey(job, wire)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0][:300]
        with contextlib.suppress(OSError):
            wire.send({"error": f"{type(error).__name__}: {text}"})
        sys.exit(1)


def _obey(job: dict[str, Any], wire: Wire) -> None:
    import torch

    from glm5.engine.tensor_parallel_rank import Rank

    rank = Rank(job["rank"], job["world"], torch.device(job["device"]), job["store"], wire)
    while (message := wire.receive()) is not None:
        getattr(rank, message.pop("do"))(**message)


if __name__ == "__main__":
    main()
