"""The verb that predicts memory and time of a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from glm5.cli.options import Json, Overrides, Recipe, app, show


@app.command()
def plan(
    recipe: Recipe,
    gpus: Annotated[int, typer.Option(min=1, help="Processes, each with a device of its own.")] = 1,
    device: Annotated[str, typer.Option(help="a100, h100, h200, b200, mi300x, ascend-910b or ascend-910c.")] = "h100",
    mfu: Annotated[float, typer.Option(help="Assumed share of the peak rate.")] = 0.15,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Predict whether a recipe's stages fit into the memory of a job, and how long they take; needs no GPU."""
    from glm5.launch.plan import load_and_plan, table

    found = load_and_plan(recipe, overrides, gpus, device, mfu)
    if as_json:
        show(found, True)
    else:
        typer.echo(table(found))
    if not found["fits"]:
        raise typer.Exit(1)
