"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from glm5.records import Completion, SamplingParams


@dataclass(eq=False)
class Request:
    """One sample of one prompt. `cached_len` counts the tokens whose latents are in the cache under present weights."""

    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    completion: Completion = field(default_factory=Completion)
    row: int = -1
    cached_len: int = 0
    done: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion.token_ids)

    def pending(self) -> list[int]:
        """Tokens that the model has not seen yet; at least one."""
        start = self.cached_len
        if start >= len(self.prompt_ids):
            return self.completion.token_ids[start - len(self.prompt_ids) :]
        return self.prompt_ids[start:] + self.completion.token_ids

    def finish(self, reason: str) -> None:
        self.completion.finish_reason = reason
        self.done = True
