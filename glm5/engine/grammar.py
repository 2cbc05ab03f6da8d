"""Grammars restrict the next token: for example, an answer must be JSON that matches a schema, or a tool call.

llguidance (extra `grammar`) computes the masks from grammars in Lark's notation, which `glm5.engine.grammar_rules`
writes. This module adds the tokenizer, limits and clear errors. It also handles what the library's matcher does not
see: the think block before the answer, and which stop token may end each kind of answer. It forbids ordinary text that
spells out a special marker, because a text parser would take it for the real one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import thread_time
from typing import Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.grammar_rules import written
from glm5.engine.words import Mask, Words
from glm5.errors import EngineError, MissingExtraError
from glm5.records import GrammarSpec

KEPT_BYTES = 256 << 20
"""Compiled grammars are kept for later requests, up to this total charge (see `OWN_BYTES`): about 32 usual grammars."""
KEPT_STEPS = 50_000
"""A compiled grammar is kept for at most this many sampled tokens, because every new text makes its lexer larger."""
OWN_BYTES, BYTES_PER_CHARACTER = 8 << 20, 64
"""Bytes that are charged for a compiled grammar: a constant plus an amount per character of its text. Actual use: usual
grammars 0.1 MB, expressions over Unicode classes 4 MB from the start, a lexer with `LEXER_STATES` states about 20
MB."""
LEXER_STATES = 16_000
COMPILE_FUEL, STEP_FUEL, STEP_ITEMS = 1_000_000, 200_000, 2_000
"""Limits of the work at compile time and per token. A grammar that exceeds them is refused or fails."""
FREE_SECONDS, SECONDS_PER_STEP = 2.0, 0.005
"""CPU time that all samples of a compiled grammar may take together: a fixed part, and a part per token. With 154,000
ids, usual grammars take 0.1 to 0.4 ms per token; a character class repeated up to 1000 times takes 4 ms."""

Result = TypeVar("Result")
_THINKING = ("</think>", "<tool_call>")
_ANSWER = {"tools": ("</arg_value>",), "json": ("<tool_call>",), "json_schema": ("<tool_call>",)}


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe. Construction takes a few milliseconds per ten thousand tokens
    of the vocabulary. Every kind except "any" needs llguidance."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.words = Words(tokenizer)
        self._kept: OrderedDict[tuple[str, str, bool], _Source] = OrderedDict()
        self._known = WeakValueDictionary[tuple[str, str, bool], _Source]()  # kept or in use
        self._living = WeakSet[_Source]()  # all of `_known`, and dropped grammars still in use
        self._lock = threading.Lock()

    def check(self, spec: GrammarSpec) -> None:
        """Compile ahead of time. Raises EngineError, with the reason, for a grammar that cannot be enforced, and
        MissingExtraError without llguidance."""
        self._source(spec)

    def compile(self, spec: GrammarSpec) -> Compiled:
        """A compiled grammar, for any number of samples. Raises EngineError like `check`."""
        return Compiled(self.words, self._source(spec), spec, self._lock)

    def state(self, spec: GrammarSpec) -> GrammarState:
        """A fresh state for one sample. Raises EngineError like `check`."""
        return self.compile(spec).state()

    @cached_property
    def _library(self) -> tuple[Any, Any, Any]:
        """llguidance, its tokenizer for this vocabulary, and its limits."""
        try:
            import llguidance
        except ImportError:
            raise MissingExtraError("llguidance", "grammar") from None
        vocabulary: Any = _Vocabulary(self.tokenizer)
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=COMPILE_FUEL, step_lexer_fuel=STEP_FUEL, step_max_items=STEP_ITEMS,
            max_lexer_states=LEXER_STATES, verbose_errors=False,
        )  # fmt: skip
        return llguidance, llguidance.LLTokenizer(vocabulary, eos_token=list(self.tokenizer.stop_token_ids)), limits

    def has_room(self, spec: GrammarSpec, limit: int) -> bool:
        """Whether this grammar and all others in use cost at most `limit` bytes. Drops kept grammars, the oldest first,
        until they do; a dropped grammar that is in use still counts."""
        with self._lock:
            if spec.kind == "any" or self._fresh(spec) is not None:
                return True
            size = _size(spec.value)
            while self._kept and self._bytes() + size > limit:
                self._kept.popitem(last=False)
            return self._bytes() + size <= limit

    def _bytes(self) -> int:
        return sum(source.size for source in self._living)

    def _fresh(self, spec: GrammarSpec) -> _Source | None:
        """The compiled grammar if it is known and not `worn`, else None. Drops all kept grammars that are `worn`."""
        for key in [key for key, source in self._kept.items() if source.worn]:
            del self._kept[key]
        found = self._known.get((spec.kind, spec.value, spec.many))
        return None if found is None or found.worn else found

    def _source(self, spec: GrammarSpec) -> _Source | None:
        if spec.kind == "any":
            return None
        with self._lock:
            source = self._fresh(spec)
        if source is not None and source.slow:
            raise EngineError(f"The {_NOUN[spec.kind]} takes too long to evaluate; make it simpler.")
        if source is None:
            library, tokens, limits = self._library
            text = written(spec, self.tokenizer)
            matcher = library.LLMatcher(tokens, library.LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
            matcher.compute_bitmask()  # the library checks some limits only in this call
            if matcher.is_error():
                raise EngineError(f"The {_NOUN[spec.kind]} cannot be enforced: {_reason(matcher)}.")
            source = _Source(matcher, _size(text))
        key = (spec.kind, spec.value, spec.many)
        with self._lock:
            self._living.add(source)
            self._known[key] = self._kept[key] = source
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and sum(kept.size for kept in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return source


def _size(text: str) -> int:
    return OWN_BYTES + BYTES_PER_CHARACTER * len(text)


@dataclass(eq=False)
class _Source:
    """A compiled grammar that samples copy. The copies share a lexer that grows with use, so a grammar is dropped after
    `KEPT_STEPS` steps, or after a copy has failed. A slow grammar is kept, so that the next request for it is
    refused."""

    matcher: Any
    size: int
    steps: int = 0
    seconds: float = 0.0
    failed: bool = False

    @property
    def worn(self) -> bool:
        """Whether the grammar must be dropped and compiled again for new requests."""
        return self.failed or (self.steps >= KEPT_STEPS and not self.slow)

    @property
    def slow(self) -> bool:
        """Whether the samples of this grammar have taken too much time. A slow grammar takes no more steps, so it stays
        slow."""
        return self.seconds > FREE_SECONDS + SECONDS_PER_STEP * self.steps

    def timed(self, work: Callable[..., Result], *arguments: object) -> Result:
        began = thread_time()
        try:
            return work(*arguments)
        finally:
            self.seconds += thread_time() - began


@dataclass(frozen=True)
class Compiled:
    """A compiled grammar. The matcher in `source` stays in its initial state; samples copy it."""

    words: Words
    source: _Source | None
    spec: GrammarSpec
    lock: threading.Lock

    def state(self) -> GrammarState:
        """A fresh state for one sample."""
        with self.lock:
            matcher = None if self.source is None else self.source.matcher.deep_copy()
        return GrammarState(self.words, matcher, self.spec, self.source)


class GrammarState:
    """The position of one sample in its grammar. Without a `matcher` the answer may have any token. `done` is set once
    the sample's stop token is accepted. `failed` is the reason why no token is possible any more (a library limit, or
    an answer that cannot end). `slow` is set once the grammar has taken too much time. The caller must end a sample
    that is `failed` or `slow`."""

    def __init__(self, words: Words, matcher: Any, spec: GrammarSpec, source: _Source | None = None) -> None:
        self.done = False
        self.failed: str | None = None
        self._words = words
        self._matcher = matcher
        self._source = source or _Source(None, 0)
        self._budget = spec.thinking_tokens
        self._answer = _ANSWER.get(spec.kind, ())
        self._ends = {"tools": words.ends_calls, "any": words.ends}.get(spec.kind, words.ends_answer)
        self._thinking = spec.after_thinking
        self._thought = 0
        self._spelled = 0  # state of `Spelling` for the markers
        self._past: list[tuple[bool, int, bool, bool]] = []  # thinking, spelled, done, whether the matcher moved

    @property
    def thinking(self) -> bool:
        """Whether the sample is still in its think block."""
        return self._thinking

    @property
    def slow(self) -> bool:
        """Whether the samples of this grammar have together taken too much time."""
        return self._source.slow

    def fill(self, mask: Mask, drafted: Sequence[int] = ()) -> None:
        """Set the bits of the tokens that may come next, after the `drafted` ones. `mask` has one bit per id, all 0
        before the call.

        After a draft that the grammar forbids, all bits are set. If no token is possible, `failed` is set, and `mask`
        has only the bits of the stop tokens.
        """
        before, moved = self.failed, 0
        try:
            for token in drafted:
                if not self._allows(token):
                    break
                self.accept(token)
                moved += 1
            if moved < len(drafted):
                mask[:] = -1
            else:
                found = self._next()
                mask[: len(found)] = found
        finally:  # roll back after an error too: the failed step is retried from this state
            if moved:
                self.rollback(moved)
                self.failed = before  # a dead end after a draft is not final

    def accept(self, token: int) -> None:
        """Advance the state by a sampled token."""
        now = (self._thinking, self._spelled, self.done)
        moved = False
        if not self.done and self.failed is None and not self.slow:
            marker = token in self._words.special
            self._spelled = 0 if marker else self._words.spelling(self._markers).after(self._spelled, token)
            if self._thinking:
                self._thought += 1
                self._thinking = token != self._words.end_of_thought
            elif token in self._words.stops:
                self.done = True
            elif self._matcher is not None:
                moved = bool(self._source.timed(self._matcher.consume_token, token))
                self._source.steps += 1
                if not moved:
                    self._fail(_reason(self._matcher))
        self._past.append((*now, moved))

    def rollback(self, count: int) -> None:
        """Roll back the last `count` tokens."""
        in_matcher = 0
        for _ in range(count):
            self._thinking, self._spelled, self.done, moved = self._past.pop()
            in_matcher += moved
            self._thought -= self._thinking
        if in_matcher:
            self._matcher.rollback(in_matcher)

    def fork(self) -> GrammarState:
        """An independent copy."""
        clone = object.__new__(GrammarState)
        clone.__dict__.update(self.__dict__)
        clone._matcher = None if self._matcher is None else self._matcher.deep_copy()
        clone._past = list(self._past)
        return clone

    @property
    def _markers(self) -> tuple[str, ...]:
        return _THINKING if self._thinking else self._answer

    def _allows(self, token: int) -> bool:
        if self.done or self.failed is not None or self.slow or self._thinking or self._matcher is None:
            return _has(self._next(), token)
        if token in self._words.stops:
            return _has(self._ends, token) and bool(self._matcher.is_accepting())
        spelled_out = not _has(self._words.spelling(self._answer).allowed(self._spelled), token)
        return not spelled_out and self._source.timed(self._matcher.validate_tokens, [token]) == 1

    def _fail(self, reason: str) -> None:
        self.failed = reason
        self._source.failed = True

    def _next(self) -> Mask:
        if self.done or self.failed is not None or self.slow:
            return self._ends
        if self._thinking:
            if self._budget is not None and self._thought >= self._budget:
                return self._words.only_end_of_thought
            return self._words.thought & self._words.spelling(_THINKING).allowed(self._spelled)
        if self._matcher is None:
            return self._words.everything
        found = np.frombuffer(self._source.timed(self._matcher.compute_bitmask), dtype=np.int32)
        found = found[: len(self._words.everything)]  # the library has a spare word for a vocabulary of 32 n tokens
        if self._matcher.is_error():
            self._fail(_reason(self._matcher))
            return self._ends
        found = found & self._words.spelling(self._answer).allowed(self._spelled) & (self._ends | self._words.no_stop)
        if not found.any():
            self.failed = "no token is allowed next"
            return self._ends
        return found


def _has(mask: Mask, token: int) -> bool:
    return 0 <= token < 32 * len(mask) and bool(mask[token >> 5] >> (token & 31) & 1)


class _Vocabulary:
    """The tokenizer interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.stop_token_ids[0]
        self.tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special.values())

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


_NOUN = {"json": "JSON grammar", "grammar": "grammar", "json_schema": "JSON schema", "regex": "regular expression",
         "choice": "list of choices", "tools": "forced tool call"}  # fmt: skip


def _reason(matcher: Any) -> str:
    """The library's error in one line of bounded length."""
    text = str(matcher.get_error()).split("<state>")[0].strip()
    line = (text.splitlines() or ["unknown reason"])[0].strip().rstrip(".")
    return line if len(line) <= 200 else line[:200] + "..."
