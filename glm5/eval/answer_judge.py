"""A model grades replies that no program can: free-text answers, claims, translations, dialogues (§6, App. B).

A judge that gives no verdict is a failure of the evaluation, not of the answer: it counts under `errors`, and the same
command asks again. `glm5.eval.judge_forms` has the questions.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar
from urllib.parse import urlsplit

from glm5.agents.endpoint import Endpoint, EndpointError
from glm5.agents.wire import OnDelta
from glm5.errors import UsageError
from glm5.eval.judge_forms import Question, questions
from glm5.rl.judge.prompt import read_object
from glm5.tasks.judged import Material

TEMPERATURES = (0.0, 0.7)
"""Of the first request for a verdict, and of the second, if the first gave none of the right form."""
MOST_FAILED = 8
"""Replies in a row without a verdict that end the evaluation."""
MOST_TOKENS = 8192
_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)

Name = TypeVar("Name")


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

    def scores(self, replies: Sequence[tuple[Name, Material, str]]) -> Iterator[tuple[Name, float | str]]:
        """The score of each reply, in any order; or why there is no verdict. Raises EndpointError after `MOST_FAILED`
        in a row without one."""
        left, stopped = iter(replies), threading.Event()
        running: dict[Future[float | str], Name] = {}
        failed = 0

        def told(kind: str, text: str) -> None:
            if stopped.is_set():
                raise EndpointError("The evaluation was stopped.")

        with ThreadPoolExecutor(self.concurrency, "judge") as threads:
            try:
                while True:
                    while len(running) < self.concurrency and (following := next(left, None)) is not None:
                        name, material, reply = following
                        running[threads.submit(self.score, material, reply, told)] = name
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        name, found = running.pop(future), future.result()
                        yield name, found
                        failed = failed + 1 if isinstance(found, str) else 0
                        if failed >= min(MOST_FAILED, len(replies)):
                            raise EndpointError(f"The judge gave no verdict {failed} times in a row; the last: {found}")
            finally:
                stopped.set()
                if running:
                    self.endpoint.close()

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
            found = self._ask(question, told)
            if isinstance(found, str):
                return found
            scores.append(found)
        return fmean(scores)

    def _ask(self, question: Question, told: OnDelta | None) -> float | str:
        why = "no verdict"
        for temperature in TEMPERATURES:
            model = self.endpoint.asking(max_tokens=self.max_tokens, temperature=temperature)
            model = model.answering(question.schema) if self.structured else model
            try:
                said = model.complete(question.messages, [], told).message.content
            except EndpointError as error:
                why = str(error)[:300]
                self.structured = self.structured and not error.refused
                continue
            found = read_object(_THOUGHT.sub("", said))
            if found is not None and set(found) <= set(question.schema["properties"]):
                if (score := question.read(found)) is not None:
                    return score
            why = f"not a verdict: {said[-200:]!r}"
        return why
