"""Verbs for task folders in Harbor's format: check and run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from glm5.cli.options import DialectName, Json, app, say, show, told
from glm5.errors import DataError, UsageError

if TYPE_CHECKING:
    from glm5.agents.endpoint import Dialect
    from glm5.agents.terminal import Outcome
    from glm5.records import Message

task_app = typer.Typer(help="Tasks: folders in Harbor's format, search, slides.")
build_app = typer.Typer(help="Make tasks with a factory.")
app.add_typer(task_app, name="task")
task_app.add_typer(build_app, name="build")

TaskFolder = Annotated[Path, typer.Argument(help="Task folder: task.toml, instruction.md, environment/, tests/.")]
Given = Annotated[list[str], typer.Option("--env", help="NAME=VALUE for a ${NAME} of task.toml; may be repeated.")]
Bases = Annotated[list[str], typer.Option("--base", help="IMAGE=DIR: folders of DIR stand for FROM IMAGE.")]


def _pairs(texts: list[str], option: str) -> dict[str, str]:
    pairs = dict[str, str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} takes NAME=VALUE, not {text!r:.60}.")
        pairs[name] = value
    return pairs


def _bases(texts: list[str]) -> dict[str, dict[str, Path]]:
    found = dict[str, dict[str, Path]]()
    for name, text in _pairs(texts, "--base").items():
        if not Path(text).is_dir():
            raise UsageError(f"--base {name}: {text} is not a folder.")
        found[name] = {f"/{folder.name}": folder for folder in sorted(Path(text).iterdir()) if folder.is_dir()}
    return found


@task_app.command("check")
def check(
    folder: TaskFolder,
    repeats: Annotated[int, typer.Option(min=1, help="Trials of the solution and of doing nothing.")] = 3,
    env: Given = [],  # noqa: B006
    base: Bases = [],  # noqa: B006
    sample: Annotated[int, typer.Option(min=1, help="Of search tasks: questions for the oracle.")] = 50,
    as_json: Json = False,
) -> None:
    """Check a task: its solution scores 1, doing nothing and every attack 0. A folder of tasks: how many can run. A
    build of search tasks: its questions again, planted bad ones, the oracle on --sample questions."""
    from glm5.obs.progress import QuietConsole
    from glm5.tasks.harbor.check import check as check_task
    from glm5.tasks.harbor.check import runnable

    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {what}; give the folder of a task, of several tasks, or of a build of search tasks.")
    if (folder / "web.sqlite").is_file():
        from glm5.cli.task_search import check_search

        raise typer.Exit(0 if check_search(folder, sample, as_json) else 1)
    if folder.is_dir() and not (folder / "task.toml").exists():
        tasks = sorted(path.parent for path in folder.glob("*/task.toml"))
        if tasks:
            show(runnable(tasks, _bases(base)), as_json)
            return
    with QuietConsole().status("reading") as status:
        report = check_task(
            folder, repeats=repeats, env=_pairs(env, "--env"), bases=_bases(base), progress=status.update
        )
    if as_json:
        show(report.as_dict(), True)
    else:
        for name, value in (("ok", report.ok), ("oracle", report.oracle), ("no_op", report.no_op)):
            typer.echo(f"{name:<8} {value}")
        typer.echo(f"repeats  {report.repeats}")
        typer.echo(f"attacks  {len(report.attacks)}, {sum(1 for r in report.attacks.values() if r == 0.0)} scored 0")
        for warning in report.warnings:
            say(f"note: {warning}")
        for reason in report.reasons:
            say(f"reason: {reason}")
    raise typer.Exit(0 if report.ok else 1)


@task_app.command("run")
def run(
    folder: TaskFolder,
    agent: Annotated[str, typer.Option(help="oracle, nop, terminal, or a command line that runs in the room.")],
    timeout: Annotated[float | None, typer.Option(min=0.1, help="Seconds of the agent; default: the task's.")] = None,
    env: Given = [],  # noqa: B006
    base: Bases = [],  # noqa: B006
    model: Annotated[str | None, typer.Option(help="Of terminal: URL of a server, or a checkpoint directory.")] = None,
    name: Annotated[str, typer.Option(help="Name of the model; default: the server's first.")] = "",
    dialect: DialectName = "openai",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the server's API key; or GLM5_API_KEY.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Replies of the model.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=16, help="Maximum tokens of one reply.")] = 8192,
    context_tokens: Annotated[int, typer.Option(min=1, help="Context length of the model.")] = 128_000,
    sft: Annotated[
        Path | None, typer.Option(help="File for the session as SFT data, if the reward is above 0.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run an agent on a task and print the reward. A command finds the task in /logs/agent/instruction.md; "terminal"
    lets a model work on the room's terminal."""
    from glm5.tasks.harbor.folder import TaskFolder as Folder
    from glm5.tasks.harbor.trial import TaskRoom, command_agent, nop, oracle

    task = Folder.read(folder)
    for warning in task.warnings:
        say(f"warning: {warning}", err=True)
    if (agent == "terminal") != (model is not None):
        raise UsageError("--agent terminal and --model need each other.")
    chosen, played = {"oracle": oracle, "nop": nop}.get(agent) or command_agent(agent), list["Outcome"]()
    with contextlib.ExitStack() as stack:
        if model is not None:
            from glm5.agents.models import open_model
            from glm5.agents.terminal import trial_agent
            from glm5.serve.keys import find_key

            key = find_key("api", None, api_key_file)
            opened = open_model(model, name, cast("Dialect", dialect), key, max_tokens)
            endpoint, measure = stack.enter_context(opened)
            chosen = trial_agent(
                endpoint, played.append, turns=turns, context_tokens=context_tokens, count=measure.count,
                record=None if as_json else _shown,
            )  # fmt: skip
        room = TaskRoom(task, env=_pairs(env, "--env"), bases=_bases(base), agent_timeout_s=timeout)
        result = stack.enter_context(room).trial(chosen)
    values = {"task": task.name, "reward": result.reward, "rewards": dict(result.rewards), "error": result.error}
    values |= {"cause": result.cause, "message": result.message, "seconds": dict(result.seconds)}
    values |= {"agent_output": result.agent_output, "verifier_output": result.verifier_output}
    values |= {"ended": played[0].reason, "turns": played[0].turns} if played else {}
    if played and sft is not None and (result.reward or 0.0) > 0:
        from glm5.agents.sft import terminal_conversations
        from glm5.data.sft import write_conversations

        write_conversations(sft, terminal_conversations(played[0].pieces))
    show(values, as_json)
    raise typer.Exit(0 if result.rewards else 1)


def _shown(message: Message) -> None:
    """Show a message of a session as it comes."""
    from glm5.terminal.screen import Screen

    screen = Screen()
    screen.write(f"{message.reasoning or ''}{message.content}\n", style="" if message.role == "assistant" else "dim")


@build_app.command("terminal")
def build_terminal(
    out: Annotated[Path, typer.Option(help="Folder that gets the task folders and manifest.jsonl.")],
    count: Annotated[int, typer.Option(min=1, help="Number of tasks; the seeds are taken in turn.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Number of the first task of each seed.")] = 0,
    only: Annotated[list[str], typer.Option("--only", help="Name of a seed; may be repeated. Default: all.")] = [],  # noqa: B006
    verify: Annotated[bool, typer.Option("--verify", help="Check every task; list those that fall.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Server's URL or checkpoint directory of a model that writes the tasks instead.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the model; default: the server's first.")] = "",
    dialect: DialectName = "openai",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the server's API key; or GLM5_API_KEY.")] = None,
    page: Annotated[
        list[Path], typer.Option("--page", help="Text file from which the model makes a task; may be repeated.")
    ] = [],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="How often the model may construct a task until it passes.")] = 4,
    as_json: Json = False,
) -> None:
    """Make terminal tasks from hand-written seeds: text, git, SQLite, archives, builds, services and more; or let a
    model write them, from ideas or from pages, and keep those that pass their check. A build that was stopped goes
    on."""
    from glm5.obs.progress import QuietConsole
    from glm5.tasks.terminal.build import build

    if model is not None:
        if only or verify:
            raise UsageError("--only and --verify are for the hand-written seeds; leave them out with --model.")
        show(_written(out, model, name, dialect, api_key_file, page, count, seed, rounds), as_json)
        return
    if page:
        raise UsageError("--page needs --model.")

    with QuietConsole().status("starting") as status:
        found = build(
            out, count, seed, only, verify, lambda done, total, name: status.update(f"{done} of {total}: {name}")
        )
    show(found, as_json)
    raise typer.Exit(1 if found["fallen"] else 0)


def _written(
    out: Path, model: str, name: str, dialect: str, key_file: Path | None, page: list[Path], count: int, seed: int,
    rounds: int,
) -> dict[str, Any]:  # fmt: skip
    from glm5.agents.endpoint import EndpointError
    from glm5.agents.models import open_model
    from glm5.records import Message
    from glm5.serve.keys import find_key
    from glm5.tasks.terminal.written import Fallen, Writer, ideas, pages

    key = find_key("api", None, key_file)

    with open_model(model, name, cast("Dialect", dialect), key) as (endpoint, _):

        def ask(prompt: str) -> str:
            try:
                return endpoint.complete([Message("user", prompt)], []).message.content or ""
            except EndpointError as error:
                if error.too_long:
                    raise Fallen("prompt", str(error)) from error
                raise

        writer = Writer(out, ask, rounds, endpoint.name, told)
        return writer.run(pages(page) if page else ideas(seed), len(page) if page else count)
