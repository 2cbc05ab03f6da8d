"""Verbs that make something: tokenizers, data, training runs, reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.options import Out, Overrides, Recipe, Sources, app, data_app, tokenizer_app
from glm5.errors import UsageError


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
    trained.save(out)
    typer.echo(f"Trained {trained.vocab_size} tokens on {len(documents)} documents; wrote {out}.")


@data_app.command("build")
def data_build(
    sources: Sources,
    tokenizer: Annotated[Path, typer.Option(help="Tokenizer or checkpoint directory.")],
    out: Out,
) -> None:
    """Tokenise sources into shards with a held-out split by file."""
    from glm5.chat import Tokenizer
    from glm5.data.shards import build_shards
    from glm5.data.sources import read_sources

    counts = build_shards(read_sources(sources), Tokenizer.load(tokenizer), out, sources)
    typer.echo(", ".join(f"{name} {count:,}" for name, count in counts.items()))


@app.command()
def train(recipe: Recipe, overrides: Overrides = [], resume: Annotated[bool, typer.Option("--resume")] = False) -> None:  # noqa: B006
    """Run training stages. A run that exists is resumed; without --resume, that is an error."""
    _run(recipe, overrides, kinds=("tokenizer", "pretrain", "midtrain", "dsa_warmup", "dsa_sparse"), resume=resume)


@app.command()
def adapt(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory of a dense MLA model.")],
    data: Annotated[Path, typer.Option(help="Shards made by `glm5 data build` with the model's tokenizer.")],
    out: Annotated[Path, typer.Option(help="Where the DSA checkpoint goes.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of each of the two stages.")] = 50,
    index_topk: Annotated[int, typer.Option(min=1, help="Keys per query that DSA keeps.")] = 32,
    index_heads: Annotated[int, typer.Option(min=1, help="Indexer heads.")] = 16,
    index_dim: Annotated[int, typer.Option(min=1, help="Width of an indexer head.")] = 32,
    row_length: Annotated[int, typer.Option(min=2)] = 512,
) -> None:
    """Turn a dense MLA checkpoint into a sparse one: indexer warm-up, then joint sparse training."""
    from glm5.config.recipe import RunRecipe
    from glm5.launch.pipeline import run_pipeline

    common = {"rows": 8, "row_length": row_length}
    warmup = {"steps": steps, "lr": 5e-3, "final_lr": 2e-4, "kind": "adamw", "weight_decay": 0.0}
    sparse = {"steps": steps, "lr": 2e-3, "schedule": "constant"}
    recipe = RunRecipe.model_validate(
        {
            "name": f"{out.name}-adapt",
            "runs": str(out.parent),
            "start": str(model),
            "data": str(data),
            "final": str(out),
            "model": {"index_topk": index_topk, "index_n_heads": index_heads, "index_head_dim": index_dim},
            "stages": [
                {"name": "dsa-warmup", "kind": "dsa_warmup", "optim": warmup, **common},
                {"name": "dsa-sparse", "kind": "dsa_sparse", "optim": sparse, **common},
            ],
        }
    )
    run_pipeline(recipe)
    typer.echo(f"Wrote {out}; metrics are in {out.parent / recipe.name}.")


@app.command()
def sft(recipe: Recipe, overrides: Overrides = []) -> None:  # noqa: B006
    """Run supervised fine-tuning stages (resumes)."""
    _run(recipe, overrides, kinds=("sft",))


@app.command()
def rl(recipe: Recipe, overrides: Overrides = []) -> None:  # noqa: B006
    """Run reinforcement-learning and distillation stages (resumes)."""
    _run(recipe, overrides, kinds=("reasoning", "agentic", "general", "distill"))


@app.command()
def pipeline(recipe: Recipe, overrides: Overrides = []) -> None:  # noqa: B006
    """Run chained stages into runs/NAME/NN-stage/, evaluate after each, and write the report (resumes)."""
    run = _run(recipe, overrides)
    from rich.console import Console

    from glm5.report import build_report, summary_table

    page = build_report(run)
    Console().print(summary_table(json.loads((run / "results.json").read_text(encoding="utf-8"))))
    typer.echo(f"Report: {page}")
    typer.echo(f"Chat with the result: glm5 serve {run / 'final'}")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Write RUN/report.html."""
    from glm5.report import build_report

    typer.echo(f"Report: {build_report(run)}")


def _run(recipe: Path, overrides: list[str], kinds: tuple[str, ...] = (), resume: bool = True) -> Path:
    from glm5.config.load import load_recipe
    from glm5.config.recipe import RunRecipe

    loaded = load_recipe(recipe, RunRecipe, overrides)
    for stage in loaded.stages:
        if kinds and stage.kind not in kinds:
            raise UsageError(f'{recipe}: stage "{stage.name}" is of kind {stage.kind}; run it with `glm5 pipeline`.')
    folder = Path(loaded.runs) / loaded.name
    if not resume and (folder / "recipe.toml").exists():
        raise UsageError(f"{folder} exists already; pass --resume to go on with it, or choose another name.")
    from glm5.launch.pipeline import run_pipeline

    run = run_pipeline(loaded)
    typer.echo(f"Results: {run / 'results.json'}")
    return run
