"""The KV pool: pages of a fixed number of tokens, with the latents of all layers and the keys of their indexers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from glm5.config.decoding import bytes_per_token, caching_layers
from glm5.config.model import GLM5Config
from glm5.device import host_memory
from glm5.errors import EngineError
from glm5.model.context import LatentCache
from glm5.ops import KEY_TILE
from glm5.ops.cache_rows import packed_width

PAGE = KEY_TILE
"""Tokens per page. The indexer reads keys in tiles of this size, so a tile never spans two pages."""

FIRST_PAGES = 32
"""Pages allocated at the start; the memory doubles on demand."""


class KVPool:
    """Pages numbered 1 .. `total`. Page 0 is a dummy page: discarded writes go there.

    Sequences own pages by reference count (`alloc`, `incref`, `free`); the prefix cache pins pages (`pin`, `unpin`).
    Pages that are only pinned count as available: `reclaim`, set by the cache, frees them.
    """

    def __init__(
        self,
        config: GLM5Config,
        tokens: int,
        *,
        states: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        packed: bool = False,
    ) -> None:
        """`packed`: see `LatentCache`."""
        self.total = -(-tokens // PAGE)
        first = min(self.total, FIRST_PAGES)
        self.cache = LatentCache(config, 1 + first, PAGE, dtype, states=states, device=device, packed=packed)
        self.reclaim: Callable[[int], None] = lambda count: None
        self._refcounts = [0] * (self.total + 1)
        self._pinned = [False] * (self.total + 1)
        self._free: list[int] = []
        self._next = 1  # the lowest page that was never allocated
        self._busy = 0  # pages with a reference count > 0

    @property
    def available(self) -> int:
        """Number of pages that `alloc` can return, including those that it must evict first."""
        return self.total - self._busy

    @property
    def unused(self) -> int:
        """Number of pages that are neither referenced by a sequence nor pinned."""
        return len(self._free) + self.total + 1 - self._next

    def held(self, page: int) -> bool:
        """Whether a sequence references the page."""
        return self._refcounts[page] > 0

    def alloc(self, count: int) -> list[int]:
        """`count` pages with one reference each. Raises EngineError if fewer are available."""
        if count > self.available:
            raise EngineError(f"The cache has {self.available} free pages, {count} are needed.")
        if count > self.unused:
            self.reclaim(count - self.unused)
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, self._next = self._next, self._next + 1
            self._refcounts[page] = 1
            pages.append(page)
        self._busy += count
        if self._next > self.cache.rows:
            self.cache.grow(min(1 + self.total, max(self._next, 2 * self.cache.rows)))
        return pages

    def incref(self, page: int) -> None:
        """Add a reference to a page that is in use."""
        self._busy += self._refcounts[page] == 0
        self._refcounts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Remove one reference from each page."""
        for page in pages:
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                self._busy -= 1
                if not self._pinned[page]:
                    self._free.append(page)

    def pin(self, page: int) -> None:
        """Keep a page for the prefix cache; a sequence must reference it now."""
        self._pinned[page] = True

    def unpin(self, page: int) -> None:
        """Remove the prefix cache's pin from a page."""
        self._pinned[page] = False
        if self._refcounts[page] == 0:
            self._free.append(page)

    def copy(self, source: int, target: int) -> None:
        """Copy the contents of one page to another."""
        for pool in (self.cache.latents, self.cache.index_keys):
            pool[:, target] = pool[:, source]

    def dump(self, page: int, tokens: int) -> bytes | Tensor:
        """The first `tokens` tokens of a page: latents, then indexer keys. Bytes, or of an accelerator uint8 [n] on the
        host, in page-locked memory; the copy is not waited for, so only `load` may read it."""
        parts = [part[:, page, :tokens].contiguous().view(torch.uint8).flatten() for part in self._parts()]
        device = self.cache.latents.device
        if device.type == "cpu":
            return b"".join(part.numpy().tobytes() for part in parts)
        data = host_memory(sum(part.numel() for part in parts), device)
        return data.copy_(torch.cat(parts), non_blocking=True)

    def to_bytes(self, data: bytes | Tensor) -> bytes:
        """What `dump` returned, as bytes. Waits for an accelerator's copy."""
        if isinstance(data, bytes):
            return data
        torch.accelerator.synchronize()
        return data.numpy().tobytes()

    def load(self, page: int, tokens: int, data: bytes | Tensor) -> None:
        """Inverse of `dump`. Raises EngineError for `data` of the wrong size."""
        at = 0
        for part in self._parts():
            target = part[:, page, :tokens]
            size = target.numel() * target.element_size()
            if isinstance(data, Tensor):
                raw = data[at : at + size]
            else:
                raw = torch.from_numpy(np.frombuffer(data, dtype=np.uint8, count=size, offset=at).copy())
            target.copy_(raw.view(target.dtype).view(target.shape), non_blocking=True)
            at += size
        if at != len(data):
            raise EngineError(f"A stored page has {len(data)} bytes, {at} were expected.")

    def page_bytes(self, tokens: int = PAGE) -> int:
        """Number of bytes that `dump` returns for `tokens` tokens."""
        return sum(part.shape[0] * tokens * part.shape[3] * part.element_size() for part in self._parts())

    def _parts(self) -> tuple[Tensor, ...]:
        return tuple(part for part in (self.cache.latents, self.cache.index_keys) if part.shape[3])


def token_bytes(config: GLM5Config, dtype: torch.dtype, packed: bool = False) -> int:
    """Cache bytes per token over all layers, the MTP layer included: latents of each, and index keys of those with an
    indexer of their own. `packed`: see `LatentCache`."""
    if not packed:
        return max(1, bytes_per_token(config, dtype.itemsize))
    indexing, caching = caching_layers(config, config.num_hidden_layers + config.num_nextn_predict_layers)
    rank = config.kv_lora_rank
    latent = packed_width(rank, config.cache_values_per_token - rank, dtype)
    return caching * latent + indexing * packed_width(config.index_head_dim, 0, dtype)
