"""Pass-rate caches and the families that they filter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.errors import ConfigError, DataError
from glm5.records import Outcome, Trajectory
from glm5.tasks import make_family
from glm5.tasks.difficulty import (
    DifficultySampler,
    PassCount,
    count_passes,
    family_key,
    read_pass_counts,
    within,
    write_pass_counts,
)

RATES = {0: PassCount(0, 8), 3: PassCount(4, 8), 4: PassCount(8, 8), 7: PassCount(1, 10), 9: PassCount(9, 10)}


def test_counts_of_a_policy_and_family_add_up(tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    write_pass_counts(path, "sft", "math {}", {3: PassCount(1, 8), 4: PassCount(0, 8)})
    write_pass_counts(path, "base", "math {}", {3: PassCount(8, 8)})
    write_pass_counts(path, "sft", "code {}", {3: PassCount(8, 8)})
    write_pass_counts(path, "sft", "math {}", {3: PassCount(2, 4)})
    assert read_pass_counts(path, "sft", "math {}") == {3: PassCount(3, 12), 4: PassCount(0, 8)}
    assert read_pass_counts(path, "nobody", "math {}") == {}


GOOD = {"policy": "sft", "family": "math {}", "index": 1, "passed": 1, "tries": 2}


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", "[" * 50_000, "{}", json.dumps({**GOOD, "more": 1}), json.dumps({**GOOD, "index": "1"}),
     json.dumps({**GOOD, "passed": 3}), json.dumps({**GOOD, "tries": 0, "passed": 0}),
     json.dumps({**GOOD, "index": -1}),
     json.dumps({**GOOD, "passed": -1}), json.dumps({**GOOD, "index": True}), json.dumps({**GOOD, "passed": 0.5}),
     json.dumps({**GOOD, "policy": None})],
)  # fmt: skip
def test_malformed_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rates.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(DataError, match=r"rates\.jsonl:3: "):
        read_pass_counts(path, "other", "other")


def test_missing_and_binary_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_pass_counts(tmp_path / "no.jsonl", "a", "b")
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="UTF-8"):
        read_pass_counts(tmp_path / "b", "a", "b")


def test_counts_come_from_trajectories() -> None:
    def played(problem: str, outcome: Outcome) -> Trajectory:
        return Trajectory(problem, "math", 0, [], float(outcome is Outcome.SOLVED), outcome)

    solved, failed, lost = Outcome.SOLVED, Outcome.FAILED, Outcome.ENV_ERROR
    played_all = [
        played(f"math/train/0/{i}", o) for i, o in ((1, solved), (1, failed), (2, failed), (1, lost), (5, lost))
    ]
    assert count_passes(played_all) == {1: PassCount(1, 2), 2: PassCount(0, 1)}
    for name in ("math/heldout/0/1", "math", "math/train/0/x"):
        with pytest.raises(DataError, match="no training problem"):
            count_passes([played(name, solved)])


def test_bounds_are_inclusive() -> None:
    assert within(RATES, 0.1, 0.9) == [3, 7, 9] and within(RATES, 0, 0) == [0] and within(RATES, 1, 1) == [4]


@settings(deadline=None, max_examples=80)
@given(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.99]), st.integers(0, 300), st.integers(0, 5))
def test_the_sampler_keeps_the_share_and_repeats_nothing_unseen(unseen: float, draws: int, seed: int) -> None:
    sampler = DifficultySampler(RATES, 0.1, 0.9, unseen, seed)
    drawn = [sampler.index(draw) for draw in range(draws)]
    new = [index for index in drawn if index not in RATES]
    old = [index for index in drawn if index in RATES]
    assert set(old) <= {3, 7, 9} and len(set(new)) == len(new) and abs(len(new) - unseen * draws) <= 0.5
    for start in range(0, len(old) - 2, 3):
        assert sorted(old[start : start + 3]) == [3, 7, 9]  # every round has each once
    again = DifficultySampler(RATES, 0.1, 0.9, unseen, seed)
    assert [again.index(draw) for draw in reversed(range(draws))] == drawn[::-1]
    assert sampler.index(10**9) >= 0


def test_impossible_samplers_are_refused() -> None:
    for low, high, unseen in ((0.5, 0.4, 0), (-1, 1, 0), (0, 2, 0), (0, 1, 1.5)):
        with pytest.raises(ConfigError, match="difficulty"):
            DifficultySampler(RATES, low, high, unseen)
    with pytest.raises(DataError, match="none of 5"):
        DifficultySampler(RATES, 0.2, 0.3)
    assert [DifficultySampler({}, 0.2, 0.3, 1).index(i) for i in range(3)] == [0, 1, 2]


def test_a_family_with_the_option_draws_kept_training_problems_only(tmp_path: Path) -> None:
    path, options = tmp_path / "rates.jsonl", {"levels": [1], "topics": ["linear"]}
    write_pass_counts(path, "sft", family_key("math", options), RATES)
    plain = make_family("math", **options)
    difficulty = {"cache": str(path), "policy": "sft", "low": 0.1, "high": 0.9}
    family = make_family("math", **options, difficulty=difficulty)
    kept = {plain.problem("train", index).prompt for index in (3, 7, 9)}
    assert {family.problem("train", 1_000_000 + index).prompt for index in range(30)} == kept
    assert family.problem("heldout", 5) == plain.problem("heldout", 5)
    assert (family.name, family.domain) == ("math", "math")
    with pytest.raises(ConfigError, match="cache and policy"):
        make_family("math", difficulty={"cache": str(path)})
    with pytest.raises(DataError, match="none of 0"):
        make_family("math", difficulty=difficulty)  # measured with other options
