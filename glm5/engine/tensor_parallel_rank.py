"""What the ranks of a tensor-parallel engine other than rank 0 do: one method per message of `tensor_parallel` and
`tensor_parallel_group`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.device import make_current, put
from glm5.engine.kv_pool import PAGE, KVPool
from glm5.engine.page_hash import weights_digest
from glm5.engine.runner import SHIFT, forward_pass, widened
from glm5.engine.tensor_parallel_group import SECONDS, Collectives, Wire, cache_digest, load_part, tensor_bytes
from glm5.engine.weight_group import connect
from glm5.model.context import paged_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops.pages import Pages


class Rank:
    """A part of the model, with a cache and a page table that follow those of rank 0."""

    model: GLM5ForCausalLM
    cache: KVPool
    table: Tensor

    def __init__(self, rank: int, world: int, device: torch.device, store: tuple[str, int], wire: Wire) -> None:
        make_current(device)
        self.device, self._wire = device, wire
        self._store = (store[0], store[1])
        self._ranks = Collectives(rank, world, device)
        self._exact = True

    def load(self, directory: str, dtype: str, flash_comm: str | None) -> None:
        """Load this rank's part of a checkpoint; rank 0 has checked it, and warns."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = GLM5ForCausalLM.from_pretrained(Path(directory), dtype=getattr(torch, dtype), device="meta")
        self.model = load_part(whole, self._ranks, flash_comm)
        self._wire.send({"bytes": tensor_bytes(self.model)})

    def join(self) -> None:
        """Connect with the other ranks."""
        self._ranks.join(dist.PrefixStore("tp", connect(self._store, SECONDS)))

    def build(self, tokens: int, rows: int, exact: bool) -> None:
        """A new, empty cache for `rows` sequences."""
        model, self._exact = self.model, exact
        self.cache = KVPool(model.config, tokens, states=rows, dtype=model.dtype, device=self.device)
        self.table = torch.zeros(rows, 16, dtype=torch.long, device=self.device)

    def forward(
        self,
        shape: list[int],
        longest: int,
        first_key: int,
        mtp: bool,
        pages: int,
        columns: int,
        entered: list[tuple[int, int, list[int]]],
    ) -> None:
        """Compute this rank's share of a pass over tokens [B, T]. `entered`: (row, first column, pages) of the page
        table that are new."""
        self._follow(pages, columns, entered)
        count = shape[0] * shape[1]
        numbers = self._ranks.copy(torch.empty(4, count, dtype=torch.long, device=self.device))
        ids, rows, positions, places = numbers.unbind()
        ctx = paged_context(
            self.cache.cache,
            Pages(self.table, rows, PAGE, SHIFT),
            positions.view(shape),
            longest=longest,
            places=places,
            first_key=first_key,
            exact=self._exact,
        )
        hidden = None
        if mtp:
            width = self.model.config.hidden_size
            hidden = self._ranks.copy(torch.empty(count, width, dtype=self.model.dtype, device=self.device))
        forward_pass(self.model, ids.view(shape), hidden, ctx)

    def _follow(self, pages: int, columns: int, entered: list[tuple[int, int, list[int]]]) -> None:
        self.cache.cache.grow(pages)
        if columns > self.table.shape[1]:
            self.table = widened(self.table, columns)
        for row, first, own in entered:
            self.table[row, first : first + len(own)] = put(own, self.device)

    def copy(self, pages: int, source: int, target: int) -> None:
        """See `KVPool.copy`."""
        self.cache.cache.grow(pages)
        self.cache.copy(source, target)

    def page(self, pages: int, page: int, tokens: int, bytes: int) -> None:
        """See `KVPool.load`."""
        self.cache.cache.grow(pages)
        self.cache.load(page, tokens, self._wire.read(bytes))

    def tensor(self, name: str, bytes: int) -> None:
        """New values of a tensor, which follow as bytes."""
        target = self.model.state_dict()[name]
        data = self._wire.read(bytes)
        if data:
            target.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(target.dtype).view(target.shape))

    def weights(self) -> None:
        """Answer with the digest of the weights."""
        self._wire.send({"weights": weights_digest(self.model)})

    def digest(self, **options: Any) -> None:
        """Answer with the SHA-256 of the cache."""
        self._wire.send({"digest": cache_digest(self.cache)})
