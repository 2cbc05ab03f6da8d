"""The pool of pages: fixed numbers of tokens whose latents and indexer keys, of all layers, live and die together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.errors import EngineError
from glm5.model.context import LatentCache
from glm5.ops import KEY_TILE

PAGE = KEY_TILE
"""Tokens per page. The indexer reads keys in tiles of as many, so that a tile never spans two pages."""

FIRST_PAGES = 32
"""Pages whose memory exists from the start; it doubles whenever more are needed."""


class KVPool:
    """Pages numbered 1 .. `total`; page 0 belongs to nobody and takes what is not to be kept.

    A page is in use while sequences hold it (`take`, `share`, `release`) or the prefix cache keeps it (`keep`,
    `drop`). What only the cache keeps counts as available: `reclaim`, set by the cache, gives such pages back.
    """

    def __init__(
        self, config: GLM5Config, tokens: int, *, states: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.total = -(-tokens // PAGE)
        first = min(self.total, FIRST_PAGES)
        self.cache = LatentCache(config, 1 + first, PAGE, dtype, states=states, device=device)
        self.reclaim: Callable[[int], None] = lambda count: None
        self._holders = [0] * (self.total + 1)
        self._kept = [False] * (self.total + 1)
        self._released: list[int] = []
        self._fresh = 1  # the first page that was never used
        self._busy = 0  # pages that sequences hold

    @property
    def available(self) -> int:
        """Pages that `take` could give."""
        return self.total - self._busy

    @property
    def unused(self) -> int:
        """Pages that neither a sequence holds nor the prefix cache keeps."""
        return len(self._released) + self.total + 1 - self._fresh

    def held(self, page: int) -> bool:
        """Whether a sequence holds the page."""
        return self._holders[page] > 0

    def take(self, count: int) -> list[int]:
        """`count` pages for one holder. Raises EngineError when not so many are available."""
        if count > self.available:
            raise EngineError(f"The cache has {self.available} free pages, {count} are needed.")
        if count > self.unused:
            self.reclaim(count - self.unused)
        pages = []
        for _ in range(count):
            if self._released:
                page = self._released.pop()
            else:
                page, self._fresh = self._fresh, self._fresh + 1
            self._holders[page] = 1
            pages.append(page)
        self._busy += count
        if self._fresh > self.cache.rows:
            self.cache.grow(min(1 + self.total, max(self._fresh, 2 * self.cache.rows)))
        return pages

    def share(self, page: int) -> None:
        """One more holder of a page that is in use."""
        self._busy += self._holders[page] == 0
        self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less of each page."""
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._busy -= 1
                if not self._kept[page]:
                    self._released.append(page)

    def keep(self, page: int) -> None:
        """The prefix cache keeps a page that a sequence holds."""
        self._kept[page] = True

    def drop(self, page: int) -> None:
        """The prefix cache no longer keeps a page."""
        self._kept[page] = False
        if self._holders[page] == 0:
            self._released.append(page)

    def copy(self, source: int, target: int) -> None:
        """The contents of one page into another."""
        for pool in (self.cache.latents, self.cache.index_keys):
            pool[:, target] = pool[:, source]

    def dump(self, page: int, tokens: int) -> bytes:
        """The first `tokens` of a page as bytes: latents, then indexer keys."""
        return b"".join(
            part[:, page, :tokens].contiguous().cpu().view(torch.uint8).numpy().tobytes() for part in self._parts()
        )

    def load(self, page: int, tokens: int, data: bytes) -> None:
        """Inverse of `dump`. Raises EngineError where the size does not fit."""
        at = 0
        for part in self._parts():
            target = part[:, page, :tokens]
            size = target.numel() * target.element_size()
            raw = np.frombuffer(data, dtype=np.uint8, count=size, offset=at).copy()
            target.copy_(torch.from_numpy(raw).view(target.dtype).view(target.shape))
            at += size
        if at != len(data):
            raise EngineError(f"A stored page has {len(data)} bytes, {at} were expected.")

    def page_bytes(self, tokens: int = PAGE) -> int:
        """Size of `dump`."""
        return sum(part.shape[0] * tokens * part.shape[3] * part.element_size() for part in self._parts())

    def _parts(self) -> tuple[Tensor, ...]:
        return tuple(part for part in (self.cache.latents, self.cache.index_keys) if part.shape[3])


def token_bytes(config: GLM5Config, dtype: torch.dtype) -> int:
    """Cache bytes per token over all layers, the MTP layer included."""
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    keeping = sum(not config.is_recurrent(layer) for layer in range(layers))
    width = config.cache_values_per_token + (config.index_head_dim if config.use_dsa else 0)
    return max(1, keeping * width * torch.empty(0, dtype=dtype).element_size())
