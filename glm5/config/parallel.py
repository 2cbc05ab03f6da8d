"""How a run is spread over processes. torchrun starts the processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glm5.config.schema import Frozen

DEVICE_PATTERN = r"^[a-z]+(:\d{1,4})?$"
DEVICES_PATTERN = r"^[a-z]+(:\d{1,4})?(, ?[a-z]+(:\d{1,4})?)*$"

MEMORY_PATTERN = r"^\d{1,7}(\.\d{1,3})? ?[KMG]i?B$"
_UNITS = {"K": 1, "M": 2, "G": 3}


class Layout(Frozen):
    """Every process computes different rows (data parallel) and holds a shard of every parameter. `ep` neighbouring
    processes divide the routed experts among them; the number of processes must be a multiple of `ep`. `cp` neighbours
    compute the same rows, each a part of the tokens (context parallel). With `pp`, each process computes some of the
    layers, and all this holds for the processes of each stage.

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
    pp: int = Field(1, ge=1)
    """Pipeline stages by which the layers are divided. Ranks are numbered stage by stage: with N processes, the first
    N / `pp` have the first stage. Processes of different stages with the same place in it compute the same rows."""
    pp_stages_per_rank: int = Field(1, ge=1)
    """Stages that every process has (interleaving): with v of them there are `pp` x v stages, and the i-th group of
    processes has stages i, i + `pp`, i + 2 `pp`, … The waits at both ends of a step are v times as short."""
    pp_layers: list[int] = []
    """Number of layers of every stage, `pp` x `pp_stages_per_rank` numbers. 0 for the last stage leaves it the output
    head alone; the MTP layer is then on the stage before it (§2.4). Empty: divided by the work per token."""
    pp_deferred: int = Field(0, ge=0)
    """Micro-batches per process whose weight gradients may wait until the process would otherwise be idle: backward
    first passes on the gradients of activations (zero bubble). Until then inputs and output gradients of every linear
    layer stay in memory."""
    device: str = Field("auto", pattern=DEVICE_PATTERN)
    """Device of training, rollouts and evaluation: "auto" (CUDA, then another accelerator, then the CPU), "cpu", or a
    device's name in torch such as "cuda:1". Several processes communicate by the device's own library (NCCL for CUDA),
    on CPUs by gloo."""
    memory: str | None = Field(None, pattern=MEMORY_PATTERN)
    """Memory of a process's device, such as "70GiB" or "64GB", if it may not have all of it: for `recompute = "auto"`
    and for `glm5 plan`. A tenth is kept free."""
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

    @property
    def memory_bytes(self) -> float | None:
        """`memory` in bytes."""
        if self.memory is None:
            return None
        unit = self.memory.lstrip("0123456789. ")
        return float(self.memory.removesuffix(unit)) * (1024 if "i" in unit else 1000) ** _UNITS[unit[0]]
