"""Which device tensors live on, the one place that decides it; the widest numbers there; and copies to and from one
that wait as little as possible."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
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
BACK_ENDS = {"npu": "torch_npu", "musa": "torch_musa", "mlu": "torch_mlu", "gcu": "torch_gcu"}
"""The package that gives torch a device, by the device's name. torch imports only those that ask for it."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


def choose_device(name: str = AUTO, number: int | None = None) -> torch.device:
    """The device that a recipe or a command calls `name`.

    "auto" is CUDA, then another accelerator that torch or an installed back end (`BACK_ENDS`) has registered, then the
    CPU. Apple's "mps" must be named. In a job of torchrun, a device without a number is the one of the process's
    LOCAL_RANK. The engine `number` of several takes its turn among the names, which commas divide,
    and, if the name has no number, among the devices. Raises ConfigError for a device that torch does not know or that
    is not here.
    """
    if number is not None:
        names = name.split(",")
        name = names[number % len(names)].strip()
    if name == AUTO:
        device = _first_accelerator() or torch.device("cpu")
    else:
        _import_back_end(name.partition(":")[0])
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


def memory_of(device: torch.device) -> int:
    """Bytes of a device's memory; of the CPU, this machine's. Raises ConfigError if nobody knows."""
    module = None if device.type == "cpu" else _back_end(device)
    try:
        if device.type == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(module.mem_get_info(device)[1])  # type: ignore[union-attr]
    except (AttributeError, OSError, RuntimeError, ValueError):
        raise ConfigError(f"The memory of {device} is not known; set parallel.memory.") from None


def name_of(device: torch.device) -> str:
    """What the maker calls a device, or its type."""
    module = None if device.type == "cpu" else _back_end(device)
    get = getattr(module, "get_device_name", None)
    return device.type if get is None else str(get(device))


def make_current(device: torch.device) -> None:
    """Make a device with a number the current one of this process. What names no device, such as page-locked memory,
    would use the first one, and every process would take some hundred megabytes there."""
    if device.index is not None:
        torch.get_device_module(device).set_device(device)


def _first_accelerator() -> torch.device | None:
    if torch.cuda.is_available():
        return torch.device("cuda")
    for kind in BACK_ENDS:
        try:
            _import_back_end(kind)
        except ConfigError as error:
            _log.warning("%s The search for a device goes on.", error)
    other = torch.accelerator.current_accelerator()
    if other is None or other.type == "mps" or _back_end(other) is None:
        return None
    return torch.device(other.type)


def _import_back_end(kind: str) -> None:
    package = BACK_ENDS.get(kind)
    if package is None or hasattr(torch, kind) or not importlib.util.find_spec(package):
        return
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f'{package}, which gives torch the device "{kind}", does not load: {error!s:.99}.') from error


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


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that does not compute with float64, as most accelerators for inference."""
    return torch.float64 if device.type in ("cpu", "meta") or _has_float64(device.type) else torch.float32


@functools.cache
def _has_float64(kind: str) -> bool:
    try:
        (torch.ones(2, dtype=torch.float64, device=kind) * 0.5).sum()
    except (RuntimeError, TypeError):
        return False
    return True


def widened(tensor: Tensor) -> Tensor:
    """The tensor in the `widest` dtype of its device, for sums over many numbers."""
    return tensor.to(widest(tensor.device))


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
    """A copy of all tensors in nested dicts, lists and tuples to the CPU, as bytes in one piece. It begins here, and
    the host waits for it, once, when it calls. Tensors that are on the CPU stay as they are."""

    def __init__(self, tree: T) -> None:
        self._leaves, self._shape = tree_flatten(tree)
        away = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and not leaf.is_cpu]
        # Wide numbers first: each part then begins where a number of its size may.
        self._away = sorted(away, key=lambda i: -self._leaves[i].element_size())
        self._event: torch.Event | None = None
        if not self._away:
            return
        parts = [self._leaves[i].detach().reshape(-1).contiguous() for i in self._away]
        self._flat = torch.cat([part.view(torch.uint8) for part in parts])
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
            sizes = [leaves[i].numel() * leaves[i].element_size() for i in self._away]
            for i, part in zip(self._away, self._flat.cpu().split(sizes), strict=True):
                leaves[i] = part.view(leaves[i].dtype).view(leaves[i].shape)
        return tree_unflatten(leaves, self._shape)
