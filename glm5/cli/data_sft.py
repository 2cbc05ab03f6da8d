"""Verbs of SFT data: sample attempts of a model, and select from attempts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from glm5.cli.options import Json, assignments, data_app, show
from glm5.errors import UsageError

sft_app = typer.Typer(help="SFT data from attempts of a model: rejection sampling, best-of-N, pass rates, filters.")
data_app.add_typer(sft_app, name="sft")


@sft_app.command("sample")
def sft_sample(
    model: Annotated[str, typer.Argument(help="URL of an OpenAI-compatible server, such as `glm5 serve`.")],
    family: Annotated[str, typer.Option(help="Task family, e.g. arithmetic.")],
    out: Annotated[Path, typer.Option(help="JSONL file to write, or to go on with.")],
    options: Annotated[list[str], typer.Option("--set", help="An option of the family, key=value.")] = [],  # noqa: B006
    problems: Annotated[int, typer.Option(min=1, help="Problems of the split for training.")] = 100,
    samples: Annotated[int, typer.Option(min=1, help="Attempts per problem.")] = 8,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one reply, thoughts included.")] = 4096,
    max_turns: Annotated[int, typer.Option(min=1)] = 16,
    name: Annotated[str, typer.Option(help="The model's name; default: the first that the server lists.")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the server's API key; or GLM5_API_KEY.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Attempts at a time.")] = 8,
    as_json: Json = False,
) -> None:
    """Play training problems of a task family several times each. The same command goes on after an interruption."""
    from glm5.agents.endpoint import Endpoint
    from glm5.config.suite import Suite, SuitePart
    from glm5.eval.remote_player import RemotePlayer
    from glm5.eval.sft_samples import sample_attempts
    from glm5.obs.progress import QuietConsole
    from glm5.serve.keys import find_key
    from glm5.stats import clustered_share

    endpoint = Endpoint(model, name, key=find_key("api", None, api_key_file))
    part = SuitePart(name=family, family=family, options=assignments(options))
    suite = Suite(
        title="sft", problems=problems, repeats=samples, temperature=temperature, max_tokens=max_tokens,
        max_turns=max_turns, parts=[part],
    )  # fmt: skip
    with QuietConsole().status("sampling") as status:
        counts = sample_attempts(
            RemotePlayer(endpoint, concurrency), part, suite, out, endpoint.name,
            lambda done, total: status.update(f"{done:,} of {total:,} attempts"),
        )  # fmt: skip
    rate = clustered_share([c.passed for c in counts.values()], [c.tries for c in counts.values()])
    found: dict[str, Any] = {"problems": len(counts), "attempts": sum(c.tries for c in counts.values())}
    show(found | {"passed": sum(c.passed for c in counts.values()), "low": rate.low, "high": rate.high}, as_json)


@sft_app.command("select")
def sft_select(
    sources: Annotated[
        list[Path], typer.Argument(help="JSONL of `sample` (or other attempts), or session stores (.sqlite) of RL.")
    ],
    out: Annotated[Path, typer.Option(help="JSONL file of conversations to write, for `glm5 sft`.")],
    best: Annotated[int, typer.Option(min=1, help="Passing attempts per problem that are kept.")] = 1,
    least_reward: Annotated[float, typer.Option(help="Reward of an attempt that passes.")] = 1.0,
    pass_rate: Annotated[str, typer.Option(help="Keep problems with a pass rate from LOW to HIGH.")] = "0:1",
    least_attempts: Annotated[int, typer.Option(min=1, help="Attempts that a pass rate needs.")] = 1,
    longest: Annotated[int, typer.Option(min=1, help="Characters of all replies, reasoning included.")] = 200_000,
    tools: Annotated[Path | None, typer.Option(help="JSON list of the tools that a store's prompts show.")] = None,
    mask: Annotated[bool, typer.Option(help="Leave calls that failed out of the loss.")] = True,
    as_json: Json = False,
) -> None:
    """Keep the best passing attempts without a fault, and say why the others are left out."""
    from glm5.data.sft import write_conversations
    from glm5.data.sft_select import Rules, read_attempts, select
    from glm5.rollout.attempts import store_attempts

    low, high = _band(pass_rate)
    shown = [] if tools is None else _tools(tools)
    attempts = (
        attempt
        for path in sources
        for attempt in (store_attempts(path, shown) if _is_store(path) else read_attempts(path))
    )
    rules = Rules(least_reward, low, high, least_attempts, best, longest, mask=mask)
    selected = select(attempts, rules)
    write_conversations(out, selected.conversations)
    show(selected.plain(), as_json)


def _band(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low, high = 1.0, 0.0
    if not 0 <= low <= high <= 1:
        raise UsageError(f"--pass-rate takes LOW:HIGH from 0 to 1, such as 0.1:0.9, not {text!r:.40}.")
    return low, high


def _is_store(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(16) == b"SQLite format 3\0"
    except OSError:
        return False


def _tools(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, list):
        raise UsageError(f"--tools {path} is not a file with a JSON list of tools.")
    return found
