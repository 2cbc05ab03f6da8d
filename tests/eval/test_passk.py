"""pass@k: the estimator against all subsets, its interval against repetition, and what an evaluation draws."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from pydantic import ValidationError

from glm5.config.evaluation import EvalConfig
from glm5.config.families import FamilyConfig
from glm5.errors import ConfigError, GradingError
from glm5.eval import harness
from glm5.eval.harness import evaluate, play_skill
from glm5.eval.passk import pass_at_k, pass_score, pass_scores
from glm5.records import Completion, Message, Outcome, StepResult
from glm5.stats import wilson
from glm5.tasks import DistinctProblems, Episode, families

ARITHMETIC = FamilyConfig(name="arithmetic", options={"levels": [1], "thinking": False})
CONFIG = EvalConfig(
    families=[ARITHMETIC], problems=5, max_tokens=4, max_context=300, samples=3, ks=[1, 2], mtp_prompts=0
)


@pytest.mark.parametrize("samples", [1, 2, 5, 6])
def test_the_estimate_is_the_share_of_subsets_with_a_right_answer(samples: int) -> None:
    for passed, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        answers = [True] * passed + [False] * (samples - passed)
        subsets = list(itertools.combinations(answers, k))
        assert pass_at_k(samples, passed, k) == pytest.approx(float(Fraction(sum(map(any, subsets)), len(subsets))))


def test_published_and_extreme_values() -> None:
    assert pass_at_k(8, 2, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of 6 pairs
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)
    assert pass_at_k(10_000, 3, 5000) == pytest.approx(1 - 5000 * 4999 * 4998 / (10_000 * 9999 * 9998))
    assert [pass_at_k(8, c, 8) for c in (0, 1, 8)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_what_cannot_be_estimated_is_refused(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ConfigError, match=f"pass@{k} .* draw at least k samples"):
        pass_at_k(samples, passed, k)
    with pytest.raises(ConfigError, match="no problems"):
        pass_score([], 4, 1)


def test_the_mean_is_over_problems() -> None:
    found = pass_scores([0, 1, 4], 4, [2, 1, 2])
    assert list(found) == ["1", "2"]
    assert found["1"]["score"] == pytest.approx((0 + 1 / 4 + 1) / 3)
    assert found["2"]["score"] == pytest.approx((0 + 3 / 6 + 1) / 3)
    assert all(part["n"] == 3 and 0 <= part["low"] < part["score"] < part["high"] <= 1 for part in found.values())


@pytest.mark.parametrize(("right", "n"), [(0, 20), (20, 20), (7, 20), (1, 3)])
@pytest.mark.parametrize(("samples", "k"), [(1, 1), (8, 8), (8, 1)])
def test_right_or_wrong_values_have_wilsons_interval(right: int, n: int, samples: int, k: int) -> None:
    """Of 8 samples all or none are right, so that more of them tell nothing."""
    found, expected = pass_score([samples] * right + [0] * (n - right), samples, k), wilson(right, n)
    assert (found["score"], found["n"]) == (pytest.approx(right / n), n)
    assert (found["low"], found["high"]) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_samples_that_tell_something_narrow_the_interval() -> None:
    """1, 2 or 3 of 4 right: narrower than for as many problems of one sample. 2 everywhere say nothing on the spread,
    and count as 20 answers, made wider as Student's t is."""
    found, single = pass_score([1, 2, 3, 2] * 5, 4, 1), wilson(10, 20)
    assert single.low < found["low"] < found["high"] < single.high
    number = 20 * (1.959964 / 2.093024) ** 2
    found, expected = pass_score([2] * 20, 4, 1), wilson(number / 2, number)
    assert (found["low"], found["high"]) == (pytest.approx(expected.low), pytest.approx(expected.high))


@pytest.mark.parametrize(("a", "b", "least"), [(0.3, 0.3, 0.93), (2.0, 5.0, 0.93), (0.2, 4.0, 0.88)])
@pytest.mark.parametrize("k", [1, 4])
def test_the_interval_covers_what_it_should(a: float, b: float, least: float, k: int) -> None:
    """Problems whose chances are drawn from Beta(a, b); pass@k of one is 1 - (1-p)^k, of all its mean over p. Where
    nearly all of 60 problems are hopeless, no interval keeps its 95 %; Student's has less."""
    rng = random.Random(f"{a} {b} {k}")
    truth = 1.0
    for i in range(k):
        truth *= (b + i) / (a + b + i)
    truth = 1.0 - truth
    covered = 0
    for _ in range(400):
        chances = [rng.betavariate(a, b) for _ in range(60)]
        found = pass_score([sum(rng.random() < p for _ in range(8)) for p in chances], 8, k)
        covered += found["low"] <= truth <= found["high"]
    assert least <= covered / 400 <= 0.99


# ---------------------------------------------------------------------------------------------------- the evaluation


class Coin:
    """An engine whose answer depends on the seed alone, with 1 of 3 right."""

    def __init__(self, tokenizer: Any, answers: dict[tuple[int, ...], str]) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.asked: list[tuple[float, int | None]] = []
        self.options: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **options: Any) -> Coin:
        self.options.append(options)
        return self

    def generate(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Completion]:
        found = []
        for prompt, asked in zip(prompts, params, strict=True):
            self.asked.append((asked.temperature, asked.seed))
            right = asked.seed is not None and asked.seed % 3 == 0
            text = self.answers[tuple(prompt)] if right else "no"
            ids = [*self.tokenizer.encode(text), self.tokenizer.special["<|user|>"]]
            found.append(Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop"))
        return found


@pytest.fixture
def coin(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Coin:
    answers = {}
    family = families.make_family("arithmetic", **ARITHMETIC.options)
    for index in DistinctProblems(family, "heldout").indices(5):
        problem: Any = family.problem("heldout", index)
        context = Episode(problem.env(), tokenizer, max_context=300).pending()
        answers[tuple(context or ())] = str(problem.answer)
    made = Coin(tokenizer, answers)
    monkeypatch.setattr(harness, "Engine", made)
    return made


def test_an_evaluation_counts_right_samples_per_problem(small: Any, tokenizer: Any, coin: Coin) -> None:
    found = evaluate(small(), tokenizer, CONFIG, None, seed=2)["skills"]["arithmetic"]
    drawn = [(temperature, seed) for temperature, seed in coin.asked if seed is not None]
    greedy = [temperature for temperature, seed in coin.asked if seed is None]
    assert greedy == [0.0] * 5 and [t for t, _ in drawn] == [1.0] * 15 and len(set(drawn)) == 15
    right = [sum(drawn[5 * turn + i][1] % 3 == 0 for turn in range(3)) for i in range(5)]  # type: ignore[operator]
    assert 0 < sum(right) < 15
    assert found["passed"] == " ".join(map(str, right)) and found["samples"] == 3
    assert found["solved"] == "00000" and found["score"] == 0.0
    assert found["pass@k"] == {"1": pass_score(right, 3, 1), "2": pass_score(right, 3, 2)}
    assert found["pass@k"]["1"]["score"] == pytest.approx(sum(right) / 15)
    assert json.loads(json.dumps(found)) == found


def test_draws_depend_on_the_seed_and_not_on_how_many_follow(small: Any, tokenizer: Any, coin: Coin) -> None:
    def seeds(seed: int, samples: int) -> list[Any]:
        coin.asked.clear()
        evaluate(small(), tokenizer, CONFIG.model_copy(update={"samples": samples}), None, seed)
        return [s for _, s in coin.asked if s is not None]

    first = seeds(0, 3)
    assert seeds(0, 3) == first and seeds(0, 6)[:15] == first and not set(seeds(1, 3)) & set(first)


def test_without_samples_there_is_only_the_greedy_score(small: Any, tokenizer: Any, coin: Coin) -> None:
    found = evaluate(small(), tokenizer, CONFIG.model_copy(update={"samples": 0}), None)["skills"]["arithmetic"]
    assert found.keys() == {"score", "low", "high", "n", "solved"} and len(coin.asked) == 5


def test_the_engine_is_exact_unless_the_recipe_says_otherwise(small: Any, tokenizer: Any, coin: Coin) -> None:
    evaluate(small(), tokenizer, CONFIG, None)
    evaluate(small(), tokenizer, CONFIG.model_copy(update={"rollouts": "fast"}), None)
    assert [options["exact"] for options in coin.options] == [True, True, False, False]


def test_a_real_engine_draws_different_answers(small: Any, tokenizer: Any) -> None:
    played = play_skill(small(seed=3), tokenizer, ARITHMETIC, CONFIG, seed=1)
    assert [t.group for t in played] == [0, 1, 2, 3, 4] * 3
    assert len({t.turns[0].output_ids for t in played if t.group == 0}) > 1
    again = play_skill(small(seed=3), tokenizer, ARITHMETIC, CONFIG, seed=1)
    assert [t.turns for t in again] == [t.turns for t in played]
    greedy = play_skill(small(seed=3), tokenizer, ARITHMETIC, CONFIG)
    assert len(greedy) == 5


class Broken(families.Family):
    """A family whose odd problems cannot be judged; the others are always solved."""

    name = domain = "broken"

    def __init__(self, seed: int = 0) -> None:
        pass

    def problem(self, split: str, index: int) -> Any:
        class Problem:
            key = problem = f"broken/{index}"
            domain = "broken"

            def env(self) -> Any:
                return self

            def start(self) -> Any:
                return (Message("user", "?"),), (), False

            def step(self, message: Message | None) -> StepResult:
                if index % 2:
                    raise GradingError("out of order")
                return StepResult(done=True, reward=1.0, outcome=Outcome.SOLVED)

        return Problem()


def test_failures_of_the_environment_are_no_success_and_are_counted(
    small: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families.FAMILIES, "broken", Broken)
    config = CONFIG.model_copy(update={"families": [FamilyConfig(name="broken")]})
    found = evaluate(small(), tokenizer, config, None)["skills"]["broken"]
    assert (found["solved"], found["errors"], found["passed"], found["sample_errors"]) == ("10101", 2, "3 0 3 0 3", 6)


@pytest.mark.parametrize(
    ("values", "said"),
    [({"samples": 4}, "pass@8 needs at least 8 `samples` per problem, not 4"), ({"ks": [0]}, "greater than or equal"),
     ({"temperature": 0.0}, "greater than 0"), ({"samples": -1}, "greater than or equal"),
     ({"rollouts": "slow"}, "fast")],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EvalConfig(**values)
    assert EvalConfig(samples=8).ks == [1, 8] and EvalConfig(samples=2, ks=[]).samples == 2
