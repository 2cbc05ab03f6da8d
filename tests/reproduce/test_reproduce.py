"""`glm5 reproduce`: verdicts from intervals, what restarts and failures do, and quick runs of every experiment."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from glm5.cli import app
from glm5.config.model import GLM5Config
from glm5.data.packing import Batch
from glm5.errors import ConfigError, Glm5Error, UsageError
from glm5.files import publish_dir
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.reproduce import (
    EXPERIMENTS,
    command,
    efficient_attention,
    growing,
    joined,
    muon_split,
    plan,
    reproduce,
    runner,
    summary,
    verdict,
    worker,
)
from glm5.reproduce.measure import KeptAttention, block_loss, blocks, pinned_prompts, repetition, retrieval
from glm5.reproduce.plan import Experiment, Outcome, Question, Work, thinned
from glm5.stats import Interval, t_quantile
from glm5.tasks.needle import needle_text
from glm5.train.step_metrics import StepMetrics

NAMES = sorted(EXPERIMENTS)
LOWER = Question("a is lower", "loss", "a", "b", "lower", main=True)


# --------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("expect", "low", "high", "margin", "found"),  # the margin of "equal", the least that matters of the others
    [
        ("lower", -2.0, -0.1, 0.0, "supported"),
        ("lower", -2.0, 0.0, 0.0, "undecided"),
        ("lower", -2.0, 0.1, 0.0, "undecided"),
        ("lower", 0.1, 2.0, 0.0, "not supported"),
        ("higher", 0.1, 2.0, 0.0, "supported"),
        ("higher", -2.0, -0.1, 0.0, "not supported"),
        ("higher", -math.inf, math.inf, 0.0, "undecided"),
        ("higher", -0.1, 0.29, 0.3, "not supported"),
        ("higher", -0.1, 0.31, 0.3, "undecided"),
        ("higher", 0.01, 0.29, 0.3, "not supported"),
        ("higher", 0.01, 0.31, 0.3, "supported"),
        ("lower", -0.29, 0.1, 0.3, "not supported"),
        ("lower", -0.31, 0.1, 0.3, "undecided"),
        ("lower", -0.29, -0.01, 0.3, "not supported"),
        ("lower", -0.31, -0.01, 0.3, "supported"),
        ("lower", -math.inf, math.inf, 0.3, "undecided"),
        ("equal", -0.1, 0.2, 0.2, "supported"),
        ("equal", -0.1, 0.3, 0.2, "undecided"),
        ("equal", 0.21, 0.3, 0.2, "not supported"),
        ("equal", -0.3, -0.21, 0.2, "not supported"),
        ("equal", 0.0, 0.0, 0.0, "supported"),
    ],
)
def test_what_an_interval_settles(expect: str, low: float, high: float, margin: float, found: str) -> None:
    sizes = {"margin" if expect == "equal" else "least": margin}
    assert verdict.judge(expect, Interval((low + high) / 2, low, high, 3), **sizes) == found


def test_paired_interval_by_hand() -> None:
    # Differences -1, -2, -3: mean -2, standard deviation 1, t(0.975, 2 degrees of freedom) = 4.302653 (tables), so the
    # half width is 4.302653 / sqrt(3) = 2.484138. Unpaired, the spread of 10, 20, 30 would hide all of it.
    values = {"a": {"loss": [9.0, 18.0, 27.0]}, "b": {"loss": [10.0, 20.0, 30.0]}}
    found = verdict.answer(LOWER, values)
    assert found["difference"]["mean"] == -2.0
    assert found["difference"]["low"] == pytest.approx(-4.484138, abs=1e-5)
    assert found["difference"]["high"] == pytest.approx(0.484138, abs=1e-5)
    assert found["verdict"] == "undecided"
    # Differences -1.9, -2, -2.1: half width 4.302653 * 0.1 / sqrt(3) = 0.248414.
    values["a"]["loss"] = [8.1, 18.0, 27.9]
    found = verdict.answer(LOWER, values)
    assert found["difference"]["high"] == pytest.approx(-2 + 0.248414, abs=1e-5)
    assert found["verdict"] == "supported" and found["values"] == pytest.approx([-1.9, -2.0, -2.1])
    # Two looks: 97.5 %, 6.205347 * 0.1 / sqrt(3) = 0.358266.
    found = verdict.answer(LOWER, values, looks=2)
    assert found["difference"]["high"] == pytest.approx(-2 + 0.358266, abs=1e-5) and found["looks"] == 2


@pytest.mark.parametrize(
    "expect, margin, least",
    [("lower", 0.0, 0.0), ("lower", 0.0, 0.5), ("higher", 0.0, 0.0), ("higher", 0.0, 2.5), ("equal", 0.1, 0.0),
     ("equal", 1.5, 0.0)],
)  # fmt: skip
def test_how_many_seeds_would_decide(expect: str, margin: float, least: float) -> None:
    """The same three values, as often as it takes to make the interval decide, with the same standard deviation."""
    three = [-1.0, 1.0, 3.0]
    question = replace(LOWER, expect=expect, margin=margin, least=least)  # type: ignore[arg-type]
    entry = verdict.answer(question, {"a": {"loss": [2.0, 4.0, 6.0]}, "b": {"loss": [3.0, 3.0, 3.0]}})
    assert entry["values"] == three and entry["verdict"] == "undecided"
    said = re.fullmatch(r"about (\d+) seeds would decide, (for|against) it", verdict.outlook(entry))
    assert said is not None

    def decided(n: int) -> str:
        half = t_quantile(0.95, n - 1) * 2.0 / math.sqrt(n)
        return verdict.judge(expect, Interval(1.0, 1.0 - half, 1.0 + half, n), entry["margin"], least)

    number, verdicts = int(said[1]), {"for": "supported", "against": "not supported"}
    assert decided(number) == verdicts[said[2]] and decided(number - 1) == "undecided"
    assert verdict.outlook(entry | {"verdict": "supported"}) == verdict.outlook(entry | {"note": "x"}) == ""
    even = verdict.answer(question, {"a": {"loss": [-4.0, 4.0]}, "b": {"loss": [0.001, 0.0]}})
    assert "more than 1,000 seeds" in verdict.outlook(even) or expect == "equal" or least


def test_gaps_margins_and_chance() -> None:
    values = {
        "a": {"loss": [5.0, 6.0]}, "a0": {"loss": [4.9, 5.9]}, "b": {"loss": [7.0, 8.0]}, "b0": {"loss": [5.0, 6.0]},
    }  # fmt: skip
    gap = replace(LOWER, left_base="a0", right_base="b0")
    found = verdict.answer(gap, values)
    assert found["values"] == pytest.approx([-1.9, -1.9]) and found["verdict"] == "supported"
    within = Question("", "loss", "a", "a0", "equal", 0.02)
    found = verdict.answer(within, values)
    assert found["margin"] == pytest.approx(0.02 * 5.4) and found["verdict"] == "supported"
    assert verdict.answer(replace(within, margin=0.01), values)["verdict"] == "not supported"

    other = Question("", "loss", "a", "a", "lower", right_metric="early")
    assert verdict.answer(other, {"a": {"loss": [1.0, 2.0], "early": [3.0, 4.0]}})["values"] == [-2.0, -2.0]

    scored = {"a": {"s": [0.5, 0.5], "chance": [0.25, 0.25]}, "b": {"s": [0.26, 0.24], "chance": [0.25, 0.25]}}
    asked = Question("", "s", "b", "b", "equal", 0.1, chance="chance")
    assert verdict.answer(asked, scored)["verdict"] == "undecided"
    assert "chance" in verdict.answer(asked, scored)["note"]
    assert verdict.answer(replace(asked, left="a", right="a"), scored)["verdict"] == "supported"
    assert verdict.answer(replace(asked, able=("a", "s")), scored)["verdict"] == "supported"
    assert verdict.answer(replace(asked, left="a", able=("b", "s")), scored)["note"] == "b is not above chance"


def test_one_seed_settles_nothing() -> None:
    found = verdict.answer(LOWER, {"a": {"loss": [1.0]}, "b": {"loss": [9.0]}})
    assert found["difference"] == {"mean": -8.0, "low": None, "high": None}
    assert found["verdict"] == "undecided"


def test_the_claim_rests_on_the_main_questions() -> None:
    def entry(main: bool, found: str) -> dict[str, Any]:
        return {"main": main, "verdict": found}

    assert verdict.overall([entry(True, "supported"), entry(False, "not supported")]) == "supported"
    assert verdict.overall([entry(True, "supported"), entry(True, "undecided")]) == "undecided"
    assert verdict.overall([entry(True, "undecided"), entry(True, "not supported")]) == "not supported"
    assert verdict.overall([entry(False, "supported")]) == "undecided"


@pytest.mark.parametrize("name", NAMES)
def test_questions_name_variants_that_exist(name: str) -> None:
    experiment = EXPERIMENTS[name]
    variants = [variant.name for variant in experiment.variants]
    assert any(question.main for question in experiment.questions)
    for question in experiment.questions:
        named = {question.left, question.right, question.left_base, question.right_base} - {None}
        assert named <= set(variants) and question.metric in experiment.labels
        assert question.right_metric is None or question.right_metric in experiment.labels
        assert (question.margin > 0) == (question.expect == "equal")
    for place, variant in enumerate(experiment.variants):
        assert variant.after is None or variant.after in variants[:place]


# --------------------------------------------------------------------------------------------------- what is measured


def test_head_shapes_are_the_papers() -> None:
    variants = muon_split.sizes(False, None)["variants"]
    small, wide = variants["mla"], variants["mla256-split"]
    assert wide["num_attention_heads"] * 3 == small["num_attention_heads"] * 2

    def width(variant: dict[str, int]) -> int:
        return variant["qk_nope_head_dim"] + variant["qk_rope_head_dim"]

    assert width(wide) * 3 == width(small) * 4
    # §2.1: 96 heads of 128 + 64 | 128 against 64 heads of 192 + 64 | 256, an eighth of each.
    assert [8 * v for v in (width(small), small["v_head_dim"], width(wide), wide["v_head_dim"])] == [192, 128, 256, 256]


def test_only_the_up_projections_lose_their_split(small: Callable[..., Any]) -> None:
    before, after = small(use_dsa=False), small(use_dsa=False)
    muon_split.whole_matrices(after)
    changed = set()
    for (name, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        if getattr(a, "muon_split", None) != getattr(b, "muon_split", None):
            changed.add(name.split("self_attn.")[-1])
            assert b.muon_split == (b.shape[0],)
    assert changed == {"q_b_proj.weight", "kv_b_proj.weight"}


def test_a_split_update_gives_every_head_its_own_scale() -> None:
    gradient = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    gradient[:4] *= 100.0  # one loud head
    split = muon_split.orthogonal(gradient, (4, 4, 4)).view(3, -1).norm(dim=1)
    whole = muon_split.orthogonal(gradient, (12,)).view(3, -1).norm(dim=1)
    assert float(split.max() / split.min()) < 1.5
    assert float(whole.max() / whole.min()) > 5


class Text:
    """A shard of made-up documents."""

    def __init__(self, lengths: list[int], vocab: int = 40) -> None:
        generator = torch.Generator().manual_seed(1)
        self.documents = [torch.randint(0, vocab, (n,), generator=generator).numpy() for n in lengths]
        self.paths = [f"file{i}.py" for i in range(len(lengths))]

    def __len__(self) -> int:
        return len(self.documents)

    def document(self, index: int) -> Any:
        return self.documents[index]


def test_block_loss_scores_the_same_tokens_at_every_length(small: Callable[..., Any]) -> None:
    model, text = small(use_dsa=False).eval(), Text([20, 50, 40])
    ends = blocks(text, 32, 4, 5)  # type: ignore[arg-type]
    assert len(set(ends)) == 5 and all(32 <= end < len(text.document(i)) for i, end in ends)
    for length in (8, 32):
        total = 0.0
        for index, end in ends:
            ids = torch.tensor(text.document(index)[end - length : end]).unsqueeze(0)
            logp = torch.log_softmax(model(ids).logits.detach().double(), dim=-1)[0]
            total -= sum(float(logp[i - 1, ids[0, i]]) for i in range(length - 4, length))
        assert block_loss(model, text, ends, length, 4) == pytest.approx(total / 20, abs=1e-5)  # type: ignore[arg-type]


def test_kept_attention_by_brute_force() -> None:
    batch = Batch(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[0, 0, -1]]), torch.zeros(1, 3, dtype=torch.bool))
    watch = KeptAttention(batch, 2, StepMetrics())
    scores = torch.tensor([[[5.0, 9.0, 1.0, 2.0, 7.0]]])  # the last key is out of sight; keys 1 and 0 are chosen
    target = torch.tensor([[[0.05, 0.5, 0.35, 0.1, 3.0]]])  # most attended: 1 and 2; nearest: 3 and 2
    valid = torch.tensor([[[True, True, True, True, False]]])
    watch.measure(0, scores, target, valid, torch.tensor([[True]]))
    found = watch.metrics.numbers()
    assert found == pytest.approx(
        {"kept_mass": 0.55, "kept_mass_oracle": 0.85, "kept_mass_nearest": 0.45, "recall": 0.5}, abs=1e-6
    )


def test_pinned_prompts_do_not_move(tokenizer: Any) -> None:
    text = Text([30, 5, 60])
    prompts = pinned_prompts(text, tokenizer, 5, 8, 4)  # type: ignore[arg-type]
    assert [p["path"] for p in prompts] == ["file0.py", "file2.py"] * 2 + ["file0.py"]
    for prompt in prompts:
        document = text.document(int(prompt["path"][4]))
        at = prompt["offset"]
        assert prompt["ids"] == document[at : at + 8].tolist() and at + 8 + 4 <= len(document)
    assert prompts == pinned_prompts(text, tokenizer, 5, 8, 4)  # type: ignore[arg-type]
    assert len({(p["path"], p["offset"]) for p in prompts}) > 3


def test_repetition() -> None:
    assert repetition([[1, 2, 3, 4, 5, 6]]) == 0.0
    # 1 2 1 2 1 2: the 4-grams are 1212, 2121, 1212.
    assert repetition([[1, 2, 1, 2, 1, 2]]) == pytest.approx(1 / 3)
    assert repetition([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0.0


def test_thinned_curves_keep_their_mean() -> None:
    assert thinned([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0), (3.0, 7.0)], 2) == [(0.5, 2.0), (2.5, 6.0)]
    assert thinned([]) == []


# ------------------------------------------------------------------------------------------------------ quick runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Quick runs, made when first asked for."""
    root = tmp_path_factory.mktemp("reproduce")
    made: dict[str, dict[str, Any]] = {}

    def get(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in made:
            made[name] = reproduce(name, quick=True, runs=root, publish=root / "published")
        return root / f"{name}-quick", made[name]

    return get


SLOW = (
    "icepop", "lag", "rollout-dtype", "reasoning-rl", "distillation", "dsa-bonus", "general-rewards", "slides",
    "data-quality",
)  # fmt: skip
"""These take the path of `topk`, which `make test` runs; `data-quality` makes five corpora first."""
NEEDS = {"data-quality": "datatrove"}


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in NAMES])
def test_quick(name: str, finished: Any) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    folder, result = finished(name)
    experiment = EXPERIMENTS[name]
    assert result == json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert result["quick"] is True and result["seeds"] == [0, 1]
    assert list(result["variants"]) == [variant.name for variant in experiment.variants]
    for variant, metrics in result["variants"].items():
        for metric, found in metrics.items():
            runs = [worker.read_run(folder, variant, seed) for seed in (0, 1)]
            assert found["values"] == [run["metrics"][metric] for run in runs if run]
            assert found["low"] <= found["mean"] <= found["high"] and math.isfinite(found["mean"])
    assert {q["metric"] for q in result["verdict"]["questions"]} <= set(experiment.labels)
    assert re.fullmatch("[0-9a-f]{64}", result["corpus"]["sha256"])

    text = (folder / "card.md").read_text(encoding="utf-8")
    assert "quick run" in text and "Verdict: **" not in text
    assert f"glm5 reproduce {name} --quick" in text and experiment.limits[0] in text
    figures = set(re.findall(r"\]\((\S+\.svg)\)", text))
    assert figures == {f"{figure.file}.svg" for figure in experiment.figures}
    published = {path.name for path in (folder.parent / "published" / name).iterdir()}
    assert published == figures | {"card.md", "result.json", "manifest.json"}
    assert "nothing else" in summary(result)


@pytest.mark.long
def test_variants_of_a_seed_see_the_same_text(finished: Any) -> None:
    _, result = finished("dsa")
    # At the length of the kept keys sparse attention is dense: what warm-up did to the indexer cannot be seen.
    base, warm = (result["variants"][variant]["loss@1"]["values"] for variant in ("base", "warmup"))
    assert warm == pytest.approx(base, abs=1e-5)
    assert result["variants"]["warmup"]["loss@8"]["values"] != result["variants"]["base"]["loss@8"]["values"]
    kept = result["variants"]["adapted"]
    assert kept["kept_mass"]["mean"] <= kept["kept_mass_oracle"]["mean"]


@pytest.mark.long
def test_the_first_step_is_the_same_for_all_that_mtp_does_not_touch(finished: Any) -> None:
    _, result = finished("mtp")
    curves = result["curves"]["loss"]
    assert curves["one-depth"]["mean"][0] == curves["three-depths"]["mean"][0]
    assert curves["one-depth"]["mean"][-1] != curves["three-depths"]["mean"][-1]
    assert 1 <= result["variants"]["one-depth"]["accept_length"]["mean"] <= 4
    assert len(result["details"]["prompts"]) == result["config"]["prompts"]


@pytest.mark.long
def test_finished_runs_are_not_repeated(finished: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, result = finished("mtp")
    name = EXPERIMENTS["mtp"]
    (worker.run_folder(folder, "three-depths", 1) / "run.json").unlink()
    done: list[tuple[str, int]] = []

    def counting(work: Work) -> Outcome:
        done.append((work.variant, work.seed))
        return name.run(work)

    monkeypatch.setitem(EXPERIMENTS, "mtp", replace(name, run=counting))
    again = reproduce("mtp", quick=True, runs=folder.parent)
    assert done == [("three-depths", 1)]
    assert again["variants"] == result["variants"] and again["curves"] == result["curves"]
    worker.run_one(folder, "one-depth", 0)  # as a second worker would, which waited for the first
    assert len(done) == 1
    monkeypatch.setattr(runner, "run_one", lambda *key: done.append(key))
    assert len(runner.run_all(name, folder, [0, 1], 0, lambda text: None).done) == 4 and len(done) == 1


@pytest.mark.long
def test_an_interrupted_run_goes_on_from_its_state(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped in the middle of training ends with the numbers of one that is not."""
    _, result = finished("muon-split")
    real = EXPERIMENTS["muon-split"]
    trained = Work.train
    steps: list[int] = []

    def saving(quick: bool, steps: int | None) -> dict[str, Any]:
        return real.sizes(quick, steps) | {"save_every": 1}

    def stopping(self: Work, runner_: Any, model: Any, stage: Any) -> Any:
        def stopped(model: Any, stage: Any, shard: Any, tokenizer: Any, io: Any, seed: int) -> None:
            def advance(count: int, numbers: dict[str, float]) -> None:
                steps.append(count)
                if sum(steps) == 3:
                    raise KeyboardInterrupt

            runner_(model, stage, shard, tokenizer, replace(io, advance=advance), seed)

        return trained(self, stopped, model, stage)

    monkeypatch.setitem(EXPERIMENTS, "muon-split", replace(real, sizes=saving))
    monkeypatch.setattr(Work, "train", stopping)
    with pytest.raises(KeyboardInterrupt):
        reproduce("muon-split", quick=True, seeds=1, runs=tmp_path)
    assert (worker.run_folder(tmp_path / "muon-split-quick", "gqa", 0) / "state").exists()
    steps.append(-1000)
    again = reproduce("muon-split", quick=True, seeds=1, runs=tmp_path)
    assert steps[:6] == [0, 1, 1, 1, -1000, 2], "two of three steps were saved"
    for variant, metrics in again["variants"].items():
        assert {k: v["values"][0] for k, v in metrics.items()} == {
            k: v["values"][0] for k, v in result["variants"][variant].items()
        }


def test_a_grown_model_is_kept(finished: Any, tmp_path: Path) -> None:
    folder, result = finished("dsa")
    s = result["config"]
    work = Work(s, "base", 0, tmp_path, folder / "corpus")
    changes = {"initializer_range": 0.03}
    once = growing.grown(work, s["growing"], changes)
    rows = work.rows()
    assert {row["stage"] for row in rows} == {"rows-32"} and len(rows) == growing.steps_of(s["growing"])
    assert growing.tokens_of(s["growing"]) == len(rows) * 2 * 32
    again = growing.grown(work, s["growing"], changes)
    assert len(work.rows()) == len(rows), "it is not trained again"
    assert all(torch.equal(a, b) for a, b in zip(once.parameters(), again.parameters(), strict=True))


@pytest.mark.long
def test_more_seeds_add_to_what_is_there(finished: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = finished("mtp")
    before = (worker.run_folder(folder, "one-depth", 0) / "run.json").stat().st_mtime_ns
    result = reproduce("mtp", quick=True, seeds=3, runs=folder.parent)
    assert result["seeds"] == [0, 1, 2]
    assert (worker.run_folder(folder, "one-depth", 0) / "run.json").stat().st_mtime_ns == before

    # Elsewhere, where only the published result of two seeds is, the third one is added to it.
    published, runs = folder.parent / "for-adding", folder.parent / "elsewhere"
    shutil.copytree(folder.parent / "published" / "mtp", published / "mtp")
    adding = functools.partial(reproduce, "mtp", quick=True, seeds=3, runs=runs, publish=published, add=True)
    with pytest.raises(ConfigError, match=r"mtp cannot stay: their steps was \d+, and is 9 now"):
        adding(steps=9)
    shutil.rmtree(runs)
    first, assemble = _read(published), command.assemble

    def while_another_publishes(*given: Any) -> dict[str, Any]:
        _publish(published, first | {"seeds": [0, 5]})
        return assemble(*given)

    monkeypatch.setattr(command, "assemble", while_another_publishes)
    with pytest.raises(Glm5Error, match="has changed while these seeds ran; they are kept"):
        adding()
    monkeypatch.undo()
    _publish(published, first)
    grown = adding()
    assert {path.name for path in (runs / "mtp-quick" / "runs").iterdir()} == {
        f"{variant.name}-2" for variant in EXPERIMENTS["mtp"].variants
    }
    values = {name: {key: one["values"] for key, one in found.items()} for name, found in result["variants"].items()}
    assert grown["verdict"] == verdict.judged(EXPERIMENTS["mtp"], values, looks=2)["verdict"] != result["verdict"]
    for key in ("variants", "seeds", "config", "corpus", "tokens", "details"):
        assert grown[key] == result[key], key
    for name, curves in result["curves"].items():
        for variant, curve in curves.items():
            for part, points in curve.items():
                assert grown["curves"][name][variant][part] == pytest.approx(points), (name, variant, part)
    assert [part["seeds"] for part in grown["added"]] == [[2]]
    assert grown == json.loads((published / "mtp" / "result.json").read_text(encoding="utf-8"))
    card = (published / "mtp" / "card.md").read_text(encoding="utf-8")
    assert "after a look at those before: 2. On: " in card and "97.5 % interval" in card
    assert adding() == grown, "nothing is left to do"


def _read(published: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((published / "mtp" / "result.json").read_text(encoding="utf-8"))
    return found


def _publish(published: Path, result: object) -> None:
    with publish_dir(published / "mtp") as fresh:
        (fresh / "result.json").write_text(json.dumps(result), encoding="utf-8")


@pytest.mark.long
def test_seeds_are_added_only_to_a_whole_result_of_this_experiment(finished: Any, tmp_path: Path) -> None:
    folder, _ = finished("mtp")
    shutil.copytree(folder.parent / "published" / "mtp", tmp_path / "mtp")
    whole, experiment = _read(tmp_path), EXPERIMENTS["mtp"]
    assert joined.read_published(experiment, tmp_path / "mtp") == whole
    plan = {"quick": True, "sizes": whole["config"], "corpus": whole["corpus"]}
    joined.check_same(whole, plan, {})
    with pytest.raises(ConfigError, match="their device was cpu, and is NVIDIA H200 now"):
        joined.check_same(whole, plan, {"device": "NVIDIA H200"})
    with pytest.raises(ConfigError, match=r"their corpus.train_tokens was \d+, and is 3 now"):
        joined.check_same(whole, plan | {"corpus": whole["corpus"] | {"train_tokens": 3}}, {})

    one, values = "one-depth", next(iter(whole["variants"]["one-depth"]))
    curve = next(iter(whole["curves"]))
    for path, value in [
        (("seeds",), []), (("seeds",), ["0", "1"]), (("seeds",), [0, 0]), (("seeds",), [0, -1]), (("seeds",), None),
        (("seeds",), [0, 1, 2]), (("name",), "muon-split"), (("config",), []), (("variants",), []),
        (("variants", one), {}), (("variants", one, values, "values"), [1.0]),
        (("variants", one, values, "values"), [1.0, float("nan")]), (("variants", one, values, "values"), [1.0, "2"]),
        (("variants", "more"), {}), (("curves",), None), (("curves", curve, one, "step"), [1.0]), (("tokens",), {}),
        (("seconds",), None), (("seconds", "runs", one), [1.0]), (("machine",), "EPYC"), (("software",), {}),
        (("details",), 3), (("added",), [{}]),
    ]:  # fmt: skip
        broken = copy.deepcopy(whole)
        functools.reduce(lambda found, key: found[key], path[:-1], broken)[path[-1]] = value
        _publish(tmp_path, broken)
        with pytest.raises(ConfigError, match=r"result\.json is (no|a) result .*leave --add out\.$"):
            joined.read_published(experiment, tmp_path / "mtp")
    for text in ("[" * 100_000, "{}", "null", '"quick"', "1" * 5000):
        with publish_dir(tmp_path / "mtp") as fresh:
            (fresh / "result.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="is no result of"):
            joined.read_published(experiment, tmp_path / "mtp")
    (tmp_path / "mtp" / "result.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="damaged"):
        joined.read_published(experiment, tmp_path / "mtp")
    (tmp_path / "mtp" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="has no manifest"):
        joined.read_published(experiment, tmp_path / "mtp")
    assert joined.read_published(experiment, tmp_path / "nothing") is None


def test_curves_join_at_the_steps_that_all_seeds_have() -> None:
    experiment = EXPERIMENTS["mtp"]
    first, *others = (variant.name for variant in experiment.variants)
    points = [[(1.0, 1.0), (2.0, 3.0), (4.0, 9.0)], [(1.0, 3.0), (3.0, 5.0), (4.0, 4.0)], [(2.0, 7.0), (4.0, 2.0)]]

    def result(seeds: list[int]) -> dict[str, Any]:
        runs = {first: [{"curves": {"loss": points[seed]} if seed < 3 else {}} for seed in seeds]}
        return {"seeds": seeds, "curves": verdict.curves(experiment, runs | {key: [] for key in others})}

    whole = result([0, 1, 2, 3])["curves"]
    assert whole == {"loss": {first: {"seeds": 3, "step": [4.0], "mean": [5.0], "low": [2.0], "high": [9.0]}}}
    for left, right in (([0, 1], [2, 3]), ([3, 0], [1, 2]), ([3], [0, 1, 2]), ([0, 1, 2], [3])):
        assert joined._curves(result(left), result(right)) == whole, (left, right)


def test_another_plan_is_refused(finished: Any) -> None:
    folder, _ = finished("mtp")
    with pytest.raises(ConfigError, match=r"another plan \(steps differ"):
        reproduce("mtp", quick=True, steps=9, runs=folder.parent)


def test_a_plan_with_the_old_names_of_its_sizes_goes_on(tmp_path: Path) -> None:
    claim = functools.partial(command._claim, EXPERIMENTS["dsa"], tmp_path, True, None, False)
    plan = claim()
    sizes = {{"variant_steps": "arm_steps"}.get(key, key): value for key, value in plan["sizes"].items()}
    assert sizes != plan["sizes"]
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"sizes": sizes}), encoding="utf-8")
    (tmp_path / "runs" / "base-0" / "model").mkdir(parents=True)
    assert claim() == plan


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(name="muon"), 'no experiment "muon" (did you mean "muon-split"?)'),
        (dict(name="mtp", seeds=0), "--seeds takes 1 or more"),
        (dict(name="mtp", add=True), "name its folder with --publish"),
        (dict(name="mtp", steps=4, minutes=1.0), "give one of them"),
        (dict(name="mtp", minutes=-1.0), "--minutes more than 0"),
    ],
)
def test_usage_errors(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        reproduce(**arguments, runs=tmp_path)


# ------------------------------------------------------------------------------------------------------- scheduling


def fake(variants: Any, run: Callable[[Work], Outcome]) -> Experiment:
    return replace(EXPERIMENTS["dsa"], variants=variants, run=run, questions=(), figures=(), labels={})


def plan_of(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / worker.PLAN).write_text(json.dumps({"name": name, "quick": True, "sizes": {}}), encoding="utf-8")


def test_variants_wait_for_what_they_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    def run(work: Work) -> Outcome:
        order.append((work.variant, work.seed))
        after = {"continued": "base", "warmup": "base", "adapted": "warmup"}.get(work.variant)
        assert work.start == (tmp_path / "runs" / f"{after}-{work.seed}" / "model" if after else None)
        (work.folder / "metrics.jsonl").touch()
        return Outcome({"loss": 1.0}, 1)

    experiment = fake(EXPERIMENTS["dsa"].variants[::-1], run)
    monkeypatch.setitem(EXPERIMENTS, "dsa", experiment)
    plan_of(tmp_path, "dsa")
    report = runner.run_all(experiment, tmp_path, [0, 1], 0, lambda text: None)
    variants = ["base", "continued", "warmup", "adapted"]
    assert sorted(report.done) == sorted((variant, seed) for variant in variants for seed in (0, 1)) and not report.left
    for seed in (0, 1):
        mine = [variant for variant, s in order if s == seed]
        assert mine.index("base") < mine.index("warmup") < mine.index("adapted")


def test_workers_run_this_copy_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(runner.subprocess, "Popen", lambda command, env, **_: started.append((command, env)))
    runner._start(tmp_path, ("base", 0))
    ((command, environment),) = started
    assert command[1] == "-P"  # nothing comes from the folder in which one happens to stand
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(__file__).parents[2])


def test_nothing_begins_after_the_deadline(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["mtp"]
    plan_of(tmp_path, "mtp")
    report = runner.run_all(experiment, tmp_path, [0], 0, lambda text: None, deadline=time.monotonic() - 1)
    assert report.done == [] and report.left == [("one-depth", 0), ("three-depths", 0)]


def test_steps_that_fit_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two variants of 0.1 s per step and 2 s of measuring each: 3 seeds on 2 workers in 60 s leave
    (0.9 * 60 * 2 / 3 - 4) / 0.2 = 160 steps, less the little that the trial took."""

    def run(work: Work) -> Outcome:
        return Outcome({"loss": 1.0}, 1)

    experiment = replace(EXPERIMENTS["mtp"], run=run)
    monkeypatch.setattr(plan, "build_corpus", lambda folder, vocab, size: {})
    monkeypatch.setattr(command, "run_all", lambda *arguments: runner.Report())
    took = {"seconds": {"wall": 10.0, "training": 8.0, "step": 0.1}}
    monkeypatch.setattr(command, "_need", lambda folder, variant, seed: took)
    found = command._fitting_steps(experiment, tmp_path, True, 3, 2, 60.0)
    assert 150 <= found <= 160
    with pytest.raises(UsageError, match="too few"):
        command._fitting_steps(experiment, tmp_path, True, 30, 2, 60.0)


@pytest.mark.dist
@pytest.mark.slow
def test_a_killed_worker_is_reported(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "mtp-quick"
    killed: list[int] = []

    def kill_one() -> None:
        lock = worker.run_folder(folder, "one-depth", 0) / "lock"
        while not lock.exists():
            time.sleep(0.02)
        pid = next(p for p in children() if "one-depth 0" in command_line(p))
        killed.append(pid)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    with pytest.raises(Glm5Error, match=r"1 of 2 runs failed: one-depth seed 0 \(killed by SIGKILL\)") as caught:
        reproduce("mtp", quick=True, seeds=1, workers=1, steps=6, runs=tmp_path)
    thread.join()
    assert killed and "the same command goes on" in str(caught.value)
    assert worker.read_run(folder, "three-depths", 0) is not None, "the other run was not lost"
    assert worker.read_run(folder, "one-depth", 0) is None
    runner.run_all(EXPERIMENTS["mtp"], folder, [0], 1, said.append)
    assert worker.read_run(folder, "one-depth", 0) is not None


def children() -> list[int]:
    return [
        int(p)
        for p in Path(f"/proc/{os.getpid()}/task/{threading.main_thread().native_id}/children").read_text().split()
    ]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("command", "often", "end"),
    [
        ("exec sleep 100", 1, -signal.SIGTERM),
        ("trap 'sleep 0.6; exit 7' TERM; while :; do sleep 0.1; done", 2, 7),  # it saves while the second one comes
        ("trap '' TERM; exec sleep 100", 1, -signal.SIGKILL),
    ],
)
def test_workers_do_not_outlive_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, command: str, often: int, end: int
) -> None:
    processes, said = list[subprocess.Popen[bytes]](), list[str]()

    def start(folder: Path, key: tuple[str, int]) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(["sh", "-c", command]))
        for turn in range(often):
            threading.Timer(0.2 + 0.3 * turn, os.kill, (os.getpid(), number)).start()
        return processes[-1]

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "GRACE_SECONDS", 2.0)
    with pytest.raises(KeyboardInterrupt):
        runner.run_all(EXPERIMENTS["mtp"], tmp_path, [0], 1, said.append)
    assert [process.returncode for process in processes] == [end]
    assert said == ["stopping: runs save their state first, which takes 2 seconds at most"]


def test_why_a_worker_ended(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert runner._reason(log, -signal.SIGKILL) == "killed by SIGKILL"
    assert runner._reason(log, 3) == "exit code 3"
    log.write_text("noise\nError: the corpus is gone.\n", encoding="utf-8")
    assert runner._reason(log, 1) == "the corpus is gone."


def test_observing_changes_nothing(small: Callable[..., Any]) -> None:
    """Kept attention is read off dense attention, which stays what it is."""
    model = small().eval()
    ids = torch.randint(0, 40, (1, 24), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    hidden, metrics = [], StepMetrics()
    for watch in (None, KeptAttention(batch, 4, metrics)):
        ctx = packed_context(batch.documents, exact=False)
        ctx.observer, ctx.attend_dense = watch, True
        with torch.no_grad():
            hidden.append(model.model(ids, ctx))
    assert torch.equal(*hidden)
    found = metrics.numbers()
    assert 0 < found["kept_mass"] <= found["kept_mass_oracle"] <= 1 + 1e-5 and 0 <= found["recall"] <= 1


def test_beam_search_finds_the_layers_that_matter_least() -> None:
    """Scores that add up over layers: the best pattern is known, and a wide beam cannot miss it. A beam that sees few
    candidates still changes two layers a step, half of them in the end."""
    worth = [5, 1, 7, 2, 8, 3, 9, 4, 6, 0]
    scored: list[str] = []

    def score(pattern: str) -> tuple[float, float]:
        scored.append(pattern)
        return sum(w for w, kind in zip(worth, pattern, strict=True) if kind == "F"), 0.0

    found = efficient_attention.beam_search(10, score, Random(0), candidates=10_000)
    assert found == "".join("S" if w < 5 else "F" for w in worth)
    assert {pattern.count("S") for pattern in scored} == {2, 4, 5} and len(scored) == len(set(scored))
    scored.clear()
    few = efficient_attention.beam_search(10, score, Random(0), candidates=6)
    assert few.count("S") == 5 and len(scored) == 18


@torch.no_grad()
def test_a_saved_model_gets_windows_of_the_experiment(tmp_path: Path) -> None:
    """The file of a model without windows does not have their length: they must not be the 4,096 of the preset."""
    s = efficient_attention.sizes(True, None)
    config = GLM5Config.preset("nano", **s["model"] | s["gqa"])
    GLM5ForCausalLM(config).save_pretrained(tmp_path)
    loaded = GLM5ForCausalLM.from_pretrained(tmp_path)
    changed = efficient_attention.efficient(loaded, s, "interleave", "swa")
    windows = [changed.config.window(layer) for layer in range(config.num_hidden_layers)]
    assert windows == [s["row_length"] // 16, None] * (config.num_hidden_layers // 2)
    ids = torch.arange(s["row_length"]).unsqueeze(0)
    assert not torch.allclose(changed(ids).logits[0, -1], loaded(ids).logits[0, -1])


def test_a_value_is_retrieved_only_if_all_its_tokens_are_likeliest(small: Any, tokenizer: Any) -> None:
    """Against the model's own greedy continuation, one prompt at a time."""
    model, length, problems = small(vocab_size=tokenizer.vocab_size), 80, 6
    found, mean = retrieval(model, tokenizer, length, problems, seed=3)
    right, total = 0, 0.0
    for index in range(problems):
        prompt, answer = needle_text(3, index, length, index / (problems - 1), split="heldout")
        ids, wanted = tokenizer.encode(prompt), tokenizer.encode(answer)
        with torch.no_grad():
            scores = model(torch.tensor([ids + wanted])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        right += scores.argmax(-1).tolist() == wanted
        total += float(scores[range(len(wanted)), wanted].sum())
    assert found == right / problems and mean == pytest.approx(total / problems, rel=1e-4)


def test_all_go_on_after_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def one(name: str, **options: Any) -> dict[str, Any]:
        asked.append((name, options))
        if name == "mtp":
            raise RuntimeError("no room")
        return {"name": name}

    monkeypatch.setattr(command, "summary", lambda result: "")
    monkeypatch.setattr(command, "reproduce", one)
    with pytest.raises(Glm5Error, match=rf"1 of {len(NAMES)} experiments failed: mtp"):
        command.reproduce_all(quick=True)
    assert [name for name, _ in asked] == list(EXPERIMENTS) and all(o == {"quick": True} for _, o in asked)
    monkeypatch.setattr(command, "reproduce", lambda name, **options: {"name": name})
    assert list(command.reproduce_all()) == list(EXPERIMENTS)


def test_the_help_names_every_experiment() -> None:
    """The command does not import the experiments for its help, which would cost seconds."""
    said = " ".join(CliRunner().invoke(app, ["reproduce", "--help"]).output.split())
    assert [name for name in NAMES if name not in said] == []
