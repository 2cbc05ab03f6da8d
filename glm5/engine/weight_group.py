"""Weights over `torch.distributed`: the trainer is rank 0 of a process group of its own, engines are the other ranks.

A group is made directly over a TCP store, so no side needs a default group, and one that exists is not touched. Only
bytes of tensors travel in it: nothing is pickled. Its keys in the store are those of torch's own groups, so SGLang
servers, which make theirs with torch's helper, can be ranks too. gloo is for weights on CPUs, NCCL for GPUs.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.engine.weights import Staged, staged, tensor_hash
from glm5.errors import EngineError
from glm5.model.disk_names import disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.parallel.tensor import whole_state

SECONDS = 60.0
"""Longest time for all ranks to join a group, and for one buffer to arrive."""
BUFFER_BYTES, BUFFER_TENSORS = 256 << 20, 4096
"""Most bytes and tensors of one buffer; a larger tensor has a buffer of its own."""
CONNECT_SECONDS, POLL_SECONDS = 5.0, 2e-4
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
"""Types in which weights may be sent."""


class GroupError(EngineError):
    """A group could not be made, or a transfer in it did not end well: a rank is gone, too late, or closed it."""


@dataclass(frozen=True)
class Part:
    """Tensors that are sent in one buffer, one after the other: names on disk, types, shapes, and SHA-256 of their
    bytes."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    hashes: Sequence[str] | None = None

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors in a buffer of bytes."""
        begin = 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            end = begin + math.prod(shape) * DTYPES[dtype].itemsize
            piece = flat[begin:end]
            if begin % DTYPES[dtype].itemsize:  # types are mixed
                piece = piece.clone()
            yield name, piece.view(DTYPES[dtype]).reshape(tuple(shape))
            begin = end

    @property
    def bytes(self) -> int:
        """Size of the buffer."""
        sizes = zip(self.dtypes, self.shapes, strict=True)
        return sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in sizes)


def pack(model: GLM5ForCausalLM, limit: int = BUFFER_BYTES) -> list[tuple[Part, Tensor]]:
    """All weights in buffers on the CPU, each of one type and at most `limit` bytes."""
    rows: list[list[tuple[str, Tensor]]] = []
    size = 0
    for name, tensor in sorted(disk_tensors(model).items(), key=lambda item: str(item[1].dtype)):
        bytes = tensor.numel() * tensor.element_size()
        other = not rows or rows[-1][0][1].dtype != tensor.dtype or len(rows[-1]) == BUFFER_TENSORS
        if other or size + bytes > limit:
            rows.append([])
            size = 0
        rows[-1].append((name, tensor))
        size += bytes
    return [_packed(row) for row in rows]


def _packed(row: Sequence[tuple[str, Tensor]]) -> tuple[Part, Tensor]:
    dtype = str(row[0][1].dtype).removeprefix("torch.")
    part = Part([name for name, _ in row], [dtype] * len(row), [list(tensor.shape) for _, tensor in row])
    flat = torch.empty(part.bytes, dtype=torch.uint8)
    hashes = []
    for (_, to), (_, tensor) in zip(part.views(flat), row, strict=True):
        to.copy_(tensor.detach())
        hashes.append(tensor_hash(to))
    return Part(part.names, part.dtypes, part.shapes, hashes), flat


class Assembly:
    """A complete set of weights for `model` that arrives in parts. The model is not changed."""

    def __init__(self, model: GLM5ForCausalLM) -> None:
        self._model = model
        self._state = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in whole_state(model).items()}
        self._targets = disk_tensors(model, self._state)
        self._missing = set(self._targets)

    def check(self, part: Part) -> None:
        """Before it arrives: raise EngineError for a part that does not fit."""
        for name, dtype, shape in zip(part.names, part.dtypes, part.shapes, strict=True):
            if name not in self._targets:
                raise EngineError(f'Weight update does not fit the model: tensor "{name:.200}" is not in the model.')
            if name not in self._missing:
                raise EngineError(
                    f'Weight update: tensor "{name:.200}" was sent twice; destroy the group, begin again.'
                )
            if (own := self._targets[name].shape) != torch.Size(shape):
                raise EngineError(
                    f'Weight update does not fit the model: tensor "{name}" has shape {list(shape)!s:.80}, not '
                    f"{list(own)}."
                )
            if dtype not in DTYPES:
                raise EngineError(f'Weight update does not fit the model: tensor "{name}" is {dtype:.40}.')

    def add(self, part: Part, flat: Tensor) -> None:
        """Keep what arrived. Raises EngineError if a hash differs."""
        for index, (name, tensor) in enumerate(part.views(flat)):
            if part.hashes is not None and tensor_hash(tensor) != part.hashes[index].lower():
                raise EngineError(f'Weight update: tensor "{name}" is corrupt (its SHA-256 differs).')
            self._targets[name].copy_(tensor)
            self._missing.discard(name)

    @property
    def missing(self) -> int:
        """Number of tensors that have not arrived."""
        return len(self._missing)

    def staged(self) -> Staged:
        """The weights, once they are complete, for `weights.apply`."""
        return staged(self._model, self._state, "torch.distributed")


class WeightGroup:
    """One rank of a group. Returns once all `world` ranks have joined, through the store at `address`.

    Raises EngineError if the store does not answer or this machine lacks what `backend` needs, GroupError if the others
    do not join within `seconds`.
    """

    def __init__(
        self, address: tuple[str, int], name: str, rank: int, world: int, backend: str, seconds: float = SECONDS
    ) -> None:
        self.name, self.seconds = name, seconds
        self._closed = threading.Event()
        if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise EngineError('The backend "nccl" needs a GPU on every rank, and this process has none; use "gloo".')
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        joining = f'Cannot join the group "{name:.100}" at {address[0]:.100}:{address[1]} as rank {rank} of {world}: '
        try:
            store: dist.Store = connect(address, seconds)
            host = _own_address(address)
        except (RuntimeError, OSError) as error:
            raise EngineError(joining + _short(error)) from None
        try:
            for prefix in (name, f"{name}/", f"{self.device.type}/"):
                store = dist.PrefixStore(prefix, store)
            self._group: Any = process_group(store, rank, world, backend, seconds, host)
        except (RuntimeError, OSError) as error:
            raise GroupError(joining + _short(error)) from None

    def send(self, flat: Tensor) -> None:
        """Send a buffer from rank 0 to all others; they call `receive`. Raises GroupError."""
        self._broadcast(flat.to(self.device))

    def receive(self, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The `count` elements that rank 0 sends, in memory of the host. Raises GroupError."""
        flat = torch.empty(count, dtype=dtype, device=self.device)
        self._broadcast(flat)
        return flat.cpu()

    def close(self) -> None:
        """Leave the group; a transfer that is under way in another thread raises GroupError at once. Does not block."""
        self._closed.set()
        held, self._group = [self._group], None
        if held[0] is not None:
            _release(held)

    def _broadcast(self, flat: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        held = [self._group]
        if held[0] is None:
            raise GroupError(f'The group "{self.name:.100}" was closed.')
        deadline = time.monotonic() + self.seconds
        try:
            held.append(held[0].broadcast([flat], options))
            while not held[1].is_completed():
                if self._closed.is_set():
                    raise GroupError(f'The group "{self.name:.100}" was closed.')
                if time.monotonic() > deadline:
                    raise GroupError(f"A buffer of {flat.numel()} bytes did not arrive in {self.seconds:g} seconds.")
                time.sleep(POLL_SECONDS)
            held[1].wait()
        except (RuntimeError, GroupError) as error:
            self.close()
            _release(held)
            if isinstance(error, GroupError):
                raise
            raise GroupError(f'A transfer in the group "{self.name:.100}" failed: {_short(error)}') from None


def serve_store(host: str) -> tuple[dist.TCPStore, tuple[str, int]]:
    """The store of a trainer's groups, on a free port of `host`, and its address. Anyone who can connect to it can join
    the groups. Raises EngineError if this machine does not have that address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        raise EngineError(f"Cannot listen on {host} for engines that want weights: {error.strerror}.") from None
    with listener:
        address, descriptor = (host, int(listener.getsockname()[1])), os.dup(listener.fileno())
    wait = timedelta(seconds=SECONDS)
    store = dist.TCPStore(*address, None, True, wait, wait_for_workers=False, master_listen_fd=descriptor)
    return store, address


def connect(address: tuple[str, int], seconds: float) -> dist.TCPStore:
    """A connection to a store; its operations wait at most `seconds`. Raises OSError or RuntimeError."""
    socket.create_connection(address, CONNECT_SECONDS).close()  # torch would try for long, and log every attempt
    return dist.TCPStore(*address, None, False, timedelta(seconds=seconds), wait_for_workers=False)


def new_name() -> str:
    """A name that no other group has."""
    return f"glm5-{secrets.token_hex(8)}"


def backend_of(model: torch.nn.Module) -> str:
    """The backend for a trainer whose model this is."""
    return "nccl" if next(model.parameters()).is_cuda else "gloo"


def _own_address(address: tuple[str, int]) -> str:
    """The address of this machine from which it reaches another one."""
    with socket.create_connection(address, CONNECT_SECONDS) as connection:
        return str(connection.getsockname()[0])


def process_group(store: dist.Store, rank: int, world: int, backend: str, seconds: float, host: str) -> Any:
    """A "gloo" or "nccl" group that is not torch's default group. gloo listens on the address `host`."""
    options: Any
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=10 * seconds)  # we stop waiting before its watchdog would end the process
        return dist.ProcessGroupNCCL(store, rank, world, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=seconds)
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    options._devices = [gloo.create_device(interface=named) if named else gloo.create_device(hostname=host)]
    return gloo(store, rank, world, options)


def _release(held: list[Any]) -> None:
    """Drop the references in `held`, the first to a group, in a thread: the last one's end blocks until the group's
    transfers have ended. The caller must not have more of them."""

    def drop() -> None:
        held[0].abort()  # of NCCL; gloo's transfers end in time
        held.clear()

    threading.Thread(target=drop, daemon=False).start()  # a process that ends within would abort


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
