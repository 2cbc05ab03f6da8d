"""Shared by the verbs: the application itself, common options, and printing of results."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from glm5.errors import UsageError, for_screen

app = typer.Typer(
    name="glm5",
    help="The GLM-5 system: train, adapt, fine-tune, reinforce, distil, evaluate, serve.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
tokenizer_app = typer.Typer(help="Tokenizers.")
data_app = typer.Typer(help="Training data.")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(data_app, name="data")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Overrides = Annotated[list[str], typer.Option("--set", help="Override a recipe key, e.g. --set stages.sft.rows=8.")]
Sources = Annotated[list[str], typer.Argument(help='Folders, text files, JSONL, parquet, "git:PATH", or "stdlib".')]
Out = Annotated[Path, typer.Option(help="Directory to write.")]
Recipe = Annotated[Path, typer.Argument(help="A TOML recipe, e.g. recipes/laptop.toml.")]
ChatTemplate = Annotated[
    str | None, typer.Option(help="Version (5.0 to 5.3) or Jinja file; default: what the checkpoint says.")
]
Checkpoint = Annotated[Path, typer.Argument(help="Checkpoint directory.")]


def _known_dialect(name: str) -> str:
    if name not in ("openai", "anthropic"):
        raise typer.BadParameter(f"it is openai or anthropic, not {name!r:.40}.")
    return name


Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
DialectName = Annotated[
    str, typer.Option(callback=_known_dialect, help="Of the server: openai (Chat Completions) or anthropic (Messages).")
]
Device = Annotated[str, typer.Option(help='"auto" (an accelerator, else the CPU), "cpu", or one such as "cuda:1".')]


class Dtype(enum.Enum):
    """Dtypes for running a model."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def assignments(pairs: list[str]) -> dict[str, Any]:
    """`key=value` pairs; a value that parses as JSON is JSON, otherwise text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise UsageError(f"--set takes key=value, not {pair!r:.60}.")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values


def show(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(values))
        return
    width = max((len(key) for key in values), default=0)
    for key, value in values.items():
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        say(f"{key:<{width}}  {text}")


def say(text: str, err: bool = False) -> None:
    """Print a line for people; what programs of a room or a model say may be in it."""
    typer.echo(for_screen(text), err=err)


def told(line: str) -> None:
    """Say on stderr how a command goes on."""
    say(line, err=True)


def model_config(model: str) -> Any:
    """The configuration of a preset or of a checkpoint directory."""
    from glm5.config.model import PRESETS, GLM5Config

    return GLM5Config.load(model) if model not in PRESETS and Path(model).is_dir() else GLM5Config.preset(model)
