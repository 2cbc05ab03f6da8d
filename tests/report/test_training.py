"""Reports of training runs: what is drawn is what was written, in any state of the run, and nothing acts."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.report import build_report, figures, training
from glm5.report.adaptation import adaptation_section
from glm5.report.artifacts import Adaptation, read_artifacts
from glm5.report.records import stage_samples, stage_updates
from glm5.report.results import load_run

PageOf = Callable[[Path], tuple[str, Any]]

STAGES = (("pretrain", "pretrain"), ("warmup", "dsa_warmup"), ("sparse", "dsa_sparse"))
RECIPE = """name = "tiny-1"
seed = 3
preset = "tiny"

[[stages]]
name = "pretrain"
kind = "pretrain"
optim = { steps = 400, lr = 0.02 }

[[stages]]
name = "warmup"
kind = "dsa_warmup"
optim = { steps = 40, lr = 0.005 }

[[stages]]
name = "sparse"
kind = "dsa_sparse"
optim = { steps = 100, lr = 0.001 }
"""


def training_metrics(
    steps: tuple[int, ...] = (400, 40, 100), layers: int = 3, heads: int = 2, monitor_every: int = 10
) -> list[dict[str, Any]]:
    draw = random.Random(11)
    rows: list[dict[str, Any]] = []
    skipped, clock = 0, 1.8e9
    for (stage, kind), count in zip(STAGES, steps):
        skipped = 0
        for step in range(1, count + 1):
            share = step / count
            monitored = (step - 1) % monitor_every == 0
            seconds = 0.5 + draw.random() / 10 + (0.2 if monitored else 0)
            clock += seconds
            lost = kind == "pretrain" and step in (120, 121, 275)
            skipped += lost
            row: dict[str, Any] = {"stage": stage, "step": step, "time": round(clock, 3), "tokens": 8192}
            row |= {
                "lr": 0.02 * min(1, step / 20) * (0.55 + 0.45 * math.cos(math.pi * share)),
                "grad_norm": None if lost else math.exp(draw.gauss(-1 + 2 * math.exp(-20 * share), 0.25)),
                "skipped": skipped,
                "step_seconds": seconds,
                "optimizer_seconds": 0.11 + draw.random() / 50,
                "tokens_per_second": 8192 / seconds,
            }
            if kind != "dsa_warmup":
                start, end = (8.3, 2.6) if kind == "pretrain" else (2.8, 2.55)
                loss = end + (start - end) * math.exp(-9 * share) - 0.2 * share + draw.gauss(0, 0.06)
                loss += 4.0 if (stage, step) == ("pretrain", 222) else 0.0
                row |= {"loss": None if lost else loss, "bits_per_byte_train": loss / 1.9}
                row |= {f"mtp{d}_loss": loss + 0.45 * d + draw.gauss(0, 0.03) for d in (1, 2, 3)}
                row["load_max"] = 1.2 + math.exp(-6 * share) + abs(draw.gauss(0, 0.1))
                if monitored:
                    row |= {f"mtp{d}_accuracy": (0.5 - 0.1 * d) * (1 - math.exp(-5 * share)) for d in (1, 2, 3)}
                    for layer in range(1, layers):
                        row[f"load_max/L{layer}"] = 1.1 + math.exp(-6 * share) + layer / 20 + abs(draw.gauss(0, 0.05))
                        row[f"load_min/L{layer}"] = 0.8 * (1 - math.exp(-4 * share)) - layer / 50 + 0.1
                    for layer in range(layers):
                        for head in range(heads):
                            top = 6 + 8 * (1 - math.exp(-8 * share)) + layer + head / 2 + draw.gauss(0, 0.4)
                            row[f"max_logit/L{layer}/H{head}"] = top
                    row["max_logit"] = max(v for k, v in row.items() if k.startswith("max_logit/"))
            if kind != "pretrain":
                row["indexer_kl"] = (1.1 if kind == "dsa_warmup" else 0.2) * math.exp(-5 * share) + 0.12
                if monitored:
                    row["indexer_recall"] = 0.9 - 0.5 * math.exp(-6 * share) * (kind == "dsa_warmup")
                    row |= {f"indexer_recall/L{n}": row["indexer_recall"] - n / 40 for n in range(layers)}
            if step % 25 == 0 and kind != "dsa_warmup":
                row |= {"held_out_bits_per_byte": row["bits_per_byte_train"] + 0.05, "held_out_loss": loss + 0.1}
            rows.append(row)
    return rows


def adaptation() -> dict[str, Any]:
    k = [2**i for i in range(3, 11)]
    tokens = [i * 500_000 for i in range(1, 21)]
    dense = [2.6 + math.exp(-i / 4) / 5 for i in range(20)]
    return {
        "topk": 256,
        "recall": {f"L{n}": 0.97 - 0.02 * n for n in range(6)} | {"L10": 0.5},
        "mass_curve": {
            "k": k,
            "indexer": [1 - 0.9 * math.exp(-size / 90) for size in k],
            "oracle": [1 - 0.8 * math.exp(-size / 60) for size in k],
        },
        "kl": [[step, 0.1 + math.exp(-step / 30)] for step in range(1, 201)],
        "baseline": {
            "tokens": tokens,
            "dense": dense,
            "sparse": [d + 0.1 * math.exp(-i / 5) for i, d in enumerate(dense)],
        },
        "held_out": {"length": 2048, "dense": 2.6012, "sparse": 2.6118, "gap_percent": 0.41},
    }


def samples() -> list[dict[str, Any]]:
    prompts = ("def fibonacci(n):", "The capital of France")
    return [
        {
            "step": step,
            "prompt": prompt,
            "text": f"\n    return {step} <script>alert(1)</script> \x1b[2J https://a.example",
        }
        for step in range(0, 4001, 250)
        for prompt in prompts
    ]


def updates() -> list[dict[str, Any]]:
    names = [
        f"model.layers.{n}.self_attn.{part}.weight" for n in range(6) for part in ("q_b_proj", "kv_b_proj", "o_proj")
    ]
    split = [
        {"rule": "muon split", "name": name, "block": [32, 128], "parameters": 65536, "matrices": 16, "update_rms": 0.2,
         "lr": 0.02} for name in names
    ]  # fmt: skip
    rest = {"rule": "adamw", "name": "model.norm.weight", "block": None, "parameters": 256, "matrices": 1,
            "update_rms": 1.0, "lr": 0.002}  # fmt: skip
    return [*split, rest]


def write_training_run(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """All files of the run but results.json, as after a kill."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.7", "devices": "2 × cpu", "threads": 2}))
    for index, (stage, _) in enumerate(STAGES):
        (folder / f"{index:02d}-{stage}").mkdir(exist_ok=True)
    first, last = folder / "00-pretrain", folder / "02-sparse"
    (first / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples()))
    (first / "update_table.json").write_text(json.dumps(updates()))
    (last / "adaptation.json").write_text(json.dumps(adaptation()))
    return folder


def results() -> dict[str, Any]:
    """What results.json adds at the end."""
    stages = [{"name": name, "kind": kind, "numbers": {"loss": 2.5}} for name, kind in STAGES]
    return {
        "name": "tiny-1", "seed": 3, "preset": "tiny", "parameters": 13_000_000, "stages": stages,
        "reference_bits_per_byte": 1.9, "software": {"torch": "2.13.0"}, "times": {"total_seconds": 2900.0},
    }  # fmt: skip


SMALL = training_metrics()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_training_run(tmp_path / "tiny-1", SMALL)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What the panels of a group were asked to show, by title, instead of their pictures."""
    asked: dict[str, dict[str, Any]] = {}

    def note(title: str, series: Any, note: str = "", axis: Any = figures.STEPS, level: Any = None, **rest: Any) -> Any:
        shown = {one.label: list(one.points) for one in series if one.points}
        if not shown:
            return None
        asked[title] = {"series": shown, "axis": axis.label, "level": level, **rest}
        return figures.Panel(title, figures.Markup(""))

    monkeypatch.setattr(training, "curves", note)
    monkeypatch.setattr(training, "layered", note)
    return asked


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take most of a page's time, and some tests are about the rest of it."""
    monkeypatch.setattr(figures, "draw_svg", lambda title, draw: figures.Markup("<svg></svg>"))


def column(stage: str, key: str) -> list[float]:
    return [row[key] for row in SMALL if row["stage"] == stage and row.get(key) is not None]


def test_a_whole_training_run_has_all_sections(run: Path, page_of: PageOf) -> None:
    (run / "results.json").write_text(json.dumps(results()))
    html, page = page_of(run)
    assert page.headings == ["stages", "curves", "adaptation", "learning", "updates", "notes"]
    groups = re.findall(r"<h3>(.*?)</h3>", html)
    assert groups[:8] == [
        "Language modelling", "Bits per byte", "Optimizer", "Multi-token prediction (MTP)", "Expert load",
        "Attention logits", "Sparse attention (DSA)", "Throughput",
    ]  # fmt: skip
    # loss, bits, optimizer, MTP, experts, logits and heads, DSA, speed, adaptation
    assert html.count("<svg") == 2 + 2 + 2 + 4 + 4 + 2 + 6 + 4 + 2 + 5
    text = " ".join(page.text.split())
    for said in (
        "It was trained on 4,423,680 tokens in 540 steps.",
        "xz: 1.900",
        "3 steps with a loss or gradient that was not finite",
        "The 256 tokens that the indexers pick hold 86.0% of attention on the mean of 7 layers, 50.0% in the worst.",
        "On held-out documents of 2,048 tokens the loss is 2.612 with sparse attention and 2.601 with dense attention, "
        "a gap of +0.41%.",
        "2 × cpu",
        "optim = { steps = 400, lr = 0.02 }",
    ):
        assert said in text, said
    assert "not finished" not in text
    assert "://" not in html and "<script" not in html and "<script>alert(1)</script>" in page.text
    assert {name for tag, names in page.tags for name in names if name.startswith("on")} == set()


def test_the_loss_is_over_tokens_and_held_out_points_lie_on_it(run: Path, drawn: dict[str, dict[str, Any]]) -> None:
    training.training_groups(load_run(run))
    panel = drawn["pretrain"]
    losses = [(8192.0 * row["step"], row["loss"]) for row in SMALL if row["stage"] == "pretrain" and row["loss"]]
    assert panel["axis"] == "tokens" and panel["series"]["training"] == losses and len(losses) == 397
    assert [x for x, _ in panel["series"]["held out"]] == [8192.0 * 25 * n for n in range(1, 17)]
    assert "warmup" not in drawn  # it has no loss


def test_stages_follow_each_other_and_skipped_steps_are_marked(run: Path, drawn: dict[str, dict[str, Any]]) -> None:
    (run / "results.json").write_text(json.dumps(results()))
    training.training_groups(load_run(run))
    held_out = drawn["Held-out text"]
    assert held_out["reference"] == ("xz: 1.900", 1.9)
    # The warm-up was not evaluated, so the sparse stage follows pre-training directly.
    assert held_out["series"]["sparse"][0] == (8192.0 * 425, column("sparse", "held_out_bits_per_byte")[0])
    norm = drawn["Gradient norm"]
    assert norm["marks"] == [8192.0 * step for step in (120, 121, 275)] and norm["log"]
    assert norm["series"]["sparse"][0][0] == 8192.0 * 441
    share = dict(drawn["Optimizer"]["series"]["warmup"])
    first = next(row for row in SMALL if row["stage"] == "warmup")
    assert share[8192.0 * 401] == first["optimizer_seconds"] / first["step_seconds"]


def test_layers_and_heads(run: Path, drawn: dict[str, dict[str, Any]]) -> None:
    groups = {group.title: group for group in training.training_groups(load_run(run))}
    logits = drawn["Largest logit in pretrain"]["series"]
    row = SMALL[10]
    best = [max(row[f"max_logit/L{layer}/H{head}"] for head in range(2)) for layer in range(3)]
    assert [dict(logits[f"layer {n}"])[8192.0 * 11] for n in range(3)] == best
    assert [panel.title for panel in groups["Attention logits"].folded][:2] == [
        "pretrain, layer 0",
        "pretrain, layer 1",
    ]
    assert list(drawn["pretrain, layer 1"]["series"]) == ["head 0", "head 1"]
    busy = drawn["Busiest expert in pretrain"]
    assert list(busy["series"]) == ["layer 1", "layer 2"] and busy["level"] == 1.0
    assert [v for _, v in busy["series"]["layer 2"]] == column("pretrain", "load_max/L2")
    assert [v for _, v in drawn["Accuracy in sparse"]["series"]["token 3"]] == column("sparse", "mtp2_accuracy")
    assert [v for _, v in drawn["Recall in warmup"]["series"]["layer 2"]] == column("warmup", "indexer_recall/L2")


def test_of_many_layers_those_with_the_largest_logits_show_their_heads(
    tmp_path: Path, drawn: dict[str, dict[str, Any]]
) -> None:
    rows = [
        {"stage": "a", "step": step, "loss": 1.0} | {f"max_logit/L{n}/H0": 100 - abs(n - 30) for n in range(60)}
        for step in (1, 2)
    ]
    [group] = [g for g in training.training_groups(load_run(write_training_run(tmp_path / "r", rows))) if g.folded]
    assert [panel.title for panel in group.folded] == [f"a, layer {n}" for n in range(26, 34)]
    assert len(drawn["Largest logit in a"]["series"]) == 60 and "8 layers" in group.folded_title
    assert drawn["Largest logit in a"]["axis"] == "step"  # no tokens were counted


def test_where_one_stage_counts_no_tokens_the_common_axis_is_steps(
    tmp_path: Path, drawn: dict[str, dict[str, Any]]
) -> None:
    rows = [{"stage": "a", "step": n, "tokens": 10, "lr": 0.1} for n in (1, 2)]
    rows += [{"stage": "b", "step": n, "lr": 0.2} for n in (1, 2)]
    training.training_groups(load_run(write_training_run(tmp_path / "r", rows)))
    assert drawn["Learning rate"]["axis"] == "step"
    assert drawn["Learning rate"]["series"] == {"a": [(1, 0.1), (2, 0.1)], "b": [(3, 0.2), (4, 0.2)]}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("lines", [1, 2, 250])
def test_a_killed_run_is_told_from_what_is_there(run: Path, page_of: PageOf, lines: int) -> None:
    whole = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(whole[:lines]) + whole[lines][:40])
    _, page = page_of(run)
    assert f"It stands at step {lines} of 400 of pretrain (1 of 3 trained stages)." in page.text
    assert "built from metrics.jsonl and recipe.toml" in page.text
    assert {"stages", "curves", "learning"} <= set(page.headings)
    assert "None" not in page.text and "nan" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_stage_that_finished_before_the_kill_shows_its_results(run: Path, page_of: PageOf) -> None:
    stage = {"name": "pretrain", "kind": "pretrain", "numbers": {"loss": 2.0}, "exact": None, "train_seconds": 1.0,
             "evaluation": {"text": {"bits_per_byte": 1.4321, "bytes": 9}}}  # fmt: skip
    (run / "00-pretrain" / "stage.json").write_text(json.dumps(stage))
    (run / "01-warmup" / "stage.json").write_text("{")
    html, page = page_of(run)
    assert "forgetting" in page.headings and "1.432" in page.text
    assert html.count('<tr><th scope="row">warmup</th>') == 1


@pytest.mark.usefixtures("undrawn")
def test_an_adaptation_alone_is_a_report(tmp_path: Path, page_of: PageOf) -> None:
    (tmp_path / "adaptation.json").write_text(json.dumps(adaptation()))
    _, page = page_of(tmp_path)
    assert page.headings == ["adaptation", "notes"]


@pytest.mark.usefixtures("undrawn")
def test_what_is_damaged_is_named_and_left_out(run: Path, page_of: PageOf) -> None:
    (run / "00-pretrain" / "update_table.json").write_text('[{"rule": "muon"')
    (run / "02-sparse" / "adaptation.json").write_text('{"recall": 3}')
    (run / "environment.json").write_text("[" * 100_000)
    with (run / "00-pretrain" / "samples.jsonl").open("ab") as file:
        file.write(b'{"step": "x"}\n[]\n{"step": 9999, "prompt": "cut o')
    _, page = page_of(run)
    assert "updates" not in page.headings and "adaptation" not in page.headings and "learning" in page.headings
    said = "Left out, because damaged: environment.json, 00-pretrain/update_table.json, 02-sparse/adaptation.json."
    assert said in page.text and "9,999" not in page.text
    (run / "00-pretrain" / "samples.jsonl").write_bytes(b"\xff\xfe\n")
    assert "learning" not in page_of(run)[1].headings


HOSTILE = "<img src=x onerror=alert(1)></div></details>{{ 7*7 }}\x1b[2J\u202e https://evil.example <|user|>\"'&amp;"


def test_hostile_text_in_artifacts_does_nothing(run: Path, page_of: PageOf) -> None:
    rows = [{"step": n, "prompt": HOSTILE, "text": HOSTILE * 50} for n in (-5, 10**30)]
    (run / "00-pretrain" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = [{"rule": HOSTILE, "name": HOSTILE, "block": [HOSTILE, {"a": HOSTILE}], "lr": 1e308, "update_rms": -1e-300}]
    (run / "00-pretrain" / "update_table.json").write_text(json.dumps(table))
    record = {"recall": {HOSTILE: 0.5, "L1": 1e308}, "mass_curve": {"k": [0, -1, 8], "indexer": [1, None, 0.5]},
              "baseline": {"tokens": [1, 1e300], "dense": [1], "sparse": [2, 3]}, "kl": [[1, None]]}  # fmt: skip
    (run / "02-sparse" / "adaptation.json").write_text(json.dumps(record))
    (run / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (run / "recipe.toml").write_text(f"# {HOSTILE}")
    (run / f"03-{HOSTILE.replace('/', '')}").mkdir()
    (run / f"03-{HOSTILE.replace('/', '')}" / "samples.jsonl").write_text('{"step": 1, "prompt": "p", "text": ""}\n')
    html, page = page_of(run)
    assert not {tag for tag, _ in page.tags} & {"img", "script"} and "://" not in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", html)
    assert page.text.count("<img src=x onerror=alert(1)>") > 10 and "{{ 7*7 }}" in page.text


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    rows = [{"stage": "a", "step": n, "loss": math.sin(n), "tokens": 8} for n in range(1, 20_001)]
    rows[12_345]["loss"] = 77.0
    html = build_report(write_training_run(tmp_path / "r", rows)).read_text(encoding="utf-8")
    points = [len(re.findall("[ML]", path)) for path in re.findall(r' d="([^"]*)"', html)]
    assert 400 < max(points) <= figures.MOST_POINTS
    assert len(html) < 150_000


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(4, 60))
def test_thinning_keeps_ends_and_extremes(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    kept = figures.thin(points, most)
    assert len(kept) <= max(most, 4) and len(set(kept)) == len(kept)
    assert kept == sorted(kept) and set(kept) <= set(points)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert {min(values), max(values)} <= {value for _, value in kept}


def test_the_running_mean_is_the_mean_of_its_window() -> None:
    draw = random.Random(0)
    points = [(float(i), draw.random()) for i in range(2000)]
    found = figures.running_mean(points, 40)
    assert len(found) == figures.MOST_POINTS and found[0] == points[0]
    for x, mean in (found[3], found[250], found[-1]):
        i = int(x)
        window = [v for _, v in points if i - 40 <= _ <= i + min(40, i)]
        assert mean == pytest.approx(sum(window) / len(window), rel=1e-12)


def test_samples_are_spread_over_the_steps_and_the_last_writing_counts(run: Path) -> None:
    path = run / "00-pretrain" / "samples.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"step": 250, "prompt": "The capital of France", "text": "again"}) + "\n")
    found = stage_samples("pretrain", read_artifacts(run).samples["pretrain"])
    steps = [step for step, _ in found.steps]
    assert len(steps) == 12 and (steps[0], steps[-1]) == (0, 4000) and steps == sorted(set(steps))
    assert found.left_out == 17 - 12
    assert dict(found.steps[steps.index(250)][1])["The capital of France"] == "again"


def test_updates_are_summed_by_rule(run: Path) -> None:
    found = stage_updates("pretrain", read_artifacts(run).updates["pretrain"])
    assert [(name, [cell.value for cell in cells]) for name, cells in found.rules.rows] == [
        ("muon split", [f"{18 * 65536:,}", "288", "0.200"]),
        ("adamw", ["256", "1", "1"]),
    ]
    assert found.rows.rows[0][1][1].value == "32 × 128" and found.rows.rows[-1][1][1].value == "–"
    assert len(found.rows.rows) == 19 and found.left_out == 0
    many = stage_updates("a", read_artifacts(run).updates["pretrain"] * 30)
    assert len(many.rows.rows) == 400 and many.left_out == 170


def test_the_gap_to_the_baseline_is_the_difference_at_the_same_tokens(drawn: dict[str, dict[str, Any]]) -> None:
    import glm5.report.adaptation as module

    module_curves, module.curves = module.curves, training.curves
    try:
        points = {"tokens": [2, 1, 3, 4], "dense": [1.0, 2.0, None], "sparse": [1.5, 2.25, 9]}
        record = adaptation() | {"baseline": points}
        record["mass_curve"] = {"k": [0, -1, 8, 16], "indexer": [0.1, 0.2, 0.5, None]}
        section = adaptation_section("s", Adaptation.model_validate(record))
        old = {key: value for key, value in record.items() if key != "baseline"} | {"twin": points}
        assert Adaptation.model_validate(old).baseline == Adaptation.model_validate(record).baseline
    finally:
        module.curves = module_curves
    assert section is not None
    assert drawn["Loss gap"]["series"] == {"sparse − dense": [(1, 0.25), (2, 0.5)]}
    assert drawn["Recall by layer"]["series"]["recall"][-2:] == [(5, 0.97 - 0.02 * 5), (10, 0.5)]
    assert drawn["Attention mass"]["axis"] == "k"
    assert drawn["Attention mass"]["series"]["indexer"] == [(8, 0.5)]  # a logarithmic axis has no place for the others
    assert adaptation_section("s", Adaptation()) is None
