"""Log-probability and entropy of every token of some sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from glm5.data.entropy_long import TokenScores
from glm5.device import choose_device
from glm5.errors import ConfigError
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.train.losses import target_logprobs

TOKENS_AT_ONCE = 8192


class TokenScorer:
    """Scores sequences with a model; see `glm5.data.entropy_long.Scorer`. Exact mode: a sequence's numbers do not
    depend on what else is scored with it."""

    def __init__(self, model: GLM5ForCausalLM, *, exact: bool = True) -> None:
        self.model, self.exact = model.eval(), exact

    @torch.no_grad()
    def __call__(self, sequences: Sequence[np.ndarray], last: int | None = None) -> list[TokenScores]:
        found: list[TokenScores] = [TokenScores(np.empty(0), np.empty(0))] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), i))
        while order:
            longest = max(1, len(sequences[order[-1]]))
            some = order[-max(1, TOKENS_AT_ONCE // longest) :]
            del order[-len(some) :]
            for at, scores in zip(some, self._score([sequences[i] for i in some], longest, last), strict=True):
                found[at] = scores
        return found

    def _score(self, sequences: list[np.ndarray], width: int, last: int | None) -> list[TokenScores]:
        ids = torch.zeros(len(sequences), width, dtype=torch.long)
        documents = torch.full((len(sequences), width), -1)
        wanted = torch.zeros(len(sequences), width, dtype=torch.bool)
        counts = []
        for row, sequence in enumerate(sequences):
            size = len(sequence)
            ids[row, :size], documents[row, :size] = torch.from_numpy(sequence.astype(np.int64)), 0
            counts.append(max(0, size - 1) if last is None else min(last, max(0, size - 1)))
            wanted[row, size - 1 - counts[-1] : size - 1] = counts[-1] > 0
        device = self.model.device
        hidden = self.model.model(ids.to(device), packed_context(documents.to(device), exact=self.exact))
        logprobs, entropy = (
            values.cpu().double().numpy() for values in target_logprobs(self.model, hidden, ids.roll(-1, 1), wanted)
        )
        borders = np.cumsum([0, *counts])
        return [TokenScores(logprobs[a:b], entropy[a:b]) for a, b in pairwise(borders)]


def load_scorer(checkpoint: str | Path, device: str = "auto", length: int = 0) -> TokenScorer:
    """The scorer of a checkpoint directory, for sequences of up to `length` tokens. Raises ConfigError if its positions
    do not reach that far."""
    model = GLM5ForCausalLM.from_pretrained(checkpoint, device=choose_device(device))
    if length > model.config.max_position_embeddings:
        raise ConfigError(
            f"{checkpoint} has {model.config.max_position_embeddings:,} positions, fewer than the rows' {length:,} "
            "tokens; choose a smaller `length` or a checkpoint of a later stage."
        )
    return TokenScorer(model)
