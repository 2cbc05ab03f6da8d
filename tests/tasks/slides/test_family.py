"""The task family, without a browser: answers that are split, scored and recorded, and the selection of good ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from glm5.data.sft import parse_conversation, read_conversations, write_conversations
from glm5.errors import ConfigError
from glm5.records import Message, Outcome
from glm5.tasks import make_family
from glm5.tasks.slides import family as family_module
from glm5.tasks.slides.family import SlidesProblem
from glm5.tasks.slides.render import PageFault
from glm5.tasks.slides.rewards import Score, failed
from glm5.tasks.slides.selection import Sample, layout_of, select


def problem(**options: Any) -> SlidesProblem:
    found = make_family("slides", measure="static", **options).problem("train", 3)
    assert isinstance(found, SlidesProblem)
    return found


def answer(one: SlidesProblem, seed: int = 0) -> str:
    return one.demonstration(seed)[-1].content


def test_an_answer_is_scored_page_by_page() -> None:
    two = problem(pages=2)
    text = answer(two)
    result = two.env().step(Message("assistant", text))
    assert result.reward == 1.0 and result.outcome is Outcome.FAILED  # without a browser, no page is known to be 16:9
    pages = result.detail["pages"]
    assert [text[p["start"] : p["end"]].strip()[:5] for p in pages] == ["page "] * 2
    assert result.detail["rewards"] == {"markup": 1.0, "content": 1.0, "pictures": 1.0, "compliant": 0.0}
    assert not result.detail["trivial"]


@pytest.mark.parametrize(
    ("change", "reward"),
    [
        (lambda text: text.partition("---")[0], 0.5),  # a page is missing
        (lambda text: text + "\n---\npage 40 20 l\ntitle 40", 2 / 3),  # a page too many
        (lambda text: "nonsense\n---" + text.partition("---")[2], 0.5),
        (lambda text: "", 0.0),
    ],
)
def test_missing_and_superfluous_pages_cost(change: Any, reward: float) -> None:
    two = problem(pages=2)
    result = two.env().step(Message("assistant", change(answer(two))))
    assert result.reward == pytest.approx(reward, abs=1e-3)


def test_the_same_page_again_scores_nothing() -> None:
    two = problem(pages=2, form="html")
    page = f"<p>{' '.join(two.pages[0].lines)} {' '.join(two.pages[1].lines)}</p>"
    scores = [score for _, score in two.score(f"```html\n{page}\n```\n```html\n{page}\n```")]
    assert scores[0].total > 0 and scores[1].faults == ("the same page again",)


def test_an_unreadable_answer_is_malformed() -> None:
    result = problem().env().step(None)
    assert (result.reward, result.outcome, result.detail["trivial"]) == (0.0, Outcome.MALFORMED, True)
    assert set(result.detail["rewards"].values()) == {0.0}


def test_html_pages_are_taken_from_blocks_or_documents() -> None:
    one = problem(form="html", pages=2)
    assert "```html" in one.prompt and one.pages[1].title in one.prompt
    blocks = one.split_answer("Here:\n```html\n<p>a</p>\n```\nand\n```HTML\n<p>b</p>")  # the last one was cut off
    assert [page.html.strip() for page in blocks] == ["<p>a</p>", "<p>b</p>"]
    bare = one.split_answer("<!DOCTYPE html><html><p>a</html> text <html><p>b</html>")
    assert len(bare) == 2 and bare[0].html.startswith("<!DOCTYPE")
    assert one.split_answer("no page") == []
    with pytest.raises(ConfigError):
        one.demonstration(0)


def test_problems_are_the_same_for_a_seed_and_differ_between_splits() -> None:
    keys = {split: {make_family("slides", 5).problem(split, i).key for i in range(40)} for split in ("train", "rl")}
    assert keys["train"] == {make_family("slides", 5).problem("train", i).key for i in range(40)}
    assert not keys["train"] & keys["rl"]
    flawed = [make_family("slides", flawed=1.0).problem("train", i) for i in range(40)]
    good = [make_family("slides").problem("train", i) for i in range(40)]
    assert sum(answer(a) != answer(b) for a, b in zip(flawed, good, strict=True)) >= 35


@pytest.mark.parametrize(
    "options",
    [
        {"form": "pdf"},
        {"measure": "eyes"},
        {"pages": 0},
        {"most_points": 1},
        {"flawed": 2.0},
        {"variety": 0},
        {"weights": {"x": 1.0}},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_family("slides", **options)


def test_a_page_that_ends_browsers_is_the_policys_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def measure(self, html: str, assets: Any) -> None:
            raise PageFault("it ended two browsers")

    monkeypatch.setattr(family_module, "shared_renderer", Broken)
    one = make_family("slides").problem("train", 3)
    result = one.env().step(Message("assistant", one.demonstration(0)[-1].content))
    assert result.reward == 0.0 and result.detail["pages"][0]["faults"] == ["it ended two browsers"]


GOOD = Score(0.9, {"aspect": 1.0}, True, compliant=True)
TALL = dataclasses.replace(GOOD, compliant=False)
SLY = dataclasses.replace(GOOD, tricks=("zoom",))


def sample(scores: list[Score], seed: int = 0) -> Sample:
    one = problem(pages=2)
    text = answer(one, seed)
    return Sample(one, text, list(zip(one.split_answer(text), scores, strict=False)))


def test_the_best_sample_with_a_good_page_is_kept() -> None:
    low, high = sample([GOOD, GOOD], 1), sample([dataclasses.replace(GOOD, total=0.95), GOOD], 2)
    found = select([[low, high], [sample([TALL, SLY])], [sample([GOOD])]])
    assert [c.messages[1].content for c in found.conversations] == [high.text]
    assert found.report() == {
        "kept": 1, "masked pages": 0, "no good page": 1, "prompts": 3, "prompts without an answer": 2, "samples": 4,
        "wrong number of pages": 1,
    }  # fmt: skip


def test_a_defective_page_is_left_out_of_the_loss(tmp_path: Any) -> None:
    one = sample([GOOD, failed("a script")])
    assert not select([[one]], mask=False).conversations
    (kept,) = select([[one]]).conversations
    page = one.pages[1][0]
    assert kept.marks[1].content == ((page.start, page.end),)
    write_conversations(tmp_path / "kept.jsonl", [kept])
    ((_, again),) = read_conversations(tmp_path / "kept.jsonl")
    assert again.marks == kept.marks and again.messages[1].content == one.text
    assert parse_conversation({"messages": [{"role": "assistant", "content": "x"}]}).marks == {}


def test_layouts_may_be_limited() -> None:
    samples = [[sample([GOOD, GOOD], seed=4)] for _ in range(5)]
    assert len(select(samples, most_alike=2).conversations) == 2
    assert layout_of("page 1 2 l\ntitle 4") == "page title" and layout_of("<div><p>x</p></div>") == "div p"
