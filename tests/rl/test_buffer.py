"""Groups: environment failures, padding, staleness, order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.records import Outcome, Trajectory, Turn
from glm5.rl.buffer import Buffer, repair_group, staleness


def trajectory(group: int = 0, versions: tuple[int, ...] = (0,), outcome: Outcome = Outcome.FAILED) -> Trajectory:
    ids = tuple(range(len(versions)))
    turns = [Turn((1,), ids, (0.0,) * len(ids), versions, "stop")] if versions else []
    return Trajectory(f"p{group}", "toy", group, turns, 0.0, outcome)


def group_of(valid: int, size: int) -> list[Trajectory]:
    """Failures spread between the valid ones."""
    kinds = [Outcome.SOLVED] * valid + [Outcome.ENV_ERROR] * (size - valid)
    order = sorted(range(size), key=lambda i: (i * 7) % size)
    return [trajectory(outcome=kinds[i]) for i in order]


@pytest.mark.parametrize(("valid", "size", "kept"), [
    (32, 32, True), (17, 32, True), (16, 32, False), (0, 32, False), (1, 1, True), (0, 1, False), (1, 2, False),
    (2, 3, True), (1, 3, False),
])  # fmt: skip
def test_more_than_half_must_be_valid(valid: int, size: int, kept: bool) -> None:
    group = group_of(valid, size)
    repaired = repair_group(group, size)
    if not kept:
        assert repaired == []
        return
    sound = [t for t in group if t.outcome is not Outcome.ENV_ERROR]
    assert len(repaired) == size
    assert all(a is b for a, b in zip(repaired, sound + sound, strict=False))


def test_failures_of_the_policy_stay() -> None:
    kinds = [Outcome.FAILED, Outcome.TRUNCATED, Outcome.MALFORMED, Outcome.SOLVED]
    group = [trajectory(outcome=kind) for kind in kinds]
    assert repair_group(group, 4) == group


def test_staleness_counts_from_the_oldest_token() -> None:
    assert staleness(trajectory(versions=(3, 4, 7)), 9) == 6
    assert staleness(trajectory(versions=()), 9) == 0


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_the_limit_is_kept_and_one_more_is_dropped(limit: int) -> None:
    buffer = Buffer(group_size=2, max_staleness=limit)
    for number, oldest in enumerate((10 - limit, 10 - limit - 1, 10)):
        buffer.add(trajectory(number, (10,)))
        buffer.add(trajectory(number, (10, oldest)))
    buffer.drop_stale(10)
    assert (buffer.ready, buffer.dropped_stale, buffer.dropped) == (2, 1, 1)
    assert [g[0].group for g in buffer.take(5)] == [0, 2]


@given(st.permutations([g for g in range(5) for _ in range(3)]), st.integers(0, 5))
def test_complete_groups_come_out_lowest_first(order: list[int], wanted: int) -> None:
    buffer = Buffer(group_size=3, max_staleness=0)
    count = dict.fromkeys(range(5), 0)
    for group in order:
        buffer.add(trajectory(group))
        count[group] += 1
        assert buffer.ready == sum(n == 3 for n in count.values())
    taken = buffer.take(wanted)
    assert [[t.group for t in group] for group in taken] == [[g] * 3 for g in range(wanted)]
    assert buffer.ready == 5 - wanted


def test_lost_groups_are_counted_until_one_survives() -> None:
    buffer = Buffer(group_size=2, max_staleness=0)
    for number, kinds in enumerate([(1, 1), (0, 1), (0, 0), (1, 1)]):
        for failed in kinds:
            buffer.add(trajectory(number, outcome=Outcome.ENV_ERROR if failed else Outcome.FAILED))
        assert buffer.lost_in_a_row == (1, 2, 0, 1)[number]
    assert (buffer.dropped_env, buffer.ready) == (3, 1)
