"""The processes of a tensor-parallel engine (see `tensor_parallel`): how they start, talk and end."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.device import choose_device
from glm5.engine.kv_pool import KVPool
from glm5.engine.weight_group import process_group, serve_store
from glm5.errors import ConfigError, EngineError, EngineLost
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.hf_weights import verify_checkpoint
from glm5.obs.logs import get_logger
from glm5.parallel.tensor import SplitSums, check_divisible, divide_model, fill_divided
from glm5.process import python_path

log = get_logger("engine")

COMMAND = (sys.executable, "-P", "-m", "glm5.engine.tensor_parallel_process")
LOOPBACK = "127.0.0.1"
SECONDS = 600.0
"""Longest time for all ranks to join, and for a sum in which a rank hangs. A rank that ends is noticed at once."""
NEWS_SECONDS = 2.0
"""After an error in a pass: time to learn whether another rank has ended, which is the better reason."""
END_SECONDS = 10.0


class Wire:
    """Messages between two processes: a line of JSON each, and raw bytes after it if the message says so."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._reader = connection, connection.makefile("rb")

    def send(self, message: Mapping[str, Any], *payload: Any) -> None:
        """Raises OSError if the other side is gone. `payload` are buffers of bytes."""
        self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        for part in payload:
            self._socket.sendall(part)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if the other side is gone."""
        try:
            line = self._reader.readline()
        except OSError:
            return None
        message: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
        return message

    def read(self, count: int) -> bytes:
        """The `count` bytes after a message."""
        return self._reader.read(count)

    def shut(self) -> None:
        """Let reading end on both sides."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


class Collectives:
    """Sums, gathers and copies of tensors between the ranks, once `join` has connected them. `sent` counts the bytes
    that this rank has sent in sums and gathers, by kind; those of an all-reduce as in a ring."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world, self.device = rank, world, device
        self.sent: Counter[str] = Counter()
        self._group: Any = None

    def join(self, store: dist.Store) -> None:
        """Connect the ranks; returns when all have called. Raises RuntimeError if one does not within `SECONDS`."""
        if self.device.type in ("cpu", "cuda"):
            backend, wait = ("gloo", SECONDS) if self.device.type == "cpu" else ("nccl", SECONDS / 10)
            self._group = process_group(store, self.rank, self.world, backend, wait, LOOPBACK)  # times 10 with NCCL
            return
        backend = dist.get_default_backend_for_device(self.device)
        timeout = timedelta(seconds=SECONDS)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=timeout)
        self._group = dist.group.WORLD

    @property
    def joined(self) -> bool:
        return self._group is not None

    def sum(self, x: Tensor, exact: bool) -> Tensor:
        """The sum over ranks, with the same bits on all of them; `x` may be overwritten. With `exact`, elements are
        added in rank order, so that their place in the tensor does not change their bits."""
        x = x.contiguous()
        if exact and self.world > 2:  # two numbers have one order
            self.sent["sum"] += (self.world - 1) * x.nbytes
            parts = [torch.empty_like(x) for _ in range(self.world)]
            self._group.allgather([parts], [x]).wait()
            for part in parts[1:]:
                parts[0] += part
            return parts[0]
        self.sent["sum"] += 2 * (self.world - 1) * x.nbytes // self.world
        self._group.allreduce([x], dist.AllreduceOptions()).wait()
        return x

    def sum_parts(self, parts: Tensor) -> Tensor:
        """See `parallel.tensor.Ranks`: every rank gets the parts that are its own, and adds them."""
        parts = parts.contiguous()
        self.sent["reduce-scatter"] += (self.world - 1) * parts.nbytes // self.world
        own = torch.empty_like(parts)
        exchange = getattr(self._group, "all_to_all_single", None) or self._group.alltoall_base
        exchange(own, parts, [], []).wait()
        for part in own[1:]:
            own[0] += part
        return own[0]

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        """See `parallel.tensor.Ranks`."""
        x = x.contiguous()
        self.sent["gather"] += (self.world - 1) * x.nbytes
        parts = x.new_empty(self.world, *x.shape)
        work = self._group.allgather([list(parts.unbind())], [x])

        def wait() -> Tensor:
            work.wait()
            return parts.flatten(0, 1)

        return wait

    def copy(self, x: Tensor) -> Tensor:
        """Overwrite `x` [...] on all ranks with that of rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([x], options).wait()
        return x

    def abort(self) -> None:
        """Let a transfer on an accelerator end that waits for a lost rank; gloo's end by themselves."""
        if self.device.type != "cpu" and self._group is not None:
            with contextlib.suppress(Exception):
                self._group.abort()


class Follower:
    """The process of another rank, as rank 0 sees it."""

    def __init__(self, rank: int, job: Mapping[str, Any], threads: int) -> None:
        ours, theirs = socket.socketpair()
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONPATH": python_path()}
        with theirs:
            self.process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=2,  # stdout is for what rank 0 says
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C goes only to rank 0, which lets answers finish
            )
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({**job, "rank": rank, "socket": theirs.fileno()}).encode() + b"\n")
            self.process.stdin.flush()
        self.rank, self.wire, self.error = rank, Wire(ours), ""
        self._reading = threading.Lock()

    def answer(self) -> dict[str, Any] | None:
        """The next answer of the rank; None, and perhaps `error`, if it has failed."""
        with self._reading:
            message = self.wire.receive()
            if message is not None and "error" in message:
                self.error, message = str(message["error"]), None
            return message

    def ending(self) -> str:
        """Wait for the process to end, and say how it did."""
        code = self.process.wait()
        while not self.error and self.answer() is not None:
            pass
        how = f"ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"
        return f"{how}: {self.error}" if self.error else how

    def shut(self) -> None:
        """Let the process end: it does at the end of its stdin."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.wire.shut()


class Group:
    """The ranks of one engine, started as processes of this machine; this process is rank 0.

    `failed` is None, or why the group has ended; `bytes` are those of the weights on every rank. Raises ConfigError if
    there are fewer devices than ranks.
    """

    def __init__(self, world: int, device: str = "cpu") -> None:
        devices = [choose_device(device, number) for number in range(world)]
        if devices[0].type != "cpu" and len(set(devices)) < world:
            raise ConfigError(f"--tp {world} needs {world} devices, and {device} gives {len(set(devices))}.")
        self.world, self.device, self.failed = world, devices[0], None  # type: int, torch.device, str | None
        self.collectives = Collectives(0, world, devices[0])
        self.bytes = [0] * world
        self._acts: list[Callable[[str], None]] = []
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._closing = False
        threads = torch.get_num_threads()
        if devices[0].type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, threads // world)  # as many on every rank: the same bits where all compute the same
            torch.set_num_threads(threads)
        self._store, address = serve_store(LOOPBACK)
        jobs = [{"world": world, "device": str(each), "store": address, "threads": threads} for each in devices]
        self.followers = [Follower(rank, jobs[rank], threads) for rank in range(1, world)]
        self._watchers = [threading.Thread(target=self._watch, args=(each,), daemon=True) for each in self.followers]
        for watcher in self._watchers:
            watcher.start()
        atexit.register(self.close)  # before the pipes are closed, which a watcher would take for a failure

    def load(self, directory: Path, dtype: str, flash_comm: str | None = None) -> GLM5ForCausalLM:
        """This rank's part of the model in a checkpoint directory, while the others load theirs. `flash_comm`: see
        `load_part`. Raises like `from_pretrained`, ConfigError for a model that cannot be divided, EngineLost."""
        whole = GLM5ForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), device="meta")
        check_divisible(whole.config, self.world)
        self.tell({"do": "load", "directory": str(directory), "dtype": dtype, "flash_comm": flash_comm})
        verify_checkpoint(directory)  # for all ranks
        model = load_part(whole, self.collectives, flash_comm)
        self.bytes = [tensor_bytes(model), *(answer["bytes"] for answer in self.answers())]
        megabytes = ", ".join(f"{size / 1e6:,.1f}" for size in self.bytes)
        log.info("%s: weights divided over %d ranks, MB on each: %s", directory, self.world, megabytes)
        if not self.collectives.joined:
            with self.together():
                self.tell({"do": "join"})
                self.collectives.join(dist.PrefixStore("tp", self._store))
        return model

    def tell(self, message: Mapping[str, Any], *payload: Any) -> None:
        """Send every other rank a message. Raises EngineLost."""
        with self.together():
            for follower in self.followers:
                follower.wire.send(message, *payload)

    def answers(self) -> list[dict[str, Any]]:
        """The next answer of every other rank. Raises EngineLost."""
        with self.together():
            found = [(follower, follower.answer()) for follower in self.followers]
            for follower, answer in found:
                if answer is None:
                    raise EngineError(follower.error or f"rank {follower.rank} does not answer")
            return [answer for _, answer in found if answer is not None]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """For what all ranks must finish: an error in it, here or elsewhere, ends the group, and is raised as
        EngineLost."""
        if self.failed is not None:
            raise EngineLost(self.failed)
        try:
            yield
        except EngineLost:
            raise
        except (KeyboardInterrupt, SystemExit):
            self.fail("The engine was interrupted while its processes computed together; start it again.")
            raise
        except BaseException as error:
            self._ended.wait(NEWS_SECONDS)
            text = (str(error).splitlines() or [""])[0][:300]
            self.fail(f"Rank 0 of --tp {self.world} failed ({type(error).__name__}: {text}); start the engine again.")
            raise EngineLost(self.failed or "") from error

    def fail(self, reason: str) -> None:
        """End the group, once; the first reason stays."""
        with self._lock:
            if self.failed is not None:
                return
            self.failed, acts = reason, list(self._acts)
        self._ended.set()
        if not self._closing:
            log.error("%s", reason)
        self.collectives.abort()
        for follower in self.followers:
            follower.process.kill()
        for act in acts:
            act(reason)

    def on_loss(self, act: Callable[[str], None]) -> None:
        """See `Engine.on_loss`."""
        with self._lock:
            self._acts.append(act)
            reason = self.failed
        if reason is not None:
            act(reason)

    def close(self) -> None:
        """End the other ranks, and wait for that."""
        atexit.unregister(self.close)
        with self._lock:
            self._closing, self._acts = True, []
        self.fail("The engine was closed.")
        for follower in self.followers:
            follower.shut()
        for watcher, follower in zip(self._watchers, self.followers, strict=True):
            watcher.join(END_SECONDS)
            follower.wire.close()

    def _watch(self, follower: Follower) -> None:
        how = follower.ending()
        name = f"Rank {follower.rank} of --tp {self.world} (process {follower.process.pid})"
        self.fail(f"{name} {how}; start the engine again.")


def load_part(model: GLM5ForCausalLM, ranks: Collectives, flash_comm: str | None = None) -> GLM5ForCausalLM:
    """Divide a deferred model, and load this rank's part of it. `flash_comm`: None, "plain" or "int8" (see
    `SplitSums`)."""
    split = None if flash_comm is None else SplitSums(ranks, rounds=flash_comm == "int8")
    divide_model(model, ranks.rank, ranks.world, ranks.sum, split)
    fill_divided(model, ranks.device)
    return model.eval()


def tensor_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights in a model."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor, copied to the host if it is not there."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def cache_digest(pool: KVPool) -> str:
    """SHA-256 of the pages of a pool except the dummy page."""
    digest = hashlib.sha256()
    for part in (pool.cache.latents, pool.cache.index_keys):
        digest.update(bytes_of(part[:, 1:]))
    return digest.hexdigest()
