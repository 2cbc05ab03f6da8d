"""Scores of tokens against plain log-softmax, independent of what is scored beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from glm5.train.token_scores import TokenScorer


def test_scores_are_those_of_plain_softmax(small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(use_dsa=False).eval()
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, 40, size=n).astype(np.uint16) for n in (12, 1, 7, 30, 2)]
    whole = TokenScorer(model)(sequences)
    for sequence, found in zip(sequences, whole, strict=True):
        logits = model(torch.tensor(sequence.astype(int)).unsqueeze(0)).logits[0].detach().double()
        table = logits.log_softmax(-1)
        expected = [float(table[i - 1, sequence[i]]) for i in range(1, len(sequence))]
        assert found.logprobs == pytest.approx(expected, abs=1e-5)
        entropy = -(table.exp() * table).sum(-1)[:-1]
        assert found.entropy == pytest.approx(entropy.numpy(), abs=1e-5)
    monkeypatch.setattr("glm5.train.token_scores.TOKENS_AT_ONCE", 30)
    alone = TokenScorer(model)(sequences)
    for a, b in zip(whole, alone, strict=True):
        assert (a.logprobs == b.logprobs).all() and (a.entropy == b.entropy).all()
    for cut, full in zip(TokenScorer(model)(sequences, last=3), whole, strict=True):
        assert cut.logprobs.tolist() == full.logprobs[-3:].tolist()
    assert TokenScorer(model)([]) == []
