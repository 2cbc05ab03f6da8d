"""A model grades replies that no program can: free-text answers, claims, translations, dialogues (§6, App. B).

A judge that gives no verdict is a failure of the evaluation, not of the answer: it counts under `errors`, and the same
command asks again. `glm5.eval.judge_forms` has the questions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar
from urllib.parse import urlsplit

from glm5.agents.endpoint import Endpoint, EndpointError
from glm5.agents.wire import OnDelta
from glm5.errors import UsageError
from glm5.eval.judge_forms import Question, questions
from glm5.eval.judging import Job, run_jobs
from glm5.eval.players import Spot
from glm5.records import Outcome
from glm5.rl.judge.prompt import read_object
from glm5.tasks.contract import Problem
from glm5.tasks.judged import Material, material_of

TEMPERATURES = (0.0, 0.7)
"""Of the first request for a verdict, and of the second, if the first gave none of the right form."""
MOST_TOKENS = 8192
_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)

Name = TypeVar("Name")


class Unanswered(str):
    """Why a question has no reply: the server refused it or could not be reached. The same question may get one."""


@dataclass
class AnswerJudge:
    """A judge behind a URL, asked about `concurrency` replies at a time. The verdict's schema goes along as
    `response_format` until a server refuses that."""

    endpoint: Endpoint
    concurrency: int = 8
    max_tokens: int = MOST_TOKENS
    structured: bool = True

    @classmethod
    def at(cls, url: str, name: str, key: str | None, concurrency: int = 8) -> AnswerJudge:
        """The judge at a URL. Raises UsageError for a URL with a password, for it is written into records."""
        if "@" in urlsplit(url).netloc:
            raise UsageError("The judge's URL has a password, which would be written down; give its key by a file.")
        return cls(Endpoint(url, name, key=key), concurrency)

    def judged(
        self, left: Sequence[tuple[Spot, Problem, Mapping[str, Any]]]
    ) -> Iterator[tuple[Spot, dict[str, Any] | str]]:
        """What the verdicts change in rows of a record (see `Judge`)."""
        replies = [
            (spot, material, str(row["reply"]))
            for spot, problem, row in left
            if "reply" in row and (material := material_of(problem)) is not None
        ]
        passes = {spot: material.passes for spot, material, _ in replies}
        for spot, found in self.scores(replies):
            if isinstance(found, str):
                yield spot, found
                continue
            outcome = Outcome.SOLVED if found >= passes[spot] else Outcome.FAILED
            yield spot, {"reward": found, "outcome": outcome.value}

    def scores(self, replies: Sequence[tuple[Name, Material, str]]) -> Iterator[tuple[Name, float | str]]:
        """The score of each reply, in any order; or why there is no verdict. Raises EndpointError after `MOST_FAILED`
        in a row without one."""
        jobs: list[tuple[Name, Job[float]]] = [
            (name, functools.partial(self.score, material, reply)) for name, material, reply in replies
        ]
        return run_jobs(jobs, self.concurrency, self.endpoint)

    def verdict(self, question: str, answers: Sequence[str], reply: str) -> bool | str:
        """Whether the reply means a right answer, or why the judge gives no verdict."""
        found = self.score(Material("answer", (("QUESTION", question),), tuple(answers)), reply)
        return found if isinstance(found, str) else found == 1.0

    def score(self, material: Material, reply: str, told: OnDelta | None = None) -> float | str:
        """The score of a reply, from 0 to 1, or why the judge gives no verdict. An empty reply has 0 without a
        judge."""
        if not reply.strip():
            return 0.0
        scores = []
        for question in questions(material, reply):
            found = self.ask(question, told)
            if isinstance(found, str):
                return found
            scores.append(found)
        return fmean(scores)

    def ask(self, question: Question, told: OnDelta | None) -> float | str:
        """The score that the judge's answer to a question gives, or why there is none: `Unanswered` without a reply."""
        why: str = "no verdict"
        for temperature in TEMPERATURES:
            model = self.endpoint.asking(max_tokens=self.max_tokens, temperature=temperature)
            model = model.answering(question.schema) if self.structured else model
            try:
                said = model.complete(question.messages, [], told).message.content
            except EndpointError as error:
                why = Unanswered(str(error)[:300])
                self.structured = self.structured and not error.refused
                continue
            found = read_object(_THOUGHT.sub("", said))
            if found is not None and set(found) <= set(question.schema["properties"]):
                if (score := question.read(found)) is not None:
                    return score
            why = f"not a verdict: {said[-200:]!r}"[:300]
        return why
