"""What answers sum up to: shares, rewards, dollars, pass^k, and changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glm5.config.suite import SuitePart
from glm5.errors import ConfigError
from glm5.eval.passk import all_of_k
from glm5.eval.suite import find_suite
from glm5.eval.summary import difference, summary
from glm5.stats import Interval, bounded_mean, clustered_share, mean_interval, mean_of_groups, wilson


def test_dollars_have_no_bounds_and_one_year_has_no_interval() -> None:
    suite = find_suite("vending-bench-2", {}, repeats=2)

    def rows(*balances: float) -> list[dict[str, Any]]:
        return [
            {
                "cell": "vending",
                "key": f"{i // 2}",
                "place": i // 2,
                "repeat": i % 2,
                "outcome": "failed",
                "reward": dollars,
            }
            for i, dollars in enumerate(balances)
        ]

    found = summary(suite, rows(400.0, 600.0, 1000.0, 3000.0, -8.0, 8.0))
    want = mean_interval([500.0, 2000.0, 0.0])
    assert found == pytest.approx({**want.plain(), "unit": "$", "note": suite.note}) and found["high"] > 3000
    alone = summary(suite, rows(400.0, 600.0))
    assert (alone["score"], alone["low"], alone["high"], alone["n"]) == (500.0, None, None, 1)
    assert "Infinity" not in json.dumps(alone)
    change = difference(suite, rows(500.0, 700.0, 900.0, 900.0), rows(400.0, 600.0, 1000.0, 1000.0))
    assert change["score"] == 0.0 and change["low"] == -change["high"] < -1000


def test_checks_of_some_parts_count_beside_the_whole_problems() -> None:
    parts = [SuitePart(name=name, family="arithmetic") for name in ("pages", "sums")]
    suite = find_suite("arithmetic", {}).model_copy(update={"parts": parts})
    rows: list[dict[str, Any]] = [{"cell": "sums", "place": 0, "reward": 1.0, "outcome": "solved"}]
    for place, said in enumerate((["pass"] * 4, ["pass", "error"], ["fail"] * 2)):
        checks = {str(number): one for number, one in enumerate(said)}
        outcome = "solved" if set(said) == {"pass"} else "failed"
        rows.append({"cell": "pages", "place": place, "reward": 0.0, "outcome": outcome, "checks": checks})
        rows[-1]["built"] = place < 2
    found = summary(suite, rows)
    assert (found["cells"]["pages"]["score"], found["cells"]["sums"]["n"]) == (pytest.approx(1 / 3), 1)
    assert found["checks"].keys() == found["built"].keys() == {"all", "pages"} and found["unjudged"] == 1
    assert found["checks"]["pages"] == clustered_share([4, 1, 0], [4, 2, 2]).plain()
    assert found["built"]["pages"] == bounded_mean([1, 1, 0]).plain()


def test_pass_hat_k() -> None:
    """By hand: of four answers to each of three problems, 4, 2 and 0 are right."""
    suite = find_suite("arithmetic", {}).model_copy(update={"repeats": 4, "all_of": [1, 2, 4]})
    rows = [
        {
            "cell": "arithmetic",
            "place": place,
            "repeat": i,
            "reward": 0.0,
            "outcome": "solved" if i < right else "failed",
        }
        for place, right in enumerate((4, 2, 0))
        for i in range(4)
    ]
    found = summary(suite, rows)["pass^k"]
    assert [found[k]["score"] for k in ("1", "2", "4")] == pytest.approx([0.5, (1 + 1 / 6) / 3, 1 / 3])
    assert found["4"]["n"] == 3 and found["4"]["low"] < 1 / 3 < found["4"]["high"]
    assert [all_of_k(4, 2, k) for k in (1, 2, 3)] == pytest.approx([1 / 2, 1 / 6, 0.0])
    for wrong in ((4, 5, 1), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ConfigError):
            all_of_k(*wrong)
    with pytest.raises(ConfigError, match="at least as many repeats"):
        find_suite("tau2-bench", {}, repeats=2)


def test_families_are_scored_as_before() -> None:
    rows = [{"cell": "arithmetic", "place": i, "repeat": 0, "outcome": o, "reward": 0.3} for i, o in enumerate(
        ["solved", "failed", "env_error", "solved"])]  # fmt: skip
    found = summary(find_suite("arithmetic", {}), rows)
    interval = wilson(2, 4)
    assert found == pytest.approx({"score": 0.5, "low": interval.low, "high": interval.high, "n": 4, "errors": 1})


def test_means_of_groups() -> None:
    """One group is itself; many equal ones narrow the interval by the root of their number."""
    one = Interval(0.5, 0.3, 0.8, 10)
    assert mean_of_groups([one]) == one
    four = mean_of_groups([one] * 4)
    assert (four.low, four.high, four.n) == pytest.approx((0.4, 0.65, 40))
    assert bounded_mean([1.0, 0.0, 1.0, 1.0]) == wilson(3, 4)
    for few in ([0.5], [0.5, 0.5], [0.5, 0.5, 0.501], [0.2, 0.4, 0.3]):
        found = bounded_mean(few, most=64 * len(few))
        assert 0.0 <= found.low < found.value < found.high <= 1.0 and found.high - found.low > 0.25
    for values in ([], [1.5], [-0.1]):
        with pytest.raises(ValueError, match="rewards"):
            bounded_mean(values)
    with pytest.raises(ValueError, match="no groups"):
        mean_of_groups([])
