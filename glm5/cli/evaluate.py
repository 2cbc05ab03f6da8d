"""`glm5 eval`: suites and task families, on a checkpoint or an endpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from glm5.cli.options import Device, Dtype, Json, app, assignments, show
from glm5.errors import UsageError

LIMITS = ("max_tokens", "max_turns", "max_context")
SHARED = frozenset({"model", "suite", "problems", "options", "out", "name", "concurrency", "api_key_file", "as_json"})
OWN_SUITES = {
    "browse": SHARED | {"render_tools", "limits", "temperature", "seed", "template"},
    "lm-eval": SHARED | {"tokenizer"},
}
"""The options that these suites take."""


@app.command("eval")
def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or URL of an OpenAI-compatible server.")],
    suite: Annotated[
        str, typer.Option(help="aime, ruler, browse, lm-eval, … (docs/evaluation.md), a task family, or a .toml file.")
    ],
    problems: Annotated[
        int | None, typer.Option(min=1, help="Per part of the suite; default: the suite's, or 100.")
    ] = None,
    options: Annotated[
        list[str], typer.Option("--set", help="Option of the tasks, e.g. --set 'length=[4096,8192]'; repeatable.")
    ] = [],  # noqa: B006
    parts: Annotated[list[str], typer.Option("--part", help="Only this part of the suite; repeatable.")] = [],  # noqa: B006
    render_tools: Annotated[
        bool | None,
        typer.Option(
            "--render-tools/--no-render-tools",
            help="Show tool specifications in the prompt; servers other than `glm5 serve` get no tools if not.",
        ),
    ] = None,
    limits: Annotated[
        list[str], typer.Option("--limit", help="max_tokens of a reply, max_turns, max_context: NAME=N; repeatable.")
    ] = [],  # noqa: B006
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy; default: the suite's.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Answers per problem.")] = None,
    seed: Annotated[int, typer.Option(help="Of sampled answers.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for every answer and the result; resumes.")] = None,
    against: Annotated[Path | None, typer.Option(help="--out of an earlier run: report the paired difference.")] = None,
    trained_on: Annotated[
        Path | None, typer.Option(help="Tokenizer stage of the model's run: were problems in its training text?")
    ] = None,
    name: Annotated[str, typer.Option(help="URL: name of the model; default: the server's first.")] = "",
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="URL: problems at a time.")] = 8,
    api_key_file: Annotated[Path | None, typer.Option(help="URL: file with the API key; or GLM5_API_KEY.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="URL: tokenizer directory that measures long prompts.")] = None,
    template: Annotated[
        bool, typer.Option("--template-kwargs/--no-template-kwargs", help="URL: say whether to think in the request.")
    ] = True,
    plain: Annotated[
        bool | None, typer.Option("--plain/--chat", help="Prompts as plain text (base models) or chat; default: suite.")
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="URL of a model that grades answers or web projects; cc-bench-frontend also takes scripted."),
    ] = None,
    judge_name: Annotated[str, typer.Option(help="Its name; default: the server's first.")] = "",
    judge_key_file: Annotated[Path | None, typer.Option(help="File with its API key; or GLM5_JUDGE_KEY.")] = None,
    user: Annotated[str | None, typer.Option(help="URL of a model that plays the user of dialogues.")] = None,
    user_name: Annotated[str, typer.Option(help="Its name; default: the server's first.")] = "",
    user_key_file: Annotated[Path | None, typer.Option(help="File with its API key; or GLM5_USER_KEY.")] = None,
    exact: Annotated[bool, typer.Option("--exact/--fast", help="Checkpoint: bitwise reproducible, or fast.")] = True,
    dense: Annotated[bool, typer.Option("--dense", help="Checkpoint: attend to all keys.")] = False,
    needles: Annotated[bool, typer.Option("--needle-recall", help="Checkpoint: are needles selected?")] = False,
    device: Device = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Checkpoint: type of weights and cache.")] = Dtype.float32,
    as_json: Json = False,
) -> None:
    """Score a model on held-out problems, with 95 % intervals. The suite browse lets an agent with search tools and a
    context policy answer the questions of a build (docs/search.md); lm-eval runs the tasks of that package."""
    _check_options(context, suite)
    if suite == "lm-eval":
        from glm5.cli.lm_eval import lm_eval

        found = lm_eval(model, assignments(options), out, problems, name, concurrency, tokenizer, api_key_file)
        show({suite: found} if as_json else found, as_json)
        return
    if suite == "browse":
        from glm5.cli.browse import browse

        found = browse(
            model, problems or 100, assignments(options), assignments(limits), out, name=name, at_once=concurrency,
            seed=seed, temperature=temperature, key_file=api_key_file, render_tools=render_tools is not False,
            template=template,
        )  # fmt: skip
        show({suite: found} if as_json else found, as_json)
        if not found["n"]:
            raise typer.Exit(1)
        return
    from glm5.eval.contamination import trained_texts
    from glm5.eval.remote_player import simulated_user
    from glm5.eval.suite import find_suite, run_suite
    from glm5.obs.progress import QuietConsole

    limited = assignments(limits)
    if not limited.keys() <= set(LIMITS) or min(map(_natural, limited.values()), default=1) < 1:
        raise UsageError("--limit takes max_tokens, max_turns or max_context and a number above 0.")
    changes: dict[str, Any] = {"problems": problems, "temperature": temperature, "top_p": top_p, "repeats": repeats}
    chosen = find_suite(
        suite, assignments(options), parts, **changes, **limited, render_tools=render_tools, plain=plain
    )
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(QuietConsole().status("starting"))
        if "://" in model and (dense or needles or "max_context" in limited):
            raise UsageError("--dense, --needle-recall and --limit max_context are of checkpoints, not of URLs.")
        if "://" in model:
            chosen, player, told = _remote(model, chosen, name, concurrency, api_key_file, tokenizer, template)
        elif chosen.context == "none" and user is None and not chosen.plain and not chosen.stop:
            chosen, player, told = _local(Path(model), chosen, device, dtype.value, exact, dense, needles)
        elif dense or needles:
            raise UsageError("--dense and --needle-recall are not for context policies, plain prompts and users.")
        else:
            options_of_server = [*("--device", device), *("--dtype", dtype.value), "--exact" if exact else "--fast"]
            chosen, player, told = _served(Path(model), chosen, concurrency, options_of_server, stack)

        grader, person = None, None
        if judge is not None:
            grader, named = _judge(judge, chosen, judge_name, judge_key_file, concurrency)
            told = {**told, "judge": named}
        if user is not None:
            player.user = _user(user, user_name, user_key_file)
            person = simulated_user(player.user)
            told = {**told, "user": {"url": player.user.base, "name": player.user.name}}

        def advance(what: str, done: int, total: int) -> None:
            status.update(f"{what} ({done} of {total})")

        found = run_suite(
            chosen, player, seed=seed, folder=out, told=told, against=against, judge=grader, user=person,
            trained_on=None if trained_on is None else trained_texts(trained_on), advance=advance,
        )  # fmt: skip
    if as_json:
        show({suite: found}, as_json)
        return
    unit = found.get("unit", "")
    for label, score in _lines(suite, found):
        mean, low, high = (_amount(score[key], unit) for key in ("score", "low", "high"))
        typer.echo(f"{label:<40} {mean:>7}  [{low}, {high}]  n = {score['n']}")
    for label, share in found.get("needle_recall", {}).items():
        typer.echo(f"indexers select of the needles, {label}: {share:.1%}")
    if (change := found.get("difference")) is not None:
        mean, low, high = (_amount(change[key], unit, "+") for key in ("score", "low", "high"))
        typer.echo(f"difference {mean}  [{low}, {high}]  n = {change['n']}")
    for label, score in (found.get("contamination") or {}).items():
        if isinstance(score, dict) and score["n"]:
            typer.echo(f"problems {label} in training: {score['score']:.1%}, n = {score['n']}")
    for key in ("errors", "unjudged", "too_long", "note"):
        if key in found:
            typer.echo(f"{key}: {found[key]}")


@app.command()
def table(
    name: Annotated[
        str, typer.Argument(help="7 (reasoning, coding, agents), 8 (CC-Bench-V2), 11 (base models), general (§6.3).")
    ],
    records: Annotated[
        list[str],
        typer.Argument(help="Folders of `glm5 eval --out`, results files of lm-eval; or ROW=PATH, to say the row."),
    ] = [],  # noqa: B006
) -> None:
    """Print a table of the paper in Markdown: scores of your evaluations with their intervals, beside the paper's."""
    from glm5.eval.tables import table as made

    typer.echo(made(name, records))


def _check_options(context: typer.Context, suite: str) -> None:
    """Raises UsageError for options that were given and that the suite would ignore."""
    if suite not in OWN_SUITES:
        return
    wrong = []
    for option in context.command.params:
        source, value = context.get_parameter_source(option.name or ""), context.params.get(option.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        chat = suite == "browse" and option.name == "plain" and value is False  # what it does anyway
        if given and option.name not in OWN_SUITES[suite] and not chat:
            wrong.append((option.secondary_opts if value is False else option.opts)[0])
    if wrong:
        page = {"browse": "search", "lm-eval": "evaluation"}[suite]
        raise UsageError(f"--suite {suite} does not take {', '.join(wrong)}; docs/{page}.md has its options.")


def _lines(suite: str, found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    inner: list[tuple[str, dict[str, Any]]] = []
    heads = {"cells": "", "pass^k": "pass^", "checks": "checks, ", "built": "built, "}
    for key, group in found.items():
        if key in heads or key.startswith("by_"):
            head = heads.get(key, f"{key.removeprefix('by_')} ")
            inner += [(f"{head}{label}", score) for label, score in group.items()]
    return [*inner, (suite, found)]


def _amount(value: float | None, unit: str, sign: str = "") -> str:
    if value is None:
        return "?"  # an interval needs more than one problem
    return f"{value:{sign},.2f} {unit}" if unit else f"{value:{sign}.1%}"


def _local(
    model: Path, suite: Any, device: str, dtype: str, exact: bool, dense: bool, needles: bool
) -> tuple[Any, Any, dict[str, Any]]:
    import torch

    from glm5.chat import Tokenizer
    from glm5.config.model import GLM5Config
    from glm5.device import choose_device
    from glm5.eval.players import LocalPlayer
    from glm5.eval.suite import fingerprint, with_tokenizer
    from glm5.model.glm5 import GLM5ForCausalLM

    config = GLM5Config.load(model)
    if dense and not config.selects_keys:
        raise UsageError(f"{model} attends to all keys anyway; leave out --dense.")
    # The same weights; every key is selected.
    changed: dict[str, Any] = {"index_topk": config.max_position_embeddings} if dense else {}
    loaded = GLM5ForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), device=choose_device(device), **changed
    )
    player = LocalPlayer(loaded, Tokenizer.load(model), exact, needles)
    told = {"checkpoint": str(model), "files": fingerprint(model), "dtype": dtype, "exact": exact, "dense": dense}
    return with_tokenizer(suite, model), player, told


def _remote(
    url: str, suite: Any, name: str, concurrency: int, key_file: Path | None, tokenizer: Path | None, template: bool
) -> tuple[Any, Any, dict[str, Any]]:
    from glm5.agents.endpoint import Endpoint
    from glm5.chat import Tokenizer
    from glm5.eval.remote_player import RemotePlayer
    from glm5.eval.suite import with_tokenizer
    from glm5.serve.keys import find_key

    dialect = "completions" if suite.plain else "openai"
    endpoint = Endpoint(url, name, key=find_key("api", None, key_file), dialect=dialect)  # type: ignore[arg-type]
    told = {"url": endpoint.base, "name": endpoint.name, "template_kwargs": template}
    player = RemotePlayer(endpoint, concurrency, template, Tokenizer.load(tokenizer) if tokenizer else None)
    return with_tokenizer(suite, tokenizer) if tokenizer else suite, player, told


def _served(
    model: Path, suite: Any, concurrency: int, options: list[str], stack: contextlib.ExitStack
) -> tuple[Any, Any, dict[str, Any]]:
    """A checkpoint behind a server of its own: for context policies, plain prompts, simulated users."""
    import secrets

    from glm5.agents.endpoint import Endpoint
    from glm5.agents.models import served
    from glm5.chat import Tokenizer
    from glm5.eval.remote_player import RemotePlayer
    from glm5.eval.suite import fingerprint, with_tokenizer

    tokenizer = Tokenizer.load(model)
    key = secrets.token_urlsafe(24)
    url, dialect = stack.enter_context(served(model, key, options)), "completions" if suite.plain else "openai"
    endpoint = Endpoint(url, key=key, dialect=dialect)  # type: ignore[arg-type]
    told = {"checkpoint": str(model), "files": fingerprint(model), "served": options}
    return with_tokenizer(suite, model), RemotePlayer(endpoint, concurrency, tokenizer=tokenizer), told


def _user(url: str, name: str, key_file: Path | None) -> Any:
    """The endpoint that plays the users of dialogues."""
    from glm5.agents.endpoint import Endpoint
    from glm5.serve.keys import find_key

    if "@" in url:
        raise UsageError("The user's URL has a password, which would be written down; give its key by a file.")
    return Endpoint(url, name, key=find_key("user", None, key_file), temperature=0.0)


def _judge(url: str, suite: Any, name: str, key_file: Path | None, concurrency: int) -> tuple[Any, dict[str, str]]:
    """The judge of a suite's answers, and what the settings say of it."""
    from glm5.eval.answer_judge import AnswerJudge
    from glm5.eval.cc_bench.judge import FrontendJudge
    from glm5.eval.cc_bench.scripted_judge import scripted_judge
    from glm5.serve.keys import find_key

    frontend = {part.family == "frontend" for part in suite.parts}
    if url == "scripted":
        if frontend != {True}:
            raise UsageError("--judge scripted is for cc-bench-frontend; give the URL of a model.")
        return scripted_judge(min(2, concurrency)), {"name": "scripted"}
    asked = AnswerJudge.at(url, name, find_key("judge", None, key_file), concurrency)
    grader = FrontendJudge.of(asked.endpoint, min(4, concurrency)) if frontend == {True} else asked
    return grader, {"url": asked.endpoint.base, "name": asked.endpoint.name}


def _natural(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
