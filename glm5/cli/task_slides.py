"""`glm5 task build slides` (rejection sampling into SFT conversations) and `glm5 task score-slide`."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from glm5.cli.options import DialectName, Json, show
from glm5.cli.task import build_app, task_app
from glm5.errors import DataError, UsageError

if TYPE_CHECKING:
    from glm5.agents.endpoint import Dialect
    from glm5.tasks.slides.rewards import Score


@build_app.command("slides")
def build_slides(
    model: Annotated[str, typer.Option(help="URL of a server, or a checkpoint directory.")],
    out: Annotated[Path, typer.Option(help="JSONL file of conversations for an SFT stage.")],
    prompts: Annotated[int, typer.Option(min=1, help="Number of briefs.")] = 100,
    samples: Annotated[int, typer.Option(min=1, help="Answers per brief; the best one is kept.")] = 4,
    form: Annotated[str, typer.Option(help="compact or html.")] = "html",
    pages: Annotated[int, typer.Option(min=1, help="Pages per answer.")] = 1,
    first: Annotated[int, typer.Option(min=0, help="Number of the first brief.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the briefs.")] = 0,
    least: Annotated[float, typer.Option(min=0, max=1, help="Least score of a good page.")] = 0.8,
    mask: Annotated[
        bool, typer.Option(help="Keep answers with some good pages; defective pages are left out of the loss.")
    ] = True,
    most_alike: Annotated[int, typer.Option(min=0, help="Most kept answers of one layout; 0 is no limit.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 8192,
    name: Annotated[str, typer.Option(help="Name of the model; default: the server's first.")] = "",
    dialect: DialectName = "openai",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the server's API key; or GLM5_API_KEY.")] = None,
    as_json: Json = False,
) -> None:
    """Let a model make slides, keep the best that pass, and write them as conversations for fine-tuning."""
    from glm5.agents.endpoint import EndpointError
    from glm5.agents.models import open_model
    from glm5.data.sft import write_conversations
    from glm5.obs.progress import QuietConsole
    from glm5.records import Message
    from glm5.serve.keys import find_key
    from glm5.tasks.slides.family import SlidesFamily
    from glm5.tasks.slides.selection import Sample, select

    family, failures = SlidesFamily(seed, form=form, pages=pages), 0
    groups: list[list[Sample]] = []
    key = find_key("api", None, api_key_file)
    try:
        with (
            open_model(model, name, cast("Dialect", dialect), key, max_tokens) as (endpoint, _),
            QuietConsole().status("starting") as status,
        ):
            for i in range(prompts):
                status.update(f"brief {i + 1} of {prompts}")
                problem, group = family.problem("train", first + i), list[Sample]()
                groups.append(group)
                for _ in range(samples):
                    try:
                        answer = endpoint.complete([Message("user", problem.prompt)], []).message.content or ""
                    except EndpointError as error:
                        if not error.too_long:
                            raise
                        failures += 1
                        continue
                    group.append(Sample.of(problem, answer))
    finally:  # an error or an interruption does not lose the samples before it
        found = select(groups, least=least, mask=mask, most_alike=most_alike)
        if found.conversations:
            write_conversations(out, found.conversations)
    if not found.conversations:
        raise DataError(f"none of {len(groups)} briefs got an answer that passes: {found.report()}; lower --least.")
    show({**found.report(), "too_long": failures, "file": str(out)}, as_json)


@task_app.command("score-slide")
def score_slide(
    files: Annotated[list[Path], typer.Argument(help="HTML files, one page each.")],
    picture: Annotated[list[Path], typer.Option("--picture", help="Picture that the pages may show by its name.")] = [],  # noqa: B006
    static: Annotated[bool, typer.Option("--static", help="Without a browser; tells only some rewards.")] = False,
    screenshots: Annotated[Path | None, typer.Option(help="Folder for a picture of every page.")] = None,
    as_json: Json = False,
) -> None:
    """Score slides: every reward of a page by name, and what is wrong with it."""
    from glm5.tasks.slides.render import PageFault, Renderer
    from glm5.tasks.slides.rewards import failed, score_page

    if static and screenshots is not None:
        raise UsageError("--screenshots needs a browser; leave out --static.")
    assets = {path.name: _asset(path) for path in picture}
    found: dict[str, Any] = {}
    if static:
        found = {str(path): _plain(score_page(_text(path), None)) for path in files}
    else:
        with Renderer() as renderer:
            for path in files:
                html = _text(path)
                score = score_page(html, None)
                if score.gate:
                    try:
                        score = score_page(html, renderer.measure(html, assets))
                        if screenshots is not None:
                            _save(renderer.screenshot(html, assets, 1.0), screenshots / f"{path.stem}.png")
                    except PageFault as fault:
                        score = failed(str(fault))
                found[str(path)] = _plain(score)
    show(found, as_json)


def _plain(score: Score) -> dict[str, Any]:
    said = {"total": score.total, "compliant": score.compliant, "faults": list(score.faults)}
    return {**said, "tricks": list(score.tricks), "parts": score.parts, "unmeasured": list(score.unmeasured)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None


def _asset(path: Path) -> str:
    from glm5.tasks.slides.brief import data_uri

    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith("image/"):
        raise UsageError(f"--picture {path}: not a picture by its name.")
    try:
        return data_uri(path.name, path.read_bytes(), kind)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"--picture {path}: {error}.") from None


def _save(pixels: Any, path: Path) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
