"""How far the fast mode of an engine is from the exact one, measured on tokens that the engine has just generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm5.engine.engine import Engine
from glm5.engine.scoring import score_row
from glm5.records import Completion


@dataclass(frozen=True)
class Difference:
    """Differences in log-probability between the engine and the learner's forward pass, at generated tokens, for the
    same sequences and weights.

    Of the `tokens` compared, `unequal` differ in at least one bit. `mean_abs` and `max_abs` are in nats. All three are
    zero for an exact engine of an MLA model in fp32.
    """

    tokens: int
    unequal: int
    mean_abs: float
    max_abs: float


def measure(
    engine: Engine, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], temperature: float = 1.0
) -> Difference:
    """Compare completions, one per prompt, sampled at `temperature` (0: greedy) without penalties or filters. The
    engine must still have the weights that produced them."""
    rows = [[*prompt, *done.token_ids] for prompt, done in zip(prompts, completions, strict=True)]
    scored = [score_row(engine.model, row, temperature or 1.0) for row in rows]
    gaps = []
    for prompt, done, exact in zip(prompts, completions, scored, strict=True):
        gaps += [abs(a - b) for a, b in zip(done.logprobs, exact[len(prompt) - 1 :], strict=True)]
    return Difference(len(gaps), sum(gap != 0 for gap in gaps), sum(gaps) / max(1, len(gaps)), max(gaps, default=0.0))
