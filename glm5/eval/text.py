"""Bits per byte of held-out text."""

from __future__ import annotations

import lzma
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from glm5.chat import Tokenizer
from glm5.data.packing import pack_batch
from glm5.data.shards import Shard
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.train.losses import target_logprobs

ROWS = 16
"""Batch size for windows of 256 tokens; longer windows make smaller batches."""


@dataclass(frozen=True)
class TextScore:
    """`bits_per_byte` over `bytes` of whole documents. Every token is scored; every window has its own context."""

    bits_per_byte: float
    bytes: int

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def bits_per_byte(
    model: GLM5ForCausalLM, shard: Shard, end_of_text: int, *, max_bytes: int, window: int = 256, overlap: int = 0
) -> TextScore:
    """Score documents of a shard, up to `max_bytes` in total, each separately, in windows of at most `window` tokens.

    A window begins with the end-of-text token as context only; it predicts the first real token. A document's own end
    token is not scored. With an `overlap`, later windows of a document begin with that many tokens of the previous
    window instead, also as context only. Every token is scored exactly once, and none with less context.
    """
    if not 0 <= overlap < window:
        raise ValueError(f"windows of {window} tokens cannot overlap by {overlap}")
    rows: list[tuple[list[int], list[bool]]] = []
    total_bytes = 0
    for index in range(len(shard)):
        size = int(shard.num_bytes[index])
        if rows and total_bytes + size > max_bytes:
            continue
        total_bytes += size
        rows += _windows(shard.document(index)[:-1].astype(int).tolist(), end_of_text, window, overlap)
    rows.sort(key=lambda row: len(row[0]))  # rows of similar length share a batch
    nats = 0.0
    step = max(1, ROWS * 256 // window)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        batch = pack_batch(part, max(len(ids) for ids, _ in part))[0]
        targets, wanted = batch.targets()
        batch = batch.to(model.device)
        hidden = model.model(batch.ids, packed_context(batch.documents, exact=False))
        nats -= float(target_logprobs(model, hidden, targets, wanted)[0].cpu().double().sum())
    return TextScore(nats / math.log(2) / max(1, total_bytes), total_bytes)


def _windows(tokens: list[int], end_of_text: int, window: int, overlap: int) -> list[tuple[list[int], list[bool]]]:
    """(ids, scored) per window of one document; `scored` marks the tokens that count."""
    rows = []
    at = 0
    while at < len(tokens):
        context = tokens[at - overlap : at] if at and overlap else [end_of_text]
        piece = tokens[at : at + window - len(context)]
        rows.append(([*context, *piece], [False] * len(context) + [True] * len(piece)))
        at += len(piece)
    return rows


def xz_bits_per_byte(shard: Shard, tokenizer: Tokenizer) -> float:
    """Bits per byte of `xz -9` on all documents, each compressed separately: a baseline for the model."""
    texts = [tokenizer.decode(shard.document(i)[:-1].tolist()).encode() for i in range(len(shard))]
    packed = sum(len(lzma.compress(text, preset=9)) for text in texts)
    return 8 * packed / max(1, sum(map(len, texts)))
