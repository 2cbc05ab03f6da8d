"""The page is correct, self-contained, well-formed and harmless, whatever the run folder lacks or models wrote."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import DataError, MissingExtraError
from glm5.report import build_report
from glm5.report.results import load_run
from glm5.report.sections import comparisons, forgetting_table, needle

WriteRun = Callable[..., Path]
PageOf = Callable[[Path], tuple[str, Any]]


@pytest.fixture(scope="module")
def whole(page_of: PageOf, whole_run: Path) -> tuple[str, Any]:
    """The page of a run that has everything."""
    return page_of(whole_run)


@pytest.mark.long
def test_a_whole_run_has_every_section_in_order(whole: tuple[str, Any]) -> None:
    _, page = whole
    assert page.headings == ["stages", "forgetting", "curves", "policy", "retrieval", "drafting", "samples", "notes"]
    # RL: reward, entropy, length and masked share of four stages, staleness, a reward model, reverse KL
    assert sum(tag == "svg" for tag, _ in page.tags) == 4 + 3 + 1 + 2 + 4 * 4 + 3 + 1 + 2
    text = " ".join(page.text.split())
    for said in (
        "took a “nano” model of 1,597,984 parameters through 10 stages",
        "It took 6 min 40 s in all.",
        "0.76 on arithmetic, 0.70 on toolcall, 0.63 on bugfix and 0.82 on general",
        "2.760 bits per byte",
        "Engine and learner agreed bit for bit on 123,456 of 123,456 sampled tokens.",
        "§2.1.1",
        "make demo",
        "glm5 serve runs/laptop/final",
        "glm5 report runs/laptop",
        "the stage did not help it",
        "2.13.0",
    ):
        assert said in text, said


def test_the_page_asks_for_nothing_from_outside(whole: tuple[str, Any]) -> None:
    html, page = whole
    assert "://" not in html and "@import" not in html and "xmlns" not in html
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for tag, names in page.tags:
        for name, value in names.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name in ("src", "href", "xlink:href", "action"):
                assert value and value.startswith("#")
    assert set(re.findall(r"url\(.", html)) <= {"url(#"}
    policy = next(names["content"] for tag, names in page.tags if names.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_references_inside_the_page_lead_somewhere(whole: tuple[str, Any]) -> None:
    html, page = whole
    wanted = {str(names["href"])[1:] for _, names in page.tags if "href" in names} | set(
        re.findall(r"url\(#(.*?)\)", html)
    )
    assert wanted <= set(page.ids)
    anchors = [name for name in page.ids if name in page.headings]
    assert anchors == page.headings


@pytest.mark.long
def test_the_same_data_give_the_same_bytes(
    whole: tuple[str, Any], write_run: WriteRun, results: dict[str, Any], metrics: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Written a second time, elsewhere; the one number that differs is all that differs."""
    results["times"]["total_seconds"] = 401.0
    other = build_report(write_run(results, metrics), tmp_path / "elsewhere" / "page.html")
    assert other == tmp_path / "elsewhere" / "page.html"
    changed = other.read_text(encoding="utf-8")
    assert "6 min 41 s" in changed and changed.replace("6 min 41 s", "6 min 40 s") == whole[0]


HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'`&amp;</div></section></svg><!-- ]]> {{ 7*7 }} $\\frac{$"
    "\x00\x07\x1b[2J\x7f\x9b\r\n\u202e\u2066\u200b\ufeff\ud800 https://evil.example/x?<|user|></think>預訓練"
)


def test_hostile_text_shows_and_does_nothing(
    page_of: PageOf, write_run: WriteRun, results: dict[str, Any], metrics: list[dict[str, Any]]
) -> None:
    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key if key in _KEYS else HOSTILE + key: poison(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return HOSTILE + value if isinstance(value, str) else value

    bad = poison(results)
    for stage, original in zip(bad["stages"], results["stages"], strict=True):
        stage["kind"] = original["kind"]
    rows = [row | {"stage": HOSTILE + row["stage"]} for row in metrics]
    html, page = page_of(write_run(bad, rows, name="odd"))
    assert {tag for tag, _ in page.tags} & {"script", "img"} == set()
    assert "://" not in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066\ufeff]", html)
    for shown in (
        "<script>alert(1)</script>",
        "{{ 7*7 }}",
        "\\x1b[2J",
        "\\u202e",
        "\\ud800",
        "https://evil.example/x?",
    ):
        assert shown in page.text, shown
    special = [names for tag, names in page.tags if tag == "span" and names.get("class") == "special"]
    assert len(special) > 10
    assert sum(tag == "svg" for tag, _ in page.tags) > 10


_KEYS = {
    "name", "seed", "preset", "parameters", "corpus", "train_tokens", "train_documents", "held_out_tokens",
    "held_out_documents", "tokenizer_vocab", "stages", "kind", "numbers", "evaluation", "text", "bits_per_byte",
    "bytes",
    "skills", "score", "low", "high", "n", "needle", "mtp", "accept_length", "per_position", "samples", "family",
    "prompt", "output", "reward", "exact", "tokens", "mismatches", "max_abs_diff", "notes", "times", "total_seconds",
    "train_seconds", "evaluation_seconds", "software",
}  # fmt: skip


def test_figures_take_names_literally(page_of: PageOf, write_run: WriteRun, results: dict[str, Any]) -> None:
    for index, name in enumerate(("$\\frac{$", "<b>&x", "預訓練", "_a^b$c$", "a" * 40)):
        results["stages"][index + 1]["name"] = name
    _, page = page_of(write_run(results))
    for shown in ("$\\frac{$", "<b>&x", "預訓練", "_a^b$c$"):
        assert page.text.count(shown) >= 5, shown  # in the tables and in both figures over the stages
    assert page.text.count("a" * 15 + "…") == 2  # only in those figures


def test_long_outputs_are_cut_and_empty_ones_said(
    page_of: PageOf, write_run: WriteRun, results: dict[str, Any]
) -> None:
    results["stages"][1]["evaluation"]["samples"][0]["output"] = ""
    results["stages"][-1]["evaluation"]["samples"][0]["output"] = "a" * 4000 + "b" * 1234
    _, page = page_of(write_run(results))
    assert "… 1,234 more characters" in page.text and "ab" not in page.text.split("more characters")[0][-100:]
    assert ("div", {"class": "empty"}) in page.tags


def test_a_run_without_metrics_has_no_curves(page_of: PageOf, write_run: WriteRun, results: dict[str, Any]) -> None:
    _, page = page_of(write_run(results))
    assert page.headings == ["stages", "forgetting", "retrieval", "drafting", "samples", "notes"]


def test_a_run_of_pretraining_only(
    page_of: PageOf, write_run: WriteRun, results: dict[str, Any], metrics: list[dict[str, Any]]
) -> None:
    results["stages"] = results["stages"][:2]
    results["exact"], results["notes"] = None, []
    del results["stages"][1]["evaluation"]["mtp"], results["stages"][1]["evaluation"]["needle"]
    _, page = page_of(write_run(results, [row for row in metrics if row["stage"] == "pretrain"]))
    assert page.headings == ["stages", "forgetting", "curves", "samples", "notes"]
    assert "agreed bit for bit" not in page.text and "Reinforcement learning" not in page.text
    assert "through 2 stages: tokenizer and pre-training" in page.text


def test_an_unfinished_run_is_told_from_its_metrics(
    page_of: PageOf, write_run: WriteRun, metrics: list[dict[str, Any]]
) -> None:
    folder = write_run(None, [row | ({"loss": None} if row["step"] == 3 else {}) for row in metrics[:500]])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "warm')  # cut off by a crash
    (folder / "recipe.toml").write_text(
        'name = "laptop"\nseed = 7\npreset = "nano"\n'
        '[[stages]]\nname = "pretrain"\nkind = "pretrain"\n[[stages]]\nname = "warmup"\nkind = "dsa_warmup"\n'
    )
    html, page = page_of(folder)
    assert page.headings == ["stages", "curves", "notes"]
    assert "This run has not finished" in page.text and "with seed 7" in page.text
    assert "DSA warm-up" in page.text and "glm5 serve" not in page.text
    assert "6 min 59 s" in page.text  # from the first to the last of 420 lines of pretrain, a second apart
    assert "nan" not in html.lower().replace("nano", "")


@pytest.mark.parametrize("recipe", [None, "not = [toml", 'stages = 3\nname = 4\nseed = "x"'])
def test_an_unfinished_run_needs_no_recipe(
    page_of: PageOf, write_run: WriteRun, metrics: list[dict[str, Any]], recipe: str | None
) -> None:
    folder = write_run(None, [row for row in metrics if row["stage"] in ("pretrain", "reasoning")], name="other")
    if recipe is not None:
        (folder / "recipe.toml").write_text(recipe)
    _, page = page_of(folder)
    assert page.headings == ["stages", "curves", "policy", "notes"]
    assert "Reinforcement learning" in page.text  # by its metrics, where the kind is unknown
    assert "glm5 pipeline runs/other/recipe.toml" in page.text


def test_mismatches_are_said(page_of: PageOf, write_run: WriteRun, results: dict[str, Any]) -> None:
    results["exact"] |= {"mismatches": 6, "max_abs_diff": 0.00125}
    _, page = page_of(write_run(results))
    assert "agreed bit for bit on 123,450 of 123,456 sampled tokens; on 6 their log-probabilities" in page.text
    assert "differed, by at most 0.00125 nats" in page.text


def test_nothing_to_report(tmp_path: Path, write_run: WriteRun) -> None:
    with pytest.raises(DataError, match=r"neither results\.json nor metrics\.jsonl"):
        build_report(tmp_path)
    with pytest.raises(DataError, match="neither"):
        build_report(tmp_path / "absent")
    with pytest.raises(DataError, match="no line yet"):
        build_report(write_run(None, []))
    assert not list(tmp_path.rglob("report.html"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "the whole"),
        ('{"stages": 3}', "stages"),
        ('{"stages": [{"name": "a", "evaluation": {"skills": {"x": {"score": "high"}}}}]}', r"stages\.0\.evaluation"),
        ('{"stages": [{"name": "a", "evaluation": {"skills": {"x": {"score": NaN}}}}]}', r"skills\.x\.score"),
        ('{"parameters": 1e999}', "parameters"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_damaged_results_are_an_error_that_says_where(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(DataError, match=said) as caught:
        build_report(tmp_path)
    assert "results.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_is_no_place_for_the_page(write_run: WriteRun, results: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        build_report(write_run(results), tmp_path)


def test_without_matplotlib_the_extra_is_named(
    write_run: WriteRun, results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **keywords: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **keywords)

    folder = write_run(results)
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtraError, match=r"glm5\[report\]"):
        build_report(folder)


def test_the_table_of_forgetting_calls_changes_by_their_interval(results: dict[str, Any], write_run: WriteRun) -> None:
    table = forgetting_table(load_run(write_run(results)).results)
    assert table is not None
    assert table.headings == ["after stage", "arithmetic", "toolcall", "bugfix", "general", "bits per byte"]
    verdicts = {name: [cell.change.verdict if cell.change else None for cell in cells] for name, cells in table.rows}
    assert verdicts["pretrain"] == [None] * 5
    assert verdicts["sft"] == ["better"] * 4 + ["worse"]
    assert verdicts["reasoning"] == ["better", "same", "same", "same", "worse"]  # bits: than the 2.471 of sparse
    assert verdicts["agentic"] == ["worse", "same", "better", "same", "worse"]
    assert verdicts["general"] == ["worse", "worse", "same", "better", "worse"]
    assert verdicts["distill"] == ["same"] * 4 + ["worse"]  # arithmetic: than the 0.78 of reasoning
    assert verdicts["warmup"][-1] == "same"
    rows = dict(table.rows)
    assert rows["agentic"][0].remark == "since reasoning, −0.28\u00a0to\u00a0−0.03" and rows["pretrain"][0].remark == ""


def test_retrieval_compares_dense_sparse_and_last(results: dict[str, Any], write_run: WriteRun) -> None:
    found = needle(load_run(write_run(results)).results)
    assert found is not None
    table, panel = found
    assert table.headings == ["model", "256 bytes", "512 bytes", "1024 bytes"]
    assert [name.split()[-1] for name, _ in table.rows] == ["midtrain", "sparse", "distill"]
    assert panel is not None and [label for label, _ in panel.legend] == [
        "after midtrain",
        "after sparse",
        "after distill",
    ]


def test_samples_show_the_same_problem_at_three_stages(results: dict[str, Any], write_run: WriteRun) -> None:
    extra = {"family": "arithmetic", "prompt": "1+1=", "output": "2", "reward": 1}
    for stage in results["stages"][1:]:
        stage["evaluation"]["samples"].append(extra)
    found = comparisons(load_run(write_run(results)).results)
    assert [c.family for c in found] == ["arithmetic", "toolcall", "bugfix", "general"]
    assert all([name for name, _, _ in c.answers] == ["pretrain", "sft", "distill"] for c in found)
    assert found[0].prompt.startswith("<|user|>37+15=")


def test_null_values_everywhere_are_no_obstacle(page_of: PageOf, write_run: WriteRun, results: dict[str, Any]) -> None:
    for stage in results["stages"]:
        stage["numbers"] = dict.fromkeys(stage["numbers"])
        for score in stage.get("evaluation", {}).get("skills", {}).values():
            score["low"] = score["high"] = None
    results["stages"][1]["evaluation"]["text"]["bits_per_byte"] = None
    results["times"]["total_seconds"] = None
    results["software"]["torch"] = None
    results |= {"seed": None, "preset": None, "parameters": None}
    _, page = page_of(write_run(results))
    assert "None" not in page.text and "no interval" in page.text
