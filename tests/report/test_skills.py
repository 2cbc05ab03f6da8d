"""What stages gained, lost and brought back: intervals for pairs, the table of forgetting, recovery, all by hand."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from glm5.errors import DataError
from glm5.report import forgetting, recovered
from glm5.report.sections import recovery_table
from glm5.report.skills import recovery_sentences
from glm5.stats import paired_shares, ratio_of_means, wilson


def entry(solved: str, keep: bool = True) -> dict[str, Any]:
    found = wilson(solved.count("1"), len(solved))
    plain = {"score": found.value, "low": found.low, "high": found.high, "n": found.n}
    return plain | ({"solved": solved} if keep else {})


def run_of(stages: Sequence[tuple[str, str, dict[str, dict[str, Any]]]]) -> dict[str, Any]:
    made = [{"name": n, "kind": k, "evaluation": {"skills": skills}} for n, k, skills in stages]
    return {"name": "r", "stages": made}


# ------------------------------------------------------------------------------------------------------------ intervals


def mcnemar(won: int, lost: int) -> float:
    """Two-sided exact p-value."""
    n = won + lost
    tail = sum(math.comb(n, i) for i in range(min(won, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


def test_paired_shares_by_hand() -> None:
    """n = 98, 7 won and 2 lost: (8 - 3)/100 +- 1.96 sqrt((8/100 + 3/100 - (5/100)^2)/100)."""
    before = [False] * 7 + [True] * 2 + [True] * 50 + [False] * 39
    now = [True] * 7 + [False] * 2 + [True] * 50 + [False] * 39
    found = paired_shares(before, now)
    half = 1.959964 * math.sqrt((0.11 - 0.0025) / 100)
    assert (found.value, found.n) == (pytest.approx(5 / 98), 98)
    assert (found.low, found.high) == (pytest.approx(0.05 - half, abs=1e-6), pytest.approx(0.05 + half, abs=1e-6))
    with pytest.raises(ValueError, match="1 and 2"):
        paired_shares([True], [True, False])
    with pytest.raises(ValueError, match="0 and 0"):
        paired_shares([], [])


def test_paired_shares_decide_about_as_mcnemar_does() -> None:
    for won in range(31):
        for lost in range(31):
            same = 200 - won - lost
            found = paired_shares([False] * won + [True] * (lost + same), [True] * won + [False] * lost + [True] * same)
            p = mcnemar(won, lost)
            if p < 0.03:
                assert found.low > 0 or found.high < 0, (won, lost, p)
            if p > 0.085:
                assert found.low <= 0 <= found.high, (won, lost, p)


def test_paired_shares_cover() -> None:
    """Two stages with 0.6 and 0.5 of problems solved, that agree on most of them."""
    rng = random.Random(3)
    covered = 0
    for _ in range(600):
        pairs = [rng.choices([(1, 1), (1, 0), (0, 1), (0, 0)], [0.45, 0.05, 0.15, 0.35])[0] for _ in range(80)]
        found = paired_shares([bool(a) for a, _ in pairs], [bool(b) for _, b in pairs])
        covered += found.low <= 0.1 <= found.high
    assert 0.93 <= covered / 600 <= 0.98


def test_ratio_of_means_solves_fiellers_equation() -> None:
    rng = random.Random(1)
    below = [rng.gauss(2.0, 1.0) for _ in range(40)]
    above = [0.8 * b + rng.gauss(0.0, 0.5) for b in below]
    found = ratio_of_means(above, below)
    assert found is not None and found.low < found.value < found.high
    assert found.value == pytest.approx(sum(above) / sum(below))
    for limit in (found.low, found.high):
        rest = [a - limit * b for a, b in zip(above, below, strict=True)]
        mean = sum(rest) / 40
        error = math.sqrt(sum((r - mean) ** 2 for r in rest) / 39 / 40)
        assert abs(mean) / error == pytest.approx(2.0227, abs=1e-4)  # Student's, 39 degrees of freedom
    assert ratio_of_means([1.0, 2.0], [1.0, -1.0]) is None  # a mean of 0 below
    assert ratio_of_means([1.0], [1.0]) is None
    with pytest.raises(ValueError, match="2 and 1"):
        ratio_of_means([1.0, 2.0], [1.0])


def test_ratio_of_means_covers_the_share_that_came_back() -> None:
    """0.8 solved at best, 0.5 before, 0.74 after: 80 % of the loss."""
    rng = random.Random(7)
    covered = 0
    for _ in range(300):
        peak = [rng.random() < 0.8 for _ in range(300)]
        before = [p and rng.random() < 0.625 for p in peak]
        after = [p and (b or rng.random() < 0.8) for p, b in zip(peak, before, strict=True)]
        found = ratio_of_means(
            [a - b for a, b in zip(after, before, strict=True)], [p - b for p, b in zip(peak, before, strict=True)]
        )
        assert found is not None
        covered += found.low <= 0.8 <= found.high
    assert 0.92 <= covered / 300 <= 0.98


# ---------------------------------------------------------------------------------------------- forgetting and recovery

PEAK = "1" * 80 + "0" * 20
FALLEN = "1" * 50 + "0" * 50
BACK = "1" * 74 + "0" * 26
STAGES = [
    ("sft", "sft", {"maths": entry("1" * 40 + "0" * 60), "code": entry("0" * 60 + "1" * 40)}),
    ("reasoning", "reasoning", {"maths": entry(PEAK), "code": entry("0" * 62 + "1" * 38)}),
    ("agentic", "agentic", {"maths": entry(FALLEN), "code": entry("0" * 20 + "1" * 80)}),
    ("distill", "distill", {"maths": entry(BACK), "code": entry("0" * 22 + "1" * 78)}),
]


def test_forgetting_compares_with_the_best_earlier_stage() -> None:
    rows = forgetting(run_of(STAGES))
    assert [row.skill for row in rows] == ["maths", "code"]
    maths, code = ([(c.stage, c.best, c.change.verdict if c.change else None) for c in row.cells] for row in rows)
    assert maths == [("sft", "", None), ("reasoning", "sft", "better"), ("agentic", "reasoning", "worse"),
                     ("distill", "reasoning", "worse")]  # fmt: skip
    assert code == [("sft", "", None), ("reasoning", "sft", "same"), ("agentic", "sft", "better"),
                    ("distill", "agentic", "same")]  # fmt: skip
    change = rows[0].cells[2].change
    assert change is not None and change.paired and change.delta == pytest.approx(-0.3)
    # 0 won, 30 lost of 100: (1 - 31)/102 +- 1.96 sqrt((1/102 + 31/102 - (30/102)^2)/102)
    half = 1.959964 * math.sqrt((32 / 102 - (30 / 102) ** 2) / 102)
    assert change.low == pytest.approx(-30 / 102 - half, abs=1e-6)
    assert change.high == pytest.approx(-30 / 102 + half, abs=1e-6)
    assert rows[0].cells[3].change is not None and rows[0].cells[3].change.delta == pytest.approx(-0.06)


def test_pairs_settle_what_two_intervals_do_not() -> None:
    """6 problems of 100 lost and none won: settled problem by problem, noise between 0.80 and 0.74 otherwise."""
    for keep, verdict in ((True, "worse"), (False, "same")):
        stages = [("a", "sft", {"x": entry(PEAK, keep)}), ("b", "rl", {"x": entry(BACK, keep)})]
        change = forgetting(run_of(stages))[0].cells[1].change
        assert change is not None and (change.verdict, change.paired) == (verdict, keep)


@pytest.mark.parametrize(
    "texts", [(PEAK, "1" * 10), ("1" * 10, "0" * 10), (PEAK, "1" * 99 + "2"), (PEAK, None), ("", "")]
)
def test_outcomes_that_do_not_fit_are_not_paired(texts: tuple[str | None, str | None]) -> None:
    before, now = (entry(s) | {"solved": text} for s, text in zip((PEAK, BACK), texts, strict=True))
    change = forgetting(run_of([("a", "sft", {"x": before}), ("b", "rl", {"x": now})]))[0].cells[1].change
    assert change is not None and not change.paired and change.verdict == "same"


def test_what_distillation_brought_back() -> None:
    rows = recovered(run_of(STAGES))
    maths, code = rows
    assert (maths.stage, maths.skill, maths.best) == ("distill", "maths", "reasoning")
    assert maths.share == pytest.approx(24 / 30)
    below = [1.0] * 30 + [0.0] * 70
    above = [1.0] * 24 + [0.0] * 76
    expected = ratio_of_means(above, below)
    assert expected is not None and maths.low is not None
    assert (maths.low, maths.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert 0.6 < maths.low < 0.8 < (maths.high or 0) < 1.0
    assert maths.lost is not None and maths.lost.delta == pytest.approx(-0.3)
    assert code.share is None and code.best == "agentic"  # nothing was lost
    assert code.change is not None and code.change.delta == pytest.approx(-0.02) and code.change.verdict == "same"
    (said,) = recovery_sentences(rows)
    assert re.fullmatch(r"distill brought back 80% of maths \(\d\d% to \d\d%\)\.", said)
    table = recovery_table(rows)
    assert table is not None and [name for name, _ in table.rows] == ["maths in distill", "code in distill"]
    assert [cell.value for cell in table.rows[0][1]] == ["reasoning", "0.50", "0.74", "80%"]
    assert table.rows[1][1][3].value == "–"


def test_recovery_without_outcomes_has_a_share_but_no_interval() -> None:
    stages = [(n, k, {s: entry(v["solved"], keep=False) for s, v in skills.items()}) for n, k, skills in STAGES]
    maths, code = recovered(run_of(stages))
    assert maths.share == pytest.approx(0.8) and maths.low is None and code.share is None
    assert recovery_sentences([maths, code]) == ["distill brought back 80% of maths."]
    assert recovered(run_of(STAGES[:3])) == [] and recovery_table([]) is None


def test_a_distillation_that_costs_something_says_so() -> None:
    last = ("distill", "distill", {"maths": entry(FALLEN), "code": entry("0" * 60 + "1" * 40)})
    (said,) = recovery_sentences(recovered(run_of([*STAGES[:3], last])))
    assert said.endswith("code fell beyond noise.") and "0% of maths" in said


def test_results_of_another_shape_are_refused() -> None:
    for ask in (forgetting, recovered):
        with pytest.raises(DataError, match="stages"):
            ask({"stages": "none"})
        assert ask({"stages": [{"name": "a", "kind": "tokenizer"}]}) == []
