"""What layers keep: never over the budget, never a choice that another one beats, and as good as the best plan."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from glm5.config.keep_plan import Choice, choose, frontier

choices = st.lists(
    st.builds(Choice, st.just(False), st.just(False), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4
)
layers = st.lists(choices, min_size=1, max_size=4)


def cost(plan: tuple[Choice, ...] | list[Choice]) -> tuple[float, float]:
    return sum(c.bytes for c in plan), sum(c.seconds for c in plan)


@given(choices)
def test_no_choice_of_the_frontier_is_beaten(found: list[Choice]) -> None:
    front = frontier(found)
    assert set(front) <= set(found)
    for one in found:
        assert any(other.bytes <= one.bytes and other.seconds <= one.seconds for other in front) or any(
            a.bytes <= one.bytes <= b.bytes for a, b in pairwise(front)
        )
    assert all(a.bytes < b.bytes and a.seconds > b.seconds for a, b in pairwise(front))
    gains = [(a.seconds - b.seconds) / (b.bytes - a.bytes) for a, b in pairwise(front)]
    assert gains == sorted(gains, reverse=True)


@given(layers, st.integers(0, 60))
def test_the_plan_fits_and_is_the_best_for_its_bytes(found: list[list[Choice]], budget: int) -> None:
    plan = choose(found, budget)
    everything = [cost(one) for one in product(*found)]
    if plan is None:
        assert min(size for size, _ in everything) > budget
        return
    size, seconds = cost(plan)
    assert size <= budget
    best = min(time for used, time in everything if used <= budget)
    # What a plan loses is at most one upgrade that did not fit.
    steps = [a.seconds - b.seconds for front in map(frontier, found) for a, b in pairwise(front)]
    assert seconds <= best + max(steps, default=0)


def test_unequal_layers_are_planned_one_by_one() -> None:
    """A cheap layer is computed again before an expensive one."""
    cheap = [Choice(False, False, 100, 0.0), Choice(True, False, 10, 1.0)]
    dear = [Choice(False, False, 100, 0.0), Choice(True, False, 10, 5.0)]
    plan = choose([cheap, dear, cheap], 130)
    assert plan is not None and [c.recompute for c in plan] == [True, False, True]
