"""Verifiable instructions: every reference keeps its rules, every broken rule is noticed, nothing else pays."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.errors import ConfigError
from glm5.records import Message, Outcome, ToolCall
from glm5.tasks.instructions import text_units
from glm5.tasks.instructions.family import FILLER, LEVELS, InstructionFamily, InstructionProblem, _most_together
from glm5.tasks.instructions.rules import (
    CLOSERS,
    COMMON,
    KEYS,
    KINDS,
    OPENERS,
    SPECIAL,
    TOPICS,
    Rule,
    compatible,
    json_of,
)
from glm5.tasks.instructions.text_units import (
    bullets_of,
    count_words,
    paragraphs_of,
    read,
    sentences_of,
    skeleton,
    words_of,
)


def broken(rule: Rule, text: str) -> str:
    """A text that differs from `text` and breaks `rule`."""
    v = rule.values
    return {
        "between": lambda: text + " " + " ".join(["more"] * 40),
        "require": lambda: text.lower().replace(str(v[1]), "thing") if v else text,
        "forbid": lambda: f"{text} {v[0]}",
        "repeat": lambda: f"{text} {v[0]}",
        "letter": lambda: f"{text} {v[0]}ebu",
        "lower": lambda: text.replace("e", "E", 1) if "e" in text else text + " X",
        "upper": lambda: text + " a",
        "commas": lambda: f"{text}, so",
        "begin": lambda: f"Well {text}",
        "end": lambda: f"{text} so",
        "bullets": lambda: f"{text}\n- one more",
        "paragraphs": lambda: f"{text}\n\none more.",
        "sentences": lambda: f"{text} One more.",
        "json": lambda: text.replace(str(v[0]), "other", 1),
    }[rule.kind]()


@pytest.mark.parametrize("level", LEVELS)
def test_references_earn_one_and_every_break_is_noticed(level: int) -> None:
    family, seen = InstructionFamily(seed=level, levels=(level,)), set()
    for index in range(100):
        problem = family.problem("heldout" if index % 2 else "train", index)
        assert len(problem.rules) == level == len({KINDS[rule.kind].group for rule in problem.rules})
        text = problem.demonstration(index)[-1].content
        env = problem.env()
        env.start()
        result = env.step(Message("assistant", text))
        assert (result.reward, result.outcome, result.detail["share"]) == (1.0, Outcome.SOLVED, 1.0), (
            problem.prompt,
            text,
        )
        for rule in problem.rules:
            seen.add(rule.kind)
            wrong = broken(rule, text)
            assert not rule.holds(wrong), (rule.words, wrong)
            result = problem.env().step(Message("assistant", wrong))
            assert result.reward == 0.0 and rule.kind in result.detail["broken"] and result.detail["share"] < 1
    assert seen == set(KINDS)


def test_saying_nothing_or_little_earns_nothing() -> None:
    for kind in KINDS:
        problem = InstructionFamily(levels=(1,), kinds=(kind,)).problem("train", 0)
        topic = problem.topic
        for text in ("", " ", "x", topic, problem.prompt, f"{topic} " * 30, "- \n" * 3, "{}", "word " * 5000):
            assert problem.env().step(Message("assistant", text)).reward == 0.0, (kind, text)
        text = problem.answer(random.Random(0))
        assert problem.env().step(Message("assistant", text)).reward == 1.0
        assert problem.env().step(Message("assistant", text, tool_calls=(ToolCall("x", {}),))).reward == 0.0
        assert problem.env().step(None).outcome is Outcome.MALFORMED


@pytest.mark.parametrize(
    ("kind", "values", "text", "holds"),
    [("between", (2, 3), "one two", True), ("between", (2, 3), "one", False),
    ("between", (2, 3), "it's two-fold", True),
     ("require", ("warm", "north"), "Warm, NORTH!", True), ("require", ("warm", "north"), "warmer north", False),
     ("forbid", ("the", "and"), "then sand", True), ("forbid", ("the", "and"), "The end", False),
     ("repeat", ("broad", 2), "broad Broad", True), ("repeat", ("broad", 2), "broad broader", False),
     ("letter", ("z",), "no such", True), ("letter", ("z",), "Zoo", False),
     ("lower", (), "small only", True), ("lower", (), "123", False), ("upper", (), "BIG 1", True),
     ("upper", (), "", False),
     ("commas", (), "a; b", True), ("commas", (), "a，b", False),
     ("begin", ("Once",), '"once upon', True), ("begin", ("Once",), "At once", False),
     ("end", ("again",), "never again.", True), ("end", ("again",), "again so", False),
     ("bullets", (2,), "- a\n- b", True), ("bullets", (2,), "- a\n\n- b\n", True),
     ("bullets", (2,), "Here:\n- a\n- b", False),
     ("bullets", (2,), "- a\n- ", False), ("bullets", (2,), "* a\n* b", False), ("bullets", (0,), "x", True),
     ("paragraphs", (2,), "a b\n\nc d", True), ("paragraphs", (2,), "a\n\nb", False),
     ("paragraphs", (2,), "a\nb", False),
     ("paragraphs", (2,), "a b\n \n\n\nc a", True),
     ("sentences", (2,), "A b. C a?!", True), ("sentences", (2,), "A b. C?!", False),
     ("sentences", (2,), "A b. C", False),
     ("sentences", (1,), "Pi is 3.14.", True), ("sentences", (2,), "1. A b. 2. C d.", True),
     ("sentences", (1,), "Mr. Pat came.", True), ("sentences", (2,), 'A "b c." D e.', True),
     ("sentences", (2,), "雨が降る。雪も降る。", True), ("sentences", (4,), "rivers are nice . . . .", False),
     ("sentences", (2,), "A b. A b.", False), ("sentences", (2,), "A b. B a.", False),
     ("paragraphs", (2,), ".\n\n.", False), ("paragraphs", (2,), "a b\n\na b", False),
     ("bullets", (2,), "- .\n- .", False), ("bullets", (2,), "- a\n- a", False), ("bullets", (2,), "- a\n- - -", False),
     ("between", (2, 3), " ".join(["слово"] * 300), False), ("between", (2, 3), "a b 雨が降る", False),
     ("between", (2, 9), "a_b.c\u00a0d", True), ("between", (1, 1), "a_b", False),
     ("forbid", ("the", "and"), "t\u0336h\u0336e\u0336", False), ("forbid", ("the", "and"), "ＴＨＥ", False),
     ("forbid", ("the", "and"), "thе", False), ("forbid", ("the", "and"), "t\u200bhe", False),
     ("letter", ("j",), "ｊ", False), ("letter", ("j",), "ј", False), ("letter", ("x",), "ха", False),
     ("letter", ("z",), "žal", False), ("letter", ("j",), "ȷ", False), ("letter", ("q",), "𝐪", False),
     ("upper", (), "𝐀𝐛", False), ("upper", (), "ᴀʙ", False), ("upper", (), "雨", False), ("upper", (), "ÉTÉ", True),
     ("lower", (), "𝐀b", False), ("lower", (), "Ⓐb", False), ("lower", (), "🅰b", False), ("lower", (), "été", True),
     ("commas", (), "a、b", False), ("commas", (), "a،b", False), ("commas", (), "a‚b", False),
     ("commas", (), "a﹐b", False),
     ("repeat", ("broad", 1), "broad bröad", False),
     ("json", ("a", "b"), '{"b": "x", "a": "y"}', True),
     ("json", ("a", "b"), '```json\n{"a": "x", "b": "y"}\n```', True),
     ("json", ("a", "b"), '{"a": ".", "b": "."}', False), ("json", ("a", "b"), '{"a": "x", "b": "x"}', False),
     ("json", ("a", "b"), '{"a": "x", "b": "y", "a": "z"}', False),
     ("json", ("a", "b"), '{＂a＂: "x", "b": "y"}', False),
     ("json", ("a", "b"), '{"a": "x"}', False), ("json", ("a", "b"), '{"a": "x", "b": "y", "c": "z"}', False),
     ("json", ("a", "b"), '{"a": 1, "b": "y"}', False), ("json", ("a", "b"), 'so: {"a": "x", "b": "y"}', False),
     ("json", ("a", "b"), '{"a": " ", "b": "y"}', False), ("json", ("a", "b"), '["a", "b"]', False)],
)  # fmt: skip
def test_rules(kind: str, values: tuple[str | int, ...], text: str, holds: bool) -> None:
    assert Rule(kind, values).holds(text) is holds


@settings(deadline=2000, max_examples=3 * settings.default.max_examples)
@given(st.text(max_size=400), st.integers(0, 50))
def test_no_text_raises_and_random_texts_earn_nothing(text: str, index: int) -> None:
    problem = InstructionFamily(levels=(3,)).problem("train", index)
    if problem.topic not in text.lower():
        assert problem.env().step(Message("assistant", text)).reward == 0.0
    assert len(problem.kept(text)) == 4


@pytest.mark.parametrize(
    "text",
    [
        "[" * 4000,
        "9" * 4000,
        '{"a":' * 600,
        "." * 3999 + "x",
        "!" * 3999 + "x",
        "\n" * 3999,
        " \n" * 1999,
        "\ud800" * 99,
    ],
)
def test_hostile_texts_end(text: str) -> None:
    for kind in KINDS:
        problem = InstructionFamily(levels=(1,), kinds=(kind,)).problem("train", 1)
        assert problem.env().step(Message("assistant", text)).reward == 0.0


def test_parts_of_texts() -> None:
    assert words_of("It's A b-c.") == ["it's", "a", "b", "c"] and words_of("'It’s' 3rd") == ["it's", "3rd"]
    assert words_of("Дом и 雨が नमस्ते") == ["дом", "и", "雨", "が", "नमस्ते"]
    assert bullets_of("- a\n- b") == ["a", "b"] and bullets_of("a\n- b") == []
    assert paragraphs_of("a\nb\n\nc d") == ["a\nb", "c d"] and sentences_of("One. Two") == []
    assert json_of("[1]") == [1] and json_of("{") is None and json_of("[" * 100_000) is None
    assert skeleton("Résumé") == "resume" and skeleton("тhе") == "the"


@pytest.mark.parametrize(
    "text",
    ["thе", "ab\u200bcd", "\u202eab", "a\u00adb", "ɑb", "a\u2028b", "\u3164", "a\x0bb", "x" * 31, "\ue000", "αbc"]
    + ["\U0001f163\U0001f157\U0001f154", "\U0001f1f9\U0001f1ed\U0001f1ea"],  # white letters on black, letters of flags
)
def test_disguises_are_not_read(text: str) -> None:
    assert read(text) is None
    assert not any(Rule(kind, KINDS[kind].draw(random.Random(0))).holds(text) for kind in KINDS)


@pytest.mark.parametrize(
    "text",
    [
        "Ærø, “naïve” café – it’s 5 °C… ½",
        "👩\u200d🚀 ❤\ufe0f 👍🏽",
        "🇫🇷 and ✝",
        "Дом 雨 γη",
        "a\r\nb\tc",
        "ﬁne ① ℃",
        "O'Neill's 20%",
    ],
)
def test_honest_characters_are_read(text: str) -> None:
    assert read(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (2, "The train leaves at 5 p.m. on most days. We wait by the river."),
        (2, "We saw the U.S. coast first. Then it rained all night."),
        (2, "We like tea, cakes, etc. on Sundays. Music helps us rest."),
        (2, "We like tea, cakes, etc. Music helps us rest."),
        (2, '"Are you cold?" she asked me softly. The lamp stood by the bridge.'),
        (2, '"Are you cold?" The lamp stood by the bridge.'),
        (2, "rivers are long. birds sing well."),
        (2, "Prof. Lee came. Dr. Who ran on."),
        (2, "你好！我们去看河流。"),
        (3, "你好！你来吗？我们去看河流。"),
        (2, "他说：「你好！」我们去看河流。"),
    ],
)
def test_sentences_as_a_reader_counts_them(count: int, text: str) -> None:
    assert Rule("sentences", (count,)).holds(text)
    assert not Rule("sentences", (count + 1,)).holds(text) and not Rule("sentences", (count - 1,)).holds(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (5, "A well-known old bridge stands."),
        (4, "It costs 3.14 euros."),
        (3, "At 10:30 sharp"),
        (3, "About 1,250,000 people"),
        (4, "My state-of-the-art bridge here"),
        (4, "rivers - and lakes – too"),
        (4, "rivers.Birds sing/fly"),
        (12, "rivers-flow-to-the-sea-and-birds-follow-them-down-every-day"),  # a chain is no word
    ],
)
def test_words_as_a_reader_counts_them(count: int, text: str) -> None:
    assert count_words(text) == count
    assert not Rule("forbid", ("the", "well")).holds(text) or not {"the", "well"} & set(words_of(text))


def test_rules_beside_json_speak_of_its_texts() -> None:
    rules = (Rule("json", ("title", "mood")), Rule("forbid", ("the", "and")))
    problem = InstructionProblem("x", "rivers", rules, 2)
    assert all(problem.kept('{"title": "calm rivers", "mood": "they flow slowly"}'))
    assert not all(problem.kept('{"title": "calm rivers", "mood": "\\u0074he water flows"}'))
    assert not all(problem.kept('{"title": "calm waters", "mood": "quiet ways", "rivers": "x"}'))


def test_the_listed_words_do_not_contradict_the_rules() -> None:
    listed = {*TOPICS, *SPECIAL, *(w.lower() for w in OPENERS), *CLOSERS, *KEYS, *FILLER}
    assert len(listed) == sum(map(len, (TOPICS, SPECIAL, OPENERS, CLOSERS, KEYS, FILLER))), "a word in two lists"
    assert not listed & set(COMMON) and not any(letter in word for letter in "jqxz" for word in listed)


def test_compatible_rules_and_options() -> None:
    assert compatible("lower", ["between", "end"]) and not compatible("lower", ["upper"])
    assert (
        not compatible("json", ["commas"]) and not compatible("bullets", ["json"]) and not compatible("json", ["json"])
    )
    assert _most_together(tuple(KINDS)) >= max(LEVELS)
    for options in ({"levels": (9,)}, {"kinds": ("rhyme",)}, {"levels": (3,), "kinds": ("lower", "upper", "json")}):
        with pytest.raises(ConfigError, match="instructions"):
            InstructionFamily(**options)  # type: ignore[arg-type]
    rules = (Rule("lower", ()), Rule("commas", ()))
    keys = {InstructionProblem("x", "tea", order, 2).key for order in (rules, rules[::-1])}
    assert len(keys) == 1


@pytest.mark.parametrize("kind", ["json", "require", "forbid"])
def test_words_of_a_rule_have_no_order(kind: str) -> None:
    """Else one split asks for what another does: a JSON object with keys a and b, and one with b and a."""
    pair = KINDS[kind].draw(random.Random(1))
    problems = [InstructionProblem("x", "tea", (Rule(kind, values),), 1) for values in (pair, pair[::-1])]
    assert problems[0].prompt != problems[1].prompt and problems[0].key == problems[1].key


@pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_train_and_heldout_prompts_do_not_overlap(count: int) -> None:
    family = InstructionFamily()
    prompts = {split: {family.problem(split, index).prompt for index in range(count)} for split in ("train", "heldout")}
    assert min(map(len, prompts.values())) > count // 4 and not prompts["train"] & prompts["heldout"]


def slow_sentences(text: str) -> list[str]:
    """As `sentences_of`, looking at a whole piece again at every mark."""
    pieces, start = [], 0
    for match in text_units.SENTENCE_END.finditer(text):
        piece = text[start : match.end()]
        before = text[start : match.start()].lower().split()
        short = match.group() == "." and before and before[-1].lstrip("(\"'") in text_units.ABBREVIATIONS
        inside = piece.endswith(('"', "”", " p.m.", " etc.")) and text[match.end() :].lstrip()[:1].islower()
        if any(any(map(str.isalpha, word)) for word in text_units.words_of(piece)) and not short and not inside:
            pieces.append(piece)
            start = match.end()
    rest = text[start:]
    whole = not text_units.words_of(rest) and not text_units.SENTENCE_END.search(rest)
    return pieces if whole and text_units.say_something(pieces, 2) else []


SCRAPS = st.sampled_from(
    ["! ", ". ", "st. ", "(e.g. ", "rivers flow. ", "Dr. Who ran on? ", "12. ", "。", "川が。", "\n", "é's ", "xst. "]
    + ["at 5 p.m. ", "tea, etc. ", '"Who?" ', "They ran on. "]
)


@given(st.lists(SCRAPS, max_size=12).map("".join))
def test_sentences_are_those_of_a_slow_reading(text: str) -> None:
    assert text_units.sentences_of(text) == slow_sentences(text)


def test_marks_cost_no_more_than_words(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, real = 0, text_units.has_letters

    def counted(text: str) -> bool:
        nonlocal looked
        looked += len(text)
        return real(text)

    monkeypatch.setattr(text_units, "has_letters", counted)
    assert text_units.sentences_of("! " * 20_000) == []
    assert looked <= 50_000
    assert len(text_units.SENTENCE_END.findall("!" * 100_000 + "x")) == 0  # minutes if each mark were tried anew
    assert text_units.read("\ufdfa" * 500) is None
