"""Browse evaluation: an agent with search tools and a context policy, scored with BrowseComp-Plus's metrics (§4.2.4).

Accuracy, retrieval recall over all addresses that searches ever returned, precision and recall of the cited pages,
calibration error (only with at least 100 answers, as in BrowseComp-Plus), and searches per question.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from glm5.agents.connections import AskingThreads
from glm5.agents.endpoint import Endpoint, EndpointError
from glm5.agents.search import SearchAgent
from glm5.errors import DataError, GradingError
from glm5.files import read_rows
from glm5.stats import wilson
from glm5.tasks.search.answers import read_reply, right
from glm5.tasks.search.family import SearchFamily, SearchProblem

LEAST_CALIBRATED = 100
"""Answers with a confidence that a calibration error needs."""
BINS = 10

Judge = Callable[[str, str, Sequence[str]], bool]
"""Whether an answer to a question means one of the names. Asked only if the answer is not one of them exactly."""


@dataclass(frozen=True)
class Played:
    """One question. `right` is None if the endpoint, the web or the judge failed: then it says nothing about the
    model. `returned`, `evidence` and `cited` are addresses."""

    id: str
    right: bool | None
    answer: str = ""
    reason: str = ""
    confidence: float | None = None
    turns: int = 0
    tokens: int = 0
    discards: int = 0
    searches: int = 0
    depth: int = 0
    returned: tuple[str, ...] = ()
    cited: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    error: str = ""


def play(problem: SearchProblem, agent: SearchAgent, judge: Judge | None = None) -> Played:
    """Play one question and grade the answer."""
    browser, question = problem.browser(), problem.question
    common: dict[str, Any] = {"id": question.id, "depth": question.depth, "evidence": question.evidence}
    try:
        session = agent.run(problem.prompt, browser)
        reply = read_reply(session.answer)
        answer = browser.meant(reply.answer)
        solved = right(answer, question.names)
        if not solved and judge is not None and answer:
            solved = judge(question.asked, answer, question.names)
    except (EndpointError, GradingError) as error:
        return Played(right=None, error=str(error)[:500], **common)
    return Played(
        right=solved, answer=answer, reason=session.reason, confidence=reply.confidence, turns=session.turns,
        tokens=session.tokens, discards=session.discards, searches=browser.searches,
        returned=tuple(dict.fromkeys(browser.returned)), cited=reply.cited, **common,
    )  # fmt: skip


def evaluate(
    family: SearchFamily, split: str, problems: int, agent: SearchAgent, *, judge: Judge | None = None,
    at_once: int = 4, log: Path | None = None, told: Callable[[int, int], None] = lambda done, total: None,
    endpoints: Sequence[Endpoint] = (),
) -> dict[str, Any]:  # fmt: skip
    """Play the first distinct questions of a split, `at_once` at a time, and return the metrics.

    `log` gets one JSON line per question; questions whose line is there are not played again, except after a fault. If
    it is interrupted, `endpoints` are closed, so that it does not wait for the agent's model or the judge."""
    chosen = {(p := family.problem(split, i)).key: p for i in range(problems)}
    known = {one.id: one for one in map(_of_row, read_rows(log))} if log is not None else {}
    done = {id: played for id, played in known.items() if id in chosen and played.right is not None}
    missing = [problem for id, problem in chosen.items() if id not in done]
    with AskingThreads(at_once, "browse", *endpoints) as pool:
        for played in pool.map(lambda problem: play(problem, agent, judge), missing):
            done[played.id] = played
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(played)) + "\n")
            told(len(done), len(chosen))
    return metrics([done[id] for id in chosen])


def metrics(played: Sequence[Played]) -> dict[str, Any]:
    """BrowseComp-Plus's metrics over the questions that were judged; the others are counted as `errors`."""
    judged = [one for one in played if one.right is not None]
    interval = wilson(sum(bool(one.right) for one in judged), len(judged)) if judged else None
    found: dict[str, Any] = {
        "score": interval.value if interval else None, "low": interval.low if interval else None,
        "high": interval.high if interval else None, "n": len(judged), "errors": len(played) - len(judged),
    }  # fmt: skip
    if faults := Counter(one.error for one in played if one.right is None):
        found["error"] = faults.most_common(1)[0][0]  # the most frequent one
    if not judged:
        return found
    for name in ("searches", "turns", "tokens", "discards"):
        found[name] = round(fmean(getattr(one, name) for one in judged), 2)
    found["retrieval_recall"] = fmean(_share(one.evidence, one.returned) for one in judged)
    citing = [one for one in judged if one.cited]
    found["citing"] = len(citing)
    found["citation_precision"] = fmean(_share(one.cited, one.evidence) for one in citing) if citing else None
    found["citation_recall"] = fmean(_share(one.evidence, one.cited) for one in judged)
    confident = [(one.confidence, bool(one.right)) for one in judged if one.confidence is not None]
    found["calibration_error"] = calibration_error(confident) if len(confident) >= LEAST_CALIBRATED else None
    found["ended"] = dict(sorted(Counter(one.reason for one in judged).items()))
    found["by_depth"] = {
        str(depth): fmean(bool(one.right) for one in judged if one.depth == depth)
        for depth in sorted({one.depth for one in judged})
    }
    return found


def calibration_error(answers: Sequence[tuple[float, bool]]) -> float:
    """Root of the mean squared difference between confidence and share of right answers, over ten bins of about equal
    numbers of answers sorted by confidence, weighted by their sizes."""
    ordered = sorted(answers, key=lambda one: one[0])
    edges = [round(i * len(ordered) / BINS) for i in range(BINS + 1)]
    bins = [ordered[a:b] for a, b in pairwise(edges) if b > a]
    squares = (len(part) * (fmean(c for c, _ in part) - fmean(r for _, r in part)) ** 2 for part in bins)
    return (sum(squares) / len(ordered)) ** 0.5


def _share(wanted: Sequence[str], given: Sequence[str]) -> float:
    return len(set(wanted) & set(given)) / len(set(wanted)) if wanted else 0.0


def _of_row(row: dict[str, Any]) -> Played:
    try:
        lists = {name: tuple(row[name]) for name in ("returned", "cited", "evidence")}
        return Played(**{**row, **lists})
    except (LookupError, TypeError) as error:
        raise DataError(f"the file of episodes has a row that is none of a browse evaluation: {error!r:.200}") from None
