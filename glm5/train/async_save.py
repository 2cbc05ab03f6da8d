"""Saves of the training state in the background: a step waits only for a copy of the rank's own parts."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.logs import get_logger
from glm5.parallel.ranks import Ranks
from glm5.train.checkpoint import save_state, state_pieces, write_state
from glm5.train.shard_files import Pieces

_log = get_logger(__name__)

LEAVING_SECONDS = 30.0
"""How long a stage that ends with an error waits for the state that is being written."""


class StateSaver:
    """Writes the states of a stage to `path`, one after the other, each in a thread of its own.

    All ranks call `save` and `wait` in the same order. The threads of the ranks talk over a process group of their own
    (`Ranks.background`). A state is published after all ranks have written their parts, so a run that is killed finds
    at least the state before. As a context manager, it gives the last state time to finish if the stage fails.

    Until a state is written, the host holds a copy of the rank's weights and optimizer state; from a device it goes to
    page-locked memory, which is kept for the next save. Without `Layout.async_save`, `save` writes before it returns.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._path, self._ranks = path, ranks
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._pinned: dict[str, Tensor] = {}

    def save(
        self,
        model: GLM5ForCausalLM,
        optimizer: torch.optim.Optimizer,
        step: int,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Begin to write a state; the arguments are those of `save_state`. Waits for the state before, and raises its
        error on all ranks."""
        self.wait()
        if not self._ranks.layout.async_save:
            save_state(self._path, model, optimizer, step, extra, ranks=self._ranks)
            return
        pieces, kept = self._copied(state_pieces(model, optimizer, self._ranks)), json.loads(json.dumps(extra or {}))
        self._thread = threading.Thread(target=self._write, args=(pieces, step, kept), name="save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last state is published. Raises CheckpointError on all ranks if one could not write it; the
        state before is then unchanged."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join(LEAVING_SECONDS)
            if self._thread.is_alive():
                _log.warning("%s: the last state was not written within %g seconds.", self._path, LEAVING_SECONDS)
            elif self._error is not None:  # the stage raises its own error
                _log.warning("%s: the last state was not written: %s", self._path, self._error)

    def _write(self, pieces: Pieces, step: int, extra: dict[str, Any]) -> None:
        try:
            write_state(self._path, pieces, step, extra, self._ranks.background())
        except BaseException as error:  # a thread has nobody else to tell
            self._error = error

    @torch.no_grad()
    def _copied(self, pieces: Pieces) -> Pieces:
        """The same pieces in host memory that training does not change."""
        found = {name: (self._copy(name, tensor), region) for name, (tensor, region) in pieces.items()}
        for device in {tensor.device for tensor, _ in pieces.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # that of the current device may be another
        return found

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.to("cpu", memory_format=torch.contiguous_format, copy=True)
        if name not in self._pinned:
            self._pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return self._pinned[name].copy_(tensor, non_blocking=True)
