"""Verbs that make something: tokenizers, data, training runs, reports."""

from __future__ import annotations

import json
import logging
from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer

from glm5.cli.options import (
    Device,
    Json,
    Out,
    Overrides,
    Recipe,
    Sources,
    app,
    data_app,
    model_config,
    show,
    tokenizer_app,
)
from glm5.errors import MissingExtraError, UsageError


@tokenizer_app.command("train")
def tokenizer_train(
    sources: Sources,
    out: Out,
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size, special tokens included.")],
) -> None:
    """Train a byte-level BPE tokenizer with the GLM special tokens."""
    from glm5.chat import Tokenizer
    from glm5.data.sources import read_sources

    documents = [d for d in read_sources(sources) if not d.held_out]
    trained = Tokenizer.train((d.text for d in documents), vocab_size)
    if any(out.glob("*.safetensors")):
        raise UsageError(f"{out} holds a checkpoint, whose tokenizer would no longer fit; choose another --out.")
    trained.save(out)
    typer.echo(f"Trained {trained.vocab_size} tokens on {len(documents)} documents; wrote {out}.")


@data_app.command("build")
def data_build(
    sources: Sources,
    tokenizer: Annotated[Path, typer.Option(help="Tokenizer or checkpoint directory.")],
    out: Out,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per core.")] = None,
    dedup: Annotated[bool, typer.Option(help="Drop near-duplicates; needs the extra `data`.")] = True,
    max_bad: Annotated[
        int | None, typer.Option(min=0, help="Malformed records to skip; default: 0.1 % of them, at least 10.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tokenise sources into shards with a held-out split by file."""
    from glm5.data.build import build
    from glm5.data.shards import SPLITS
    from glm5.obs.progress import QuietConsole

    with QuietConsole().status("starting") as status:

        def report(phase: str, done: int, total: int | None) -> None:
            if done % 100 == 0 or done == total:
                status.update(f"{phase}: {done:,}" + (f" of {total:,}" if total else ""))

        info = build(sources, tokenizer, out, workers=workers, dedup=dedup, max_bad=max_bad, progress=report)
    if as_json:
        show(info, True)
        return
    counts = {f"{split}_{n}": info[f"{split}_{n}"] for split in SPLITS for n in ("tokens", "documents", "bytes")}
    counts |= {n: c for n, c in (info["near_duplicates"] or {}).items() if n.startswith("dropped")}
    counts["bad_records"] = sum(source["bad"] for source in info["sources"])
    typer.echo(", ".join(f"{name} {count:,}" for name, count in counts.items()))
    for record in info["bad_records"][:3]:
        typer.echo(f"Skipped {record}", err=True)


@app.command()
def train(recipe: Recipe, overrides: Overrides = [], resume: Annotated[bool, typer.Option("--resume")] = False) -> None:  # noqa: B006
    """Run training stages. A run that exists is resumed; without --resume, that is an error."""
    _run(recipe, overrides, kinds=("tokenizer", "pretrain", "midtrain", "dsa_warmup", "dsa_sparse"), resume=resume)


@app.command()
def adapt(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory of a dense MLA model.")],
    data: Annotated[Path, typer.Option(help="Shards made by `glm5 data build` with the model's tokenizer.")],
    out: Annotated[Path, typer.Option(help="Where the DSA checkpoint goes.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of the indexer's warm-up.")] = 100,
    sparse_steps: Annotated[int | None, typer.Option(min=1, help="Steps of the joint stage; default: as many.")] = None,
    index_topk: Annotated[int | None, typer.Option(min=1, help="Keys per query; default: by length.")] = None,
    index_heads: Annotated[int | None, typer.Option(min=1, help="Indexer heads; default: the model's.")] = None,
    index_dim: Annotated[int | None, typer.Option(min=1, help="Width of a head; default: the model's.")] = None,
    rows: Annotated[int, typer.Option(min=1)] = 8,
    row_length: Annotated[int | None, typer.Option(min=2, help="Default: as long as the data allow.")] = None,
    micro_rows: Annotated[int | None, typer.Option(min=1, help="Rows per forward pass.")] = None,
    optimizer: Annotated[str, typer.Option(help="Of the warm-up: adamw or muon.")] = "adamw",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of forward and backward.")] = "float32",
    device: Device = "auto",
    recompute: Annotated[bool, typer.Option("--recompute", help="Less memory, more time.")] = False,
    baseline: Annotated[bool, typer.Option(help="Also train a dense baseline on the same tokens.")] = True,
    twin: Annotated[bool | None, typer.Option(hidden=True)] = None,
    seed: int = 0,
) -> None:
    """Turn a dense MLA checkpoint into a sparse one, and report its gap to a dense baseline (resumes)."""
    if optimizer not in ("adamw", "muon") or dtype not in ("float32", "bfloat16"):
        raise UsageError("--optimizer is adamw or muon, --dtype float32 or bfloat16.")
    if twin is not None:
        typer.echo("warning: --twin is now --baseline; the old name goes with the next release.", err=True)
    from glm5.launch.adapt import Options, run

    options = Options(
        steps=steps,
        sparse_steps=sparse_steps,
        index_topk=index_topk,
        index_heads=index_heads,
        index_dim=index_dim,
        rows=rows,
        row_length=row_length,
        micro_rows=micro_rows,
        optimizer=optimizer,
        dtype=dtype,
        device=device,
        recompute=recompute,
        baseline=baseline if twin is None else twin,
        seed=seed,
    )
    run(model, data, out, options, echo=typer.echo)


@app.command()
def stages(
    name: Annotated[str | None, typer.Argument(help="A preset, e.g. midtrain_32k; default: all.")] = None,
    model: Annotated[str, typer.Option(help="Preset or checkpoint directory to scale to.")] = "glm5",
    tokens: Annotated[float | None, typer.Option(help="Token budget of the stage.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, instead of a token budget.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of a step.")] = None,
    row_length: Annotated[int | None, typer.Option(min=2, help="Tokens of a row.")] = None,
    pretrain_tokens: Annotated[float | None, typer.Option(help="What the model was pre-trained on.")] = None,
    as_json: Json = False,
) -> None:
    """Show the paper's training stages and their values at another scale, rule by rule."""
    from dataclasses import asdict

    from glm5.config.stages import PRESETS, scale, table

    config = model_config(model)
    budget = dict(tokens=tokens, steps=steps, rows=rows, row_length=row_length, pretrain_tokens=pretrain_tokens)
    found = [scale(stage, config, **budget) for stage in ([name] if name else PRESETS)]  # type: ignore[arg-type]
    if as_json:
        lines = {s.preset: [asdict(line) for line in s.explanation] for s in found}
        show({s.preset: {"values": s.values, "model": s.model, "explanation": lines[s.preset]} for s in found}, True)
        return
    typer.echo("\n\n".join(table(stage) for stage in found))


@app.command()
def sft(recipe: Recipe, overrides: Overrides = []) -> None:  # noqa: B006
    """Run supervised fine-tuning stages (resumes), and print the content of their data."""
    run = _run(recipe, overrides, kinds=("sft",))
    for stage in _results(run)["stages"]:
        if "data/rows" in stage["numbers"]:  # runs of earlier versions lack it
            typer.echo(f"{stage['name']}: {_told(stage['numbers'])}")


@app.command()
def rl(recipe: Recipe, overrides: Overrides = []) -> None:  # noqa: B006
    """Run stages of kind reasoning, agentic, general or distill (resumes), and print results of their last updates."""
    run = _run(recipe, overrides, kinds=("reasoning", "agentic", "general", "distill"))
    told = ("reward", "solved", "reverse_kl", "pass_rate", "kept_share")
    for stage in _results(run)["stages"]:
        numbers = stage["numbers"].items()
        parts = [f"{name} {value:.3f}" for name, value in numbers if name.partition("/")[0] in told]
        typer.echo(f"{stage['name']}: {', '.join(parts)}")


@app.command()
def pipeline(recipe: Recipe, overrides: Overrides = []) -> None:  # noqa: B006
    """Run chained stages into runs/NAME/NN-stage/, evaluate after each, and write the report (resumes)."""
    run = _run(recipe, overrides)
    from rich.console import Console

    from glm5.report import build_report, summary_table

    Console().print(summary_table(_results(run)))
    try:
        typer.echo(f"Report: {build_report(run)}")
    except MissingExtraError as error:  # the run itself is done
        typer.echo(f"No report: {error}", err=True)
    typer.echo(f"Chat with the result: glm5 serve {run / 'final'}")


@app.command()
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="One of muon-split, mtp, dsa, efficient-attention, lag, topk, icepop, rollout-dtype, dsa-bonus, "
            "reasoning-rl, distillation, general-rewards, slides, data-quality; or all."
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Seconds, not hours: shows that it runs only.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of every variant; default 3.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Time budget, from which the steps follow.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps of a run.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time, one thread each; default 2.")] = None,
    device: Annotated[str, typer.Option(help="Where models compute, such as cuda.")] = "cpu",
    runs: Annotated[Path, typer.Option(help="Where runs are kept; finished ones are not repeated.")] = Path(
        "runs/reproduce"
    ),
    publish: Annotated[Path | None, typer.Option(help="Copy result, card and plots to a folder there.")] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Keep the seeds of the result in --publish; run the others.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Test one of the paper's claims at small scale (resumes)."""
    from glm5.reproduce import reproduce as run
    from glm5.reproduce import reproduce_all, summary

    options: dict[str, Any] = dict(
        quick=quick, seeds=seeds, minutes=minutes, steps=steps, workers=workers, device=device, runs=runs,
        publish=publish, add=add,
    )  # fmt: skip
    results = reproduce_all(**options) if name == "all" else {name: run(name, **options)}
    if as_json:
        show(results if name == "all" else results[name], True)
        return
    for one, result in results.items():
        typer.echo(summary(result))
        typer.echo(f"Card: {(publish / one if publish else runs / (f'{one}-quick' if quick else one)) / 'card.md'}")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run folder, or the log of a session of `glm5 agent`.")]) -> None:
    """Write RUN/report.html, or beside a session's log a page that shows it step by step."""
    if run.is_file():
        from glm5.report.session import build_session_page

        typer.echo(f"Session: {build_session_page(run)}")
        return
    from glm5.report import build_report

    typer.echo(f"Report: {build_report(run)}")


@app.command()
def logs(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Of this rank only.")] = None,
    level: Annotated[str, typer.Option("--level", help="debug, info, warning or error, and what is worse.")] = "info",
    last: Annotated[int | None, typer.Option("--last", min=1, help="Only so many records, the latest.")] = None,
) -> None:
    """Show the logs of all ranks of a run as one, in the order of time."""
    from glm5.obs.log_view import records

    number = logging.getLevelNamesMapping().get(level.upper())
    if not number:
        raise UsageError(f"--level {level} is none of debug, info, warning and error.")
    found = records(run, rank, number)
    for record in found if last is None else deque(found, last):
        typer.echo(record)


def _results(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "results.json").read_text(encoding="utf-8"))
    return found


def _told(numbers: dict[str, float]) -> str:
    """The training data of an SFT stage, in one line."""
    data = {name.removeprefix("data/"): value for name, value in numbers.items() if name.startswith("data/")}
    left_out = {"too_long": "too long", "bad_lines": "bad lines", "untrained": "without a trained turn"}
    parts = [f"{data[k]:,.0f} {k}" for k in ("conversations", "rows", "tokens")]
    parts += [f"{data['trained_share']:.1%} of them trained", f"rows filled to {data['fill']:.1%}"]
    parts += [f"{value:.2f} {name.replace('/', ' of ')}" for name, value in data.items() if name.startswith("epochs")]
    return ", ".join(parts + [f"{data[k]:,.0f} {words}" for k, words in left_out.items() if data[k]])


def _run(recipe: Path, overrides: list[str], kinds: tuple[str, ...] = (), resume: bool = True) -> Path:
    from glm5.config.load import load_recipe
    from glm5.config.recipe import RunRecipe
    from glm5.obs.logs import rank

    loaded = load_recipe(recipe, RunRecipe, overrides)
    for stage in loaded.stages:
        if kinds and stage.kind not in kinds:
            raise UsageError(f'{recipe}: stage "{stage.name}" is of kind {stage.kind}; run it with `glm5 pipeline`.')
    folder = Path(loaded.runs) / loaded.name
    if not resume and rank() == 0 and (folder / "recipe.toml").exists():
        raise UsageError(f"{folder} exists already; pass --resume to go on with it, or choose another name.")
    from glm5.launch.pipeline import run_pipeline

    run = run_pipeline(loaded, verbose="pretrain" in kinds)
    if rank() != 0:
        raise typer.Exit()
    typer.echo(f"Results: {run / 'results.json'}")
    return run
