"""Streaming detection of stop strings: one object per sample, constant work per character.

The engine and the code that sends text to a client each feed the same tokens to a `StopStringDetector` of their own, so
both end a sample at the same character. A stop string, or one character, may span several tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import lru_cache

from glm5.chat.tokenizer import StreamDecoder, Tokenizer


class StopMatcher:
    """Takes text in pieces and returns the part before the first stop string.

    The first stop string is the one that is complete first; if several end at the same character, the longest counts.
    The output does not depend on how the text is split into pieces. `matched` is the stop string once found, `cut` the
    number of characters before it. `keep` includes the stop string in the output.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self.matched: str | None = None
        self.cut: int | None = None
        self._keep = keep
        self._next, self._fail, self._depth, self._found = automaton(tuple(stop for stop in stops if stop))
        self._state = 0
        self._taken = 0
        self._held = ""

    @property
    def watches(self) -> bool:
        """Whether there is any stop string."""
        return len(self._next) > 1

    @property
    def hit(self) -> bool:
        return self.matched is not None

    def feed(self, text: str) -> str:
        """Add text; returns the characters that can no longer be part of a stop string. Returns "" after a match."""
        if self.matched is not None:
            return ""
        state, following, fail = self._state, self._next, self._fail
        for i, char in enumerate(text):
            while state and char not in following[state]:
                state = fail[state]
            state = following[state].get(char, 0)
            if found := self._found[state]:
                return self._end(text, i + 1, found)
        self._state = state
        self._taken += len(text)
        data = self._held + text
        end = len(data) - self._depth[state]
        self._held = data[end:]
        return data[:end]

    def finish(self) -> str:
        """The held-back end of the text, which could have become a stop string; call it after the last piece."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _end(self, text: str, end: int, found: str) -> str:
        data = self._held + text[:end]
        self.matched, self.cut = found, self._taken + end - len(found)
        self._held = ""
        return data if self._keep else data[: len(data) - len(found)]


class StopStringDetector:
    """Takes the tokens of one sample and returns its text up to the first stop string.

    Args:
        stops: stop strings; an empty one never matches.
        silent: ids without text (the ids that stop the sample), in addition to the special tokens outside
            `VISIBLE_MARKERS`. The attribute `silent` has both.
        min_tokens: a stop string counts only if it begins after this many tokens.
        keep: the stop string is part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        silent: Collection[int] = (),
        min_tokens: int = 0,
        keep: bool = False,
    ) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self.silent = tokenizer.silent_ids.union(silent)
        self._matcher = StopMatcher(stops, keep=keep)
        self._early = min_tokens
        self._before = 0  # characters of the first `min_tokens` tokens

    @property
    def matched(self) -> str | None:
        """The stop string that ended the sample, or None."""
        return self._matcher.matched

    @property
    def hit(self) -> bool:
        return self._matcher.matched is not None

    @property
    def cut(self) -> int | None:
        """Number of characters of the text (without silent tokens) before the stop string; None before a match."""
        return None if self._matcher.cut is None else self._before + self._matcher.cut

    def feed(self, token: int) -> str:
        """Add a token; returns the text that is final."""
        text = "" if token in self.silent else self._decoder.feed((token,))
        if self._early > 0:
            self._early -= 1
            self._before += len(text)
            return text
        return self._matcher.feed(text)

    def feed_all(self, tokens: Sequence[int]) -> str:
        """`feed` of each token up to the stop string, joined. Much faster if there are no stop strings."""
        if not self._matcher.watches:
            return self._decoder.feed([token for token in tokens if token not in self.silent])
        return "".join(self.feed(token) for token in tokens if not self.hit)

    def finish(self) -> str:
        """After the last token: the held-back text; bytes of an incomplete character become U+FFFD."""
        if self.hit:
            return ""
        return self._matcher.feed(self._decoder.finish()) + self._matcher.finish()


@lru_cache(maxsize=16)
def automaton(stops: tuple[str, ...]) -> tuple[list[dict[str, int]], list[int], list[int], list[str]]:
    """Aho-Corasick. Four lists with one entry per state: transitions, failure link (the state of the longest proper
    suffix), depth, and the longest stop string that ends in this state (or ""). Read-only and shared by all samples of
    a request. Takes a few hundred bytes of memory per character."""
    following: list[dict[str, int]] = [{}]
    depth, found = [0], [""]
    for stop in stops:
        state = 0
        for char in stop:
            if char not in following[state]:
                following[state][char] = len(following)
                following.append({})
                depth.append(depth[state] + 1)
                found.append("")
            state = following[state][char]
        found[state] = stop
    fail = [0] * len(following)
    queue = deque(following[0].values())
    while queue:
        state = queue.popleft()
        for char, child in following[state].items():
            queue.append(child)
            back = fail[state]
            while back and char not in following[back]:
                back = fail[back]
            fail[child] = following[back].get(char, 0)
            found[child] = found[child] or found[fail[child]]
    return following, fail, depth, found
