"""What a layer's matrices read on real text: rows of activations, collected while the layer runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from glm5.model.mla import MLA
from glm5.model.moe import MoE
from glm5.ops.elementwise import swiglu
from glm5.seeds import derive_seed

ROWS = 256
"""Most rows that are kept of one place; a random choice of all."""


class Sample:
    """At most `size` of all rows that were added, every one with the same chance."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.generator = size, torch.Generator().manual_seed(seed)
        self.rows: Tensor | None = None
        self.keys = torch.empty(0)

    def add(self, rows: Tensor) -> None:
        keys = torch.rand(rows.shape[0], generator=self.generator)
        both = rows.detach() if self.rows is None else torch.cat((self.rows, rows.detach()))
        keys = torch.cat((self.keys, keys))
        kept = keys.argsort()[: self.size].sort().values
        self.rows, self.keys = both[kept.to(both.device)], keys[kept]


@contextmanager
def observe(block: Any, length: int, seed: int = 0, rows: int = ROWS) -> Iterator[dict[str, Tensor]]:
    """While the context is open, the layer may run on one row of `length` tokens at a time, in exact mode, where its
    modules are called one by one; tokens that fill up the row do not count. Afterwards the dictionary has rows
    [n, channels] by the name of their place (see `smoothing.junctions`)."""
    samples: dict[str, Sample] = {}
    found: dict[str, Tensor] = {}

    def add(place: str, values: Tensor) -> None:
        if place not in samples:
            samples[place] = Sample(rows, derive_seed(seed, "calibration", place))
        samples[place].add(values)

    attention, mlp = block.self_attn, block.mlp
    hooks = [
        block.input_layernorm.register_forward_hook(lambda m, args, out: add("input", out[:length])),
        block.post_attention_layernorm.register_forward_hook(lambda m, args, out: add("feed_forward", out[:length])),
    ]
    if isinstance(attention, MLA):

        def heads(module: nn.Module, args: tuple[Any, ...]) -> None:
            for head, values in enumerate(args[0][:length].unflatten(-1, (attention.heads, -1)).unbind(-2)):
                add(f"values.{head}", values)

        hooks.append(attention.q_a_layernorm.register_forward_hook(lambda m, args, out: add("queries", out[:length])))
        hooks.append(attention.o_proj.register_forward_pre_hook(heads))
    plain = mlp.shared_experts if isinstance(mlp, MoE) else mlp
    hooks.append(plain.down_proj.register_forward_pre_hook(lambda m, args: add("down", args[0][:length])))
    if isinstance(mlp, MoE):

        def experts(module: Any, args: tuple[Any, ...]) -> None:
            x, chosen = args[0][:length], args[2][:length]
            for number, weight in enumerate(module.gate_up_proj):
                tokens = (chosen == number).any(1).nonzero()[:, 0]
                if len(tokens):
                    add(f"experts.{number}", swiglu(x[tokens] @ weight.T))

        hooks.append(mlp.experts.register_forward_pre_hook(experts))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        found |= {place: sample.rows for place, sample in samples.items() if sample.rows is not None}
