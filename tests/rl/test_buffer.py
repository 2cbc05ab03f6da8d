"""Groups: environment failures, padding, staleness, order."""

from __future__ import annotations

from typing import Any

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
    group, buffer = group_of(valid, size), Buffer(size, 0)
    for response in group:
        buffer.add(response)
    sound = [t for t in group if t.outcome is not Outcome.ENV_ERROR]
    repaired = repair_group(sound, size)
    assert len(repaired) == (size if kept else 0) and (buffer.ready, buffer.dropped_env) == (kept, not kept)
    assert all(a is b for a, b in zip(repaired, sound + sound, strict=False))
    assert buffer.take(1) == ([repaired] if kept else []) and buffer.padded_responses == kept * (size - valid)


def test_failures_of_the_policy_stay() -> None:
    buffer = Buffer(4, 0)
    for kind in (Outcome.FAILED, Outcome.TRUNCATED, Outcome.MALFORMED, Outcome.SOLVED):
        buffer.add(trajectory(outcome=kind))
    (group,) = buffer.take(1)
    assert [t.outcome for t in group] == ["failed", "truncated", "malformed", "solved"]


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
    assert (buffer.ready, buffer.dropped_stale, buffer.dropped, buffer.stale_responses) == (2, 1, 1, 1)
    assert [g[0].group for g in buffer.take(5)] == [0, 2]


def test_only_the_stale_response_is_dropped_and_the_group_is_repaired() -> None:
    buffer = Buffer(group_size=4, max_staleness=2)
    kept = [trajectory(0, (8,)), trajectory(0, (9, 8)), trajectory(0, (10,))]
    for response in (kept[0], trajectory(0, (9, 7)), *kept[1:]):
        buffer.add(response)
    buffer.drop_stale(10)
    assert (buffer.ready, buffer.dropped, buffer.stale_responses) == (1, 0, 1)
    (group,) = buffer.take(1)
    assert all(a is b for a, b in zip(group, [*kept, kept[0]], strict=True)) and buffer.padded_responses == 1


@given(
    st.integers(1, 5),
    st.integers(0, 3),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans())  # group, age of its oldest token, whether lost
        | st.sampled_from(["train", "look", "push"]),
        max_size=80,
    ),
)
def test_no_schedule_trains_on_what_is_stale_or_loses_count(size: int, limit: int, schedule: list[Any]) -> None:
    """Any order of responses, looks, batches and updates, with groups that wait for ever and versions that jump."""
    buffer, version, numbers = Buffer(size, limit), 9, dict.fromkeys(range(4), 0)
    added: list[Trajectory] = []
    taken: list[list[Trajectory]] = []
    for event in schedule:
        if event == "push":
            version += 1
        elif event == "look":
            buffer.drop_stale(version)
        elif event == "train":
            buffer.drop_stale(version)
            for group in buffer.take(2):
                assert len(group) == size and len({t.group for t in group}) == 1
                assert all(staleness(t, version) <= limit and t.outcome is not Outcome.ENV_ERROR for t in group)
                unique = list({id(t): t for t in group}.values())
                assert 2 * len(unique) > size and all(a is unique[i % len(unique)] for i, a in enumerate(group))
                taken.append(unique)
        else:
            slot, age, lost = event
            number = slot + 4 * (numbers[slot] // size)  # a new group begins after every `size` responses
            numbers[slot] += 1
            kind = Outcome.ENV_ERROR if lost else Outcome.FAILED
            added.append(trajectory(number, (version, version - age), kind))
            buffer.add(added[-1])
    trained = [t for group in taken for t in group]
    assert len({id(t) for t in trained}) == len(trained), "a response was trained on in two batches"
    complete = sum(count // size for count in numbers.values())
    assert complete == len(taken) + buffer.dropped + buffer.ready
    assert buffer.padded_responses == sum(size - len(group) for group in taken)
    # Too few valid responses: nothing of the group was trained on.
    for number in {t.group for t in added}:
        group = [t for t in added if t.group == number]
        sound = [t for t in group if t.outcome is not Outcome.ENV_ERROR]
        mine = [t for t in trained if t.group == number]
        if len(group) == size and 2 * len(sound) <= size:
            assert not mine
    assert buffer.stale_responses <= sum(t.outcome is not Outcome.ENV_ERROR for t in added) - len(trained)


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


@pytest.mark.parametrize(("stopped", "kept"), [(3, True), (4, False), (7, False)])
def test_a_response_that_was_stopped_as_stale_is_never_trained_on(stopped: int, kept: bool) -> None:
    """It may have no token yet, and then it has no age."""
    buffer = Buffer(7, 1)
    for number in range(7):
        versions = () if number < stopped else (5,)
        response = trajectory(versions=versions, outcome=Outcome.TRUNCATED if number < stopped else Outcome.SOLVED)
        response.detail |= {"cut": "stale", "stale_at": 5} if number < stopped else {}
        buffer.add(response)
    buffer.drop_stale(5)
    (group,) = buffer.take(1) or [[]]
    assert [bool(t.turns) for t in group] == [True] * (7 if kept else 0)
    assert (buffer.dropped_stale, buffer.dropped_env, buffer.gone) == ((0, 0, []) if kept else (1, 0, [0]))
    assert buffer.stale_responses == stopped and buffer.lost_in_a_row == 0
