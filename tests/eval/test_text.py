"""Bits per byte against a loop over tokens and whole logits."""

from __future__ import annotations

import lzma
import math
from typing import Any

import pytest
import torch

from glm5.eval.text import bits_per_byte, xz_bits_per_byte

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


@pytest.mark.parametrize(
    ("window", "overlap", "max_bytes", "chosen"),
    [(16, 8, 10_000, [0, 1, 2, 3]), (16, 15, 150, [0, 1, 3]), (64, 5, 10_000, [0, 1, 2, 3])],
)
def test_overlapping_windows_score_every_token_once_with_its_context(
    small: Any, shard: Any, tokenizer: Any, window: int, overlap: int, max_bytes: int, chosen: list[int]
) -> None:
    model, end = small(dtype=F64), tokenizer.special["<|endoftext|>"]
    bits = 0.0
    with torch.no_grad():
        for index in chosen:
            ids = shard.document(index).tolist()[:-1]
            read: dict[int, Any] = {}  # of contexts with the same beginning, each is the beginning of the next
            for at, token in enumerate(ids):
                # The first window holds the end token and window - 1 others, every later one window - overlap more.
                fresh = (
                    0 if at < window - 1 else window - 1 + (at - window + 1) // (window - overlap) * (window - overlap)
                )
                row = [end, *ids]
                begin = 0 if fresh == 0 else fresh - overlap + 1
                if begin not in read:
                    context = torch.tensor([row[begin : begin + window]])
                    read[begin] = torch.log_softmax(model(context).logits[0], -1)
                bits -= float(read[begin][at - begin][token]) / math.log(2)
    found = bits_per_byte(model, shard, end, max_bytes=max_bytes, window=window, overlap=overlap)
    assert found.bytes == sum(shard.num_bytes[index] for index in chosen)
    assert found.bits_per_byte == pytest.approx(bits / found.bytes, abs=1e-9)


def test_xz_is_counted_file_by_file(shard: Any, tokenizer: Any) -> None:
    texts = [tokenizer.decode(shard.document(i)[:-1].tolist()).encode() for i in range(len(shard))]
    assert [len(text) for text in texts] == shard.num_bytes.tolist()
    sizes = [len(lzma.compress(text, preset=9)) for text in texts]
    assert xz_bits_per_byte(shard, tokenizer) == pytest.approx(8 * sum(sizes) / sum(shard.num_bytes))


def test_a_model_that_knows_nothing_needs_log2_of_the_vocabulary(small: Any, shard: Any, tokenizer: Any) -> None:
    """The byte-level tokenizer has one token a byte."""
    model = small()
    torch.nn.init.zeros_(model.lm_head.weight)
    found = bits_per_byte(model, shard, tokenizer.special["<|endoftext|>"], max_bytes=10_000)
    assert found.bits_per_byte == pytest.approx(math.log2(tokenizer.vocab_size), abs=1e-5)
