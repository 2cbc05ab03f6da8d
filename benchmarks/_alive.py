"""Counts the bytes of all tensors that are alive, by storage and not by process. Used by benchmarks and tests."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Inside, `now` and `peak` are the bytes of the storages that operators returned and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = self.largest = 0
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Any:
        resize = self._resize

        def resized(storage: Any, size: int) -> Any:
            out = resize(storage, size)
            self.count(storage)
            return out

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes:
            weakref.finalize(storage, self.freed, key)
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)

    def freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def phase(self) -> dict[str, int]:
        """Bytes since the last call: peak, largest tensor, and those that are alive now."""
        found = {"peak": self.peak, "largest": self.largest, "end": self.now}
        self.peak, self.largest = self.now, 0
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                tensor = getattr(tensor, "_local_tensor", tensor)
                self.count(tensor.untyped_storage())
        return out
