"""How a run is spread over processes. torchrun starts the processes."""

from __future__ import annotations

from pydantic import Field

from glm5.config.schema import Frozen

DEVICE_PATTERN = r"^[a-z]+(:\d{1,4})?$"
DEVICES_PATTERN = r"^[a-z]+(:\d{1,4})?(, ?[a-z]+(:\d{1,4})?)*$"


class Layout(Frozen):
    """Every process computes different rows (data parallel) and holds a shard of every parameter. `ep` neighbouring
    processes divide the routed experts among them; the number of processes must be a multiple of `ep`.

    A run may resume under another layout: states on disk do not depend on it.
    """

    ep: int = Field(1, ge=1)
    """Processes that divide the experts of a layer; it must divide the number of experts."""
    device: str = Field("auto", pattern=DEVICE_PATTERN)
    """Device of training, rollouts and evaluation: "auto" (CUDA, then another accelerator, then the CPU), "cpu", or a
    device's name in torch such as "cuda:1". Several processes communicate by the device's own library (NCCL for CUDA),
    on CPUs by gloo."""
    timeout_seconds: float = Field(600.0, gt=0)
    """A process that waits longer than this for another within a step ends with an error, and so does the job."""
    patience_seconds: float = Field(86_400.0, gt=0)
    """The same for waits while rank 0 alone trains a tokenizer, evaluates or writes."""
