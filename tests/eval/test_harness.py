"""Evaluation: scores against independent computations, intervals, and the layout that reports read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from glm5.chat import render_chat
from glm5.config.evaluation import EvalConfig
from glm5.config.families import FamilyConfig
from glm5.engine.engine import Engine
from glm5.engine.measure_acceptance import generate_speculative
from glm5.eval import harness
from glm5.eval.harness import (
    continuation_logprobs,
    evaluate,
    mtp_acceptance,
    needle_score,
    sampled_score,
    score,
    skill_score,
)
from glm5.records import Completion, Outcome, Trajectory, Turn
from glm5.seeds import derive_seed
from glm5.stats import wilson
from glm5.tasks import DistinctProblems, make_family, needle_text

ARITHMETIC = FamilyConfig(name="arithmetic", options={"levels": [1], "thinking": False})
CONFIG = EvalConfig(
    families=[ARITHMETIC, FamilyConfig(name="toolcall")], problems=3, max_tokens=5, max_context=700, text_bytes=60,
    needle_bytes=[40, 64], needle_problems=4, mtp_prompts=3, mtp_tokens=6,
)  # fmt: skip


def test_continuations_are_scored_like_the_engine_scores(small: Any, tokenizer: Any) -> None:
    model = small(seed=1)
    prompt = tokenizer.encode("ab = 12\ncd = 34\nab = ")
    choices = [tokenizer.encode(text) for text in ("12\n", "34\n", "7", "a longer one\n")]
    with torch.no_grad():
        found = continuation_logprobs(model, prompt, choices)
    scores = Engine(model).score([[*prompt, *choice] for choice in choices])
    expected = [sum(line[len(prompt) - 1 :]) for line in scores]
    assert found == pytest.approx(expected, abs=1e-5)
    assert all(len(line) - len(prompt) + 1 == len(c) for line, c in zip(scores, choices, strict=True))


def test_needle_score_equals_a_comparison_by_hand(small: Any, tokenizer: Any) -> None:
    """A document of 40 bytes has at most four values, so that every one of them is a choice."""
    model = small(seed=2)
    engine, right, chance = Engine(model), [], []
    for index in range(8):
        prompt, answer = needle_text(3, index, 40, index / 7, split="heldout")
        values = {line.split(" = ")[1] + "\n" for line in prompt.split("\n")[:-1]}
        assert answer in values and 2 <= len(values) <= 4
        context = tokenizer.encode(prompt)
        likelihood = {
            value: sum(engine.score([context + tokenizer.encode(value)])[0][len(context) - 1 :]) for value in values
        }
        right.append(max(likelihood, key=likelihood.__getitem__) == answer)
        chance.append(1 / len(values))
    found = needle_score(model, tokenizer, 40, 8, 3)
    assert found == {**score(sum(right), 8), "chance": pytest.approx(sum(chance) / 8)}
    assert 0 < sum(right) < 8


def test_a_model_that_can_retrieve_scores_one(small: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def oracle(model: Any, prompt: list[int], choices: Sequence[list[int]]) -> list[float]:
        *lines, query = tokenizer.decode(prompt).split("\n")
        (value,) = [line.removeprefix(query) for line in lines if line.startswith(query)]
        texts = [tokenizer.decode(choice) for choice in choices]
        assert len(set(texts)) == len(texts) <= 4 and all(text.strip() in tokenizer.decode(prompt) for text in texts)
        return [float(text == f"{value}\n") for text in texts]

    monkeypatch.setattr(harness, "continuation_logprobs", oracle)
    for length in (64, 512, 4000):
        found = needle_score(small(), tokenizer, length, 10, 0)
        assert (found["score"], found["n"], found["chance"]) == (1.0, 10, pytest.approx(0.25))
    monkeypatch.setattr(harness, "continuation_logprobs", lambda *args: [-value for value in oracle(*args)])
    assert needle_score(small(), tokenizer, 64, 10, 0)["score"] == 0.0


@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize(
    "taste", [int, lambda v: -int(v), lambda v: int(v[::-1])], ids=["large", "small", "last digit"]
)
def test_a_taste_for_some_values_is_worth_chance(
    small: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, length: int, taste: Callable[[str], int]
) -> None:
    """These judge the values without looking at the document."""

    def judge(model: Any, prompt: Any, choices: Sequence[list[int]]) -> list[float]:
        return [float(taste(tokenizer.decode(choice).strip())) for choice in choices]

    monkeypatch.setattr(harness, "continuation_logprobs", judge)
    found = needle_score(small(), tokenizer, length, 400, 0)
    chance = found["chance"]
    assert abs(found["score"] - chance) < 4 * (chance * (1 - chance) / 400) ** 0.5


def test_values_of_one_document_have_one_length(small: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = set()

    def shorter(model: Any, prompt: Any, choices: Sequence[list[int]]) -> list[float]:
        lengths.update(len(choice) for choice in choices)
        return [float(-len(choice)) for choice in choices]

    monkeypatch.setattr(harness, "continuation_logprobs", shorter)
    assert needle_score(small(), tokenizer, 64, 200, 0)["score"] == 0.0 and len(lengths) == 1


def test_a_model_without_any_preference_retrieves_nothing(
    small: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    assert needle_score(model, tokenizer, 64, 4, 0)["score"] == 0.0
    monkeypatch.setattr(harness, "continuation_logprobs", lambda model, prompt, choices: [-5.0] * len(choices))
    assert needle_score(model, tokenizer, 64, 4, 0)["score"] == 0.0


class Gold:
    """An engine that answers as the demonstrations of some held-out problems do, and wrongly otherwise."""

    def __init__(self, tokenizer: Any, known: int) -> None:
        family = make_family("arithmetic", **ARITHMETIC.options)
        self.rows = []
        for index in DistinctProblems(family, "heldout").indices(known):
            rendered = render_chat(
                family.problem("heldout", index).demonstration(0), tokenizer=tokenizer, enable_thinking=False,
                clear_thinking=False, add_generation_prompt=False, close_last=True,
            )  # fmt: skip
            self.rows.append(rendered.ids)
        self.wrong = [*tokenizer.encode("no"), tokenizer.special["<|user|>"]]
        self.temperatures: set[float] = set()

    def __call__(self, *args: Any, **options: Any) -> Gold:
        return self

    def generate(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Completion]:
        self.temperatures |= {p.temperature for p in params}
        found = []
        for prompt in prompts:
            row = next((r for r in self.rows if r[: len(prompt)] == list(prompt)), None)
            ids = row[len(prompt) :] if row else self.wrong
            found.append(Completion(list(ids), [0.0] * len(ids), [0] * len(ids), "stop"))
        return found


def test_skills_count_what_is_solved(small: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gold = Gold(tokenizer, known=0)
    config = CONFIG.model_copy(update={"families": [ARITHMETIC], "problems": 6, "needle_bytes": []})
    family = make_family("arithmetic", **ARITHMETIC.options)
    problems = [family.problem("heldout", i) for i in DistinctProblems(family, "heldout").indices(6)]
    assert len({p.key for p in problems}) == 6
    for known in (0, 2, 6):
        gold = Gold(tokenizer, known)
        monkeypatch.setattr(harness, "Engine", gold)
        found = evaluate(small(), tokenizer, config, None)
        interval = wilson(known, 6)
        assert found["skills"] == {
            "arithmetic": {
                "score": known / 6, "low": interval.low, "high": interval.high, "n": 6,
                "solved": "1" * known + "0" * (6 - known),
            }
        }  # fmt: skip
        assert gold.temperatures == {0.0}
    first = found["samples"][0]
    assert first["output"].startswith(str(problems[0].answer)) and first["reward"] == 1.0  # type: ignore[attr-defined]
    assert problems[0].prompt in first["prompt"] and first["family"] == "arithmetic"


@pytest.mark.parametrize("monotone", [False, True])
def test_mtp_acceptance_is_that_of_speculative_decoding(small: Any, shard: Any, monotone: bool) -> None:
    model = small(seed=4)
    if monotone:  # every token is token 0, so every draft is right
        torch.nn.init.zeros_(model.lm_head.weight)
    found = mtp_acceptance(model, shard, CONFIG, prompt_length=20)
    stride = (len(shard.tokens) - 20) // 3
    prompts = [shard.tokens[i * stride : i * stride + 20].tolist() for i in range(3)]
    result = generate_speculative(model, prompts, max_tokens=6)
    assert found["n"] == result.rounds and 3 * 5 / 4 <= result.rounds <= 3 * 5
    assert found["per_position"] == [count / result.rounds for count in result.accepted]
    assert len(found["per_position"]) == 3
    assert found["per_position"] == sorted(found["per_position"], reverse=True)
    assert found["accept_length"] == pytest.approx(1 + sum(found["per_position"]))
    assert found["accept_length"] == 4.0 if monotone else 1.0 <= found["accept_length"] < 1.5


def test_a_small_family_is_scored_on_what_it_has(
    small: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sums of two digits have 55 contents in all three splits together; a hundred held-out ones are not there."""
    config = CONFIG.model_copy(update={"families": [ARITHMETIC], "problems": 100, "needle_bytes": []})
    family = make_family("arithmetic", **ARITHMETIC.options)
    keys = {family.problem("heldout", index).key for index in range(2000)}
    monkeypatch.setattr(harness, "Engine", Gold(tokenizer, known=0))
    found = evaluate(small(), tokenizer, config, None)["skills"]["arithmetic"]
    assert found["n"] == len(found["solved"]) == len(keys) < 55 and found["asked"] == 100
    assert f"arithmetic has only {len(keys)} distinct held-out problems" in caplog.text


def test_a_family_that_is_listed_twice_keeps_both_scores(
    small: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry that is listed once has the name and the draws that it would have alone."""
    twice = [ARITHMETIC, ARITHMETIC.model_copy(update={"options": {"levels": [3], "thinking": False}})]
    update: dict[str, Any] = {"families": [*twice, FamilyConfig(name="toolcall")], "needle_bytes": [], "problems": 2}
    config = CONFIG.model_copy(update=update | {"samples": 1, "ks": [1]})
    seeds: list[Any] = []
    play_skill = harness.play_skill

    def noted(*given: Any) -> Any:
        seeds.extend(given[4:])
        return play_skill(*given)

    monkeypatch.setattr(harness, "play_skill", noted)
    found = evaluate(small(), tokenizer, config, None, seed=3)
    assert list(found["skills"]) == ["arithmetic.1", "arithmetic.2", "toolcall"]
    assert all("pass@k" in entry and entry["n"] == 2 for entry in found["skills"].values())
    assert [s["family"] for s in found["samples"]] == ["arithmetic.1"] * 2 + ["arithmetic.2"] * 2 + ["toolcall"] * 2
    names = ("arithmetic.1", "arithmetic.2", "toolcall")
    assert seeds == [derive_seed(3, "pass@k", name) for name in names]


def test_evaluate_returns_the_documented_layout(small: Any, tokenizer: Any, shard: Any) -> None:
    model = small()
    found = evaluate(model, tokenizer, CONFIG, shard, seed=5)
    assert found.keys() == {"text", "skills", "samples", "needle", "mtp"}
    assert found["text"].keys() == {"bits_per_byte", "bytes"}
    assert list(found["skills"]) == ["arithmetic", "toolcall"] and list(found["needle"]) == ["40", "64"]
    for entry in found["skills"].values():
        assert entry.keys() == {"score", "low", "high", "n", "solved"} and entry["n"] == len(entry["solved"]) == 3
    for entry in found["needle"].values():
        assert entry.keys() == {"score", "low", "high", "n", "chance"} and entry["n"] == 4
        assert entry["low"] <= entry["score"] <= entry["high"]
    assert [s["family"] for s in found["samples"]] == ["arithmetic"] * 2 + ["toolcall"] * 2
    assert all(s.keys() == {"family", "prompt", "output", "reward"} for s in found["samples"])
    assert found["mtp"].keys() == {"accept_length", "per_position", "n"}
    assert json.loads(json.dumps(found)) == found
    assert evaluate(model, tokenizer, CONFIG, shard, seed=5) == found
    assert all(parameter.grad is None for parameter in model.parameters())


def test_suites_that_cannot_run_are_left_out(small: Any, tokenizer: Any, shard: Any) -> None:
    bare = EvalConfig(text_bytes=60, mtp_prompts=2, mtp_tokens=3)
    assert evaluate(small(), tokenizer, bare, None) == {"skills": {}, "samples": [], "needle": {}}
    assert evaluate(small(num_nextn_predict_layers=0), tokenizer, bare, shard).keys() == {
        "text", "skills", "samples", "needle",
    }  # fmt: skip


def test_samples_show_what_was_said(small: Any, tokenizer: Any) -> None:
    config = CONFIG.model_copy(update={"families": [ARITHMETIC], "needle_bytes": [], "problems": 2})
    model = small(seed=6)
    found = evaluate(model, tokenizer, config, None)["samples"]
    for sample, trajectory in zip(found, harness.play_skill(model, tokenizer, ARITHMETIC, config), strict=True):
        turn = trajectory.turns[0]
        assert len(turn.output_ids) <= config.max_tokens
        assert sample["prompt"] == tokenizer.decode(turn.context_ids)
        assert sample["output"] == tokenizer.decode(turn.output_ids)
        assert trajectory.outcome is not Outcome.ENV_ERROR
        ids = list(turn.context_ids)
        for token in turn.output_ids:  # greedy, whatever the engine's seed
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)


def test_what_counts_as_solved_is_the_outcome() -> None:
    """A family may pay 0.9 or 2 for what it calls solved."""
    turn = Turn((1,), (2,), (-1.0,), (0,), "stop")
    paid = [(0.9, Outcome.SOLVED), (2.0, Outcome.SOLVED), (1.0, Outcome.FAILED), (0.0, Outcome.FAILED)]
    played = [Trajectory("p", "p", i, [turn], reward, outcome) for i, (reward, outcome) in enumerate(paid)]
    assert skill_score(played)["solved"] == "1100"
    drawn = CONFIG.model_copy(update={"samples": 1, "ks": [1]})
    assert sampled_score(played, drawn)["passed"] == "1 1 0 0"
