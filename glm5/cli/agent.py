"""`glm5 agent`: a coding agent on a repository."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from glm5.cli.options import DialectName, Json, app, data_app, show
from glm5.errors import UsageError


@app.command()
def agent(
    task: Annotated[str | None, typer.Argument(help="What to do, in words.")] = None,
    repo: Annotated[Path, typer.Option(help="The repository; it is not changed without --in-place.")] = Path("."),
    model: Annotated[str | None, typer.Option(help="URL of a server, or a checkpoint directory.")] = None,
    name: Annotated[str, typer.Option(help="Name of the model; default: the server's first.")] = "",
    dialect: DialectName = "openai",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the server's API key; or GLM5_API_KEY.")] = None,
    context: Annotated[str, typer.Option(help="none, keep-recent, discard-all or hierarchical.")] = "none",
    keep: Annotated[int, typer.Option(min=0, help="Context: latest observations to keep.")] = 5,
    limit: Annotated[int, typer.Option(min=0, help="Context: tokens above which to discard; 0: the mode's.")] = 0,
    turns: Annotated[int | None, typer.Option(min=1, help="Budget: replies of the model. Default: 100.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Budget: tokens of prompts and replies.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Budget: time. Default: 3600.")] = None,
    max_tokens: Annotated[int, typer.Option(min=16, help="Maximum tokens of one reply.")] = 8192,
    thinking: Annotated[int, typer.Option(min=0, help="Tokens of thinking to ask for in Messages.")] = 0,
    test: Annotated[str | None, typer.Option(help="Command of the tests; default: detected.")] = None,
    show: Annotated[list[Path], typer.Option(help="Folder that the room shows read-only; repeatable.")] = [],  # noqa: B006
    path: Annotated[list[str], typer.Option(help="Folder in front of PATH in the room; repeatable.")] = [],  # noqa: B006
    memory_mb: Annotated[int, typer.Option(min=64, help="Memory of the room.")] = 4096,
    disk_mb: Annotated[int, typer.Option(min=16, help="What may be written in the room.")] = 1024,
    approve: Annotated[bool, typer.Option("--approve", help="Ask before each edit and command.")] = False,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="At the end change the repository; its state before is kept in git.")
    ] = False,
    log: Annotated[Path | None, typer.Option(help="Log of the session; default: below ~/.cache/glm5.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Log of a session to go on with.")] = None,
    diff: Annotated[Path | None, typer.Option(help="File to write the patch to.")] = None,
    as_json: Json = False,
) -> None:
    """Let a model work on a copy of a repository, in a room without network, and show the patch."""
    from glm5.agents.coding import Budget, Settings, settings_for
    from glm5.agents.context import ContextPolicy
    from glm5.agents.session import Options, play
    from glm5.agents.session_log import read_log
    from glm5.serve.keys import find_key
    from glm5.terminal.agent_view import AgentView
    from glm5.terminal.screen import Screen

    key = find_key("api", None, api_key_file)
    if approve and as_json:
        raise UsageError("--approve asks questions, which --json cannot show; give one of them.")
    asked: dict[str, Any] = {"turns": turns, "tokens": tokens, "seconds": seconds}
    asked = {name: value for name, value in asked.items() if value is not None}
    if resume is not None:
        if task is not None or log is not None:
            raise UsageError("--resume goes on with the task and the log of its session; leave out the task and --log.")
        settings = Settings.of(read_log(resume)[0][0])
        settings = replace(settings, budget=replace(settings.budget, **asked), model=model or settings.model)
    else:
        if task is None or model is None:
            raise UsageError("Give a task and --model, or a log with --resume.")
        if not repo.is_dir():
            raise UsageError(f"{repo} is not a folder.")
        policy = ContextPolicy(context, keep, limit)  # type: ignore[arg-type]
        settings = settings_for(task, repo, model, test, dialect=dialect, context=policy, budget=Budget(**asked))
    view = None if as_json else AgentView(Screen(), approve=approve)
    options = Options(
        log=resume or log,
        resume=resume is not None,
        name=name,
        key=key,
        max_tokens=max_tokens,
        thinking=thinking,
        show=tuple(show),
        paths=tuple(path),
        in_place=in_place,
        memory_mb=memory_mb,
        disk_mb=disk_mb,
    )
    outcome, patch, told = play(settings, options, view)
    if diff is not None:
        diff.write_text(patch, encoding="utf-8", errors="surrogateescape")
    if view is None:
        typer.echo(json.dumps(told))
    else:
        view.end(outcome, patch)
        for line in told["notes"]:
            view.note(line)
    if not told["ok"]:
        raise typer.Exit(1)


@data_app.command("sessions")
def data_sessions(
    logs: Annotated[list[Path], typer.Argument(help="Logs of `glm5 agent`.")],
    out: Annotated[Path, typer.Option(help="JSON lines to write.")],
    rewards: Annotated[
        Path | None, typer.Option(help="JSON lines of log and reward; default: whether the last test passed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn accepted sessions of agents into SFT data, with erroneous segments masked."""
    from dataclasses import asdict

    from glm5.agents.sft import export, read_rewards

    show(asdict(export(logs, out, None if rewards is None else read_rewards(rewards))), as_json)
