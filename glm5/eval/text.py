"""Bits per byte of held-out text."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from glm5.data.packing import pack_batch
from glm5.data.shards import Shard
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.train.losses import target_logprobs

ROWS = 16


@dataclass(frozen=True)
class TextScore:
    """`bits_per_byte` over `bytes` of whole documents; every token is scored, the context starts afresh per window."""

    bits_per_byte: float
    bytes: int

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def bits_per_byte(
    model: GLM5ForCausalLM, shard: Shard, end_of_text: int, *, max_bytes: int, window: int = 256
) -> TextScore:
    """Score the first documents of a shard up to `max_bytes`. Windows begin with the end-of-text token, which is
    context only, so that the first real token is predicted too; a document's own end token is not scored."""
    rows: list[tuple[list[int], list[bool]]] = []
    total_bytes = 0
    for index in range(len(shard)):
        size = int(shard.num_bytes[index])
        if rows and total_bytes + size > max_bytes:
            continue
        total_bytes += size
        tokens = shard.document(index)[:-1].astype(int).tolist()
        for start in range(0, len(tokens), window - 1):
            piece = tokens[start : start + window - 1]
            rows.append(([end_of_text, *piece], [False] + [True] * len(piece)))
    nats = 0.0
    for start in range(0, len(rows), ROWS):
        batch, _ = pack_batch(rows[start : start + ROWS], window)
        hidden = model.model(batch.ids, packed_context(batch.documents))
        targets, wanted = batch.targets()
        nats -= float(target_logprobs(model, hidden, targets, wanted)[0].double().sum())
    return TextScore(nats / math.log(2) / max(1, total_bytes), total_bytes)
