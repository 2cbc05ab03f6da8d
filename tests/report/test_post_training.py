"""Post-training in the report: RL curves, pass@k, one rollout token by token, and whole pages."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.report import build_report, figures, forgetting, post_training
from glm5.report.artifacts import Rollout
from glm5.report.post_training import RATIO_EDGES, pass_at, policy_sections
from glm5.report.results import load_run, parse_results
from glm5.report.rollout import MOST_TOKENS, rollout_section
from glm5.report.sections import forgetting_table
from glm5.stats import wilson

WriteRun = Callable[..., Path]
PageOf = Callable[[Path], tuple[str, Any]]


def entry(solved: str) -> dict[str, Any]:
    found = wilson(solved.count("1"), len(solved))
    return {"score": found.value, "low": found.low, "high": found.high, "n": found.n, "solved": solved}


# --------------------------------------------------------------------------------------------------------------- curves


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What panels were asked to show, by title, instead of their pictures."""
    asked: dict[str, dict[str, Any]] = {}

    def of_curves(title: str, series: Any, note: str = "", **rest: Any) -> Any:
        shown = {one.label: list(one.points) for one in series if one.points}
        if not shown:
            return None
        asked[title] = {"series": shown, "note": note, **rest}
        return figures.Panel(title, figures.Markup(""))

    def of_bars(title: str, names: Any, series: Any, note: str = "", **rest: Any) -> Any:
        return of_curves(title, series, note, names=list(names), **rest)

    monkeypatch.setattr(post_training, "curves", of_curves)
    monkeypatch.setattr(post_training, "bars", of_bars)
    return asked


def policy_rows(steps: int, **columns: Callable[[int], float]) -> list[dict[str, Any]]:
    return [
        {"stage": "rl", "step": n, "time": float(n), "reward": n / 100}
        | {key.replace("__", "/"): value(n) for key, value in columns.items()}
        for n in range(1, steps + 1)
    ]


def sections_of(write_run: WriteRun, rows: list[dict[str, Any]]) -> list[Any]:
    return policy_sections(load_run(write_run({"name": "x", "stages": [{"name": "rl", "kind": "reasoning"}]}, rows)))


def bins(**counts: float) -> dict[str, Callable[[int], float]]:
    return {f"ratio_bin_{i:02d}": (lambda n, i=i: counts.get(f"b{i}", 0.0)) for i in range(11)}  # type: ignore[misc]


def test_ratio_edges_are_those_of_the_learner() -> None:
    from glm5.rl.losses import measure

    assert RATIO_EDGES == measure.RATIO_EDGES and post_training._BINS == measure.BINS


def test_times_are_those_of_the_drivers() -> None:
    from glm5.rl.drivers import live, timing

    assert set(post_training.WORK) == {*timing.WORK, *live.WORK}


def test_only_what_is_known_is_drawn(write_run: WriteRun, drawn: dict[str, Any]) -> None:
    (section,) = sections_of(write_run, policy_rows(3))
    assert list(drawn) == ["Reward in rl"] and len(section.panels) == 1
    assert drawn["Reward in rl"]["series"] == {"reward": [(1, 0.01), (2, 0.02), (3, 0.03)]}
    assert section.said == ["3 updates; reward 0.010 in the first, 0.030 in the last."]
    assert section.title == "Reasoning RL, §3.2"
    assert sections_of(write_run, [{"stage": "rl", "step": 1, "time": 1.0, "loss": 2.0}]) == []


def test_all_that_an_update_measures_is_drawn(write_run: WriteRun, drawn: dict[str, Any]) -> None:
    rows = policy_rows(
        20, solved=lambda n: n / 200, entropy=lambda n: 1 / n, length=lambda n: 20.0, masked_share=lambda n: 0.01 * n,
        clipped_share=lambda n: 0.0, ess_share=lambda n: 0.9, mismatch_mean=lambda n: 1e-4,
        mismatch_max=lambda n: 0.0 if n == 4 else 1e-2, mismatch_kl=lambda n: 1e-6, staleness_mean=lambda n: 0.5,
        staleness_max=lambda n: 2.0, reverse_kl=lambda n: 0.2, reverse_kl__sft=lambda n: 0.3,
        solved__math=lambda n: n / 100, solved__code=lambda n: n / 300, kl=lambda n: 0.01,
        generate_seconds=lambda n: 3.0, environment_seconds=lambda n: 0.5, update_seconds=lambda n: 1.0 + n % 2,
        publish_seconds=lambda n: 0.0, **bins(b5=98.0, b6=2.0),
    )  # fmt: skip
    (section,) = sections_of(write_run, rows)
    assert [panel.title.removesuffix(" in rl") for panel in section.panels] == [
        "Reward", "Solved by domain", "Entropy", "Length", "Left out or limited", "Ratios", "Effective sample size",
        "Mismatch", "Staleness", "Reverse KL", "KL penalty", "Time",
    ]  # fmt: skip
    assert set(drawn["Reward in rl"]["series"]) == {"reward", "solved"}
    assert drawn["Solved by domain in rl"]["series"]["math"][:2] == [(1, 0.01), (2, 0.02)]
    assert set(drawn["Solved by domain in rl"]["series"]) == {"math", "code"}
    assert set(drawn["Left out or limited in rl"]["series"]) == {"masked", "clipped"}
    assert set(drawn["Reverse KL in rl"]["series"]) == {"all", "to sft"}
    ratios = drawn["Ratios in rl"]
    assert ratios["series"] == {"first 5": [(5, 0.98), (6, 0.02)], "last 5": [(5, 0.98), (6, 0.02)]} and ratios["log"]
    assert len(ratios["names"]) == 11 and ratios["names"][5] == "0.794–1.26" and ratios["names"][0] == "<0.125"
    mismatch = drawn["Mismatch in rl"]
    assert mismatch["log"] and len(mismatch["series"]["largest"]) == 19 and "exactly 0 in 1 of 20" in mismatch["note"]
    time = drawn["Time in rl"]
    assert time["stacked"] and time["series"]["generate"] == [(i, 3.0) for i in range(20)]
    assert section.said == [
        "20 updates; reward 0.015 over the first 2, 0.195 over the last 2.",
        "Of all ratios of learner to engine, 2.00% lay outside of 0.79 to 1.26.",
        "With the same weights, the log-probabilities of engine and learner differed by at most 0.0100 nats.",
        "Of 1 min 40 s, generate 60%, environment 10%, update 30% and publish 0%.",
    ]


def test_first_and_last_updates_are_compared(write_run: WriteRun, drawn: dict[str, Any]) -> None:
    rows = policy_rows(12, **bins(b5=10.0))
    for row in rows[-5:]:
        row |= {"ratio_bin_05": 6.0, "ratio_bin_10": 3.0, "ratio_bin_00": 1.0}
    sections_of(write_run, rows)
    assert drawn["Ratios in rl"]["series"] == {"first 5": [(5, 1.0)], "last 5": [(0, 0.1), (5, 0.6), (10, 0.3)]}


def test_ratios_and_mismatch_of_nothing_but_agreement_are_said_and_not_drawn(
    write_run: WriteRun, drawn: dict[str, Any]
) -> None:
    names = ("mismatch_max", "mismatch_mean", "mismatch_kl", "staleness_mean", "masked_share", "clipped_share")
    zeros = {name: lambda n: 0.0 for name in names}
    (section,) = sections_of(write_run, policy_rows(1, **zeros, ess_share=lambda n: 1.0, **bins(b5=50.0)))
    assert list(drawn) == ["Reward in rl"]
    assert section.said == [
        "1 update, reward 0.010.",
        "No token was masked or clipped.",
        "All tokens weighed alike: the effective sample size was their number.",
        "Every ratio of learner to engine lay between 0.79 and 1.26 when it was trained on.",
        "With the same weights, engine and learner gave every token exactly the same log-probability.",
    ]


def test_long_runs_have_few_bars(write_run: WriteRun, drawn: dict[str, Any]) -> None:
    (section,) = sections_of(
        write_run, policy_rows(95, generate_seconds=lambda n: float(n), update_seconds=lambda n: 1.0)
    )
    time = drawn["Time in rl"]
    assert len(time["names"]) == 24 and time["names"][:2] == ["1–4", "5–8"] and time["names"][-1] == "93–95"
    assert time["series"]["generate"][0] == (0, 2.5) and time["series"]["generate"][-1] == (23, 94.0)
    assert set(time["series"]) == {"generate", "update"}
    assert "generate 98% and update 2%" in section.said[-1]


# --------------------------------------------------------------------------------------------------------------- pass@k


def with_samples(hits: int, at1: float, at8: float) -> dict[str, Any]:
    part = {"low": 0.1, "high": 0.95, "n": 50}
    found = entry("1" * hits + "0" * (50 - hits))
    return found | {"pass@k": {"8": {"score": at8} | part, "1": {"score": at1} | part}, "samples": 8, "passed": "0 8"}


def test_pass_at_k_stands_beside_the_greedy_score() -> None:
    skills = {"pre": entry("0" * 50), "sft": with_samples(20, 0.35, 0.8), "rl": with_samples(35, 0.7, 0.81)}
    stages = [{"name": name, "evaluation": {"skills": {"maths": score}}} for name, score in skills.items()]
    found = pass_at(parse_results({"stages": stages}))
    assert found is not None
    table, panels = found
    assert table.headings == ["skill", "greedy", "pass@1", "pass@8", "samples per problem"]
    assert [(name, [cell.value for cell in cells]) for name, cells in table.rows] == [
        ("maths after sft", ["0.40", "0.35", "0.80", "8"]), ("maths after rl", ["0.70", "0.70", "0.81", "8"]),
    ]  # fmt: skip
    (panel,) = panels
    assert [label for label, _ in panel.legend] == ["greedy", "pass@1", "pass@8"]
    assert pass_at(parse_results({"stages": stages[:1]})) is None


# -------------------------------------------------------------------------------------------------------------- rollout

HOSTILE = "<script>alert(1)</script></span></div>\"' onmouseover=x\x00\x1b[2J\u202e\u2066\u200b\ud800{{ 7*7 }}"


def token(text: str, **values: Any) -> dict[str, Any]:
    base = {"text": text, "loss": True, "ratio": 1.0, "rho": 1.0, "advantage": 0.5, "masked": False, "clipped": False}
    return base | {"version": 3} | values


def rollout(*tokens: dict[str, Any]) -> dict[str, Any]:
    return {"step": 12, "problem": "toy/3", "domain": "toy", "outcome": "solved", "reward": 1.0, "tokens": list(tokens)}


CONTEXT = [{"text": "<|user|>", "loss": False}, {"text": "2+", "loss": False}, {"text": "2=", "loss": False}]


@pytest.fixture
def rl_run(write_run: WriteRun) -> Callable[[Any], Path]:
    def write(content: Any) -> Path:
        folder = write_run({"name": "x", "stages": [{"name": "rl", "kind": "reasoning"}]}, policy_rows(3))
        (folder / "00-rl").mkdir(exist_ok=True)
        (folder / "00-rl" / "rollout.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return folder

    return write


def spans(html: str) -> list[tuple[str, str, str]]:
    """(classes, title, text) of the spans of the first rollout."""
    body = html.split('class="text rollout"', 1)[1].split("</div>", 1)[0]
    return [
        (m[1], m[2] or "", m[3])
        for m in re.finditer(r'<span class="(tok[^"]*)"(?: title="(.*?)")?>(.*?)</span>', body, re.S)
    ]


def test_tokens_are_coloured_by_ratio(rl_run: Callable[[Any], Path], page_of: PageOf) -> None:
    tokens = [
        token("4"), token("5", ratio=4.0), token("\n", ratio=0.25, rho=0.3, masked=True),
        token("", ratio=2.0, clipped=True),
        token("x", ratio=0.5, advantage=-1.25), token("y", ratio=1.05), {"text": "done", "loss": False},
    ]  # fmt: skip
    html, page = page_of(rl_run(rollout(*CONTEXT, *tokens)))
    assert page.headings == ["stages", "policy", "rollout", "notes"]
    assert spans(html) == [
        ("tok", "ratio 1, rho 1, advantage +0.500", "4"),
        ("tok up4", "ratio 4, rho 1, advantage +0.500", "5"),
        ("tok down4 masked", "ratio 0.2500, rho 0.3000, advantage +0.500, masked", "↵\n"),
        ("tok up2 clipped", "ratio 2, rho 1, advantage +0.500, clipped", "∅"),
        ("tok down2", "ratio 0.5000, rho 1, advantage −1.250", "x"),
        ("tok", "ratio 1.050, rho 1, advantage +0.500", "y"),
    ]
    assert html.count('<span class="context">') == 2 + 1  # two stretches, and the key
    assert '<span class="special">&lt;|user|&gt;</span>2+2=</span>' in html
    text = " ".join(page.text.split())
    for said in ("down to × 0.250", "up to × 4", "masked 1", "clipped 1", "problem toy/3", "update 12",
                 "outcome solved", "reward 1"):  # fmt: skip
        assert said in text, said
    assert '<th scope="row">3</th>' in html and '<th scope="row">2</th>' not in html.split('class="text rollout"')[1]


def test_a_rollout_without_any_change_says_so(rl_run: Callable[[Any], Path], page_of: PageOf) -> None:
    html, page = page_of(rl_run(rollout(*CONTEXT, token("4"), token("!"))))
    assert "every ratio is exactly 1" in page.text and {c for c, _, _ in spans(html)} == {"tok"}


def test_hostile_tokens_show_and_do_nothing(rl_run: Callable[[Any], Path], page_of: PageOf) -> None:
    bad = [token(c, ratio=1.5) for c in HOSTILE] + [
        token(HOSTILE),
        token("https:"),
        token("//evil.example"),
        token("a://b"),
    ]
    context = [{"text": HOSTILE, "loss": False}, {"text": "ftp:", "loss": False}, {"text": "//x", "loss": False}]
    content = rollout(*context, *bad) | {"problem": HOSTILE, "domain": HOSTILE, "outcome": HOSTILE, "teacher": HOSTILE}
    html, page = page_of(rl_run(content))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert {name for _, names in page.tags for name in names if name.startswith("on")} == set()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066\ud800]", html) and "://" not in html
    for shown in ("<script>alert(1)</script>", "{{ 7*7 }}", "\\x1b[2J", "\\u202e", "\\ud800"):
        assert page.text.count(shown) >= 3, shown
    assert "unicode-bidi: isolate" in html


def test_long_rollouts_are_cut(rl_run: Callable[[Any], Path], page_of: PageOf) -> None:
    context = {"text": "c" * 5000, "loss": False}
    html, page = page_of(rl_run(rollout(context, *(token("q", ratio=1.0 + i / 1e4) for i in range(MOST_TOKENS + 9)))))
    assert "10 more tokens are in rollout.json" in page.text and "3,500 more characters" in page.text
    assert len(spans(html)) == MOST_TOKENS - 1 and html.count('<tr><th scope="row">') < 500


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"tokens": 3}', '{"tokens": [{"ratio": 1e999, "loss": true}]}', '{"step": 1' + "0" * 400 + "}",
     '{"tokens": [{"version": -1}]}', "[" * 100_000],
)  # fmt: skip
def test_a_damaged_rollout_is_named_and_left_out(rl_run: Callable[[Any], Path], page_of: PageOf, content: str) -> None:
    _, page = page_of(rl_run(content))
    assert "rollout" not in page.headings and "Left out, because damaged: 00-rl/rollout.json." in page.text


@pytest.mark.parametrize(
    "odd",
    [{"ratio": None, "rho": None, "advantage": None, "version": None}, {"ratio": 0.0}, {"ratio": -3.0},
     {"ratio": 1.7e308}, {"ratio": 5e-324}, {"advantage": 1e300}],
)  # fmt: skip
def test_odd_numbers_are_no_obstacle(rl_run: Callable[[Any], Path], page_of: PageOf, odd: dict[str, Any]) -> None:
    html, page = page_of(rl_run(rollout(token("a", **odd), token("b"))))
    assert "rollout" in page.headings and len(spans(html)) == 2 and "None" not in page.text


def test_a_rollout_without_trained_tokens_has_no_section(rl_run: Callable[[Any], Path], page_of: PageOf) -> None:
    assert "rollout" not in page_of(rl_run(rollout(*CONTEXT)))[1].headings
    assert rollout_section("rl", Rollout()) is None


def test_what_the_loop_writes_is_what_the_report_reads(
    tokenizer: Any, tmp_path: Path, rl_run: Callable[[Any], Path], page_of: PageOf
) -> None:
    """No key of the one is unknown to the other."""
    import torch

    from glm5.parallel.ranks import Ranks
    from glm5.records import TrainSample
    from glm5.rl.learner import PolicyBatch
    from glm5.rl.losses import IcePop
    from glm5.rl.rollout_trace import FILE, RolloutTrace

    ids = tokenizer.encode("a=b")
    sample = TrainSample(ids, [False, True, True], [0.0, -1.0, -1.0], [0.0, 1.0, 1.0], [-1, 4, 4], teacher="sft")
    ones = torch.ones(1, 2)
    batch = PolicyBatch(
        logprobs=-ones,
        rollout_logprobs=-ones,
        advantages=ones,
        mask=ones.bool(),
        versions=ones.long(),
        samples=[sample],
    )

    class Same:
        version, ranks = 5, Ranks()

        def forward(self, samples: Any) -> PolicyBatch:
            return batch

    seen = RolloutTrace("IcePop")
    seen(batch, IcePop()(batch))
    learner: Any = Same()
    assert seen.write(tmp_path, learner, [], tokenizer)
    content = json.loads((tmp_path / FILE).read_text())
    assert set(content) - {"loss"} <= set(Rollout.model_fields)
    assert set(content["tokens"][1]) == {"text", "loss", "ratio", "rho", "advantage", "masked", "clipped", "version"}
    _, page = page_of(rl_run(content))
    assert "taught by sft" in " ".join(page.text.split()) and "rollout" in page.headings


# ---------------------------------------------------------------------------------------------------------- whole pages


@pytest.mark.long
def test_a_page_with_everything(
    page_of: PageOf, write_run: WriteRun, results: dict[str, Any], metrics: list[dict[str, Any]]
) -> None:
    draw = random.Random(2)
    for place, stage in enumerate(results["stages"][1:]):
        for name, score in stage["evaluation"]["skills"].items():
            hits = round(score["score"] * 100)
            score["solved"] = "".join(draw.sample("1" * hits + "0" * (100 - hits), 100))
            if place >= 4:
                score |= with_samples(20, 0.4, 0.8) | {k: score[k] for k in ("score", "low", "high", "n", "solved")}
            assert name
    for row in metrics:
        if "reward" in row:
            row |= {"generate_seconds": 2.0, "update_seconds": 1.0, "ess_share": 0.99, "ratio_bin_05": 9.0}
            row |= {f"ratio_bin_{i:02d}": 1.0 for i in range(11) if i != 5}
    shown = ("pretrain", "sft", "reasoning", "distill")
    folder = write_run(results, [row for row in metrics if row["stage"] in shown])
    for number, name in ((6, "reasoning"), (9, "distill")):
        (folder / f"{number:02d}-{name}").mkdir()
        (folder / f"{number:02d}-{name}" / "rollout.json").write_text(
            json.dumps(rollout(*CONTEXT, token("4", ratio=1.1)))
        )
    html, page = page_of(folder)
    assert page.headings == [
        "stages", "forgetting", "passk", "curves", "policy", "rollout", "retrieval", "drafting", "samples", "notes",
    ]  # fmt: skip
    assert [names["href"] for tag, names in page.tags if tag == "a"] == [f"#{name}" for name in page.headings]
    text = " ".join(page.text.split())
    assert "What distillation brought back" in text and "distill brought back" in text
    assert "since reasoning, −" in text and "pass@8" in text
    labels = [str(names["aria-label"]) for tag, names in page.tags if tag == "svg"]
    assert len(labels) == len(set(labels)) and all(": " in label for label in labels)  # each says what is in it
    assert "None" not in page.text and "://" not in html and not re.search(r"\bnan\b", html)
    assert build_report(folder).read_text(encoding="utf-8") == html


def test_old_results_still_make_a_table(results: dict[str, Any], write_run: WriteRun) -> None:
    run = load_run(write_run(results))
    table = forgetting_table(run.results)
    assert table is not None and len(table.rows) == 9 and pass_at(run.results) is None
    assert all(cell.change is None or not cell.change.paired for row in forgetting(run.results) for cell in row.cells)
    assert run.artifacts.rollouts == {} and run.artifacts.problems == []
