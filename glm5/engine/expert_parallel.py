"""Expert-parallel serving (`--dp N --expert-parallel`): N engines with their own requests and caches, whose experts are
divided over all of them (see `lockstep`).

Attention, dense layers, router and shared experts are whole in every engine, so keys and latents are nowhere twice.
Tokens travel to the engines of their experts and back by all-to-all, as in training. An engine that fails in a pass, or
ends, ends all others: they wait in it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.device import choose_device, make_current
from glm5.engine.engine import Engine
from glm5.engine.lockstep import LEAVE, MTP, TRUNK, UPDATE, Lockstep
from glm5.engine.page_hash import weights_digest
from glm5.engine.penalties import SamplerState
from glm5.engine.request import Request
from glm5.engine.runner import Feed, Runner
from glm5.engine.weight_group import connect, serve_store
from glm5.errors import ConfigError, EngineError, EngineLost
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.hf_weights import verify_checkpoint
from glm5.obs.logs import get_logger
from glm5.parallel.expert import ExpertExchange
from glm5.parallel.tensor import divide_experts_of, division_of, fill_divided
from glm5.quant.in_place import NewWeights
from glm5.records import SamplingParams

log = get_logger("engine")

SECONDS = 600.0
"""Longest time for all engines to join, and for a pass in which one hangs."""
UPDATE_SECONDS = 60.0
"""Longest time for all engines to be ready to take new weights."""
POLL_SECONDS = 0.05
LOOPBACK = "127.0.0.1"


class LockstepRunner(Runner):
    """Runs every forward pass together with the other engines."""

    lockstep: Lockstep

    def __init__(self, together: Callable[[], Any], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.step, self.pads = None, False  # the engines meet within every layer, in the passes of `_eager`
        self._together = together
        params = SamplingParams(max_tokens=1)
        state = SamplerState(params, 0, vocab_size=self.model.config.vocab_size)
        self._nobody = Request([0], params, 0, frozenset(), state, pages=[0], row=self.spare_row)

    def _eager(self, feeds: Sequence[Feed], hidden: Tensor | None, first_key: int) -> Tensor:
        with self._together():
            self.lockstep.turn(TRUNK if hidden is None else MTP)
            return super()._eager(feeds, hidden, first_key)

    def empty(self, kind: int) -> None:
        """A pass over one token on the dummy page."""
        first = int(kind == MTP)
        width = self.model.config.hidden_size
        hidden = torch.zeros(1, width, dtype=self.model.dtype, device=self.device) if first else None
        super()._eager([Feed(self._nobody, first, [0])], hidden, first)


class ExpertParallelEngine(Engine):
    """An engine of a group. Use it as any other engine; if it has nothing to do itself, call `attend` while `awaited`.

    In exact mode tokens and log-probabilities are bit for bit those of one engine. After an error in a pass, or the end
    of another engine, every call raises EngineLost.
    """

    runner: LockstepRunner

    def __init__(self, model: GLM5ForCausalLM, tokenizer: Tokenizer | None, join: Any, **options: Any) -> None:
        self._failed = ""
        self._acts: list[Callable[[str], None]] = []
        self._lockstep: Lockstep | None = None
        super().__init__(model, tokenizer, graphs=False, **options)
        group, bells = join
        self._lockstep = Lockstep(group, bells, lambda kind: self.runner.empty(kind))
        self.runner.lockstep = self._lockstep
        self._digests: list[int] = []
        self._tell_digests()

    @classmethod
    def start(
        cls, directory: Path, tokenizer: Tokenizer | None, rank: int, world: int, meeting: str, dtype: str, device: str,
        **options: Any,
    ) -> ExpertParallelEngine:  # fmt: skip
        """Load this engine's part of a checkpoint directory, and join the others: all `world` name the same file
        `meeting`, which does not exist yet. Raises ConfigError for a model that cannot be divided, EngineLost if the
        others do not join."""
        place = choose_device(device)
        make_current(place)
        whole = GLM5ForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), device="meta")
        if whole.config.has_recurrent_layers:
            raise ConfigError("--expert-parallel does not serve layers with a recurrent state; leave it out.")
        if rank == 0:
            verify_checkpoint(directory)
        try:
            bells = _stores(Path(meeting), rank)
            backend = "gloo" if place.type == "cpu" else f"cpu:gloo,{place.type}:{_backend(place)}"
            wait = timedelta(seconds=SECONDS)
            dist.init_process_group(backend, store=bells[0], rank=rank, world_size=world, timeout=wait)
        except (RuntimeError, OSError) as error:
            raise EngineLost(f"The engines of a group did not find each other: {_short(error)}") from None
        group: Any = dist.group.WORLD
        divide_experts_of(whole, rank, world, ExpertExchange(group))
        fill_divided(whole, place)
        hosts = group if place.type == "cpu" else dist.new_group(backend="gloo")
        return cls(whole.eval(), tokenizer, (hosts, bells), **options)

    def on_loss(self, act: Callable[[str], None]) -> None:
        self._acts.append(act)

    def on_bell(self, act: Callable[[], None]) -> None:
        """Call `act`, in another thread, when the other engines need this one."""
        assert self._lockstep is not None
        self._lockstep.on_bell(act)

    @property
    def awaited(self) -> bool:
        """Whether `attend` has something to do."""
        return self._lockstep is not None and self._lockstep.awaited and not self._failed

    @torch.no_grad()
    def attend(self) -> None:
        """Take part in a pass of the other engines. Raises EngineLost."""
        assert self._lockstep is not None
        with self._together():
            self._lockstep.attend()

    @torch.no_grad()
    def may_end(self) -> bool:
        """Take part in passes of the others, until all engines want to end. Raises EngineLost."""
        assert self._lockstep is not None
        with self._together():
            return self._lockstep.attend(LEAVE)

    @torch.no_grad()
    def update_weights(self, tensors: Any, version: int) -> None:
        """As `Engine.update_weights`, once all engines do so with the same version: no pass mixes two. Raises
        EngineError, and changes nothing, if they do not."""
        assert self._lockstep is not None
        with self._together():
            try:
                versions = self._lockstep.turn(UPDATE, version, UPDATE_SECONDS)
            except TimeoutError:
                raise EngineError(
                    f"The other engines did not take weights of version {version} within {UPDATE_SECONDS:g} seconds."
                ) from None
            if len(set(versions)) > 1:
                raise EngineError(f"The engines were given weights of different versions: {sorted(set(versions))}.")
        try:
            super().update_weights(tensors, version)
        finally:
            self._tell_digests()

    def weight_digests(self) -> list[int]:
        return self._digests

    @torch.no_grad()
    def _tell_digests(self) -> None:
        """Learn the digest of every engine's weights. All engines do so at once."""
        assert self._lockstep is not None
        with self._together():
            self._digests = self._lockstep.turn(UPDATE, weights_digest(self.model))

    def _copy_weights(self, new: NewWeights) -> None:
        own, division = self.model.state_dict(), division_of(self.model)
        assert division is not None
        for name, whole in new.tensors.items():
            own[name].copy_(division.part(name, whole, division.rank))

    def _new_runner(self) -> LockstepRunner:
        runner = LockstepRunner(self._together, self.model, self.pool, self.max_batch, self.exact)
        if self._lockstep is not None:  # rebuilt
            runner.lockstep = self._lockstep
        return runner

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """For what all engines must finish: an error in it loses the engine."""
        if self._failed:
            raise EngineLost(self._failed)
        try:
            yield
        except (EngineError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            text = f"A pass of the group failed ({_short(error)}); all its engines must start again."
            self._failed = text
            log.error("%s", text)
            for act in self._acts:
                act(text)
            raise EngineLost(text) from error


def _stores(meeting: Path, rank: int) -> tuple[dist.Store, dist.Store]:
    """Two connections to the group's store. Rank 0 serves it, and writes its address to the file."""
    if rank == 0:
        store, address = serve_store(LOOPBACK)
        fresh = meeting.with_name(f"{meeting.name}.{os.getpid()}")
        fresh.write_text(f"{address[0]} {address[1]}")
        fresh.rename(meeting)
        return store, connect(address, SECONDS)
    deadline = time.monotonic() + SECONDS
    while not meeting.exists():
        if time.monotonic() > deadline:
            raise OSError(f"{meeting} did not appear within {SECONDS:g} seconds")
        time.sleep(POLL_SECONDS)
    host, _, port = meeting.read_text().partition(" ")
    return connect((host, int(port)), SECONDS), connect((host, int(port)), SECONDS)


def _backend(device: torch.device) -> str:
    return str(dist.get_default_backend_for_device(device))


def _short(error: BaseException) -> str:
    said = (str(error).splitlines() or [""])[0].partition(" This is typically")[0]  # advice of gloo
    return f"{type(error).__name__}: {said}"[:300]
