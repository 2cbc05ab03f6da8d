"""Rejection sampling and mask fine-tuning: sampled answers in, conversations for SFT out (§4.2.5).

- Page level: a page counts as good if it compiles, renders, is strictly 16:9 and scores at least `least`.
- Trajectory level: an answer must have the pages that were asked for, and no more than `most_alike` kept answers may
  share one layout (global diversity).
- Best of N: of the samples of one prompt the best is kept.
- Mask: with `mask`, an answer with some good pages is kept too, and its defective pages are left out of the loss.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.data.sft import Conversation, Span, TurnMarks
from glm5.records import Message
from glm5.tasks.slides.family import LEAST_GOOD, PageText, SlidesProblem
from glm5.tasks.slides.rewards import Score


@dataclass(frozen=True)
class Sample:
    """One sampled answer to a problem, with the scores of its pages."""

    problem: SlidesProblem
    text: str
    pages: Sequence[tuple[PageText, Score]]

    @classmethod
    def of(cls, problem: SlidesProblem, text: str) -> Sample:
        """Score an answer. Raises GradingError if the renderer is at fault."""
        return cls(problem, text, problem.score(text))

    @property
    def total(self) -> float:
        """Mean of the pages asked for; pages beyond count as pages that scored 0."""
        return sum(score.total for _, score in self.pages) / max(len(self.problem.pages), len(self.pages))


@dataclass
class Selection:
    """Conversations and how they were chosen: counts of answers by what became of them."""

    conversations: list[Conversation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        """Plain counts."""
        return {"kept": len(self.conversations), **dict(sorted(self.counts.items()))}


def is_good(score: Score, least: float = LEAST_GOOD) -> bool:
    """Whether a page passes at page level."""
    return score.gate and score.compliant and score.total >= least and not score.tricks


def select(
    samples: Iterable[Sequence[Sample]], *, least: float = LEAST_GOOD, mask: bool = True, most_alike: int = 0
) -> Selection:
    """The conversations to fine-tune on, from groups of samples of one prompt each. `most_alike` 0 is no limit."""
    found, layouts = Selection(), Counter[str]()
    for group in samples:
        ranked = sorted(group, key=lambda sample: -sample.total)
        found.counts["samples"] += len(ranked)
        chosen = None
        for sample in ranked:
            if len(sample.pages) != len(sample.problem.pages):
                found.counts["wrong number of pages"] += 1
                continue
            good = [is_good(score, least) for _, score in sample.pages]
            if not any(good) or not (mask or all(good)):
                found.counts["no good page" if not any(good) else "a defective page"] += 1
                continue
            alike = layout_of(sample.text)
            if most_alike and layouts[alike] >= most_alike:
                found.counts["a layout that is kept often enough"] += 1
                continue
            chosen = sample
            layouts[alike] += 1
            found.counts["masked pages"] += good.count(False)
            found.conversations.append(_conversation(sample, good))
            break
        found.counts["prompts"] += 1
        found.counts["prompts without an answer"] += chosen is None
    return found


def layout_of(text: str) -> str:
    """The sequence of commands of a page in compact markup, or its tags: what two pages of one design share."""
    if "<" in text:
        return " ".join(re.findall(r"<([a-z][a-z0-9]*)", text.lower())[:200])
    return " ".join(line.split()[0] for line in text.splitlines() if line.strip())[:400]


def _conversation(sample: Sample, good: Sequence[bool]) -> Conversation:
    """The prompt and the answer, without the defective pages in the loss."""
    wrong: list[Span] = [(page.start, page.end) for (page, _), fine in zip(sample.pages, good, strict=True) if not fine]
    marks: Mapping[int, TurnMarks] = {1: TurnMarks(content=tuple(wrong))} if wrong else {}
    messages = [Message("user", sample.problem.prompt), Message("assistant", sample.text)]
    return Conversation(messages, thinking=False, marks=marks)
