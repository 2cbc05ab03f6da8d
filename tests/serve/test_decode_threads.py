"""The number of threads of small decoding steps follows the measured times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams
from glm5.serve.decode_threads import APART, MOST, SETTLING, TRIAL, DecodeThreads


class Clock:
    """A step takes `cost[threads]` seconds; every reading of the clock shows the total."""

    def __init__(self, cost: dict[int, float]) -> None:
        self.cost, self.now, self.used = cost, 0.0, list[int]()

    def step(self) -> None:
        self.used.append(torch.get_num_threads())
        self.now += self.cost[self.used[-1]]


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_of(clock: Clock, **engine: Any) -> DecodeThreads:
    model = SimpleNamespace(device=torch.device("cpu"))
    fields: dict[str, Any] = {"exact": False, "model": model, "step": clock.step, **engine}
    return DecodeThreads(SimpleNamespace(**fields), lambda: clock.now)  # type: ignore[arg-type]


def test_the_faster_number_is_found_again_when_the_machine_changes(two_threads: None) -> None:
    clock = Clock({1: 0.001, 2: 0.002})
    threads = threads_of(clock)
    for _ in range(1000):
        threads.step(1)
    assert clock.used[:3] == [2, 2, 2] and clock.used.count(1) > 900 and torch.get_num_threads() == 1
    clock.cost, clock.used = {1: 0.002, 2: 0.001}, []
    for _ in range(2 * (APART + SETTLING + TRIAL)):
        threads.step(1)
    assert set(clock.used[-100:]) == {2}
    clock.cost = {1: 0.001, 2: 0.002}
    for _ in range(1000):
        threads.step(1)
    threads.close()
    assert clock.used[-1] == 1 and torch.get_num_threads() == 2


def test_a_small_difference_does_not_change_it(two_threads: None) -> None:
    clock = Clock({1: 0.00098, 2: 0.001})
    threads = threads_of(clock)
    for _ in range(3 * APART):
        threads.step(4)
    assert clock.used.count(1) == 3 * (SETTLING + TRIAL)


def test_only_small_decoding_steps_of_a_fast_engine_are_tried(two_threads: None) -> None:
    clock = Clock({1: 0.001, 2: 0.002})
    for batch, engine in ((None, {}), (MOST + 1, {}), (0, {}), (1, {"exact": True})):
        threads = threads_of(clock, **engine)
        for _ in range(100):
            threads.step(batch)
    assert set(clock.used) == {2}


@pytest.mark.parametrize("samples", [1, 5])
def test_the_number_of_threads_changes_no_bit(model: GLM5ForCausalLM, two_threads: None, samples: int) -> None:
    def answers(number: int) -> list[tuple[list[int], list[float]]]:
        engine = Engine(model, exact=False)
        params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
        torch.set_num_threads(2)
        requests = [r for i in range(samples) for r in engine.submit(list(range(5 + i, 40)), params)]
        while not all(r.completion.token_ids for r in requests):
            engine.step()
        torch.set_num_threads(number)
        while not all(r.done for r in requests):
            engine.step()
        return [(r.completion.token_ids, r.completion.logprobs) for r in requests]

    assert answers(1) == answers(2)
