"""The verbs that predict memory and time: of a recipe, and of serving a model."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.core import TyperGroup

from glm5.cli.options import Json, Overrides, Recipe, app, show

Devices = Annotated[str, typer.Option(help="a100, h100, h800, h200, b200, mi300x, ascend-910b or ascend-910c.")]


class _RecipeByDefault(TyperGroup):
    """`glm5 plan RECIPE` is `glm5 plan recipe RECIPE`."""

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["recipe", *args]
        return super().parse_args(ctx, args)


plan_app = typer.Typer(cls=_RecipeByDefault, help="Predict memory and time of a recipe, or of serving; needs no GPU.")
app.add_typer(plan_app, name="plan")


@plan_app.command()
def recipe(
    recipe: Recipe,
    gpus: Annotated[int, typer.Option(min=1, help="Processes, each with a device of its own.")] = 1,
    device: Devices = "h100",
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


@plan_app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, or a preset such as glm5.")],
    gpus: Annotated[int, typer.Option(min=1, help="Devices in all.")] = 1,
    device: Devices = "h100",
    tp: Annotated[int, typer.Option(min=1, help="Devices that share the weights of an engine.")] = 1,
    quantize: Annotated[str | None, typer.Option(help="As for `glm5 serve`: int8, int4, fp8, or a scheme.")] = None,
    cache_dtype: Annotated[str, typer.Option(help="auto, which is bf16, or int8.")] = "auto",
    context: Annotated[list[int], typer.Option(help="Tokens of a sequence; repeatable.")] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """How many sequences the cache holds, and how fast decoding can be at most; needs no GPU."""
    from glm5.launch.plan_serve import CONTEXTS, plan_serve, table

    found = plan_serve(model, device, gpus, tp, quantize, cache_dtype, context or CONTEXTS)
    if as_json:
        show(found, True)
    else:
        typer.echo(table(found))
    if not found["fits"]:
        raise typer.Exit(1)
