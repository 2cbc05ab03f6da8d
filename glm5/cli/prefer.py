"""The verb `glm5 prefer`: people compare two answers at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.options import Json, app, show
from glm5.errors import UsageError


@app.command()
def prefer(
    source: Annotated[
        Path,
        typer.Argument(help='JSONL of {"prompt", "answers": [.., ..]}, or a folder of such files.', metavar="DIR|FILE"),
    ],
    store: Annotated[Path | None, typer.Option(help="File of the votes; default: beside the source.")] = None,
    rater: Annotated[str, typer.Option(help="Name that the page proposes.")] = "",
    export: Annotated[Path | None, typer.Option(help="Write the votes as JSONL and end.")] = None,
    agreement: Annotated[bool, typer.Option(help="Print how far raters agree, and end.")] = False,
    host: Annotated[str, typer.Option(help="A loopback address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8010,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Compare answers in the browser: keys 1, 2 and t. Votes are kept; the same command goes on."""
    from glm5.preferences.rows import read_pairs
    from glm5.preferences.store import PreferenceStore

    pairs = read_pairs(source)
    path = store or (source / "preferences.sqlite" if source.is_dir() else source.with_suffix(".sqlite"))
    if (export is not None or agreement) and not path.exists():
        raise UsageError(f"{path} does not exist, so there are no votes yet; vote with glm5 prefer {source}.")
    with PreferenceStore(path) as votes:
        added = votes.add_pairs(pairs)
        if export is not None or agreement:
            found: dict[str, object] = {}
            if export is not None:
                found["exported"] = votes.export(export, source)
            if agreement:
                from glm5.preferences.report import agreement_report

                found |= agreement_report(votes)
            show(found, as_json)
            return
        from glm5.preferences.app import serve_page

        typer.echo(
            f"{len(pairs):,} pairs ({added:,} new); votes go to {path}. Ctrl-C ends, the same command goes on.",
            err=True,
        )
        serve_page(votes, rater, host, port, browser)
