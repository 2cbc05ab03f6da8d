"""The command line: one verb per job. Importing this package does not import torch; each verb imports what it needs."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from glm5 import __version__, process
from glm5.cli import (  # noqa: F401 - their import adds the verbs
    agent,
    corpus,
    data_sft,
    evaluate,
    kernels,
    models,
    plan,
    platforms,
    prefer,
    quantize,
    runs,
    task,
    task_build,
    task_cc_bench,
    task_search,
    task_slides,
)
from glm5.cli.options import Json, app, show
from glm5.errors import Glm5Error, for_screen

SIGINT_CODE = 130
"""Typer's return value after Ctrl-C."""


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show what works on this machine."""
    from glm5.launch.doctor import check

    show(check(), as_json)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _fail(message: str, code: int) -> NoReturn:
    lines = [line for line in message.splitlines() if line.strip()][:3] or ["failed without a message."]
    print(for_screen("\n".join(["Error: " + lines[0], *lines[1:]])), file=sys.stderr)
    sys.exit(code)


def _interrupted() -> NoReturn:
    print("Interrupted. What was finished is saved; the same command goes on from there.", file=sys.stderr)
    sys.exit(1)


def main(run: Callable[..., Any] = app) -> None:
    """Entry point: errors are at most three lines on stderr; a user error never prints a traceback."""
    process.tune()
    if sys.argv[1:] == []:
        sys.argv.append("--help")
    try:
        code = run(standalone_mode=False)  # a verb's own exit code is returned
        if code == SIGINT_CODE:
            _interrupted()
        if isinstance(code, int) and code:
            sys.exit(code)
    except (typer.Abort, KeyboardInterrupt):
        _interrupted()
    except Glm5Error as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = ". What was saved before is intact; free some space and run again." if full else ""
        if isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
            _fail(f"{error.filename}: a folder is needed here, and a file has this name. Choose another path.", 1)
        _fail(f"{error.strerror or error}{place}{advice}", 1)
    except Exception as error:
        # Typer's releases keep the parser's errors in different modules; all of them have `format_message`.
        if not hasattr(error, "format_message"):
            raise
        ctx = getattr(error, "ctx", None)
        hint = f"\nSee {ctx.command_path} --help." if ctx else ""
        _fail(error.format_message() + hint, 2)
