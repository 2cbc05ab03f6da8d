"""What a forward pass needs besides token ids: positions, document borders, a cache, and who is watching."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.ops import KEY_TILE, ROW_TILE, round_up


class LatentCache:
    """Latents and indexer keys of every layer (the MTP layer last): the two always live and die together.

    `latents` [layers, rows, capacity, kv_lora_rank + qk_rope_head_dim], `index_keys` [layers, rows, capacity,
    index_head_dim]. Slot number = position in the row's sequence, so a query at position p sees slots 0..p and whatever
    lies behind (padding, rejected drafts) is never read before it is overwritten.
    """

    def __init__(self, config: GLM5Config, rows: int, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        layers = config.num_hidden_layers + config.num_nextn_predict_layers
        self.rows, self.capacity = rows, round_up(capacity, KEY_TILE)
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self.latents = torch.zeros(layers, rows, self.capacity, width, dtype=dtype)
        index_width = config.index_head_dim if config.use_dsa else 0
        self.index_keys = torch.zeros(layers, rows, self.capacity, index_width, dtype=dtype)


@dataclass(frozen=True)
class RouterStats:
    """One MoE layer's routing of one batch: scores [M, E] (with gradient), experts [M, K], layer index."""

    layer: int
    scores: Tensor
    experts: Tensor


class Observer(Protocol):
    """Receives what the indexer's KL loss needs (§2.1.1). `scores` carry gradient, `target` (head sums) does not.

    `valid` marks real entries. In the sparse case the last axis runs over the selected slots, else over all keys.
    """

    def indexer(self, layer: int, scores: Tensor, target: Tensor, valid: Tensor) -> None: ...


@dataclass
class ForwardContext:
    """Per-forward state, built by `packed_context`, `cache_context` or the model itself. Layers keep no state.

    positions [B, T]: RoPE position of every token. documents [B, T]: tokens attend only within equal non-negative
    numbers; None = one document per row. `exact` fixes the number of selected slots to index_topk so that results do
    not depend on the length of the row. `attend_dense` keeps attention dense although an indexer exists (DSA warm-up).
    """

    positions: Tensor
    documents: Tensor | None = None
    cache: LatentCache | None = None
    cache_rows: Tensor | None = None
    key_length: int = 0
    exact: bool = True
    attend_dense: bool = False
    observer: Observer | None = None
    router_stats: list[RouterStats] | None = None
    _valid: dict[int, Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.positions.shape[0]

    @property
    def length(self) -> int:
        return self.positions.shape[1]

    def flat(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [M, ...] with M = B * T rounded up to `ROW_TILE`; padding rows are zero."""
        x = x.flatten(0, 1)
        missing = round_up(x.shape[0], ROW_TILE) - x.shape[0]
        return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x

    def rows(self, x: Tensor) -> Tensor:
        """Inverse of `flat`: [M, ...] -> [B, T, ...]."""
        return x[: self.batch * self.length].unflatten(0, (self.batch, self.length))

    def store(self, layer: int, latents: Tensor, index_keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Write this batch's rows into the cache, if there is one, and return all keys that its queries may read."""
        if self.cache is None or self.cache_rows is None:
            return latents, index_keys
        at = (self.cache_rows.unsqueeze(1), self.positions)
        self.cache.latents[layer][at] = latents
        seen = self.cache.latents[layer, self.cache_rows, : self.key_length]
        if index_keys is None:
            return seen, None
        self.cache.index_keys[layer][at] = index_keys
        return seen, self.cache.index_keys[layer, self.cache_rows, : self.key_length]

    def valid(self, keys: int) -> Tensor:
        """Which of `keys` key slots each query may attend to: bool [B, T, keys]."""
        if keys not in self._valid:
            slots = torch.arange(keys, device=self.positions.device)
            if self.cache is not None:
                allowed = slots <= self.positions.unsqueeze(-1)
            else:
                allowed = (slots <= torch.arange(self.length, device=slots.device).unsqueeze(-1)).unsqueeze(0)
                if self.documents is not None:
                    padded = torch.nn.functional.pad(self.documents, (0, keys - self.length), value=-1)
                    allowed = allowed & (self.documents.unsqueeze(-1) == padded.unsqueeze(1))
                    # A padding token attends to itself, so that no softmax runs over nothing.
                    allowed = allowed & (self.documents >= 0).unsqueeze(-1)
                    allowed = allowed | torch.eye(self.length, keys, dtype=torch.bool, device=slots.device)
            self._valid[keys] = allowed.expand(self.batch, -1, -1)
        return self._valid[keys]


def packed_context(documents: Tensor, *, exact: bool = True) -> ForwardContext:
    """Context of packed rows: documents [B, T] numbers each row's documents 0, 1, … with -1 for padding; RoPE positions
    restart at every document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(starts, index, 0).cummax(dim=1).values
    return ForwardContext(positions=index - first, documents=documents, exact=exact)


def cache_context(cache: LatentCache, rows: Tensor, start: Tensor, length: int) -> ForwardContext:
    """Context for `length` new tokens per sequence: rows [B] of the cache, start [B] = tokens already there."""
    positions = start.unsqueeze(1) + torch.arange(length, device=start.device)
    key_length = min(cache.capacity, round_up(int(start.max()) + length, KEY_TILE))
    return ForwardContext(positions=positions, cache=cache, cache_rows=rows, key_length=key_length)


def padded_context(attention_mask: Tensor) -> ForwardContext:
    """Context of left-padded rows: attention_mask [B, T], 0 = padding."""
    present = attention_mask.bool()
    positions = (present.long().cumsum(1) - 1).clamp_min(0)
    return ForwardContext(positions=positions, documents=torch.where(present, 0, -1))
