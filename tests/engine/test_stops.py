"""Stop strings: the same end however text and characters are split, found by one scan, compared with a naive search."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.engine.stops import StopMatcher, StopStringDetector
from glm5.records import SamplingParams

TEXT = st.text("aabé", max_size=40)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the stop string that is complete first, by looking at every prefix; the longest of those ending
    there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=6 * settings.default.max_examples)
@given(TEXT, st.lists(st.text("abé", max_size=5), max_size=4), st.randoms())
def test_any_split_gives_what_a_naive_search_gives(text: str, stops: list[str], random: Any) -> None:
    expected, matched = naive(text, stops)
    matcher, found, at = StopMatcher(stops), "", 0
    while at < len(text):
        step = random.randint(0, 6)
        out = matcher.feed(text[at : at + step])
        found, at = found + out, at + step
        assert expected.startswith(found)  # nothing is let out that a stop string takes back
        longest = max(map(len, stops), default=0)
        assert matcher.hit or len(text[:at]) - len(found) < max(longest, 1)  # nothing is held without need
    found += matcher.finish()
    assert (found, matcher.matched) == (expected, matched)
    assert matcher.cut == (None if matched is None else len(expected))
    assert matcher.feed("aaaa") == "" or matched is None


def test_a_held_text_comes_out_as_soon_as_it_cannot_match() -> None:
    matcher = StopMatcher(["abcd", "bx"])
    assert [matcher.feed(c) for c in "zabcabxa"] == ["z", "", "", "", "abc", "", "a", ""]
    assert (matcher.matched, matcher.cut) == ("bx", 5)
    within = StopMatcher(["abcd", "bc"])
    assert (within.feed("xabcd"), within.matched, within.cut) == ("xa", "bc", 2)
    kept = StopMatcher(["cd"], keep=True)
    assert kept.feed("abc") + kept.feed("de") == "abcd"


@given(st.text("aé😀b", max_size=20), st.lists(st.sampled_from(["é", "😀b", "aé", "é😀"]), max_size=2))
def test_tokens_that_split_characters(text: str, stops: list[str]) -> None:
    tokenizer = BYTES
    watch = StopStringDetector(tokenizer, stops)
    found = ""
    for token in tokenizer.encode(text):
        found += watch.feed(token)
        if watch.hit:
            break
    found += watch.finish()
    assert (found, watch.matched) == naive(text, stops)
    assert watch.cut == (None if watch.matched is None else len(found))


BYTES = Tokenizer.byte_level()


def feed(watch: StopStringDetector, ids: list[int]) -> str:
    return "".join(map(watch.feed, ids)) + watch.finish()


def test_special_tokens_have_text_only_where_it_is_part_of_an_answer() -> None:
    ids = BYTES.encode("a</think>b<|user|>c<|assistant|>d", allow_special=True)
    assert feed(StopStringDetector(BYTES, []), ids) == "a</think>bcd"
    watch = StopStringDetector(BYTES, ["|user", "bc"])
    assert (feed(watch, ids), watch.matched, watch.cut) == ("a</think>", "bc", 9)
    assert feed(StopStringDetector(BYTES, [], silent={BYTES.encode("b")[0]}), ids) == "a</think>cd"


def test_early_tokens_are_no_stops() -> None:
    ids = BYTES.encode("xyxyxy")
    for least, cut in ((0, 0), (1, 2), (2, 2), (3, 4), (5, None)):
        watch = StopStringDetector(BYTES, ["xy"], min_tokens=least)
        assert (feed(watch, ids), watch.cut) == ("xyxyxy"[:cut], cut)


def test_an_incomplete_character_at_the_end() -> None:
    watch = StopStringDetector(BYTES, ["zz"])
    assert feed(watch, BYTES.encode("aé")[:-1]) == "a\ufffd"


def test_work_is_linear_in_the_text() -> None:
    """A stop string that nearly matches everywhere, one character at a time."""
    stops = ["a" * 250 + "b", "a" * 256 + "c"]

    def seconds(length: int) -> float:
        matcher, begun = StopMatcher(stops), time.process_time()
        for _ in range(length):
            matcher.feed("a")
        return time.process_time() - begun

    seconds(1000)
    assert seconds(40_000) < 40 * max(seconds(4000), 1e-3)


def test_samples_with_the_same_stop_strings_share_what_finds_them() -> None:
    stops = [chr(97 + i) + "z" * 255 for i in range(16)]
    tracemalloc.start()
    try:
        watches = [StopStringDetector(BYTES, list(stops)) for _ in range(64)]
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()
    texts = [feed(watch, BYTES.encode("x" + stop + "y")) for watch, stop in zip(watches, stops, strict=False)]
    assert texts == ["x"] * 16 and [watch.matched for watch in watches[:17]] == [*stops, None]


@pytest.mark.parametrize("stop", ["jk", "9. ab"])
def test_the_engine_and_a_reader_of_its_tokens_stop_at_the_same_place(
    parrot: Any, tokenizer: Tokenizer, line: str, stop: str
) -> None:
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    prompt = tokenizer.encode(line)[:20]
    free = tokenizer.decode(Engine(parrot, tokenizer).generate([prompt], params)[0].token_ids)
    at = free.index(stop)
    (done,) = Engine(parrot, tokenizer).generate([prompt], replace(params, stop=("never", stop)))
    watch = StopStringDetector(tokenizer, ("never", stop))
    text = feed(watch, done.token_ids)
    assert (done.finish_reason, text, watch.matched) == ("stop", free[:at], stop)
    # Until its own first token behind `min_tokens`, a stop string is text like any other.
    later = free.index(stop, at + 1)
    early = len(tokenizer.encode(free[: at + 1]))
    (done,) = Engine(parrot, tokenizer).generate([prompt], replace(params, stop=(stop,), min_tokens=early))
    assert feed(StopStringDetector(tokenizer, (stop,), min_tokens=early), done.token_ids) == free[:later]
