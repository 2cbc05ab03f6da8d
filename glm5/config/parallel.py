"""How a run is spread over processes. torchrun starts the processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glm5.config.schema import Frozen


class Layout(Frozen):
    """Every process computes different rows (data parallel) and holds a shard of every parameter. `ep` neighbouring
    processes divide the routed experts among them; the number of processes must be a multiple of `ep`.

    A run may resume under another layout: states on disk do not depend on it.
    """

    ep: int = Field(1, ge=1)
    """Processes that divide the experts of a layer; it must divide the number of experts."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of training. Several processes communicate by gloo on CPUs and by NCCL on GPUs."""
    timeout_seconds: float = Field(600.0, gt=0)
    """A process that waits longer than this for another within a step ends with an error, and so does the job."""
    patience_seconds: float = Field(86_400.0, gt=0)
    """The same for waits while rank 0 alone trains a tokenizer, evaluates or writes."""
