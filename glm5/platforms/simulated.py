"""An accelerator that this machine does not have, with real numbers: tensors that say they are on device "npu" and
compute on the CPU. Import it before anything that may run a backward pass, in a process without another back end."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from glm5.ops.operators import TORCH_FORMS

DEVICE = "npu"

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.bincount, aten.masked_select, aten._unique2, aten.equal}


class _Backend(_DummyBackendModule):
    """With the functions that `torch.utils.checkpoint` and `make_current` ask for."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return []

    def is_autocast_enabled(self) -> bool:
        return False

    def set_device(self, device: torch.device) -> None:
        pass


class Pretender(Tensor):
    """A tensor that says it is on `DEVICE` and computes on the CPU, our operators in their torch forms. What would wait
    for a device raises RuntimeError. Use it inside `Pretending`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretender:
        return Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(DEVICE, 0),
        )  # fmt: skip

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class Pretending(TorchDispatchMode):
    """Inside, tensors made on `DEVICE` are `Pretender`s too. With `waits`, what would wait for the device does so, and
    its place in glm5 is added there. Without `float64`, the device refuses that dtype, as most accelerators do."""

    def __init__(self, waits: list[str] | None = None, float64: bool = True) -> None:
        super().__init__()
        self.waits, self.float64 = waits, float64

    def __enter__(self) -> Pretending:
        self._before = _state.waits, _state.float64
        _state.waits, _state.float64 = self.waits, self.float64
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        _state.waits, _state.float64 = self._before
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if any(isinstance(x, Pretender) for x in tree_leaves((args, kwargs))):
            return _run(func, args, kwargs)
        if device is not None and torch.device(device).type == DEVICE:
            return _pretend(func(*args, **kwargs | {"device": "cpu"}))
        return func(*args, **kwargs)


@dataclass
class _State:
    waits: list[str] | None = None
    float64: bool = True


_state = _State()


def _pretend(tensor: Tensor) -> Pretender:
    if tensor.dtype == torch.float64 and not _state.float64:
        raise TypeError(f"the device {DEVICE} has no float64")
    return Pretender(tensor)


def _wait(func: Any) -> None:
    if _state.waits is None:
        raise RuntimeError(f"{func} waits for the device")
    places = [
        f"{f.filename.split('/glm5/')[-1]}:{f.lineno}" for f in traceback.extract_stack() if "/glm5/" in f.filename
    ]
    _state.waits.append(f"{func.overloadpacket} at {' < '.join(reversed(places[-3:]))}")


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    plain, options = tree_map_only(Pretender, lambda x: x.held, (args, dict(kwargs)))
    packet, device = func.overloadpacket, options.get("device")
    masks = packet in (aten.index, aten.index_put, aten.index_put_) and any(
        x is not None and x.dtype == torch.bool for x in plain[1]
    )
    leaves = packet is aten._to_copy and device is not None and torch.device(device).type == "cpu"
    leaves |= packet is aten.copy_ and not isinstance(args[0], Pretender)
    late = packet is aten.copy_ and ((len(args) > 2 and args[2]) or options.get("non_blocking", False))
    if packet in WAITS or masks or (leaves and not late):
        _wait(func)
    if leaves:
        return func(*plain, **options)
    others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not isinstance(x, Pretender)]
    if any(x.ndim for x in others) and packet is not aten.copy_:
        raise RuntimeError(f"{func} mixes tensors of the CPU with tensors of the device")
    if device is not None:
        options["device"] = "cpu"
    form = TORCH_FORMS[func._schema.name.split("::")[1]] if func.namespace == "glm5" else func
    out = tree_map_only(Tensor, _pretend, form(*plain, **options))
    return return_and_correct_aliasing(func, args, dict(kwargs), out)


_setup_privateuseone_for_python_backend(DEVICE, backend_module=_Backend())
