"""What a decoding step reads and computes at least: bytes and seconds, without drafts, for even and independent choices
of experts."""

from __future__ import annotations

from glm5.config.arithmetic import size_report
from glm5.config.devices import Device
from glm5.config.model import GLM5Config
from glm5.config.parameters import ENDS, parameters

KINDS = ("embedding", "mtp", "experts", "other")
"""Weights by when a decoding step reads them: hardly, not without drafts, those of chosen experts, all."""


def kinds_of_weights(config: GLM5Config, item: int) -> dict[str, int]:
    """Bytes of the weights by kind (`KINDS`), `item` bytes each."""
    found = dict.fromkeys(KINDS, 0)
    for p in parameters(config):
        kind = "experts" if p.expert else "embedding" if p.layer == ENDS and "embed" in p.name else "other"
        found["mtp" if p.layer == config.num_hidden_layers else kind] += p.size * item
    return found


def caching_layers(config: GLM5Config, layers: int) -> tuple[int, int]:
    """Of the first layers, how many cache index keys (those with an indexer of their own) and how many latents."""
    indexing = sum(config.caches_index_keys(layer) for layer in range(layers))
    return indexing, sum(not config.is_recurrent(layer) for layer in range(layers))


def bytes_per_token(config: GLM5Config, item: int) -> int:
    """Cache bytes of a token over all layers, the MTP layer included, `item` bytes per number."""
    return sum(_cached(config, config.num_hidden_layers + config.num_nextn_predict_layers)) * item


def _cached(config: GLM5Config, layers: int) -> tuple[int, int]:
    """Numbers of index keys and of latents that the first layers cache per token."""
    indexing, caching = caching_layers(config, layers)
    return indexing * config.index_head_dim, caching * config.cache_values_per_token


def step_bytes(config: GLM5Config, weights: dict[str, int], per_token: int, batch: int, context: int) -> float:
    """Bytes that a rank reads in a decoding step at least: weights but for the embedding, MTP and experts that no
    sequence chose, and of the cache (`per_token` bytes, MTP's included) the index keys of the context and the selected
    latents, or all latents."""
    left = (1 - config.num_experts_per_tok / max(1, config.n_routed_experts)) ** batch
    keys, latents = _cached(config, config.num_hidden_layers)
    share = keys / max(1, keys + latents)
    each = per_token * (keys + latents) / max(1, bytes_per_token(config, 1))
    read = min(context, config.index_topk or context) if config.selects_keys else context
    cache = each * (share * context * config.selects_keys + (1 - share) * read)
    return weights["other"] + weights["experts"] * (1 - left) + batch * cache


def decode_seconds(
    config: GLM5Config, device: Device, weights: dict[str, int], per_token: int, batch: int, context: int, tp: int = 1
) -> float:
    """A decoding step of `batch` sequences of `context` tokens on `tp` devices at least; `weights` and `per_token` are
    those of one."""
    read = step_bytes(config, weights, per_token, batch, context)
    flops = batch * size_report(config, context)["decode_flops_per_token"] / tp
    return max(read / device.bandwidth, flops / device.flops)
