"""Changes to the logits before temperature: penalties, biases, and masks of forbidden tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from glm5.device import put
from glm5.errors import EngineError
from glm5.records import SamplingParams
from glm5.seeds import derive_seed

if TYPE_CHECKING:
    from glm5.engine.grammar import GrammarState
    from glm5.engine.words import Mask, Spelling

LOWEST_TEMPERATURE = 1e-6
HIGHEST_TEMPERATURE = 1e6
"""Temperature limits; 0 (greedy) is also valid. Outside the limits the division or the logits may overflow."""
HIGHEST_PENALTY = 10
HIGHEST_BIAS = 1000
MAX_BAD_BYTES = 4096
"""Maximum bytes of all `bad_words` together, in UTF-8; each byte takes a few hundred bytes of memory."""


class SamplerState:
    """Sampling state of one sample: parameters, seed and the tokens so far.

    Call `advance` after every token that is kept. A preempted request keeps its state, because no part of the state
    depends on the cache. Penalty counts ([V] each) exist only with a penalty, `forbidden` ([V]) only with
    `allowed_token_ids`. `spelling` is the automaton of the `bad_words`, and `spelled` is the state that the answer has
    reached in that automaton.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        *,
        vocab_size: int,
        prompt: Sequence[int] = (),
        stop_ids: Iterable[int] = (),
        grammar: GrammarState | None = None,
        spelling: Spelling | None = None,
        position: int = 0,
    ) -> None:
        self.params = params
        self.seed = seed
        self.position = position
        self.grammar = grammar
        self.stop_ids = sorted(i for i in stop_ids if 0 <= i < vocab_size)
        self.bias = [(i, value) for i, value in params.logit_bias if value and 0 <= i < vocab_size]
        self.spelling = spelling
        self.spelled = 0
        self.forbidden: Tensor | None = None
        if params.allowed_token_ids is not None:
            self.forbidden = _all_but(tuple(params.allowed_token_ids), vocab_size)
        self.counts: Tensor | None = None
        self.seen: Tensor | None = None
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            self.counts = torch.zeros(vocab_size)
            self._counts = self.counts.numpy()
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[torch.tensor(prompt, dtype=torch.long)] = True
            self._seen = self.seen.numpy()

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p may remove tokens."""
        p = self.params
        return p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)

    def plain(self, ahead: int = 0) -> bool:
        """Whether the token `ahead` positions after the next one comes from the model's own distribution at some
        temperature, and nothing but its log-probability is reported. Compiled calls draw such tokens."""
        return not (self.params.top_logprobs or self.filters or self.adjusts(ahead))

    @property
    def factor(self) -> float:
        """What logits are multiplied with; 0 for greedy."""
        temperature = self.params.temperature
        return 1.0 / temperature if temperature else 0.0

    def advance(self, token: int) -> None:
        """Record a token that is kept."""
        self.position += 1
        if self.counts is not None:
            self._counts[token] += 1
            if self.seen is not None:
                self._seen[token] = True
        if self.grammar is not None:
            self.grammar.accept(token)
        if self.spelling is not None:
            self.spelled = self.spelling.after(self.spelled, token)

    def uniform(self, purpose: str = "token", ahead: int = 0) -> float:
        """The random number in [0, 1) of (seed, purpose, position + ahead)."""
        return derive_seed(self.seed, purpose, self.position + ahead) / 2**63

    def adjusts(self, ahead: int = 0) -> bool:
        """Whether the logits of the token `ahead` positions after the next one must be adjusted."""
        return (
            self.counts is not None
            or bool(self.bias)
            or self.grammar is not None
            or self.forbidden is not None
            or self.spelling is not None
            or self.position + ahead < self.params.min_tokens
        )


@lru_cache(maxsize=4)  # an entry takes a few MB, mostly for its key, the tuple of allowed ids
def _all_but(allowed: tuple[int, ...], vocab_size: int) -> Tensor:
    """[V], true for all ids except `allowed`; shared by samples, so do not modify it."""
    if not 0 <= min(allowed) <= max(allowed) < vocab_size:
        raise EngineError(f"allowed_token_ids must lie in the model's vocabulary, 0 to {vocab_size - 1}.")
    forbidden = torch.ones(vocab_size, dtype=torch.bool)
    forbidden[torch.tensor(allowed)] = False
    return forbidden


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise EngineError for a value that is not valid."""
    p = params
    if p.max_tokens < 1 or p.n < 1 or p.top_k < 0 or p.min_tokens < 0:
        raise EngineError("max_tokens and n must be at least 1, top_k and min_tokens at least 0 (0 = no limit).")
    if p.temperature != 0 and not LOWEST_TEMPERATURE <= p.temperature <= HIGHEST_TEMPERATURE:
        limits = f"{LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE:,.0f}"
        raise EngineError(f"temperature must be 0 (greedy) or a number from {limits}.")
    if not 0 < p.top_p <= 1 or not 0 <= p.min_p <= 1:
        raise EngineError("top_p must lie in (0, 1], min_p in [0, 1].")
    if not (abs(p.presence_penalty) <= HIGHEST_PENALTY and abs(p.frequency_penalty) <= HIGHEST_PENALTY):
        raise EngineError(
            f"presence_penalty and frequency_penalty must lie in [-{HIGHEST_PENALTY}, {HIGHEST_PENALTY}]."
        )
    if not 1 / HIGHEST_PENALTY <= p.repetition_penalty <= HIGHEST_PENALTY:
        raise EngineError(
            f"repetition_penalty must lie in [{1 / HIGHEST_PENALTY}, {HIGHEST_PENALTY}]; 1 means no penalty."
        )
    for token, value in p.logit_bias:
        if not 0 <= token < vocab_size:
            raise EngineError(f"logit_bias has the token id {token}; the model's vocabulary ends at {vocab_size - 1}.")
        if not abs(value) <= HIGHEST_BIAS:
            raise EngineError(f"logit_bias must lie in [-{HIGHEST_BIAS}, {HIGHEST_BIAS}].")
    if p.allowed_token_ids is not None:
        if not p.allowed_token_ids:
            raise EngineError("allowed_token_ids is empty; give at least one id, or leave it out to allow all.")
        _all_but(tuple(p.allowed_token_ids), vocab_size)
        if p.grammar is not None:
            raise EngineError(
                "allowed_token_ids cannot be combined with a grammar, a schema, a forced call or a thinking budget."
            )
    check_bad_words(p.bad_words)
    limit = p.grammar.thinking_tokens if p.grammar is not None else None
    if limit is not None and limit < 0:
        raise EngineError("thinking_tokens of a grammar must be at least 0.")


def check_bad_words(words: Sequence[str]) -> None:
    """Raise EngineError unless `words` are valid `bad_words`."""
    if not all(words):
        raise EngineError("bad_words has an empty string; remove it.")
    if sum(len(word.encode("utf-8", "replace")) for word in words) > MAX_BAD_BYTES:
        raise EngineError(f"bad_words may have at most {MAX_BAD_BYTES:,} bytes in all; give fewer or shorter ones.")


def adjust(logits: Tensor, states: Sequence[SamplerState], drafted: Sequence[Sequence[int]]) -> Tensor:
    """Apply the states' penalties, biases and masks in place to logits [n, V] in fp32 or wider. Row i predicts the
    token after `drafted[i]`, which are tokens that its state has not recorded yet. All operations are batched."""
    _penalise(logits, states, drafted)
    rows, ids, values = [], [], []
    for row, state in enumerate(states):
        for token, value in state.bias:
            rows.append(row)
            ids.append(token)
            values.append(value)
    if rows:
        where = (put(rows, logits.device), put(ids, logits.device))
        logits.index_put_(where, put(values, logits.device, logits.dtype), accumulate=True)
    _mask(logits, states, drafted)
    _keep_allowed(logits, states)
    _without_bad_words(logits, states, drafted)
    return _without_early_stops(logits, states, drafted)


def _penalise(logits: Tensor, states: Sequence[SamplerState], drafted: Sequence[Sequence[int]]) -> None:
    mine = [row for row, state in enumerate(states) if state.counts is not None]
    if not mine:
        return
    counts = torch.stack([counts for row in mine if (counts := states[row].counts) is not None])
    for i, row in enumerate(mine):
        for token in drafted[row]:
            counts[i, token] += 1
    where = put(mine, logits.device)
    lines = logits[where]
    factors = [states[row].params.repetition_penalty for row in mine]
    if any(factor != 1.0 for factor in factors):
        seen = torch.stack([counts[i] > 0 if (s := states[row].seen) is None else s for i, row in enumerate(mine)])
        seen = put(seen | (counts > 0), logits.device)
        factor = put(factors, logits.device, logits.dtype).unsqueeze(1)
        lines = torch.where(seen, torch.where(lines > 0, lines / factor, lines * factor), lines)
    counts = put(counts.to(logits.dtype), logits.device)
    frequency, presence = (
        put([getattr(states[row].params, name) for row in mine], logits.device, logits.dtype).unsqueeze(1)
        for name in ("frequency_penalty", "presence_penalty")
    )
    logits[where] = lines - frequency * counts - presence * (counts > 0)


def _mask(logits: Tensor, states: Sequence[SamplerState], drafted: Sequence[Sequence[int]]) -> None:
    """Apply the grammars' masks, one bit per token and row; ids outside the tokenizer's vocabulary are always
    masked."""
    mine = [row for row, state in enumerate(states) if state.grammar is not None]
    if not mine:
        return
    masks = np.zeros((len(mine), -(-logits.shape[1] // 32)), dtype=np.int32)
    for i, row in enumerate(mine):
        grammar = states[row].grammar
        assert grammar is not None
        grammar.fill(masks[i], drafted[row])
    where = put(mine, logits.device)
    logits[where] = logits[where].masked_fill(_cleared(masks, logits), float("-inf"))


def _cleared(masks: Mask, logits: Tensor) -> Tensor:
    """bool [n, V], true for cleared bits of masks [n, words], on the device of `logits`."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    return put(torch.from_numpy(bits == 0), logits.device)


def _keep_allowed(logits: Tensor, states: Sequence[SamplerState]) -> None:
    mine = [row for row, state in enumerate(states) if state.forbidden is not None]
    if mine:
        forbidden = torch.stack([f for row in mine if (f := states[row].forbidden) is not None])
        where = put(mine, logits.device)
        logits[where] = logits[where].masked_fill(put(forbidden, logits.device), float("-inf"))


def _without_bad_words(logits: Tensor, states: Sequence[SamplerState], drafted: Sequence[Sequence[int]]) -> None:
    """Forbid tokens that complete a bad word, except in a row with no other possible token."""
    mine = [row for row, state in enumerate(states) if state.spelling is not None]
    if not mine:
        return
    masks = np.full((len(mine), -(-logits.shape[1] // 32)), -1, dtype=np.int32)
    for i, row in enumerate(mine):
        spelling, spelled = states[row].spelling, states[row].spelled
        assert spelling is not None
        for token in drafted[row]:
            spelled = spelling.after(spelled, token)
        allowed = spelling.allowed(spelled)
        masks[i, : len(allowed)] = allowed
    where = put(mine, logits.device)
    lines = logits[where]
    without = lines.masked_fill(_cleared(masks, logits), float("-inf"))
    logits[where] = torch.where(without.amax(-1, keepdim=True) > float("-inf"), without, lines)


def _without_early_stops(logits: Tensor, states: Sequence[SamplerState], drafted: Sequence[Sequence[int]]) -> Tensor:
    """Forbid stop ids before `min_tokens`, except in a row with no other possible token (for example, its grammar
    allows only the end)."""
    early = [
        (row, token)
        for row, state in enumerate(states)
        if state.position + len(drafted[row]) < state.params.min_tokens
        for token in state.stop_ids
    ]
    if not early:
        return logits
    impossible = torch.full((), float("-inf"), dtype=logits.dtype, device=logits.device)
    without = logits.index_put(tuple(put(early, logits.device).T), impossible)
    return torch.where(without.amax(-1, keepdim=True) > float("-inf"), without, logits)
