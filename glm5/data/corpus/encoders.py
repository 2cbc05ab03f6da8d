"""Encoders of short texts: directions of words, averaged, and BERT as all-MiniLM-L6-v2 has it, in plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from glm5.model.tensor_files import open_tensors, read_header, read_tensor

LAYERS, HEADS, EPS = 6, 12, 1e-12
LONGEST = 256
"""Tokens of a text that count, with the two marks at its ends: what the model was trained for."""


class StaticVectors:
    """Called with a text, returns the mean direction of its distinct tokens, [d]; zeros for an empty text.

    Each token counts once and by direction only. Otherwise rare words, whose vectors are long, decide, and pages of one
    template with other names are far apart.
    """

    def __init__(self, weights: Path, tokenizer: Path) -> None:
        vectors = _tensors(weights)["embedding.weight"].double()
        self._directions = vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-6)
        self._tokenizer = _tokenizer(tokenizer)

    def __call__(self, text: str) -> Tensor:
        ids = sorted(set(self._tokenizer.encode(text, add_special_tokens=False).ids))
        return self._directions[torch.tensor(ids, dtype=torch.long)].sum(dim=0) / max(1, len(ids))


class MiniLM:
    """Called with a text, returns the mean of the last layer's states, [384]."""

    def __init__(self, weights: Path, tokenizer: Path) -> None:
        self._weights = {name: one for name, one in _tensors(weights).items() if one.is_floating_point()}
        self._tokenizer = _tokenizer(tokenizer)
        self._tokenizer.enable_truncation(LONGEST)

    def __call__(self, text: str) -> Tensor:
        return self.states(torch.tensor(self._tokenizer.encode(text).ids)).mean(dim=0)

    def states(self, ids: Tensor) -> Tensor:
        """ids [T] -> states of the last layer [T, 384]."""
        weights = self._weights
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = self._norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings")
        for layer in range(LAYERS):
            name = f"encoder.layer.{layer}"
            q, k, v = (
                self._linear(x, f"{name}.attention.self.{part}").unflatten(-1, (HEADS, -1)).transpose(0, 1)
                for part in ("query", "key", "value")
            )
            mixed = F.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).flatten(1)
            x = self._norm(x + self._linear(mixed, f"{name}.attention.output.dense"), f"{name}.attention.output")
            wide = F.gelu(self._linear(x, f"{name}.intermediate.dense"))
            x = self._norm(x + self._linear(wide, f"{name}.output.dense"), f"{name}.output")
        return x

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.LayerNorm.weight"], self._weights[f"{name}.LayerNorm.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _tensors(file: Path) -> dict[str, Tensor]:
    stored = read_header(file)
    with open_tensors(file, next(iter(stored.values())).stamp) as handle:
        return {name: read_tensor(handle, one) for name, one in stored.items()}


def _tokenizer(file: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
