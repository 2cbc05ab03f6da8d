"""Bits per byte against a loop over tokens and whole logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from glm5.eval.text import bits_per_byte

F64 = torch.float64


@torch.no_grad()
def brute_force(model: Any, shard: Any, end: int, chosen: list[int], window: int) -> tuple[float, int]:
    bits, size = 0.0, 0
    for index in chosen:
        ids = shard.document(index).tolist()
        assert ids[-1] == end
        size += int(shard.num_bytes[index])
        for start in range(0, len(ids) - 1, window - 1):
            piece = ids[:-1][start : start + window - 1]
            logp = torch.log_softmax(model(torch.tensor([[end, *piece]])).logits[0], -1)
            bits -= sum(float(logp[i, token]) for i, token in enumerate(piece)) / math.log(2)
    return bits / size, size


@pytest.mark.parametrize("window", [16, 64])
@pytest.mark.parametrize(
    ("max_bytes", "chosen"), [(21, [0]), (10, [0]), (60, [0, 3]), (150, [0, 1, 3]), (10_000, [0, 1, 2, 3])]
)
def test_bits_per_byte_equals_a_loop(
    small: Any, shard: Any, tokenizer: Any, window: int, max_bytes: int, chosen: list[int]
) -> None:
    model, end = small(dtype=F64), tokenizer.special["<|endoftext|>"]
    assert shard.num_bytes.tolist() == [21, 90, 400, 33]
    found = bits_per_byte(model, shard, end, max_bytes=max_bytes, window=window)
    expected, size = brute_force(model, shard, end, chosen, window)
    assert found.bytes == size
    assert found.bits_per_byte == pytest.approx(expected, abs=1e-9)
    assert found.plain() == {"bits_per_byte": found.bits_per_byte, "bytes": size}


def test_a_model_that_knows_nothing_needs_log2_of_the_vocabulary(small: Any, shard: Any, tokenizer: Any) -> None:
    """The byte-level tokenizer has one token a byte."""
    model = small()
    torch.nn.init.zeros_(model.lm_head.weight)
    found = bits_per_byte(model, shard, tokenizer.special["<|endoftext|>"], max_bytes=10_000)
    assert found.bits_per_byte == pytest.approx(math.log2(tokenizer.vocab_size), abs=1e-5)
