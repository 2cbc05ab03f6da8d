"""The inputs of a forward pass besides token ids: positions, document boundaries, the KV cache and observers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.model.offload import Offload
from glm5.ops import KEY_TILE, ROW_TILE, round_up
from glm5.ops.cache_rows import pack_rows, packed_width
from glm5.ops.indexer_kl import Look, dense_kl
from glm5.ops.pages import Pages
from glm5.ops.rope import rope_table
from glm5.ops.wide import wide

if TYPE_CHECKING:
    from glm5.model.pipeline_stage import StagePass

Recompute = bool | Literal["selective"]


class RecurrentState:
    """Fixed-size state of recurrent layers: `memory` [layers, rows, heads, head_dim, head_dim] in fp32 or wider, and
    `inputs` [layers, rows, taps - 1, channels], the last inputs of the short convolutions."""

    def __init__(
        self, config: GLM5Config, rows: int, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> None:
        layers = [layer for layer in range(config.num_hidden_layers) if config.is_recurrent(layer)]
        self.slots = {layer: slot for slot, layer in enumerate(layers)}
        heads, dim = config.num_attention_heads, config.head_dim
        self.memory = torch.zeros(len(layers), rows, heads, dim, dim, dtype=wide(dtype), device=device)
        channels = (heads + 2 * config.num_key_value_heads) * dim if config.efficient_attention == "gdn" else 0
        taps = config.gdn_conv_kernel - 1
        self.inputs = torch.zeros(len(layers), rows, taps, channels, dtype=dtype, device=device)


class LatentCache:
    """The KV cache: latents of every layer and indexer keys of those that select keys, the MTP layer last, allocated
    together.

    `latents` [layers, rows, capacity, cache_values_per_token] (GQA: keys and values side by side), `index_keys`
    [indexers, rows, capacity, index_head_dim]; `slots` and `index_slots` are the places of a layer in them. A row is a
    whole sequence in `cache_context`, a page in `paged_context`. Recurrent layers have their state in `recurrent`
    instead, one per sequence, `states` in all.
    A query at position p reads positions 0..p of its sequence. Later slots (padding, rejected drafts) are overwritten
    before they are read.
    With `packed`, rows are int8 with a scale each (see `glm5.ops.cache_rows`): the latents of MLA without their rotary
    part, and the index keys.
    """

    def __init__(
        self,
        config: GLM5Config,
        rows: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        *,
        states: int | None = None,
        device: torch.device | str | None = None,
        packed: bool = False,
    ) -> None:
        layers = range(config.num_hidden_layers + config.num_nextn_predict_layers)
        keeping = [layer for layer in layers if not config.is_recurrent(layer)]
        indexing = [layer for layer in layers if config.caches_index_keys(layer)]
        self.slots = {layer: slot for slot, layer in enumerate(keeping)}
        self.index_slots = {layer: slot for slot, layer in enumerate(indexing)}
        self.rows, self.capacity = rows, round_up(capacity, KEY_TILE)
        width, index_width = config.cache_values_per_token, config.index_head_dim if indexing else 0
        self.dtype, self.packed = dtype, packed
        self.values = config.kv_lora_rank if packed else 0
        if packed:
            width = packed_width(self.values, width - self.values, dtype)
            index_width = packed_width(index_width, 0, dtype)
        stored = torch.int8 if packed else dtype
        self.latents = torch.zeros(len(keeping), rows, self.capacity, width, dtype=stored, device=device)
        self.index_keys = torch.zeros(len(indexing), rows, self.capacity, index_width, dtype=stored, device=device)
        self.recurrent = RecurrentState(config, rows if states is None else states, dtype, device)

    def grow(self, rows: int) -> None:
        """Add rows up to `rows`; existing rows keep their index."""
        more = rows - self.rows
        if more > 0:
            for name in ("latents", "index_keys"):
                old = getattr(self, name)
                fresh = old.new_zeros(old.shape[0], more, *old.shape[2:])
                setattr(self, name, torch.cat((old, fresh), dim=1))
            self.rows = rows


@dataclass(frozen=True)
class RouterStats:
    """Routing of one batch in one MoE layer: scores [M, E] (with gradient), experts [M, K], layer index."""

    layer: int
    scores: Tensor
    experts: Tensor


@dataclass(frozen=True)
class AllKeys:
    """Inputs of the KL over all keys in one layer; scores are computed later, in blocks of queries.

    index_q [B, T, J, d], index_k [B, S, d] and index_w [B, T, J] carry gradient. q [B, N, T, H] and k [B, N, S, H] come
    from attention and carry none. The softmax runs over scale * q . k of the keys start .. end - 1 (int64 [B, T]).
    index_q, index_k and index_w are None in a layer that reuses the selection of an earlier one (IndexShare).
    """

    index_q: Tensor | None
    index_k: Tensor | None
    index_w: Tensor | None
    q: Tensor
    k: Tensor
    start: Tensor
    end: Tensor
    scale: float

    def kl(self, weight: Tensor, look: Look | None = None) -> Tensor:
        """Sum over queries of weight [B, T] * KL(attention || indexer). `look` receives every block of scores (see
        `glm5.ops.indexer_kl.dense_kl`)."""
        assert self.index_q is not None and self.index_k is not None and self.index_w is not None
        view = (self.index_q, self.index_k, self.index_w, self.q, self.k, self.start, self.end, self.scale)
        return dense_kl(*view, weight, look)


class Observer(Protocol):
    """Receives the inputs of the indexer's KL (§2.1.1), once per call of a layer that selects keys.

    A layer without an indexer of its own (IndexShare) gives no index and no scores: those of the last layer that had
    some are meant, and the same slots are selected.

    If the backward pass recomputes a layer, it passes `noop()`: the first run has already been recorded. An observer
    must not save tensors for autograd, because the second run saves none.
    """

    def dense(self, layer: int, keys: AllKeys) -> None:
        """A layer attended to all keys (DSA warm-up)."""

    def selected(self, layer: int, scores: Tensor | None, target: Tensor, valid: Tensor) -> None:
        """A layer attended to selected keys. [B, T, K] each: indexer scores with gradient, attention summed over heads
        without gradient, and a mask of the filled slots."""

    def noop(self) -> Observer:
        """An observer that accepts the same calls and ignores them."""


@dataclass
class ForwardContext:
    """State of one forward pass, built by `packed_context`, `cache_context` or the model itself. Layers keep no state.

    positions [B, T]: RoPE position of every token. documents [B, T]: a token attends only to tokens with the same
    non-negative number; None = one document per row; the tokens of a document are contiguous.
    With a cache: `pages` maps each token to the pages of its sequence, `places` [M] is the slot in the flat pool for
    its own latent, `state_rows` [B] is the recurrent state of each sequence, `first_key` is the first position that
    queries see, and lengths [B] is the number of real tokens per row (None = all; padding matters to recurrent layers
    only).
    With context parallelism, `gather_keys` makes of the keys [B, T, ...] of this rank's tokens the `key_length` keys
    that its queries read, [B, S, ...], and `key_range` is given.
    `exact` computes in the forms that learner and engine share: the bits of a token then do not depend on its batch, on
    a cache or on the row length. `attend_dense` keeps attention dense even with an indexer (DSA warm-up). max_logits,
    if not None, receives the largest attention logit of each head [N] by layer (softmax attention only). `recompute`:
    True saves only the inputs of each layer, and the backward pass computes the layer again; "selective" also saves
    what is expensive to compute. A tuple has a setting for each layer, the MTP layer's last. `offload` moves what
    layers save to host memory until backward needs it. `stage_pass`: that of a pipeline stage."""

    positions: Tensor
    documents: Tensor | None = None
    cache: LatentCache | None = None
    pages: Pages | None = None
    places: Tensor | None = None
    state_rows: Tensor | None = None
    first_key: int = 0
    lengths: Tensor | None = None
    key_length: int = 0
    gather_keys: Callable[[Tensor], Tensor] | None = None
    exact: bool = True
    attend_dense: bool = False
    observer: Observer | None = None
    router_stats: list[RouterStats] | None = None
    max_logits: dict[int, Tensor] | None = None
    recompute: Recompute | tuple[Recompute, ...] = False
    offload: Offload | None = None
    stage_pass: StagePass | None = None
    _ranges: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _all_keys: dict[int | None, Tensor] = field(default_factory=dict)
    _rope: dict[tuple[int, float], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.positions.shape[0]

    @property
    def length(self) -> int:
        return self.positions.shape[1]

    def flat(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [M, ...]; in exact mode M = B * T is rounded up to `ROW_TILE` with rows of zeros."""
        x = x.flatten(0, 1)
        missing = round_up(x.shape[0], ROW_TILE) - x.shape[0] if self.exact else 0
        return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x

    def rows(self, x: Tensor) -> Tensor:
        """Inverse of `flat`: [M, ...] -> [B, T, ...]."""
        batch, length = self.positions.shape
        if x.shape[0] != batch * length:
            x = x[: batch * length]
        return x.view(batch, length, *x.shape[1:])

    def pools(self, layer: int) -> tuple[Tensor, Tensor | None] | None:
        """The layer's latents and, if it selects keys, index keys in the cache, if there is one: pools [R, S, ...] that
        `pages` refers to, not copies. `places` are the slots of this batch."""
        if self.cache is None or self.places is None:
            return None
        slot = self.cache.index_slots.get(layer)
        return self.cache.latents[self.cache.slots[layer]], None if slot is None else self.cache.index_keys[slot]

    def store(self, layer: int, latents: Tensor, index_keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Write the latents and index keys [B, T, ...] of this batch into the cache, if there is one. Returns what its
        queries read: these, `pools`, or with context parallelism those of all ranks."""
        if self.gather_keys is not None:
            return self.gather_keys(latents), None if index_keys is None else self.gather_keys(index_keys)
        pools = self.pools(layer)
        if pools is None or self.places is None:
            return latents, index_keys
        pool, keys = pools
        if self.cache is not None and self.cache.packed:
            latents = pack_rows(latents, self.cache.values)
            index_keys = None if index_keys is None else pack_rows(index_keys, index_keys.shape[-1])
        pool.view(-1, pool.shape[-1]).index_copy_(0, self.places, latents.flatten(0, 1))
        if index_keys is None or keys is None:
            return pool, None
        keys.view(-1, keys.shape[-1]).index_copy_(0, self.places, index_keys.flatten(0, 1))
        return pool, keys

    def seen(self, stored: Tensor) -> Tensor:
        """The result of `store`, copied into batch order and cut to the longest sequence: [B, S, ...]. The tokens of a
        batch entry must belong to one sequence; slots past its last token are zero."""
        if self.pages is None:
            return stored
        table = self.pages.table[self.pages.rows.view(self.positions.shape)[:, 0]]
        needed = -(-self.key_length // self.pages.size)
        found = stored[table[:, :needed]].flatten(1, 2)[:, : self.key_length]
        known = torch.arange(found.shape[1], device=found.device) <= self.positions.amax(1, keepdim=True)
        # The softmax gives these slots weight 0, but 0 * infinity would still spoil the sum.
        return found.where(known.view(*known.shape, *[1] * (found.ndim - 2)), 0)

    def rope(self, dim: int, theta: float) -> tuple[Tensor, Tensor]:
        """cos and sin [M, dim / 2] for flat rows, computed once per forward."""
        if (dim, theta) not in self._rope:
            if self.exact:
                cos, sin = map(self.flat, rope_table(self.positions, dim, theta))
            else:
                cos, sin = rope_table(self.positions.flatten(), dim, theta)
            self._rope[dim, theta] = cos, sin
        return self._rope[dim, theta]

    def key_range(self, window: int | None = None) -> tuple[Tensor, Tensor]:
        """The key slots start .. end - 1 that each query may attend to, int64 [B, T] each; `window` limits their count.

        Documents are contiguous, so a range is enough and memory stays linear in the length.
        """
        if window not in self._ranges:
            if self.gather_keys is not None:
                start, end = self._ranges[None]
            elif self.cache is not None:
                start, end = torch.full_like(self.positions, self.first_key), self.positions + 1
            else:
                index = torch.arange(self.length, device=self.positions.device).expand_as(self.positions)
                start, end = torch.zeros_like(index), index + 1
                if self.documents is not None:
                    # A padding token attends to itself: a softmax over no keys would be NaN.
                    start = torch.where(self.documents < 0, index, run_starts(self.documents))
            if window is not None:
                start = torch.maximum(start, end - window)
            self._ranges[window] = (start, end)
        return self._ranges[window]

    def all_keys(self, window: int | None = None) -> Tensor:
        """The slots of `key_range` as indices [B, T, K], ascending, then -1, like an indexer's; computed once."""
        if window not in self._all_keys:
            start, end = self.key_range(window)
            # An accelerator is not asked for the longest range.
            most = int((end - start).max()) if start.is_cpu else self.key_length or self.length
            slots = start.unsqueeze(-1) + torch.arange(most, device=start.device)
            self._all_keys[window] = slots.where(slots < end.unsqueeze(-1), -1)
        return self._all_keys[window]

    def note_routing(self, layer: int, scores: Tensor, experts: Tensor) -> None:
        """Keep the routing of the real rows: scores [M, E], experts [M, K]."""
        assert self.router_stats is not None
        real = self.batch * self.length
        self.router_stats.append(RouterStats(layer, scores[:real], experts[:real]))

    def note_max_logits(self, layer: int, found: Tensor) -> None:
        """Keep the element-wise maximum of `found` [N] and earlier values of the layer (MTP runs once per depth)."""
        assert self.max_logits is not None
        before = self.max_logits.get(layer)
        self.max_logits[layer] = found if before is None else torch.maximum(before, found)

    def present(self) -> Tensor:
        """Which tokens are real, not padding: bool [B, T]."""
        if self.documents is not None:
            return self.documents >= 0
        index = torch.arange(self.length, device=self.positions.device).expand(self.batch, -1)
        return index < (self.length if self.lengths is None else self.lengths.unsqueeze(1))

    def recall(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """A recurrent layer's memory [B, N, H, H] and convolution inputs [B, taps - 1, C] before this batch. Rows that
        start at position 0 get zeros. (None, None) without a cache."""
        if self.cache is None or self.state_rows is None:
            return None, None
        carried, slot = self.cache.recurrent, self.cache.recurrent.slots[layer]
        going = self.positions[:, 0] > 0
        memory, inputs = carried.memory[slot, self.state_rows], carried.inputs[slot, self.state_rows]
        return memory * going.view(-1, 1, 1, 1), inputs * going.view(-1, 1, 1)

    def remember(self, layer: int, memory: Tensor, inputs: Tensor | None) -> None:
        """Store the state for the next `recall`; inputs [B, taps - 1 + T, C] are the old ones, then this batch's."""
        if self.cache is None or self.state_rows is None:
            return
        carried, slot = self.cache.recurrent, self.cache.recurrent.slots[layer]
        carried.memory[slot, self.state_rows] = memory
        if inputs is not None:
            last = torch.arange(carried.inputs.shape[2], device=inputs.device) + self.present().sum(1, keepdim=True)
            carried.inputs[slot, self.state_rows] = inputs.gather(1, last.unsqueeze(-1).expand(-1, -1, inputs.shape[2]))


def run_starts(documents: Tensor) -> Tensor:
    """Index of the first token of each token's document, int64 [B, T]; documents are runs of equal numbers."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(starts, index, 0).cummax(dim=1).values


def packed_context(documents: Tensor, *, exact: bool = True) -> ForwardContext:
    """Context of packed rows. documents [B, T] numbers the documents of each row 0, 1, …, padding is -1; RoPE positions
    restart at every document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return ForwardContext(positions=index - run_starts(documents), documents=documents, exact=exact)


def cache_context(
    cache: LatentCache,
    rows: Tensor,
    start: Tensor,
    length: int,
    lengths: Tensor | None = None,
    *,
    exact: bool = True,
) -> ForwardContext:
    """Context for `length` new tokens per sequence. rows [B]: cache rows; start [B]: tokens already cached; lengths
    [B]: the number of real new tokens of rows that are padded at their end. Raises ValueError for a cache that is too
    short."""
    positions = start.unsqueeze(1) + torch.arange(length, device=start.device)
    longest = int(start.max()) + length
    if longest > cache.capacity:
        raise ValueError(f"the cache holds {cache.capacity} tokens per row, {longest} are needed")
    batch = torch.arange(len(rows), device=rows.device).repeat_interleave(length)
    return paged_context(
        cache,
        Pages(rows.unsqueeze(1).contiguous(), batch, cache.capacity),
        positions,
        longest=min(cache.capacity, longest),
        state_rows=rows,
        lengths=lengths,
        exact=exact,
    )


def paged_context(
    cache: LatentCache,
    pages: Pages,
    positions: Tensor,
    *,
    longest: int,
    places: Tensor | None = None,
    state_rows: Tensor | None = None,
    lengths: Tensor | None = None,
    first_key: int = 0,
    exact: bool = True,
) -> ForwardContext:
    """Context for new tokens of several sequences in a paged cache: positions [B, T], all below `longest`.

    MLA accepts tokens of any sequences in any order, for example [1, M], if it selects keys or in exact mode. All other
    attention needs one sequence per batch entry. `places` overrides the slots in `pages` that the latents go to.
    """
    return ForwardContext(
        positions=positions,
        cache=cache,
        pages=pages,
        places=pages.place(pages.rows, positions.flatten()) if places is None else places,
        state_rows=state_rows,
        first_key=first_key,
        lengths=lengths,
        key_length=round_up(longest, KEY_TILE),
        exact=exact,
    )


def padded_context(attention_mask: Tensor, *, exact: bool = True) -> ForwardContext:
    """Context of padded rows: attention_mask [B, T], 0 = padding. The tokens of a row are contiguous and have RoPE
    positions from 0 on. Raises ValueError for padding between the tokens of a row."""
    present = attention_mask.bool()
    index = torch.arange(present.shape[1], device=present.device)
    first, count = (~present).long().cummin(1).values.sum(1, keepdim=True), present.sum(1, keepdim=True)
    apart = ((index >= first) & (index < first + count)).ne(present).any(1).nonzero().flatten().tolist()
    if apart:
        raise ValueError(f"attention_mask has padding between the tokens of row {apart[0]}; pad rows at their ends")
    positions = (index - first).clamp(min=0)
    return ForwardContext(positions=positions.where(present, 0), documents=torch.where(present, 0, -1), exact=exact)
