"""Every parameter of a model, by name and shape, from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError

ENDS = -1
"""`Parameter.layer` of the embedding, the final norm and the output head."""


@dataclass(frozen=True)
class Parameter:
    """`layer`: of the trunk, the number of layers for the MTP layer, or ENDS. `expert`: a stack of routed experts."""

    name: str
    shape: tuple[int, ...]
    layer: int
    expert: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def indexer(self) -> bool:
        return ".indexer." in self.name

    def held(self, ranks: int, ep: int) -> int:
        """Elements that the rank with the most holds if `ranks` ranks share the rows, of which `ep` neighbours divide
        the experts first: rows are dealt out in equal runs, rounded up."""
        return -(-self.rows(ep) // self.sharers(ranks, ep)) * (self.size // self.shape[0])

    def whole(self, ranks: int, ep: int) -> int:
        """Elements of this rank's experts, or of the whole parameter, padded to equal runs of rows."""
        return self.held(ranks, ep) * self.sharers(ranks, ep)

    def rows(self, ep: int) -> int:
        """Rows that the ranks with the same experts share."""
        return self.shape[0] // ep if self.expert else self.shape[0]

    def sharers(self, ranks: int, ep: int) -> int:
        """Number of ranks that share these rows."""
        return ranks // ep if self.expert else ranks


@lru_cache(maxsize=64)
def parameters(config: GLM5Config) -> tuple[Parameter, ...]:
    """In the order of the model. Raises ConfigError for recurrent layers."""
    if config.has_recurrent_layers:
        raise ConfigError("Memory of recurrent layers (Gated DeltaNet, SimpleGDN) is not predicted.")
    c = config
    found = [Parameter("model.embed_tokens.weight", (c.vocab_size, c.hidden_size), ENDS)]
    for layer in range(c.num_hidden_layers):
        found += _block(c, layer, f"model.layers.{layer}.")
    found.append(Parameter("model.norm.weight", (c.hidden_size,), ENDS))
    found.append(Parameter("lm_head.weight", (c.vocab_size, c.hidden_size), ENDS))
    if c.num_nextn_predict_layers:
        layer, hidden = c.num_hidden_layers, c.hidden_size
        found += [Parameter(f"mtp.{name}.weight", (hidden,), layer) for name in ("enorm", "hnorm")]
        found.append(Parameter("mtp.eh_proj.weight", (hidden, 2 * hidden), layer))
        found += _block(c, layer, "mtp.block.")
        found.append(Parameter("mtp.shared_head.norm.weight", (hidden,), layer))
    return tuple(found)


def _block(c: GLM5Config, layer: int, prefix: str) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}input_layernorm.weight", (c.hidden_size,), layer)
    shapes = _mla(c, layer) if c.attention_type == "mla" else _gqa(c)
    for name, shape in shapes:
        yield Parameter(f"{prefix}self_attn.{name}", shape, layer)
    yield Parameter(f"{prefix}post_attention_layernorm.weight", (c.hidden_size,), layer)
    if layer < c.num_hidden_layers and c.is_dense_layer(layer):
        yield from _swiglu(f"{prefix}mlp.", c.hidden_size, c.intermediate_size, layer)
        return
    experts, width = c.n_routed_experts, c.moe_intermediate_size
    yield Parameter(f"{prefix}mlp.gate.weight", (experts, c.hidden_size), layer)
    yield Parameter(f"{prefix}mlp.experts.gate_up_proj", (experts, 2 * width, c.hidden_size), layer, expert=True)
    yield Parameter(f"{prefix}mlp.experts.down_proj", (experts, c.hidden_size, width), layer, expert=True)
    if c.n_shared_experts:
        yield from _swiglu(f"{prefix}mlp.shared_experts.", c.hidden_size, c.n_shared_experts * width, layer)


def _swiglu(prefix: str, hidden: int, width: int, layer: int) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}gate_up_proj.weight", (2 * width, hidden), layer)
    yield Parameter(f"{prefix}down_proj.weight", (hidden, width), layer)


def _mla(c: GLM5Config, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads = c.num_attention_heads
    yield "q_a_proj.weight", (c.q_lora_rank, c.hidden_size)
    yield "q_a_layernorm.weight", (c.q_lora_rank,)
    yield "q_b_proj.weight", (heads * c.qk_head_dim, c.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
    yield "kv_a_layernorm.weight", (c.kv_lora_rank,)
    yield "kv_b_proj.weight", (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    yield "o_proj.weight", (c.hidden_size, heads * c.v_head_dim)
    if c.use_dsa and (layer == c.num_hidden_layers or c.computes_topk(layer)):
        yield "indexer.wq_b.weight", (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield "indexer.wk.weight", (c.index_head_dim, c.hidden_size)
        yield "indexer.k_norm.weight", (c.index_head_dim,)
        yield "indexer.k_norm.bias", (c.index_head_dim,)
        yield "indexer.weights_proj.weight", (c.index_n_heads, c.hidden_size)


def _gqa(c: GLM5Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"{name}_proj.weight", (rows, c.hidden_size)
        if c.attention_bias:
            yield f"{name}_proj.bias", (rows,)
    yield "o_proj.weight", (c.hidden_size, queries)
    if c.use_qk_norm:
        yield "q_norm.weight", (c.head_dim,)
        yield "k_norm.weight", (c.head_dim,)


@dataclass(frozen=True)
class Sizes:
    """Elements of a group of parameters on one process: `held` between steps, `whole` if gathered (padded as transfers
    need it), of these `experts`; `feed_forward` without padding; `widest` is the largest one. `learned_`: those
    that are trained, `local` whole without padding. `states`: numbers of the optimizer's state."""

    held: int = 0
    whole: int = 0
    experts: int = 0
    feed_forward: int = 0
    widest: int = 0
    learned_held: int = 0
    learned_whole: int = 0
    learned_experts: int = 0
    learned_local: int = 0
    learned_local_experts: int = 0
    states: int = 0


def learns(p: Parameter, trains: str) -> bool:
    """Whether a parameter is trained: `trains` is "all", "backbone" (without the indexers) or "indexers"."""
    return trains == "all" or (trains == "indexers") == p.indexer


def sizes_of(found: Iterable[Parameter], ranks: int, ep: int, trains: str = "all", optimizer: str = "muon") -> Sizes:
    """Sums over parameters. Muon keeps one number for an element of a matrix, AdamW two."""
    counts = dict.fromkeys(vars(Sizes()), 0)
    for p in found:
        held, whole = p.held(ranks, ep), p.whole(ranks, ep)
        local = p.rows(ep) * (p.size // p.shape[0])
        own = {"held": held, "whole": whole, "experts": whole * p.expert, "feed_forward": local * (".mlp." in p.name)}
        if learns(p, trains):
            adam = optimizer == "adamw" or p.layer == ENDS or len(p.shape) < 2
            own |= {"learned_held": held, "learned_whole": whole, "learned_experts": whole * p.expert}
            own |= {"learned_local": local, "learned_local_experts": local * p.expert, "states": held * (1 + adam)}
        for name, size in own.items():
            counts[name] += size
        counts["widest"] = max(counts["widest"], whole)
    return Sizes(**counts)


@lru_cache(maxsize=512)
def layer_sizes(config: GLM5Config, ranks: int, ep: int, trains: str, optimizer: str) -> dict[int, Sizes]:
    """`sizes_of` each layer, without ENDS."""
    layers: dict[int, list[Parameter]] = {}
    for p in parameters(config):
        layers.setdefault(p.layer, []).append(p)
    alike: dict[tuple[tuple[int, ...], ...], Sizes] = {}
    found = {}
    for layer, own in layers.items():
        shapes = tuple(p.shape for p in own)
        if layer == ENDS or shapes not in alike:
            alike[shapes] = sizes_of(own, ranks, ep, trains, optimizer)
        found[layer] = alike[shapes]
    return found
