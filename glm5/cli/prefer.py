"""The verb `glm5 prefer`: people compare two answers at a time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glm5.cli.options import Json, Port, app, show, told
from glm5.errors import UsageError

if TYPE_CHECKING:
    from glm5.preferences.store import PreferenceStore


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
    port: Port = 8010,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Compare answers in the browser: keys 1, 2 and t. Votes are kept; the same command goes on."""
    from glm5.preferences.rows import read_pairs
    from glm5.preferences.store import PreferenceStore

    pairs = read_pairs(source)
    path = store or (source / "preferences.sqlite" if source.is_dir() else source.with_suffix(".sqlite"))
    if export is not None or agreement:
        if not path.exists():
            raise UsageError(f"{path} does not exist, so there are no votes yet; vote with glm5 prefer {source}.")
        with PreferenceStore(path) as votes:
            votes.add_pairs(pairs)
            show(_results(votes, source, export, agreement, as_json), as_json)
        return
    from glm5.preferences.app import bind_local, serve_page

    # The socket first: a host or port that is refused leaves no store behind.
    with contextlib.closing(bind_local(host, port)) as listener, PreferenceStore(path) as votes:
        added, others = votes.add_pairs(pairs), votes.pairs_left_out()
        more = f", which has {others:,} more, not asked because not in {source}" if others else ""
        told(f"{len(pairs):,} pairs ({added:,} new); votes go to {path}{more}. Ctrl-C ends, the same command goes on.")
        serve_page(votes, rater, host, listener, browser)


def _results(
    votes: PreferenceStore, source: Path, export: Path | None, agreement: bool, exact: bool
) -> dict[str, object]:
    """What --export and --agreement print; numbers are rounded unless they must be `exact`."""
    left_out, found = votes.votes_left_out(), dict[str, object]()
    if not votes.votes():
        others = f" ({left_out:,} are on other pairs)" if left_out else ""
        raise UsageError(
            f"{votes.path} has no votes yet on the pairs of {source}{others}; vote with glm5 prefer {source}."
        )
    if export is not None:
        found["exported"] = votes.export(export, source)
    if agreement:
        from glm5.preferences.report import agreement_report

        report = agreement_report(votes)
        found |= report if exact else _rounded(report)
    return found | {"votes_on_other_pairs": left_out}


def _rounded(value: Any) -> Any:
    """A value of JSON with at most three decimals."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value
