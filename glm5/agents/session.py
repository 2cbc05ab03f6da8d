"""One session of the coding agent from its settings to its patch: opens log, model and room, plays, applies."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from glm5.agents.coding import CodingAgent, Outcome, Settings, View
from glm5.agents.endpoint import Dialect
from glm5.agents.models import SILENCE_S, open_model
from glm5.agents.session_log import SessionLog
from glm5.agents.tools import SPECS
from glm5.agents.workspace import ROOT, apply, check_work_tree, diff, safety_commit
from glm5.errors import UsageError
from glm5.sandbox.container import open_environment
from glm5.sandbox.environment import RoomLimits


@dataclass(frozen=True)
class Options:
    """What may differ from run to run of a session: where its log is, how its model is reached, what its room shows.
    `paths` go in front of PATH in the room."""

    log: Path | None = None
    resume: bool = False
    name: str = ""
    key: str | None = None
    max_tokens: int = 8192
    thinking: int = 0
    show: tuple[Path, ...] = ()
    paths: tuple[str, ...] = ()
    in_place: bool = False
    memory_mb: int = 4096
    disk_mb: int = 1024


def play(settings: Settings, options: Options, view: View | None = None) -> tuple[Outcome, str, dict[str, Any]]:
    """Play a session to its end. Returns the outcome, the patch, and both as JSON.

    Raises:
        UsageError: no such repository, or with `in_place` no git work tree.
        DataError: the log cannot be used.
        GradingError: this machine has no rooms, or the room failed; the session can be resumed.
    """
    repo = Path(settings.repo)
    if not repo.is_dir():
        raise UsageError(f"{repo} is not a folder.")
    if options.in_place:
        check_work_tree(repo)
    path = options.log or _new_log()
    _outside(path, repo)
    notes, written = [f"The log is {path}."], True
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(SessionLog(path, resume=options.resume))
        dialect = cast(Dialect, settings.dialect)
        opened = open_model(
            settings.model,
            options.name,
            dialect,
            options.key,
            options.max_tokens,
            options.thinking,
            SPECS,
            min(SILENCE_S, settings.budget.seconds or SILENCE_S),
        )
        model, measure = stack.enter_context(opened)
        limits = RoomLimits(memory_mb=options.memory_mb, disk_mb=options.disk_mb)
        room = stack.enter_context(open_environment({ROOT: repo}, read_only=options.show, limits=limits))
        paths = [*options.paths, f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
        env = {"PATH": ":".join(paths)} if options.paths else {}
        agent = CodingAgent(settings, model, room, log, view or View(), measure.count, measure.overhead, env)
        outcome = agent.run()
    patch = diff(repo, outcome.changes.files)
    if options.in_place and outcome.changes.files and not outcome.ok:
        notes.append("The repository was not changed, because the session did not end by itself; --resume goes on.")
    elif options.in_place and outcome.changes.files:
        written, said = _write(repo, outcome)
        notes += said
    told = {
        "ok": outcome.ok and written,
        "reason": outcome.reason,
        "summary": outcome.summary,
        "turns": outcome.turns,
        "tokens": outcome.tokens,
        "seconds": outcome.seconds,
        "changed": sorted(outcome.changes.files),
        "left_out": dict(outcome.changes.left_out),
        "diff": patch,
        "log": str(path),
        "notes": notes,
    }
    return outcome, patch, told


def _write(repo: Path, outcome: Outcome) -> tuple[bool, list[str]]:
    """Write the changes to the repository, whose state before is kept; whether that was possible, and notes."""
    name = f"agent-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        safety_commit(repo, name, outcome.changes.files)
    except UsageError as error:  # the patch is there all the same
        return False, [f"The repository was not changed, for its state could not be kept: {error}"]
    refused = apply(repo, outcome.changes.files, outcome.seen)
    back = f"git -C {shlex.quote(str(repo))} restore --source refs/glm5/{name} -- ."
    return True, [
        *(f"{file} was not written: {why}." for file, why in refused.items()),
        f"The state before is kept; to go back (new files stay): {back}",
    ]


def _new_log() -> Path:
    """A path for a new log, in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}.jsonl"
    return Path(cache) / "glm5" / "agent" / name


def _outside(log: Path, repo: Path) -> None:
    """The room shows the repository: a log in it would show the agent its own log."""
    if log.resolve().is_relative_to(repo.resolve()):
        raise UsageError(f"The log {log} lies in the repository; name a file outside of it.")
