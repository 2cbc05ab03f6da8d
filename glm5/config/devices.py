"""Accelerators that plans and kernel predictions know: memory and peak rates by data sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from glm5.errors import UsageError, nearest

GB = 1e9
RESERVED = 0.1
"""Share of a device's memory that is assumed to go to the driver, communication libraries and fragmentation."""
PRODUCTS = 0.4
"""Share of the peak rate that matrix products are assumed to reach; nothing was measured."""


@dataclass(frozen=True)
class Device:
    """`memory` in bytes, `flops` per second of dense bf16 products, `flops_fp32` per second of fp32 arithmetic (no
    TF32), `bandwidth` of the memory in bytes per second.

    Links of one device, bytes per second in one direction: `within` a node of `node` devices, `between` nodes (its
    share of the node's network cards), and to the `host`."""

    memory: float
    flops: float
    flops_fp32: float
    bandwidth: float
    within: float = 450e9
    between: float = 50e9
    host: float = 64e9
    node: int = 8

    @property
    def usable(self) -> float:
        """Bytes for tensors."""
        return self.memory * (1 - RESERVED)


DEVICES: Mapping[str, Device] = {
    # NVIDIA's data sheets, SXM modules, without sparsity; nodes as DGX: one card of 200 (A100) or 400 Gb/s per GPU.
    "a100": Device(80 * GB, 312e12, 19.5e12, 2.039e12, within=300e9, between=25e9, host=32e9),
    "h100": Device(80 * GB, 989e12, 67e12, 3.35e12),
    "h800": Device(80 * GB, 989e12, 67e12, 3.35e12, within=200e9),  # NVLink of 400 GB/s in both directions
    "h200": Device(141 * GB, 989e12, 67e12, 4.8e12),
    # As in DGX B200: 1,440 GB over eight.
    "b200": Device(180 * GB, 2250e12, 75e12, 8.0e12, within=900e9),
    # AMD's data sheet: seven links of 64 GB/s. One card of 400 Gb/s per GPU is assumed.
    "mi300x": Device(192 * GB, 1307e12, 163.4e12, 5.3e12, within=448e9),
    # arXiv 2506.12708 (CloudMatrix384), §3.2: the package, and one of its two dies. It has no rate for
    # fp32; a quarter of the bf16 rate is assumed. Within 384 packages: 392 GB/s per package; between: 400 Gb/s.
    "ascend-910b": Device(64 * GB, 376e12, 94e12, 1.6e12, within=196e9, between=25e9, node=768),
    "ascend-910c": Device(128 * GB, 752e12, 188e12, 3.2e12, within=392e9, between=50e9, node=384),
}


HOST = Device(16 * GB, 1e11, 1e11, 2e10)
"""Some CPU. Only the ratio of its rates counts: what costs more to compute again."""


def similar_device(name: str, memory: float) -> Device:
    """The device of the table whose name is in `name`, as torch gives it, else the H100, with this memory."""
    words = name.lower().replace("ascend", "ascend-")
    found = next((device for key, device in DEVICES.items() if key in words), DEVICES["h100"])
    return replace(HOST if words == "cpu" else found, memory=memory)


def device_named(name: str) -> Device:
    """Raises UsageError for a name that is not in the table."""
    if name.lower() not in DEVICES:
        raise UsageError(f"No device {name!r:.40}{nearest(name, DEVICES)}. There are: {', '.join(DEVICES)}.")
    return DEVICES[name.lower()]
