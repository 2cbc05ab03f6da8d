"""Pipeline schedules: complete, without deadlock, one order for sender and receiver, idle as the formula says."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.config.pipeline_schedule import Action, Schedule, idle_share, make_schedule, simulate, turns

SIZES = st.tuples(st.integers(2, 6), st.integers(1, 3), st.integers(1, 17), st.integers(0, 5))
"""Ranks, stages of each, micro-batches, and how many may wait for their weight gradients."""


def transfers(schedule: Schedule, stages: int) -> tuple[dict[tuple[int, int, bool], list[tuple[int, int]]], ...]:
    """By (from rank, to rank, backward): receiving stage and micro-batch, as sent and as received."""
    sent, received = defaultdict(list), defaultdict(list)
    ranks = len(schedule)
    for rank, plan in enumerate(schedule):
        for kind, stage, micro in plan:
            step, backward = (1, False) if kind == "F" else (-1, True)
            if kind in "FBI":
                if 0 <= stage + step < stages:
                    sent[rank, (stage + step) % ranks, backward].append((stage + step, micro))
                if 0 <= stage - step < stages:
                    received[(stage - step) % ranks, rank, backward].append((stage, micro))
    return sent, received


@given(SIZES)
def test_a_schedule_is_complete_ends_and_orders_transfers_alike(sizes: tuple[int, int, int, int]) -> None:
    ranks, chunks, micros, deferred = sizes
    schedule = make_schedule(*sizes)
    stages = ranks * chunks
    simulate(schedule, lambda action: 1.0)
    for kinds in ("F", "BI", *(["W"] if deferred else [])):
        done = sorted((a.stage, a.micro, rank) for rank, plan in enumerate(schedule) for a in plan if a.kind in kinds)
        assert done == sorted((s, m, s % ranks) for s in range(stages) for m in range(micros))
    sent, received = transfers(schedule, stages)
    assert sent == received
    for plan in schedule:
        open_stage: int | None = None
        left, kept = 0, 0
        for action in plan:
            left += {"I": 1, "W": -1}.get(action.kind, 0)
            kept += {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
            assert left <= deferred + 1 and kept <= chunks * ranks + ranks
            if action.kind == "R":  # of the stage whose gradients are there, and once
                assert open_stage == action.stage
                open_stage = None
            elif action.kind != "F":
                assert open_stage in (None, action.stage)  # two stages never add up at the same time
                open_stage = action.stage
        assert open_stage is None and left == 0


@pytest.mark.parametrize(("ranks", "chunks", "micros"), [(2, 1, 4), (4, 1, 8), (4, 2, 8), (4, 3, 12), (8, 1, 64)])
def test_idle_share_is_that_of_the_formula(ranks: int, chunks: int, micros: int) -> None:
    """Backward takes twice as long as forward, half of it for weights; with them deferred, less time is idle."""
    cost = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "R": 0.0}
    found = [
        idle_share(simulate(make_schedule(ranks, chunks, micros, deferred), lambda action: cost[action.kind]))
        for deferred in (0, 1, 2 * ranks)
    ]
    assert found[0] == pytest.approx((ranks - 1) / (micros * chunks + ranks - 1))
    assert found[2] <= found[1] < found[0]


def test_two_stages_of_two_micro_batches_by_hand() -> None:
    first, last = make_schedule(2, 1, 2)
    assert "".join(f"{a.kind}{max(a.micro, 0)}" for a in first) == "F0F1B0B1R0"
    assert "".join(f"{a.kind}{max(a.micro, 0)}" for a in last) == "F0B0F1B1R0"


def test_a_schedule_that_waits_for_ever_is_found() -> None:
    both = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    with pytest.raises(ValueError, match="waits for ever"):
        simulate(both, lambda action: 1.0)


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (2, 3), (3, 2), (4, 1), (5, 3)])
def test_no_rank_waits_for_what_the_other_cannot_have(pp: int, chunks: int, answered: bool) -> None:
    """`StageLinks` waits, at a receive, for all that the other rank got before it sent. If gradients do not come back,
    for all but the newest; then ranks still come to the end."""
    stages = pp * chunks
    for micros, deferred in product((1, pp - 1, pp, 2 * pp + 1, 3 * pp), (0, 1, pp)):
        schedule = make_schedule(pp, chunks, micros, deferred)
        turn, at = turns(schedule), [0] * pp
        ways: dict[tuple[int, int, bool], list[tuple[bool, int, int]]] = defaultdict(list)
        sent: dict[tuple[int, int], dict[tuple[bool, int, int], int]] = defaultdict(dict)
        received: set[tuple[bool, int, int]] = set()
        while (before := list(at)) != [len(plan) for plan in schedule]:
            for rank, plan in enumerate(schedule):
                newest = [list(sent[rank, other])[:-pp] for other in range(pp)]
                if at[rank] == len(plan) or (not answered and not received.issuperset(chain(*newest))):
                    continue
                kind, stage, micro = plan[at[rank]]
                back = kind != "F"
                if kind in "FBI" and (answered or not back):
                    source, target = (stage + 1, stage - 1) if back else (stage - 1, stage + 1)
                    if 0 <= source < stages:
                        way = ways[source % pp, rank, back]
                        if not way:
                            continue
                        assert way[0] == (back, source, micro)
                        received.add(way.pop(0))
                        mine, until = sent[rank, source % pp], turn[back, source, micro]
                        done = {one for one, when in mine.items() if when <= until}
                        assert done <= received
                        sent[rank, source % pp] = {one: when for one, when in mine.items() if one not in done}
                    if 0 <= target < stages:
                        ways[rank, target % pp, back].append((back, stage, micro))
                        sent[rank, target % pp][back, stage, micro] = turn[back, target, micro]
                at[rank] += 1
            assert at != before, "every rank waits"
