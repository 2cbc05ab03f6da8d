"""Clocks, limits and names of the device that `gpu.py` measures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from glm5.config.devices import DEVICES


@dataclass(frozen=True)
class Clock:
    """Seconds of jobs on a device; the device is idle when a job begins and when its time is taken."""

    device: torch.device

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def once(self, job: Callable[[], Any]) -> float:
        self.wait()
        began = time.perf_counter()
        job()
        self.wait()
        return time.perf_counter() - began

    def rounds(self, job: Callable[[], Any], count: int, warm: int = 2) -> list[float]:
        for _ in range(warm):
            job()
        return [self.once(job) for _ in range(count)]

    def peak_bytes(self, job: Callable[[], Any]) -> int | None:
        """The most device memory that is allocated while the job runs; None on a CPU."""
        if self.device.type != "cuda":
            job()
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        job()
        self.wait()
        return int(torch.cuda.max_memory_allocated(self.device))

    def limits(self, quick: bool) -> dict[str, Any]:
        """What this device reaches in this run: FLOP/s of a large bf16 product, bytes per second of a large copy (read
        and written bytes both count). The data sheet's figures stand beside them."""
        size, elements = (512, 1 << 20) if quick else (8192, 1 << 29)
        a, b = (torch.randn(size, size, device=self.device).to(torch.bfloat16) for _ in range(2))
        products = self.rounds(lambda: a @ b, 3 if quick else 20)
        source = torch.zeros(elements, dtype=torch.bfloat16, device=self.device)
        target = torch.empty_like(source)
        copies = self.rounds(lambda: target.copy_(source), 3 if quick else 20)
        found: dict[str, Any] = {
            "flops": 2 * size**3 / statistics.median(products),
            "bandwidth": 2 * source.nbytes / statistics.median(copies),
        }
        sheet = next((d for name, d in DEVICES.items() if name.upper() in self.name().upper()), None)
        if sheet is not None:
            found["data_sheet"] = {"flops": sheet.flops, "bandwidth": sheet.bandwidth}
        return found

    def name(self) -> str:
        if self.device.type == "cpu":
            return "cpu"
        return str(torch.get_device_module(self.device).get_device_name(self.device))


def spread(values: list[float]) -> dict[str, float]:
    """Median, and the smallest and largest value."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "n": len(values)}
