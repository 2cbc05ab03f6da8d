"""Bytes of device memory that a training step needs on one process, from a configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from glm5.config.activations import (
    WIDE,
    Forward,
    exchanged_bytes,
    kept_by_heads,
    kept_by_layers,
    logits_bytes,
    working_bytes,
)
from glm5.config.arithmetic import component_counts
from glm5.config.model import GLM5Config

ORTHOGONALISED, ORTHOGONALISED_ON_CPU = 1 << 26, 1 << 19
"""Elements that Newton-Schulz takes at a time (`chunk_length` of `glm5/optim/newton_schulz.py`)."""


@dataclass(frozen=True)
class Sizes:
    """Parameters. `layers`: (routed experts, all else) of every layer of the trunk and, if there is one, of the MTP
    layer. `ends`: embedding, output head and final norm. `indexer`: those of one of the `indexers`."""

    layers: tuple[tuple[int, int], ...]
    ends: int
    indexer: int
    indexers: int

    @property
    def total(self) -> int:
        return sum(map(sum, self.layers)) + self.ends


def sizes(config: GLM5Config) -> Sizes:
    """Elements of every parameter; router biases are left out."""
    c, parts = config, component_counts(config)
    found = []
    for layer in range(c.num_hidden_layers + c.num_nextn_predict_layers):
        mtp = layer == c.num_hidden_layers
        own = parts["attention"] if mtp or c.attention_kind(layer) == "full" else parts["efficient_attention"]
        own += parts["layer_norms"] + (parts["mtp_extra"] if mtp else 0)
        own += parts["indexer"] if c.use_dsa and (mtp or c.computes_topk(layer)) else 0
        if not mtp and c.is_dense_layer(layer):
            found.append((0, own + parts["dense_ffn"]))
        else:
            experts = c.n_routed_experts * parts["expert"]
            found.append((experts, own + parts["moe_ffn"] - experts - c.n_routed_experts))
    indexers = sum(c.computes_topk(i) for i in range(c.num_hidden_layers)) + c.num_nextn_predict_layers
    return Sizes(tuple(found), 2 * parts["embedding"] + c.hidden_size, parts["indexer"], indexers if c.use_dsa else 0)


@dataclass(frozen=True)
class Setting:
    """How a step runs: its forward pass on this process, `parts` (micro-batches), `world` processes of which `ep`
    divide the experts, the optimizer, and what is trained."""

    forward: Forward
    parts: int = 1
    world: int = 1
    ep: int = 1
    optimizer: str = "muon"
    ns_item: int = 4
    reduce_once: bool = True
    offload: bool = False
    trains: str = "all"
    """"all", "backbone" (without the indexers) or "indexers"."""
    low_precision_copy: bool = True
    """Whether the compute dtype has a copy of the weights beside the fp32 ones; with several processes it never has."""


def step_memory(config: GLM5Config, setting: Setting) -> dict[str, int]:
    """Bytes by purpose, and `peak`: the most at one moment, which is less than their sum. `peak_phase` indexes PHASES.

    Layers are walked as backward does: gradients grow while what the forward pass kept is freed.
    """
    forward, size, world = setting.forward, sizes(config), setting.world
    trained = {"all": size.total, "indexers": size.indexer * size.indexers}
    trained["backbone"] = size.total - trained["indexers"]
    count = trained[setting.trains]
    copied = setting.low_precision_copy and world == 1 and forward.item < WIDE
    found = {
        "weights": WIDE * size.total // world,
        "low_precision_copy": forward.item * size.total if copied else 0,
        "optimizer": _optimizer_state(size, setting, count) // world,
        "gradients": max(WIDE * count // world, _summed_before(size, setting, count)),
        "activations": 0,
        "logits": logits_bytes(config, forward),
        "working": working_bytes(config, forward),
        "communication": 0,
    }
    kept = kept_by_layers(config, forward)
    if setting.offload:
        kept = [0] * max(0, len(kept) - 2) + sorted(kept)[-2:]
    found["activations"] = sum(kept) + kept_by_heads(config, forward)
    phases = _phases(config, setting, found, kept, size)
    found["communication"] = _communication(config, setting, size)
    found["peak"] = max(phases)
    found["peak_phase"] = phases.index(found["peak"])
    return found


PHASES = ("loss", "backward", "optimizer")


def _summed_before(size: Sizes, setting: Setting, count: int) -> int:
    """Gradients of earlier micro-batches; whole ones if processes sum them once per step."""
    if setting.parts == 1:
        return 0
    if setting.world == 1 or not setting.reduce_once or setting.trains == "indexers":
        return WIDE * count // setting.world
    return WIDE * (sum(experts // setting.ep + rest for experts, rest in size.layers) + size.ends)


def _optimizer_state(size: Sizes, setting: Setting, count: int) -> int:
    """Muon keeps one fp32 number for an element of a matrix, AdamW two."""
    if setting.optimizer == "adamw" or setting.trains == "indexers":
        return 2 * WIDE * count
    return WIDE * (count - size.ends) + 2 * WIDE * size.ends


def _communication(config: GLM5Config, setting: Setting, size: Sizes) -> int:
    """FSDP's gathered ends and blocks (one in use, the next, and the buffer that it arrives in), the widest block's
    gradients on their way, rows of experts on theirs, keys of other processes, and Muon's split matrices."""
    if setting.world == 1:
        return 0
    forward, item = setting.forward, setting.forward.item
    block = max(experts // setting.ep + rest for experts, rest in size.layers)
    gathered = size.ends + 3 * block
    if setting.trains == "indexers":  # no gradient tells FSDP when to gather a block again
        gathered = size.ends + sum(experts // setting.ep + rest for experts, rest in size.layers)
    rows = 4 * forward.tokens * config.num_experts_per_tok * config.hidden_size * item if setting.ep > 1 else 0
    sent = (item + WIDE) * block if setting.trains != "indexers" else 0
    return gathered * item + sent + rows + 2 * exchanged_bytes(config, forward)


def _phases(
    config: GLM5Config, setting: Setting, found: dict[str, int], kept: list[int], size: Sizes
) -> tuple[int, int, int]:
    """The most bytes in each of PHASES."""
    forward, world = setting.forward, setting.world
    fixed = found["weights"] + found["low_precision_copy"] + found["optimizer"] + _communication(config, setting, size)
    learning = setting.trains != "indexers"
    per_layer = [sum(layer) * WIDE // world if learning else 0 for layer in size.layers[: config.num_hidden_layers]]
    mtp = [sum(layer) * WIDE // world if learning else 0 for layer in size.layers[config.num_hidden_layers :]]
    ends = size.ends * forward.item if learning else 0  # the sum over losses, in the compute dtype
    before = found["gradients"] if setting.parts > 1 else 0
    loss = fixed + before + found["activations"] + found["logits"] + ends
    backward, grown = 0, ends + sum(mtp)
    for number in reversed(range(len(kept))):
        trunk = number < len(per_layer)
        own = per_layer[number] if trunk else sum(mtp)
        grown += per_layer[number] if trunk else 0
        gradients = max(before, grown) if setting.parts == 1 else before
        local = own * forward.item // WIDE  # in the compute dtype, until it is handed over
        backward = max(backward, fixed + gradients + sum(kept[: number + 1]) + found["working"] + local)
    last = size.ends * (WIDE + forward.item) if learning and world == 1 else 0  # embedding and head, handed over
    work = _optimizer_work(config, setting, size)
    optimizer = fixed + found["gradients"] + max(work, last)
    return loss, backward, optimizer


def _optimizer_work(config: GLM5Config, setting: Setting, size: Sizes) -> int:
    """Newton-Schulz over the largest batch of equal blocks, or the measured update of embedding or head (first
    step)."""
    c = config
    watched = 3 * WIDE * c.vocab_size * c.hidden_size // setting.world
    if setting.optimizer == "adamw" or setting.trains == "indexers":
        return watched
    limit = ORTHOGONALISED_ON_CPU if setting.forward.cpu else ORTHOGONALISED
    experts = c.n_routed_experts * (c.num_hidden_layers - c.first_k_dense_replace + c.num_nextn_predict_layers)
    blocks = [
        (c.moe_intermediate_size, c.hidden_size, 2 * experts // setting.world),
        (c.hidden_size, c.moe_intermediate_size, experts // setting.world),
        (c.intermediate_size, c.hidden_size, 2 * c.first_k_dense_replace),
        (c.hidden_size, c.num_attention_heads * (c.v_head_dim or c.head_dim), c.num_hidden_layers),
    ]
    work = 0
    for rows, columns, number in blocks:
        together = min(number, max(1, limit // max(1, rows * columns)))
        work = max(work, together * (3 * rows * columns + 2 * min(rows, columns) ** 2) * setting.ns_item)
    cut = 2 * setting.ns_item * sum(rest for _, rest in size.layers) // setting.world if setting.world > 1 else 0
    return max(watched, work + cut)
