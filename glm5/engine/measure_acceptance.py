"""Greedy speculative runs that measure draft acceptance (§2.1, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm5.engine.engine import Engine
from glm5.errors import EngineError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams


@dataclass(frozen=True)
class Speculation:
    """Result of a speculative run. `token_ids` has one list per prompt; `accepted[k]` counts rounds that accepted at
    least the first k + 1 drafts; `accept_length` is the mean number of tokens per verification: the accepted drafts
    plus one token of the trunk (1: no draft was accepted)."""

    token_ids: list[list[int]]
    rounds: int
    accepted: list[int]

    @property
    def accept_length(self) -> float:
        return 1.0 + sum(self.accepted) / max(1, self.rounds)


def generate_speculative(
    model: GLM5ForCausalLM, prompts: Sequence[Sequence[int]], *, max_tokens: int, drafts: int = 3
) -> Speculation:
    """Greedy continuation of prompts by exactly `max_tokens` tokens each, equal to plain greedy decoding."""
    if not prompts or not all(prompts):
        raise EngineError("generate_speculative needs at least one prompt, and no prompt may be empty.")
    longest = max(map(len, prompts)) + max_tokens
    engine = Engine(model, max_batch=len(prompts), max_length=longest, speculative=drafts, prefix_cache=False)
    done = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
    return Speculation([completion.token_ids for completion in done], engine.rounds, list(engine.accepted))
