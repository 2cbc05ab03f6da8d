"""Presentation slides as a task family: a brief in, pages out, each scored by its named rewards (§4.2.5).

With `form = "compact"` the policy writes the compact markup, which a small model can learn; with "html" it writes whole
HTML pages. The reward is the mean over the pages asked for. `detail["rewards"]` has the means by name, which the option
`normalize = "per_reward"` of an RL stage normalises one by one. An episode is solved if every page is strictly 16:9 and
scores at least `LEAST_GOOD`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.errors import ConfigError
from glm5.records import Env, Message, Outcome, StepResult
from glm5.tasks.contract import Family, ToolSpec, draw
from glm5.tasks.slides.brief import PageBrief, assets_of, draw_brief
from glm5.tasks.slides.compact import MarkupError, compile_page
from glm5.tasks.slides.oracle import oracle_page
from glm5.tasks.slides.render import PageFault, shared_renderer
from glm5.tasks.slides.rewards import Score, checked_weights, failed, score_page

FORMS = ("compact", "html")
MEASURES = ("browser", "static")
MOST_PAGES = 12
LEAST_GOOD = 0.8
MOST_RECORDED = 20_000
"""Characters of a page's HTML in a trajectory's detail."""
ASK = (
    "Make {count} as HTML. Give each page as a whole document in a block of its own, ```html to ```. A page is exactly "
    "1280 x 720 pixels, set in pixels: nothing hidden, cut off or scaled, no scripts, nothing from outside. Show every "
    "point of the brief in readable text, word for word, and every picture once, as <img src=\"NAME\"> in its own "
    "proportions (width / height is given).\n\n{brief}"
)  # fmt: skip
_BLOCK = re.compile(r"```(?:html)?[ \t]*\n(.*?)(?:```|\Z)", re.S | re.I)
_BEGIN = re.compile(r"<!doctype html|<html", re.I)
_END = re.compile(r"</html\s*>", re.I)


@dataclass(frozen=True)
class PageText:
    """One page of an answer: its HTML, or why there is none, and its span of characters in the answer."""

    html: str
    start: int
    end: int
    fault: str = ""


@dataclass(frozen=True)
class SlidesProblem:
    """Briefs of the pages of one deck."""

    id: str
    pages: tuple[PageBrief, ...]
    form: str = "compact"
    measure: str = "browser"
    flawed: float = 0.0
    variety: int = 3
    weights: tuple[tuple[str, float], ...] = ()
    domain: str = "slides"
    thinking: bool = False
    tools: Sequence[ToolSpec] = ()

    @property
    def key(self) -> str:
        return f"slides {self.form} " + " / ".join(" | ".join(page.lines) for page in self.pages)

    @property
    def prompt(self) -> str:
        text = "\n---\n".join("\n".join(page.lines) for page in self.pages)
        if self.form == "compact":
            return text
        count = "one slide" if len(self.pages) == 1 else f"{len(self.pages)} slides"
        return ASK.format(count=count, brief=text)

    def env(self) -> Env:
        return SlidesEnv(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """The oracle's pages; `flawed` of them have a flaw. Raises ConfigError for the form "html"."""
        if self.form != "compact":
            raise ConfigError('slides: there are demonstrations only for form = "compact".')
        rng = random.Random(f"slides-demonstration-{rng_seed}-{self.id}")
        pages = [oracle_page(page, rng, self.flawed, self.variety)[0] for page in self.pages]
        return [Message("user", self.prompt), Message("assistant", "\n---\n".join(pages))]

    def split_answer(self, text: str) -> list[PageText]:
        """The pages of an answer, at most `MOST_PAGES`."""
        if self.form == "html":
            found = [PageText(m[1], *m.span()) for m in _BLOCK.finditer(text)]
            return (found or _documents(text))[:MOST_PAGES]
        pages: list[PageText] = []
        at = 0
        for piece in text.split("---")[:MOST_PAGES]:
            span = at, at + len(piece)
            at += len(piece) + 3
            brief = self.pages[min(len(pages), len(self.pages) - 1)]
            try:
                pages.append(PageText(compile_page(piece, brief), *span))
            except MarkupError as error:
                pages.append(PageText("", *span, str(error)))
        return pages

    def score(self, text: str) -> list[tuple[PageText, Score]]:
        """Every page of an answer with its score. A page that repeats an earlier one scores 0, and so do pages beyond
        those asked for. Raises GradingError if the renderer is at fault."""
        weights, seen = dict(self.weights), set[str]()
        found = []
        for i, page in enumerate(self.split_answer(text)):
            if page.fault:
                score = failed(page.fault, weights)
            elif i >= len(self.pages):
                score = failed("more pages than asked for", weights)
            elif page.html in seen:
                score = failed("the same page again", weights)
            else:
                score = self._score_one(page.html, self.pages[i], weights)
            seen.add(page.html)
            found.append((page, score))
        return found

    def _score_one(self, html: str, brief: PageBrief, weights: Mapping[str, float]) -> Score:
        without = score_page(html, None, brief, weights)
        if self.measure == "static" or not without.gate:
            return without
        try:
            slide = shared_renderer().measure(html, assets_of(brief))
        except PageFault as fault:
            return failed(str(fault), weights)
        return score_page(html, slide, brief, weights)


def _documents(text: str) -> list[PageText]:
    """Whole documents in a text without blocks; one search from each end to the next beginning, so never slow."""
    found: list[PageText] = []
    at = 0
    while (begin := _BEGIN.search(text, at)) and (end := _END.search(text, begin.end())):
        found.append(PageText(text[begin.start() : end.end()], begin.start(), end.end()))
        at = end.end()
    return found


class SlidesEnv:
    """Asks once and scores every page."""

    def __init__(self, problem: SlidesProblem) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source = problem

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return (Message("user", self._source.prompt),), self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        """`detail` has `rewards` by name, `pages` (the span in the answer, total, parts, faults and tricks of each)
        and `trivial`. An answer that cannot be read is an answer without a page."""
        scored = self._source.score(message.content if message else "")
        wanted = len(self._source.pages)
        own = [score for _, score in scored[:wanted]]
        names = own[0].parts if own else checked_weights(dict(self._source.weights))
        extra = max(0, len(scored) - wanted)
        share = 1.0 / (wanted + extra)
        rewards = {name: share * sum(score.parts.get(name, 0.0) for score in own) for name in names}
        rewards["compliant"] = share * sum(score.compliant for score in own)
        good = len(own) == wanted and not extra and all(s.compliant and s.total >= LEAST_GOOD for s in own)
        if message is None:
            outcome = Outcome.MALFORMED
        else:
            outcome = Outcome.SOLVED if good and not message.tool_calls else Outcome.FAILED
        return StepResult(
            done=True,
            reward=share * sum(score.total for score in own),
            outcome=outcome,
            detail={
                "rewards": {name: round(value, 4) for name, value in rewards.items()},
                "trivial": not own or any(score.trivial for score in own),
                "pages": [
                    page_record(page, score, self._source.pages[min(i, wanted - 1)])
                    for i, (page, score) in enumerate(scored)
                ],
            },
        )


def page_record(page: PageText, score: Score, brief: PageBrief) -> dict[str, Any]:
    """One page for reports, as plain data. HTML that is longer than usual is left out."""
    return {
        "html": page.html if len(page.html) <= MOST_RECORDED else "",
        "brief": {"title": brief.title, "pictures": list(brief.pictures), "ratios": list(brief.ratios)},
        "start": page.start,
        "end": page.end,
        "total": score.total,
        "compliant": score.compliant,
        "parts": score.parts,
        "faults": list(score.faults),
        "tricks": list(score.tricks),
    }


class SlidesFamily(Family):
    """Decks of `pages` pages with 2 to `most_points` points each. `flawed` is the share of flawed pages among the
    demonstrations, `variety` how many sizes of each kind these use. `measure = "static"` works without a browser and
    gives only some rewards. `weights` are those of the total; see `rewards.WEIGHTS`."""

    name = "slides"
    domain = "slides"

    def __init__(
        self,
        seed: int = 0,
        form: str = "compact",
        pages: int = 1,
        most_points: int = 5,
        picture_share: float = 0.5,
        flawed: float = 0.0,
        variety: int = 3,
        measure: str = "browser",
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if form not in FORMS:
            raise ConfigError(f"slides: form is {' or '.join(FORMS)}, not {form!r:.40}.")
        if measure not in MEASURES:
            raise ConfigError(f"slides: measure is {' or '.join(MEASURES)}, not {measure!r:.40}.")
        if not 1 <= pages <= MOST_PAGES or not 2 <= most_points <= 8:
            raise ConfigError(f"slides: 1 to {MOST_PAGES} pages with 2 to 8 points, not {pages} and {most_points}.")
        if not 0 <= picture_share <= 1 or not 0 <= flawed <= 1:
            raise ConfigError("slides: picture_share and flawed are shares from 0 to 1.")
        if variety < 1:
            raise ConfigError(f"slides: variety is 1 or more, not {variety}.")
        checked_weights(weights)
        self.seed, self.form, self.pages, self.most_points = seed, form, pages, most_points
        self.picture_share, self.flawed, self.variety, self.measure = picture_share, flawed, variety, measure
        self.weights = tuple(sorted((weights or {}).items()))

    def problem(self, split: str, index: int) -> SlidesProblem:
        return draw(self._make, self.name, self.seed, split, index)

    def _make(self, rng: random.Random, name: str) -> SlidesProblem:
        pages = tuple(draw_brief(rng, self.most_points, self.picture_share) for _ in range(self.pages))
        return SlidesProblem(name, pages, self.form, self.measure, self.flawed, self.variety, self.weights)
