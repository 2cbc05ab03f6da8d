"""The vocabulary as bytes: masks over token ids, and texts that an answer must not contain."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.stops import automaton

Mask = NDArray[np.int32]
"""One bit per id, 32 per word, lowest bit first; ids outside the vocabulary are 0."""
KEPT_MASKS = 64
"""Maximum number of cached masks per `Spelling`."""
KEPT_SPELLINGS = 16
"""Maximum number of cached `Spelling` objects. Requests keep those that they use."""


class Words:
    """The vocabulary of one tokenizer: masks of its special tokens, and searches by bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special
        self.size = tokenizer.vocab_size
        self.special = frozenset(special.values())
        self.stops = frozenset(tokenizer.stop_token_ids)
        self.end_of_thought = special["</think>"]
        self.bytes = [tokenizer.decode_bytes([i]) for i in range(self.size)]
        self.ordinary = sorted((text, i) for i, text in enumerate(self.bytes) if i not in self.special)
        self.order = np.array([i for _, i in self.ordinary], dtype=np.intp)
        self.longest = max((len(text) for text, _ in self.ordinary), default=0)
        self.spelling = lru_cache(KEPT_SPELLINGS)(partial(Spelling, self))  # by tuple of texts; shared by all samples
        plain = set(range(self.size)) - self.special
        self.thought = self.mask(plain | {self.end_of_thought})
        self.only_end_of_thought = self.mask({self.end_of_thought})
        # In the chat template, a turn with calls ends where their results begin; other turns end at the next user turn.
        self.ends_calls = self.mask({special["<|observation|>"]})
        self.ends_answer = self.mask({special["<|user|>"], special["<|endoftext|>"]})
        self.ends = self.mask(set(self.stops))
        self.everything = self.mask(set(range(self.size)))
        self.no_stop = self.mask(set(range(self.size)) - self.stops)

    def mask(self, *sets: Collection[int] | NDArray[np.intp]) -> Mask:
        bits = np.zeros(-(-self.size // 32) * 32, dtype=np.uint8)
        for ids in sets:
            bits[ids if isinstance(ids, np.ndarray) else list(ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def starting_with(self, text: bytes) -> NDArray[np.intp]:
        """The ordinary tokens that begin with `text`, as a slice of `order`."""
        first = bisect_left(self.ordinary, (text, -1))
        last = bisect_right(self.ordinary, text, lo=first, key=lambda one: one[0][: len(text)])
        return self.order[first:last]

    def holding(self, texts: Sequence[bytes]) -> NDArray[np.intp]:
        """The ordinary tokens that contain one of `texts`. Each of `texts` consists of whole characters."""
        if not texts:
            return self.order[:0]
        anywhere = re.compile(b"(?:" + b"|".join(map(re.escape, texts)) + b")[^\xff]*")
        found = [match.start() for match in anywhere.finditer(self._joined)]
        return self.order[np.searchsorted(self._starts, found, side="right") - 1]

    @cached_property
    def _joined(self) -> bytes:
        """All ordinary tokens, separated by 0xFF, which no UTF-8 character contains."""
        return b"\xff".join(text for text, _ in self.ordinary)

    @cached_property
    def _starts(self) -> NDArray[np.intp]:
        """The offset of each token in `_joined`."""
        lengths = np.array([len(text) + 1 for text, _ in self.ordinary], dtype=np.intp)
        return np.cumsum(lengths) - lengths


class Spelling:
    """Texts that ordinary tokens must not complete, however the texts are split into tokens.

    The state is a number. It stands for the longest suffix of the answer so far that is a prefix of one of the texts.
    Special tokens reset it.
    """

    def __init__(self, words: Words, texts: Sequence[str]) -> None:
        self._words = words
        self._texts = [text.encode("utf-8", "replace") for text in texts]
        self._next, self._fail, _, _ = automaton(tuple(text.decode("latin-1") for text in self._texts))
        # Per state: for each text that begins with the state's prefix, its remaining bytes, unless they are longer than
        # any token.
        self._rests: dict[int, list[bytes]] = {}
        for text in self._texts:
            state = 0
            for n, char in enumerate(text.decode("latin-1")):
                if n and len(text) - n <= words.longest:
                    self._rests.setdefault(state, []).append(text[n:])
                state = self._next[state][char]
        self._ends: dict[int, list[NDArray[np.intp]]] = {}  # per state and rest: tokens that begin with the rest
        self._masks: dict[int, Mask] = {}
        self._whole = ~words.mask(words.holding(self._texts))

    def after(self, state: int, token: int) -> int:
        """The state after one more token."""
        if token in self._words.special or token >= self._words.size:
            return 0
        for char in self._words.bytes[token].decode("latin-1"):
            while state and char not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(char, 0)
        return state

    def allowed(self, state: int) -> Mask:
        """All tokens except those that complete one of the texts. Bits outside the vocabulary are set."""
        found = self._masks.get(state)
        if found is None:
            ends: list[NDArray[np.intp]] = []
            at = state
            while at:
                if at in self._rests and at not in self._ends:
                    self._ends[at] = [self._words.starting_with(rest) for rest in dict.fromkeys(self._rests[at])]
                ends += self._ends.get(at, ())
                at = self._fail[at]
            found = self._whole & ~self._words.mask(*ends) if ends else self._whole
            if len(self._masks) >= KEPT_MASKS:
                self._masks.clear()
            self._masks[state] = found
        return found
