"""The judge: comparisons in both orders, averaged over samples, cached, limited in cost; a failure gives no reward."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from glm5.config.reward_model import RUBRIC, JudgeConfig
from glm5.obs.logs import get_logger
from glm5.rl.judge.backends import Backend, EndpointBackend, EngineBackend, Question, Verdict
from glm5.rl.judge.cache import JudgeCache
from glm5.rl.judge.prompt import VERSION, judge_messages
from glm5.rl.start import StageStart
from glm5.seeds import derive_seed

_log = get_logger(__name__)
CACHE = "judge.sqlite"
VALUE = {"A": 1.0, "tie": 0.5, "B": 0.0}


@dataclass(frozen=True)
class Comparison:
    """Is `answer` better than `other`? `group` is the class of the prompt, which may have its own rubric."""

    prompt: str
    answer: str
    other: str
    group: str = ""


@dataclass
class JudgeCounts:
    """What the judge did since the last reset. `swapped` counts comparisons whose verdict depended on the order."""

    comparisons: int = 0
    failed: int = 0
    swapped: int = 0
    calls: int = 0
    cached: int = 0
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, float]:
        """Metrics."""
        whole = max(1, self.comparisons)
        return {
            "judge/failed": self.failed / whole,
            "judge/order_decides": self.swapped / whole,
            "judge/calls": float(self.calls),
            "judge/cached": float(self.cached),
            "judge/tokens": float(self.tokens),
        }


class Judge:
    """Compares answers with a model.

    Args:
        samples: verdicts per comparison, an even number: half with `answer` as A, half as B.
        seed: of the samples, and of the blocks' codes.
        stage: the name under which costs are counted.

    The value of a comparison is the mean over its verdicts of 1 (better), 0.5 (tie) and 0. If any verdict is missing
    after one repetition, the comparison has failed and has no value.
    """

    def __init__(
        self,
        backend: Backend,
        cache: JudgeCache,
        *,
        samples: int = 2,
        rubric: str = RUBRIC,
        rubrics: Mapping[str, str] | None = None,
        template: str = "full",
        seed: int = 0,
        stage: str = "",
        most_calls: int = 20_000,
        most_tokens: int = 50_000_000,
    ) -> None:
        if samples < 2 or samples % 2:
            raise ValueError(f"{samples} samples: half of them have the answers swapped, so give an even number")
        self.backend, self.cache, self.samples, self.stage = backend, cache, samples, stage
        self._rubric, self._rubrics, self._template = rubric, dict(rubrics or {}), template
        self._seed, self._most_calls, self._most_tokens = seed, most_calls, most_tokens
        self._secret = hashlib.sha256(f"judge {seed}".encode()).hexdigest()
        self.counts = JudgeCounts()

    def close(self) -> None:
        self.backend.close()
        self.cache.close()

    def compare(self, comparisons: Sequence[Comparison]) -> list[float | None]:
        """The value of each comparison in [0, 1]; None for one that failed. Equal texts are a tie and cost nothing."""
        asked = {i: c for i, c in enumerate(comparisons) if c.answer != c.other}
        questions = {(i, s): self._question(c, s) for i, c in asked.items() for s in range(self.samples)}
        identity = self.backend.identity
        keys = {place: self._key(identity, question) for place, question in questions.items()}
        by_key = {keys[place]: question for place, question in questions.items()}
        known = self.cache.find(list(by_key))
        self.counts.cached += len(known)
        for attempt in range(2):
            missing = {key: question for key, question in by_key.items() if key not in known}
            known |= self._ask({key: replace(q, seed=q.seed + attempt) for key, q in missing.items()})
        values = [self._value(i, c, keys, known) for i, c in enumerate(comparisons)]
        self.counts.comparisons += len(comparisons)
        self.counts.failed += sum(value is None for value in values)
        if self.counts.failures:
            _log.warning("The judge failed %d times, most often: %s", self.counts.failures.total(),
                         self.counts.failures.most_common(1)[0][0])  # fmt: skip
            self.counts.failures.clear()
        return values

    def take_counts(self) -> dict[str, float]:
        """Metrics since the last call."""
        row, self.counts = self.counts.row(), JudgeCounts()
        return row

    def _question(self, comparison: Comparison, sample: int) -> Question:
        swapped = sample % 2 == 1
        first, second = comparison.answer, comparison.other
        if swapped:
            first, second = second, first
        names = (comparison.group, comparison.group.partition("/")[0])
        more = next((self._rubrics[name] for name in names if name in self._rubrics), "")
        messages = judge_messages(
            comparison.prompt, first, second, f"{self._rubric} {more}", self._secret, self._template
        )
        return Question(tuple(messages), derive_seed(self._seed, "judge", sample, comparison.prompt, first, second))

    def _key(self, identity: str, question: Question) -> str:
        told = [VERSION, identity, self._template, question.seed, [[m.role, m.content] for m in question.messages]]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def _ask(self, missing: Mapping[str, Question]) -> dict[str, str]:
        """Ask what is not known, as far as the limits allow. Returns verdicts by the questions' keys. Both limits are
        checked before every `Backend.most` questions."""
        found: dict[str, str] = {}
        left = list(missing)
        while left:
            calls, tokens = self.cache.spent(self.stage)
            room = self._most_calls - calls if tokens < self._most_tokens else 0
            if room <= 0:
                self.counts.failures["a limit of its cost is reached (judge.most_calls, judge.most_tokens)"] += 1
                break
            count = min(room, self.backend.most)
            asked, left = left[:count], left[count:]
            found |= self._ask_some({key: missing[key] for key in asked})
        return found

    def _ask_some(self, questions: Mapping[str, Question]) -> dict[str, str]:
        """Ask, and keep what came, even if an interrupt ends it: it is paid for."""
        answers: list[Verdict] = []
        found: dict[str, str] = {}
        try:
            for verdict in self.backend.ask(list(questions.values())):
                answers.append(verdict)
        finally:
            found = {k: str(v.winner) for k, v in zip(questions, answers, strict=False) if v.winner is not None}
            calls, tokens = sum(v.calls for v in answers), sum(v.tokens for v in answers)
            self.counts.calls += calls
            self.counts.tokens += tokens
            self.counts.failures.update(verdict.failure for verdict in answers if verdict.failure)
            self.cache.add(self.stage, found, calls, tokens)
        return found

    def _value(
        self, i: int, comparison: Comparison, keys: Mapping[tuple[int, int], str], known: Mapping[str, str]
    ) -> float | None:
        if comparison.answer == comparison.other:
            return 0.5
        verdicts = [known.get(keys[i, sample]) for sample in range(self.samples)]
        if any(verdict is None for verdict in verdicts):
            return None
        values = [1.0 - VALUE[str(v)] if sample % 2 else VALUE[str(v)] for sample, v in enumerate(verdicts)]
        first, second = sum(values[0::2]), sum(values[1::2])
        self.counts.swapped += (first - self.samples / 4) * (second - self.samples / 4) < 0
        return sum(values) / len(values)


@functools.cache
def _key(file: str | None) -> str | None:
    """The server's key, from a file or the environment. `find_key` empties that, so a process looks once."""
    from glm5.serve.keys import find_key

    return find_key("api", None, Path(file) if file else None)


def stage_judge(config: JudgeConfig, start: StageStart) -> Judge:
    """The judge of a stage, with its cache in the run's folder. Raises ConfigError or CheckpointError for a model that
    does not exist."""
    tokens, temperature, template = config.max_tokens, config.temperature, config.template
    backend: Backend
    if config.remote:
        key = _key(config.key_file)
        backend = EndpointBackend(
            config.model,
            config.name,
            key=key,
            max_tokens=tokens,
            temperature=temperature,
            template=template,
            concurrency=config.concurrency,
            seconds=config.seconds,
            structured=config.structured,
        )
    else:
        folder, device = start.judge_checkpoint(config.model), start.io.ranks.device
        backend = EngineBackend(folder, max_tokens=tokens, temperature=temperature, template=template, device=device)
    return Judge(
        backend,
        JudgeCache(start.io.folder.parent / CACHE),
        samples=config.samples,
        rubric=config.rubric,
        rubrics=config.rubrics,
        template=config.template,
        stage=start.io.name,
        most_calls=config.most_calls,
        most_tokens=config.most_tokens,
    )


@dataclass(frozen=True)
class AnswerGroup:
    """Answers to one prompt that are to be scored, human answers to it, and the class of the prompt."""

    prompt: str
    answers: Sequence[str]
    references: Sequence[str] = ()
    group: str = ""


def judge_groups(judge: Judge, groups: Sequence[AnswerGroup]) -> list[list[float | None]]:
    """The score of every answer in [0, 1]: the mean of its comparisons. None if fewer than half of these have a value,
    or if there is nothing to compare it with. An answer is compared with the human answers to its prompt. Without any,
    the answers stand in a ring, and each is compared with the two on either side."""
    comparisons: list[Comparison] = []
    places: list[tuple[int, int, int | None]] = []  # group, answer, and the other answer if that is scored too
    for g, found in enumerate(groups):
        met: list[tuple[int, int | None, str]] = [
            (i, None, text) for i in range(len(found.answers)) for text in found.references
        ]
        for i, other, text in met or [(i, j, found.answers[j]) for i, j in _ring(len(found.answers))]:
            comparisons.append(Comparison(found.prompt, found.answers[i], text, found.group))
            places.append((g, i, other))
    values: list[list[list[float | None]]] = [[[] for _ in found.answers] for found in groups]
    for (g, i, other), value in zip(places, judge.compare(comparisons), strict=True):
        values[g][i].append(value)
        if other is not None:
            values[g][other].append(None if value is None else 1.0 - value)
    return [[_mean(own) for own in row] for row in values]


def _ring(count: int) -> list[tuple[int, int]]:
    """The pairs of neighbours at distance 1 and 2 in a ring, each once."""
    steps = [step for step in (1, 2) if 2 * step <= count]
    return [(i, (i + step) % count) for step in steps for i in range(step if 2 * step == count else count)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and 2 * len(known) >= len(values) else None
