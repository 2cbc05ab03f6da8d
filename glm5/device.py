"""Which device tensors live on: the one place that decides it."""

from __future__ import annotations

import os
from types import ModuleType

import torch

from glm5.errors import ConfigError

AUTO = "auto"


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
            raise ConfigError(f'device = "{name:.40}" is none that torch knows; {_here()}') from None
    if device.type == "cpu":
        return device
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
