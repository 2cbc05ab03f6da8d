"""Verbs of corpora: make one from a recipe, show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from glm5.cli.options import Checkpoint, Device, Json, Out, Overrides, Recipe, data_app, show
from glm5.errors import UsageError

EXECUTORS = ("local", "ray", "slurm")


@data_app.command("run")
def data_run(
    recipe: Recipe,
    out: Out,
    workers: Annotated[int | None, typer.Option(min=1, help="Parts at the same time; default: one per core.")] = None,
    executor: Annotated[
        str, typer.Option(help="local, ray (a cluster named by RAY_ADDRESS), or slurm (jobs; run it on a login node).")
    ] = "local",
    sbatch: Annotated[
        list[str], typer.Option(help="With slurm, an option of sbatch: partition=cpu, time=8:00:00, mem-per-cpu=4G.")
    ] = [],  # noqa: B006
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Make a corpus from a recipe: read, filter, deduplicate, tokenise. The same command goes on after an interruption.
    Needs the extra `data`."""
    from glm5.config.corpus import CorpusRecipe
    from glm5.config.load import load_recipe
    from glm5.data.corpus.run import run_corpus
    from glm5.obs.progress import QuietConsole

    if executor not in EXECUTORS:
        raise UsageError(f'--executor is "{executor:.40}"; choose {", ".join(EXECUTORS[:-1])} or {EXECUTORS[-1]}.')
    options = dict(one.partition("=")[::2] for one in sbatch)
    if "" in options or "" in options.values() or (options and executor != "slurm"):
        raise UsageError("--sbatch takes NAME=VALUE, as in --sbatch partition=cpu, and needs --executor slurm.")
    checked = load_recipe(recipe, CorpusRecipe, overrides)
    with QuietConsole().status("planning") as status:
        account = run_corpus(
            checked,
            out,
            executor=cast(Any, executor),
            workers=workers,
            sbatch=options,
            progress=lambda now: status.update(str(now)),
        )
    if as_json:
        show(account, True)
        return
    for line in summary(account):
        typer.echo(line)


@data_app.command("classifier")
def data_classifier(recipe: Recipe, out: Out, overrides: Overrides = [], as_json: Json = False) -> None:  # noqa: B006
    """Train a classifier of texts for quality buckets, and print its precision and recall on held-out texts."""
    from glm5.config.corpus import ClassifierRecipe
    from glm5.config.load import load_recipe
    from glm5.data.corpus.labelled import train_classifier
    from glm5.obs.progress import QuietConsole

    checked = load_recipe(recipe, ClassifierRecipe, overrides)
    with QuietConsole().status("starting") as status:
        facts = train_classifier(checked, out, progress=status.update)
    if as_json:
        show(facts, True)
        return
    held_out = facts["held_out"]
    for name in ("precision", "recall"):
        low, high = facts["intervals"][name]
        typer.echo(f"{name} {held_out[name]:.1%} ({low:.1%} to {high:.1%})")
    for name, found in (("area under the ROC curve", held_out), ("of length and little words", facts["baseline"])):
        low, high = found["area_interval"]
        typer.echo(f"{name} {found['area']:.4f} ({low:.4f} to {high:.4f})")
    typer.echo(f"{facts['texts']['held_out']:,} held-out texts; wrote {out}")


@data_app.command("score")
def data_score(
    corpus: Annotated[Path, typer.Argument(help="A folder that `glm5 data run` made, without quality buckets.")],
    model: Annotated[str, typer.Option(help="URL of an OpenAI-compatible server.")],
    out: Out,
    name: Annotated[str, typer.Option(help="The model's name; default: the first that the server lists.")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the server's API key; or GLM5_API_KEY.")] = None,
    rubric: Annotated[Path | None, typer.Option(help="Text file that says what the scores 0 to 5 mean.")] = None,
    kinds: Annotated[str, typer.Option(help="Kinds of documents to score.")] = "web,prose",
    most: Annotated[int | None, typer.Option(min=1, help="New documents to score at most.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Documents at a time.")] = 8,
    chunk: Annotated[
        int, typer.Option(min=200, max=19_200, help="Characters of a chunk; the last may have a quarter more.")
    ] = 6000,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of a document at most, evenly spread.")] = 12,
    floor: Annotated[float, typer.Option(min=0, max=1, help="A chunk below this score decides alone.")] = 0.2,
    as_json: Json = False,
) -> None:
    """Score the documents of a corpus with a language model, in chunks; `quality.classifier` of another run names the
    result. The same command goes on after an interruption."""
    from dataclasses import asdict

    from glm5.config.corpus import CorpusRecipe
    from glm5.config.load import load_recipe
    from glm5.data.corpus.scores import Chunking, corpus_documents
    from glm5.eval.answer_judge import AnswerJudge
    from glm5.eval.document_scores import RUBRIC, score_documents
    from glm5.obs.progress import QuietConsole
    from glm5.serve.keys import find_key

    tokenizer = load_recipe(corpus / "recipe.toml", CorpusRecipe, []).tokenizer
    judge = AnswerJudge.at(model, name, find_key("api", None, api_key_file), concurrency)
    text = RUBRIC if rubric is None else rubric.read_text(encoding="utf-8").strip()
    documents = corpus_documents(corpus, kinds.split(","), tokenizer)
    with QuietConsole().status("scoring") as status:
        counts = score_documents(
            documents, out, judge, Chunking(chunk, chunks, floor), text, most,
            lambda done: status.update(f"{done:,} documents scored"),
        )  # fmt: skip
    show(asdict(counts), as_json)


@data_app.command("long")
def data_long(
    recipe: Recipe,
    out: Out,
    device: Device = "auto",
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Make long-context rows from a corpus: natural long documents, NExtLong, EntropyLong. The same command goes on
    after an interruption. Needs the extra `search`."""
    from glm5.chat.tokenizer import Tokenizer
    from glm5.config.load import load_recipe
    from glm5.config.long_rows import LongRecipe
    from glm5.data.long_rows import make_long_rows
    from glm5.obs.progress import QuietConsole

    checked = load_recipe(recipe, LongRecipe, overrides)
    scorer, place = None, checked.tokenizer or checked.checkpoint
    with QuietConsole().status("loading") as status:
        if checked.checkpoint is not None:
            from glm5.train.token_scores import load_scorer

            scorer = load_scorer(checked.checkpoint, device, checked.length)
        account = make_long_rows(
            checked,
            out,
            Tokenizer.byte_level() if place is None else Tokenizer.load(place),
            scorer,
            lambda section, done, tasks: status.update(f"{section}: {done} of {tasks} parts"),
        )
    if as_json:
        show(account, True)
        return
    for name, counts in account["sections"].items():
        typer.echo(f"{name}: " + ", ".join(f"{key} {count:,}" for key, count in counts.items()))


@data_app.command("reach")
def data_reach(
    checkpoint: Checkpoint,
    shards: Annotated[list[Path], typer.Argument(help="Shard folders; each is a set of its own.")],
    out: Out,
    split: Annotated[str, typer.Option(help="train or held_out.")] = "train",
    length: Annotated[int | None, typer.Option(min=64, help="Longest context; default: the model's positions.")] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of 16 tokens per set.")] = 200,
    device: Device = "auto",
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Measure how far information travels in text: the loss of the same tokens by length of context. Writes
    OUT/reach.json and OUT/reach.html."""
    from glm5.chat.tokenizer import Tokenizer
    from glm5.data.shards import SPLITS, open_shard
    from glm5.eval.reach import reach, told
    from glm5.files import atomic_write
    from glm5.report.reach import write_reach_page
    from glm5.train.token_scores import load_scorer

    if split not in SPLITS:
        raise UsageError(f'--split is "{split:.40}"; choose {" or ".join(SPLITS)}.')
    tokenizer = Tokenizer.load(checkpoint)
    found = {str(folder): open_shard(folder, split, tokenizer) for folder in shards}
    scorer = load_scorer(str(checkpoint), device, length or 0)
    longest = length or scorer.model.config.max_position_embeddings
    result = {"checkpoint": str(checkpoint)} | reach(scorer, found, length=longest, blocks=blocks, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / "reach.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    page = write_reach_page(result, out / "reach.html")
    if as_json:
        show(result, True)
        return
    for line in (*told(result), f"Wrote {page}."):
        typer.echo(line)


@data_app.command("report")
def data_report(
    corpus: Annotated[Path, typer.Argument(help="A folder that `glm5 data run` made.")],
) -> None:
    """Write CORPUS/report.html: sizes, languages, samples of kept and dropped documents with reasons."""
    from glm5.report.corpus import build_corpus_report

    typer.echo(f"Wrote {build_corpus_report(corpus)}.")


def summary(account: dict[str, Any]) -> list[str]:
    """The account in a few lines."""
    lines = [f"{account['documents']:,} documents from {account['files']:,} files, {account['bytes'] / 1e6:,.1f} MB"]
    if account["joined"]["files"]:
        joined = account["joined"]
        lines.append(f"{joined['files']:,} source files joined to {joined['documents']:,} documents by repository")
    for name, step in account["steps"].items():
        worst = ", ".join(f"{reason} {count:,}" for reason, count in list(step["reasons"].items())[:5])
        lines.append(f"{name}: {step['dropped']:,} of {step['documents']:,} dropped" + (f" ({worst})" if worst else ""))
    if account["added"]:
        lifted = ", ".join(f"{count:,} to {bucket}" for bucket, count in account["added"].items())
        lines.append(f"the second classifier added {sum(account['added'].values()):,} documents ({lifted})")
    if held_out := account["held_out"]:
        worst, bound = held_out["most_similar"], held_out["similarity"]
        lines.append(
            f"held out: {held_out['documents']:,} documents; {held_out['moved']:,} more were as similar as {bound} to "
            f"training text and moved there; of the rest "
            + ("none has half of that" if worst is None else f"the most similar has {worst:.2f}")
        )
    for name, shard in account["shards"].items():
        lines.append(
            f"{name}: {shard['train_documents']:,} documents, {shard['train_tokens']:,} tokens; "
            f"held out {shard['held_out_documents']:,}, {shard['held_out_tokens']:,}"
        )
    return lines
