"""How a run is spread over processes. The processes themselves come from torchrun."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glm5.config.schema import Frozen


class Layout(Frozen):
    """Every process computes different rows (data parallel) and holds a shard of every parameter. `ep` neighbouring
    processes share out the routed experts among them; the number of processes must be a multiple of it.

    A run may go on under another layout: states on disk do not depend on it.
    """

    ep: int = Field(1, ge=1)
    """Processes among which the experts of a layer are divided; it must divide their number."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where training computes; of several processes, gloo connects CPUs and NCCL connects GPUs."""
    timeout_seconds: float = Field(600.0, gt=0)
    """A process that waits longer than this for another within a step ends with an error, and the job with it."""
    patience_seconds: float = Field(86_400.0, gt=0)
    """The same for waits while rank 0 alone trains a tokenizer, evaluates or writes."""
