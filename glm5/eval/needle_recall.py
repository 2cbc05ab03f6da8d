"""Whether the indexers of sparse attention select the needles of a long prompt (§2.1.1)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.chat import Tokenizer
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM


def token_places(tokenizer: Tokenizer, ids: Sequence[int], texts: Sequence[str]) -> list[int]:
    """Places of the tokens in which the first occurrence of each text lies. A text that does not occur has none."""
    pieces = [tokenizer.decode_bytes([token]) for token in ids]
    ends = list(itertools.accumulate(map(len, pieces)))
    whole, found = b"".join(pieces), set()
    for text in texts:
        begin = whole.find(text.encode())
        last = begin + len(text.encode())
        if begin >= 0:
            found |= {i for i, piece in enumerate(pieces) if ends[i] > begin and ends[i] - len(piece) < last}
    return sorted(found)


@torch.no_grad()
def needle_recall(model: GLM5ForCausalLM, ids: Sequence[int], places: Sequence[int]) -> float | None:
    """Share of the tokens at `places` that the indexers select for the last token of `ids`, mean over the layers with
    an indexer. None without places, without sparse attention, or if there are no more tokens than are selected."""
    if not places or not model.config.selects_keys or len(ids) <= (model.config.index_topk or 0):
        return None
    wanted, shares = torch.tensor(places, device=model.device), []

    def note(module: object, inputs: object, outputs: tuple[Tensor, Tensor | None]) -> None:
        if outputs[1] is not None and getattr(module, "indexer", None) is not None:
            shares.append(float(torch.isin(wanted, outputs[1].flatten(0, -2)[-1]).float().mean()))

    attentions = [module for module in model.model.modules() if hasattr(module, "indexer")]
    hooks = [module.register_forward_hook(note) for module in attentions]
    try:
        batch = torch.tensor([list(ids)], device=model.device)
        model.model(batch, packed_context(torch.zeros_like(batch), exact=False))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(shares) / len(shares) if shares else None
