"""A request that the engine cannot compute ends its own episode, not the evaluation or the measurement around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from glm5.chat import Tokenizer
from glm5.errors import EngineError, RequestFailed
from glm5.records import Completion, Outcome, SamplingParams
from glm5.tasks import PassCount, make_family, measure_pass_rates, open_episodes, play

TOKENIZER = Tokenizer.byte_level("5.2")
FAMILY = make_family("arithmetic", levels=[1], thinking=False)
PROBLEMS = [(index, FAMILY.problem("rl", index)) for index in range(9)]


class Failing:
    """Answers with the seed it was given; like an engine it computes nothing if it fails on one of the prompts."""

    def __init__(self, bad: Callable[[Sequence[int]], bool]) -> None:
        self.bad, self.calls = bad, 0

    def generate(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Completion]:
        self.calls += 1
        if any(map(self.bad, prompts)):
            raise RequestFailed("the engine failed on this request")
        said = [[*TOKENIZER.encode(str(one.seed)), TOKENIZER.special["<|user|>"]] for one in params]
        return [Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop") for ids in said]


def played(completer: Any, count: int = 9) -> list[Any]:
    return play(open_episodes(PROBLEMS[:count], TOKENIZER, max_context=300), completer, SamplingParams(seed=4))


def asks(*numbers: int) -> Callable[[Sequence[int]], bool]:
    texts = [PROBLEMS[number][1].prompt for number in numbers]
    return lambda prompt: any(text in TOKENIZER.decode(prompt) for text in texts)


@pytest.mark.parametrize("bad", [(3,), (0, 8), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_the_others_get_what_they_would_have_got(bad: tuple[int, ...]) -> None:
    whole, found = played(Failing(lambda prompt: False)), played(Failing(asks(*bad)))
    lost = [number for number, trajectory in enumerate(found) if trajectory.outcome is Outcome.ENV_ERROR]
    assert set(bad) <= set(lost) and len({PROBLEMS[number][1].prompt for number in lost}) == len(
        {PROBLEMS[number][1].prompt for number in bad}
    )
    for number, (trajectory, before) in enumerate(zip(found, whole, strict=True)):
        if number in lost:
            assert trajectory.detail["cause"] == "abort" and trajectory.reward == 0.0
        else:
            assert trajectory == before


def test_an_engine_that_computes_nothing_is_no_score() -> None:
    for count in (1, 9):
        with pytest.raises(RequestFailed):
            played(Failing(lambda prompt: True), count)


def test_a_broken_engine_is_not_asked_again() -> None:
    class Broken(Failing):
        def generate(self, prompts: Any, params: Any) -> list[Completion]:
            self.calls += 1
            raise EngineError("nothing goes any more")

    broken = Broken(asks(0))
    with pytest.raises(EngineError, match="nothing goes"):
        played(broken)
    assert broken.calls == 1


def test_a_failed_request_is_no_measurement() -> None:
    params = SamplingParams(seed=4, max_tokens=40)
    counts = measure_pass_rates(Failing(asks(2)), TOKENIZER, FAMILY, range(4), 3, params, max_context=300, split="rl")
    assert counts == {index: PassCount(0, 3) for index in (0, 1, 3)}
