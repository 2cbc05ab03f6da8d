"""How a run is spread over processes. torchrun starts the processes."""

from __future__ import annotations

from typing import Literal

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
    cp: int = Field(1, ge=1)
    """Context parallelism: processes that take the same rows and divide their tokens. It must divide the number of
    processes. A `cp` larger than the processes of a node must be a multiple of them."""
    cp_plan: Literal["workload", "zigzag"] = "workload"
    """How `cp` divides tokens. "workload": evenly by work; a long document is cut over as many processes as needed, a
    short one stays on one. "zigzag": every row is cut into 2 cp chunks, of which each process takes an early and a late
    one."""
    device: str = Field("auto", pattern=DEVICE_PATTERN)
    """Device of training, rollouts and evaluation: "auto" (CUDA, then another accelerator, then the CPU), "cpu", or a
    device's name in torch such as "cuda:1". Several processes communicate by the device's own library (NCCL for CUDA),
    on CPUs by gloo."""
    reduce_once: bool = True
    """Sum gradients over the processes once per step, after its last micro-batch, instead of after each. Between
    micro-batches every process then keeps the gradients of all its experts and of everything else whole, in fp32: 4
    bytes per parameter instead of 4 / processes. It costs nothing if a step has one micro-batch. Turn it off if that
    does not fit."""
    async_save: bool = True
    """Write states of training in the background: a step waits only for a copy of its process's weights and optimizer
    state in host memory, which is there until the state is written. Turn it off if that does not fit."""
    timeout_seconds: float = Field(600.0, gt=0)
    """A process that waits longer than this for another within a step ends with an error, and so does the job."""
    patience_seconds: float = Field(86_400.0, gt=0)
    """The same for waits while rank 0 alone trains a tokenizer, evaluates or writes."""
