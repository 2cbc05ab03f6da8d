"""Tensor-parallel serving (`--tp N`): one engine over N processes of this machine, each with a part of every layer.

Rank 0 is the process that has the engine: scheduler, prefix cache, grammars and sampler are there and nowhere else. The
other ranks (`tensor_parallel_process`) only compute: each forward pass is announced to them with its input, so what
they do cannot differ from what rank 0 does. Announcements are lines of JSON over a socket, followed by raw bytes;
tensors within a pass go over a `torch.distributed` group (gloo on CPUs, the device's library otherwise).

A pass that fails on any rank ends the group, because the others wait in it: the engine is lost then, with one reason.
If this process ends, for whatever reason, the other ranks see the end of their stdin and end too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.engine.kv_pool import KVPool
from glm5.engine.request import Request
from glm5.engine.runner import Feed, Runner, forward_pass
from glm5.engine.tensor_parallel_group import Group, bytes_of, cache_digest
from glm5.errors import ConfigError, EngineError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.parallel.tensor import check_divisible, division_of
from glm5.quant.in_place import NewWeights


class SharedPool(KVPool):
    """The pool of rank 0: what changes its pages outside of a forward pass is repeated on all ranks."""

    def __init__(self, group: Group, *arguments: Any, **options: Any) -> None:
        self._group = group
        super().__init__(*arguments, **options)

    def copy(self, source: int, target: int) -> None:
        self._group.tell({"do": "copy", "pages": self.cache.rows, "source": source, "target": target})
        super().copy(source, target)

    def dump(self, page: int, tokens: int) -> bytes:
        return self.to_bytes(super().dump(page, tokens))  # the bytes will go to the other ranks

    def load(self, page: int, tokens: int, data: bytes | Tensor) -> None:
        assert isinstance(data, bytes)
        super().load(page, tokens, data)
        message = {"do": "page", "pages": self.cache.rows, "page": page, "tokens": tokens, "bytes": len(data)}
        self._group.tell(message, data)


class LeadingRunner(Runner):
    """Runs every forward pass on all ranks at once."""

    def __init__(self, group: Group, *arguments: Any) -> None:
        self._group = group
        self._entered: list[tuple[int, int, list[int]]] = []  # (row, first column, pages) new in the page table
        super().__init__(*arguments)
        self.step, self.pads = None, False  # the ranks meet within every layer, in the passes of `_eager`

    def _table(self, request: Request) -> None:
        known = request.entered
        super()._table(request)
        if request.entered != known:
            self._entered.append((request.row, known, request.pages[known:]))

    def _eager(self, feeds: Sequence[Feed], hidden: Tensor | None, first_key: int) -> Tensor:
        ids, ctx = self._inputs(feeds, first_key)
        assert ctx.pages is not None and ctx.places is not None
        numbers = torch.stack([ids.flatten(), ctx.pages.rows, ctx.positions.flatten(), ctx.places.flatten()])
        entered, self._entered = self._entered, []
        message = {
            "do": "forward",
            "shape": list(ids.shape),
            "longest": ctx.key_length,
            "first_key": first_key,
            "mtp": hidden is not None,
            "pages": self.pool.cache.rows,
            "columns": self.table.shape[1],
            "entered": entered,
        }
        ranks = self._group.collectives
        with self._group.together():
            self._group.tell(message)
            ranks.copy(numbers)
            if hidden is not None:
                hidden = ranks.copy(hidden.contiguous())
            return forward_pass(self.model, ids, hidden, ctx)


class TpEngine(Engine):
    """An engine whose layers are divided over the ranks of a group. Use it as any other engine, and `close` it.

    Greedy tokens and log-probabilities equal those of one process up to rounding: sums are in another order. So with
    `exact`, results do not depend on the batch, but are not bit for bit the learner's. After an error in a forward
    pass, or the end of a rank, every call raises EngineLost. Raises EngineError for `host_cache_bytes` with GQA, whose
    keys and values are divided too.
    """

    def __init__(
        self, group: Group, model: GLM5ForCausalLM, tokenizer: Tokenizer | None = None, **options: Any
    ) -> None:
        if (options.get("host_cache_bytes") or options.get("disk_cache")) and model.config.attention_type == "gqa":
            raise EngineError(
                "A cache in host memory or on disk (--host-cache-mb, --disk-cache) with --tp needs MLA: every rank has "
                "other keys of GQA."
            )
        self.group = group
        super().__init__(model, tokenizer, **options)

    @classmethod
    def start(
        cls,
        directory: Path,
        tokenizer: Tokenizer | None,
        world: int,
        dtype: str,
        device: str,
        quantize: str | None = None,
        flash_comm: str | None = None,
        **options: Any,
    ) -> TpEngine:
        """Start the processes, and load a checkpoint directory (see `Engine.from_pretrained`). Raises ConfigError for
        `quantize`, whose integers are not divided, and for `flash_comm` that is unknown or rounds in exact mode."""
        if quantize is not None:
            raise ConfigError("quantize needs one process per engine; leave out --tp.")
        if flash_comm not in (None, "plain", "int8"):
            raise ConfigError(f"--flash-comm is plain or int8, not {flash_comm!r:.20}.")
        if flash_comm == "int8" and options.get("exact", True):
            raise ConfigError("--flash-comm int8 rounds what ranks send; take plain, or --fast instead of --exact.")
        check_divisible(GLM5Config.load(directory), world)
        group = Group(world, device)
        try:
            return cls(group, group.load(directory, dtype, flash_comm), tokenizer, **options)
        except BaseException:
            group.close()
            raise

    def close(self) -> None:
        super().close()
        self.group.close()

    def on_loss(self, act: Callable[[str], None]) -> None:
        self.group.on_loss(act)

    def digests(self) -> list[str]:
        """SHA-256 of the cache of every rank, the same on all ranks of an MLA model."""
        self.group.tell({"do": "digest"})
        return [cache_digest(self.pool), *(answer["digest"] for answer in self.group.answers())]

    def weight_digests(self) -> list[int]:
        self.group.tell({"do": "weights"})
        return [*super().weight_digests(), *(answer["weights"] for answer in self.group.answers())]

    def _new_pool(self) -> KVPool:
        rows = self.max_batch + 1
        build = {"do": "build", "tokens": self.cache_tokens, "rows": rows, "exact": self.exact}
        self.group.tell(build)
        options = {"states": rows, "dtype": self.model.dtype, "device": self.model.device}
        return SharedPool(self.group, self.model.config, self.cache_tokens, **options)

    def _new_runner(self) -> Runner:
        return LeadingRunner(self.group, self.model, self.pool, self.max_batch, self.exact)

    def _copy_weights(self, new: NewWeights) -> None:
        own, division = self.model.state_dict(), division_of(self.model)
        assert division is not None
        with self.group.together():
            for name, whole in new.tensors.items():
                own[name].copy_(division.part(name, whole, 0))
                for follower in self.group.followers:
                    part = bytes_of(division.part(name, whole, follower.rank).to(own[name].dtype))
                    follower.wire.send({"do": "tensor", "name": name, "bytes": len(part)}, part)
