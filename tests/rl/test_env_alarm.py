"""The alarm when a family's environment begins to fail more often: exact levels, windows, and what it must notice."""

from __future__ import annotations

import random
from fractions import Fraction
from math import comb
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.records import Outcome, Trajectory
from glm5.rl.env_alarm import LEAST, LEVEL, Alarm, EnvAlarm, fisher
from glm5.rl.env_errors import EnvErrors

sizes = st.integers(1, 40)


def chance(k: int, rollouts: int, bad: int, whole: int) -> Fraction:
    """Of exactly `k` failures among the rollouts of the window."""
    return Fraction(comb(bad, k) * comb(whole - bad, rollouts - k), comb(whole, rollouts))


@given(sizes, sizes, st.data())
def test_fisher_is_the_exact_tail_and_keeps_its_level(rollouts: int, earlier: int, data: st.DataObject) -> None:
    whole = rollouts + earlier
    bad = data.draw(st.integers(0, whole))
    possible = range(max(0, bad - earlier), min(rollouts, bad) + 1)
    for failed in possible:
        tail = sum(chance(k, rollouts, bad, whole) for k in possible if k >= failed)
        assert fisher(failed, rollouts, bad - failed, earlier) == pytest.approx(float(tail), rel=1e-9, abs=1e-300)
    for level in (0.2, 0.01):  # whatever the common rate is, it is exceeded this rarely
        alarms = [k for k in possible if fisher(k, rollouts, bad - k, earlier) <= level]
        assert sum((chance(k, rollouts, bad, whole) for k in alarms), Fraction()) <= Fraction(level * (1 + 1e-9))


def feed(alarm: EnvAlarm, version: int, failures: int, rollouts: int, family: str = "f") -> list[Alarm]:
    """Spread the failures evenly."""
    found = []
    for i in range(rollouts):
        failed = (i + 1) * failures // rollouts > i * failures // rollouts
        if (one := alarm.add(family, version, "crash" if failed else None)) is not None:
            found.append(one)
    return found


def test_a_rise_is_told_once_per_window_with_its_numbers() -> None:
    alarm = EnvAlarm()
    assert feed(alarm, 0, 2, 100) == []
    (one,) = feed(alarm, 7, 90, 100)
    assert (one.family, one.version, one.failed, one.rollouts) == ("f", 7, 18, LEAST)
    assert (one.before, one.earlier, one.causes) == (2, 100, {"crash": 18}) and one.p_value < LEVEL
    assert str(one).startswith(
        "the environment of f fails more often than before: 18 of 20 rollouts since version 7 (18"
    )
    later = [len(feed(alarm, version, 90, 100)) for version in range(8, 30)]
    assert later[0] == 1 and later == sorted(later, reverse=True) and not later[-1]  # it becomes the usual rate


def test_a_small_rise_needs_more_rollouts() -> None:
    alarm = EnvAlarm()
    feed(alarm, 0, 20, 1000)
    (one,) = feed(alarm, 1, 60, 600)
    assert one.rollouts in (80, 160, 320) and one.failed / one.rollouts == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("per_version", [1, 7, 19])
def test_versions_with_few_rollouts_are_taken_together(per_version: int) -> None:
    alarm = EnvAlarm()
    version = 0
    for _ in range(60):
        version += 1
        assert feed(alarm, version, 0, per_version) == []
    found: list[Alarm] = []
    for _ in range(60):
        version += 1
        found += feed(alarm, version, per_version, per_version)
    assert found and found[0].version >= 60 - LEAST and found[0].rollouts >= LEAST


def test_without_earlier_rollouts_there_is_no_alarm() -> None:
    alarm = EnvAlarm()
    assert feed(alarm, 0, 90, 100) == []
    assert feed(alarm, 1, 1, 100) == []  # it falls
    assert feed(alarm, 1, 100, 100, "other") == []  # families are apart


@given(st.floats(0, 1), st.integers(0, 1 << 30))
def test_constant_rates_give_few_false_alarms(rate: float, seed: int) -> None:
    """The level holds for each window, so 40 windows have more than three alarms with a chance below 1e-7."""
    rng, alarm = random.Random(seed), EnvAlarm()
    found = [
        alarm.add("f", version, "crash" if rng.random() < rate else None)
        for version in range(40)
        for _ in range(rng.choice([5, 20, 64]))
    ]
    assert sum(one is not None for one in found) <= 3


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.booleans()), max_size=200), st.integers(0, 200))
def test_a_resume_changes_nothing(events: list[tuple[str, int, bool]], cut: int) -> None:
    whole, broken = EnvAlarm(), EnvAlarm()
    for i, (family, version, failed) in enumerate(events):
        if i == cut:
            state, broken = broken.state, EnvAlarm()
            broken.restore(state)
        cause = "crash" if failed else None
        assert whole.add(family, version, cause) == broken.add(family, version, cause)
    assert whole.state == broken.state


def trajectory(cause: str | None) -> Trajectory:
    outcome = Outcome.FAILED if cause is None else Outcome.ENV_ERROR
    return Trajectory("p", "d", 0, [], 0.0, outcome, {} if cause is None else {"cause": cause})


def test_metrics_and_log(caplog: pytest.LogCaptureFixture) -> None:
    errors = EnvErrors("rl", 0.9, 64)
    for i in range(40):
        errors.add("tools", trajectory("timeout" if i == 0 else None), 0)
    row = errors.row()
    assert (row["env_errors"], row["excluded/tools"], row["excluded/tools/timeout"]) == (1.0, 1 / 40, 1 / 40)
    assert not any(name.startswith("env_alarms") for name in row) and not caplog.text
    for i in range(20):
        errors.add("tools", trajectory("grading" if i % 2 else None), 1)
    state = errors.state
    row = errors.row()
    assert (row["excluded/tools"], row["excluded/tools/grading"], row["env_alarms/tools"]) == (0.5, 0.5, 1.0)
    assert "excluded/tools/timeout" not in row and row["env_errors"] == 11
    assert "rl: the environment of tools fails more often than before: 10 of 20 rollouts" in caplog.text
    again = EnvErrors("rl", 0.9, 64)
    again.restore(state)
    assert again.row() == row and again.state == errors.state
    old: dict[str, Any] = {name: state[name] for name in ("causes", "last", "latest")}
    again.restore(old)  # of an earlier version
    assert again.row()["env_errors"] == 11
