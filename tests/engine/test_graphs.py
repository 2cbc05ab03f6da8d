"""CUDA graphs on a machine without CUDA: on which device and stream a pass is captured. That replayed passes give the
right tokens is in `tests/test_device.py`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm5.engine.graphs import CudaCapture


class Cuda:
    """The functions of `torch.cuda` that a capture calls; notes the device and the stream where the pass runs."""

    def __init__(self) -> None:
        self.devices, self.streams = [0], ["own of 0"]
        self.passes: list[tuple[int, str]] = []
        self.captured: list[dict[str, Any]] = []
        self.capturing = False

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device.index)
        self.streams.append(f"own of {device.index}")
        yield
        self.devices.pop()
        self.streams.pop()

    def Stream(self, device: torch.device | None = None) -> Any:
        name = f"side of {self.devices[-1] if device is None else device.index}"
        return SimpleNamespace(name=name, wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return SimpleNamespace(name=self.streams[-1], wait_stream=lambda other: None)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    @contextmanager
    def graph(self, graph: Any, **options: Any) -> Iterator[None]:
        self.captured.append(options)
        self.capturing = True
        with self.stream(options.get("stream") or SimpleNamespace(name="side of 0")):
            yield
        self.capturing = False

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: None)

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, 1


def test_a_pass_is_captured_on_the_device_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one process may be on several devices. A stream of another device would capture nothing."""
    cuda = Cuda()
    for name in ("device", "Stream", "current_stream", "stream", "graph", "CUDAGraph", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))

    def forward() -> torch.Tensor:
        assert gc.isenabled() is not cuda.capturing, "what the collector frees ends a capture"
        cuda.passes.append((cuda.devices[-1], cuda.streams[-1]))
        return torch.zeros(1)

    for number in (1, 2):
        capture = CudaCapture(torch.device("cuda", number))
        capture(forward)
        capture(forward)
        assert cuda.passes == [(number, f"side of {number}")] * 6
        cuda.passes.clear()
    assert {options["capture_error_mode"] for options in cuda.captured} == {"thread_local"}
    assert cuda.devices == [0]
