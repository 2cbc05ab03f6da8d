"""Activation offload: what backward needs waits in host memory (§2.4).

Copies run on a stream of their own and the host waits for none of them. A layer's tensors leave the device while the
layer computes. In backward, the first tensor of a layer that is asked for also fetches the layer before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from glm5.obs.logs import get_logger

_log = get_logger(__name__)

LEAST_BYTES = 1 << 20
"""Smaller tensors stay on the device: a copy would cost more than they do."""

_View = tuple[torch.Size, tuple[int, ...], Any]
"""Shape, strides and offset."""


def has_device_memory(model: nn.Module) -> bool:
    """Whether the model is on an accelerator; on a CPU, one line in the log says that offload does nothing."""
    found = not next(model.parameters()).is_cpu
    if not found:
        _log.info("offload: the model is on a CPU, so what backward needs is in host memory already.")
    return found


class Offload:
    """Offloads what the layers of one forward pass save. Tensors with memory in common are copied once; parameters and
    what `shared` returns are not copied."""

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        self.least_bytes = least_bytes
        self.bytes = 0  # that were copied to the host
        self._before: _Layer | None = None
        self._copies: weakref.WeakValueDictionary[Any, _Copy] = weakref.WeakValueDictionary()

    @contextmanager
    def layer(self, layer: nn.Module) -> Iterator[None]:
        """Inside, tensors that autograd saves are packed, in the order of layers that backward reverses."""
        group = self._before = _Layer(self._before)
        with saved_tensors_hooks(functools.partial(self._pack, layer, group), _unpack):
            yield

    def _pack(self, layer: nn.Module, group: _Layer, tensor: Tensor) -> Tensor | tuple[_Copy, _View]:
        if tensor.is_cpu or tensor.layout != torch.strided or tensor.nbytes < self.least_bytes:
            return tensor
        memory = StorageWeakRef(tensor.untyped_storage())  # unlike an address, not used again for other memory
        key = memory, tensor.dtype, tensor._version
        copy = self._copies.get(key)
        if copy is None:
            # Looked up late: FSDP gathers the parameters of a layer in the layer's own call.
            if any(StorageWeakRef(p.untyped_storage()) == memory for p in layer.parameters()):
                return tensor
            copy = self._copies[key] = _Copy(_whole(tensor), group)
            self.bytes += copy.host.nbytes
        return copy, (tensor.shape, tensor.stride(), tensor.storage_offset())


def _unpack(packed: Tensor | tuple[_Copy, _View]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    copy, (shape, stride, offset) = packed
    return copy.get().as_strided(shape, stride, offset)


def _whole(tensor: Tensor) -> Tensor:
    """All of the tensor's memory, in one dimension."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


class _Layer:
    """The copies of a layer that backward still needs, and the layer before."""

    def __init__(self, before: _Layer | None) -> None:
        self.before = before
        self.copies: weakref.WeakSet[_Copy] = weakref.WeakSet()

    def fetch(self) -> None:
        for copy in list(self.copies):
            copy.fetch()


class _Copy:
    """One tensor in host memory, and on the device again once it has been fetched."""

    def __init__(self, tensor: Tensor, layer: _Layer) -> None:
        self.lane, self.layer, self.device = _lane(tensor.device), layer, tensor.device
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.lane.copy(tensor, self.host, on_device=tensor)
        self.back: Tensor | None = None
        self.arrived: Any = None
        layer.copies.add(self)

    def fetch(self) -> None:
        """Start the copy back, if it has not been started."""
        if self.back is None:
            self.back = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
            self.arrived = self.lane.copy(self.host, self.back, on_device=self.back)

    def get(self) -> Tensor:
        """The tensor on the device, for work that is launched from now on."""
        if self.arrived is None and self.back is not None:
            return self.back
        self.layer.fetch()
        if self.layer.before is not None:
            self.layer.before.fetch()
        self.fetch()
        assert self.back is not None
        self.lane.wait(self.arrived)
        self.arrived = None
        return self.back


class _Lane:
    """The stream that copies run on, in order: a copy back therefore finds its data on the host."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.stream = self.module.Stream(device)

    def copy(self, source: Tensor, target: Tensor, on_device: Tensor) -> Any:
        """Copy after the work launched so far; returns an event. The memory of `on_device` is not used again before
        the copy has ended."""
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            target.copy_(source, non_blocking=True)
        on_device.record_stream(self.stream)
        return self.stream.record_event()

    def wait(self, event: Any) -> None:
        """Work launched from now on runs after the event."""
        self.module.current_stream(self.device).wait_event(event)


@functools.cache
def _lane(device: torch.device) -> _Lane:
    return _Lane(device)
