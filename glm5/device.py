"""Which device tensors live on, the one place that decides it; and copies to and from one that wait as little as
possible."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from glm5.errors import ConfigError

AUTO = "auto"
PINNING = ("cuda", "xpu")
"""Devices whose copies from pageable memory wait for everything before them."""

T = TypeVar("T")


def choose_device(name: str = AUTO, number: int | None = None) -> torch.device:
    """The device that a recipe or a command calls `name`.

    "auto" is CUDA, then another accelerator that torch or an installed back end has registered, then the CPU. Apple's
    "mps" must be named: it has no float64, which training uses. In a job of torchrun, a device without a number is the
    one of the process's LOCAL_RANK. The engine `number` of several takes its turn among the names, which commas divide,
    and, if the name has no number, among the devices. Raises ConfigError for a device that torch does not know or that
    is not here.
    """
    if number is not None:
        names = name.split(",")
        name = names[number % len(names)].strip()
    if name == AUTO:
        device = _first_accelerator() or torch.device("cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ConfigError(f'device = "{name:.40}" is not a device of torch; {_here()}') from None
    if device.type == "cpu":
        return torch.device("cpu")  # tensors have no number there
    back_end = _back_end(device)
    if back_end is None:
        raise ConfigError(f'device = "{name:.40}" is not available on this machine; {_here()}')
    index, count, rank = device.index, back_end.device_count(), os.environ.get("LOCAL_RANK", "")
    if index is None and number is not None:
        index = number % max(1, count)
    elif index is None and rank.isdecimal():
        index = int(rank)
    if index is not None and index >= count:
        raise ConfigError(
            f'device = "{name:.40}": number {index} was asked for, and this machine has {count} of them; start fewer '
            "processes on it, or choose another."
        )
    return device if index is None else torch.device(device.type, index)


def make_current(device: torch.device) -> None:
    """Make a device with a number the current one of this process. What names no device, such as page-locked memory,
    would use the first one, and every process would take some hundred megabytes there."""
    if device.index is not None:
        torch.get_device_module(device).set_device(device)


def _first_accelerator() -> torch.device | None:
    if torch.cuda.is_available():
        return torch.device("cuda")
    other = torch.accelerator.current_accelerator()
    if other is None or other.type == "mps" or _back_end(other) is None:
        return None
    return torch.device(other.type)


def _back_end(device: torch.device) -> ModuleType | None:
    """The module of an accelerator, such as `torch.cuda`; None if it cannot be used here."""
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return None
    return module if module.is_available() else None


def _here() -> str:
    found = _first_accelerator()
    return f'choose "auto" or "cpu"{"" if found is None else f" or {found.type!r}"}.'.replace("'", '"')


def put(values: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor(values)`, or a tensor of the CPU, on a device. The host does not wait for the device."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return pinned(tensor, device).to(device, non_blocking=device.type != "cpu")


def host_memory(size: int, device: torch.device) -> Tensor:
    """Uninitialised bytes uint8 [size] on the host, page-locked if copies from `device` need it."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=_pins(device))


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU in page-locked memory if copies to `device` need it, otherwise the tensor itself."""
    return tensor.pin_memory() if _pins(device) and tensor.is_cpu and not tensor.is_pinned() else tensor


def _pins(device: torch.device) -> bool:
    return device.type in PINNING and _back_end(device) is not None


def on_host(tree: T) -> T:
    """The same dicts, lists and tuples with all tensors on the CPU (see `Fetch`)."""
    return Fetch(tree)()


class Fetch(Generic[T]):
    """A copy of all tensors in nested dicts, lists and tuples to the CPU. It begins here, and the host waits for it,
    once, when it calls. Tensors of an accelerator arrive as float64, in which integers up to 2^53 are exact; those that
    are on the CPU stay as they are."""

    def __init__(self, tree: T) -> None:
        self._leaves, self._shape = tree_flatten(tree)
        self._away = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and not leaf.is_cpu]
        self._event: torch.Event | None = None
        if not self._away:
            return
        self._flat = torch.cat([self._leaves[i].detach().double().reshape(-1) for i in self._away])
        if _pins(self._flat.device):
            pinned = torch.empty(self._flat.shape, dtype=self._flat.dtype, pin_memory=True)
            self._event, device = torch.Event(self._flat.device), self._flat.device
            self._flat = pinned.copy_(self._flat, non_blocking=True)
            self._event.record(torch.accelerator.current_stream(device))

    def __call__(self) -> T:
        leaves = list(self._leaves)
        if self._away:
            if self._event is not None:
                self._event.synchronize()
            sizes = [leaves[i].numel() for i in self._away]
            for i, part in zip(self._away, self._flat.cpu().split(sizes), strict=True):
                leaves[i] = part.view(leaves[i].shape)
        return tree_unflatten(leaves, self._shape)
