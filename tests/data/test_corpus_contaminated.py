"""Documents with problems of evaluations are found as the check of a trained model finds them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from glm5.data.corpus.contaminated import Problems, compared_words, read_problems
from glm5.errors import DataError
from glm5.eval.contamination import Overlap

PROBLEM = "A farmer has twelve hens and every hen lays three eggs a day, so how many eggs are there after one week?"


def test_copies_are_found_whatever_their_punctuation_and_other_texts_are_not() -> None:
    problems = Problems({"hens": PROBLEM, "short": "Is this a very short one?", "tiny": "two words"})
    assert len(problems) == 2
    assert problems.worst(f"Before. {PROBLEM.upper().replace(',', ' --')} After.") == ("hens", 1.0)
    assert problems.worst("He asked: is this a very short one? No.") == ("short", 1.0)
    assert problems.worst("A farmer has twelve hens and they lay some eggs; two words") == ("", 0.0)
    assert problems.worst("") == ("", 0.0)


DISGUISES = {
    "tags": PROBLEM.replace("twelve hens", "<b class='x'>twelve</b> h<i>en</i>s").replace(" eggs", "<br/> eggs"),
    "blocks": "<p>" + PROBLEM.replace(", so", ",</p>\n<p>so") + "</p>",
    "entities": PROBLEM.replace("a day", "a&nbsp;day").replace("?", "&#63;"),
    "escaped tags": PROBLEM.replace("hens", "&lt;em&gt;hens&lt;/em&gt;"),
    "emphasis": PROBLEM.replace("twelve", "**twe**lve").replace("three", "_three_").replace("week", "`week`"),
    "a link": PROBLEM.replace("twelve hens", '[twelve hens](https://hens.example/a_b "Hens")'),
    "a reference": PROBLEM.replace("twelve hens", "[twelve hens][4]"),
    "a quote": "> " + PROBLEM.replace("every", "\n> every"),
    "hyphens at line ends": PROBLEM.replace("farmer", "far-\nmer").replace("there after", "there af-\n  ter"),
    "hyphens in a quote": "> " + PROBLEM.replace("farmer", "far-\n> mer"),
    "soft hyphens": PROBLEM.replace("farmer", "far\u00admer").replace("twelve", "twel\u00ad\nve"),
    "invisible characters": PROBLEM.replace("farmer", "f\u200barm\u2060er").replace("A ", "\ufeffA "),
    "characters of format": PROBLEM.replace("farmer", "f\U000e0020a\u3164r\ufff9m\U000e0100e\uffa0r"),
    "comments": PROBLEM.replace("farmer", "far<!-- <b> x -->mer").replace("twelve", "<!-- a\nb -->twelve"),
    "a comment": f"<!-- {PROBLEM} -->",
    "empty elements": PROBLEM.replace("farmer", "f<bdi></bdi>a<x-y z='1'/>r<svg></svg>mer"),
    "a link in a link": PROBLEM.replace("twelve hens", "[![twelve](a.png) [hens](c_d)](b)"),
    "wide letters": "".join(chr(ord(c) + 0xFEE0) if c.isalpha() else c for c in PROBLEM),
    "mathematical letters": "".join(chr(0x1D41A + ord(c) - 97) if c.islower() else c for c in PROBLEM),
    "a ligature": PROBLEM.replace("after", "a\ufb05er"),  # a long s and a t: NFKC makes them "st"
}


@pytest.mark.parametrize("name", DISGUISES)
def test_disguises_do_not_hide_a_problem(name: str) -> None:
    hidden = DISGUISES[name]
    problem = PROBLEM.replace("after", "aster") if name == "a ligature" else PROBLEM
    assert hidden != problem
    for a, b in ((problem, hidden), (hidden, problem)):
        found, share = Problems({"hens": a}).worst(f"Before.\n\n{b}\n\nAfter.")
        words = 3 * (name == "comments" and a == hidden)  # of the comments
        assert found == "hens" and share == pytest.approx(22 / (22 + words))


def test_words_with_hyphens_are_found_however_the_line_breaks() -> None:
    problem = "What do the well-known co-operative farms of the lowlands grow in a twenty-acre field after the war?"
    for broken in (problem.replace("well-", "well-\n"), problem.replace("twenty-", "twenty-\n  "), problem):
        assert Problems({"farms": problem}).worst(broken) == ("farms", 1.0)
    assert compared_words("from 10-\n20, a - b") == "from 10 20 a b".split()  # digits have ranges, not hyphens


@hypothesis.given(st.text(alphabet="ab<>/![]()*_`~\\-&;# \n\u00ad\u200b", max_size=60))
def test_any_markup_gives_words(text: str) -> None:
    assert all(word.isalnum() for word in compared_words(text))


@pytest.mark.parametrize(
    "piece", ["<a ", "[a](", "<", "a-\n", "[", "&#", "_*", "<b", "](", "\u00ad\n", "<!--", "<!---->", "<p", "[[a](b)"]
)
def test_markup_without_end_is_read_once(piece: str) -> None:
    """In quadratic time this would not end today."""
    assert all(word.isalnum() for word in compared_words(piece * 100_000))


@hypothesis.given(st.integers(0, 10**6))
def test_the_share_is_that_of_the_check_of_a_trained_model(seed: int) -> None:
    draw = random.Random(seed)
    words = [f"w{draw.randrange(30)}" for _ in range(200)]
    problems = {}
    for n in range(6):
        start, length = draw.randrange(150), draw.randint(3, 50)
        problem = words[start : start + length]
        if draw.random() < 0.5:
            problem[draw.randrange(len(problem))] = "other"
        problems[str(n)] = " ".join(problem)
    text = " ".join(words)
    overlap = Overlap(problems)
    overlap.read([text])
    assert Problems(problems).worst(text)[1] == max(share or 0.0 for share in overlap.shares().values())


def test_problems_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": PROBLEM}) + "\n")
    assert read_problems([f"{tmp_path}/p.jsonl#question"]).worst(PROBLEM)[1] == 1.0
    (tmp_path / "q.jsonl").write_text(json.dumps({"text": "short"}) + "\n")
    with pytest.raises(DataError, match="no problem"):
        read_problems([f"{tmp_path}/q.jsonl"])
    with pytest.raises(DataError, match="malformed"):
        read_problems([f"{tmp_path}/p.jsonl"])
