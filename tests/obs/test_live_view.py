"""The view of a live run: what it shows on a terminal, in one line, and without an answer."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from glm5.obs.live_view import GONE, LiveView
from glm5.obs.progress import PipelineProgress

STATUS: dict[str, Any] = {
    "version": 12, "in_flight": 37, "permits": 64, "allowed": 99, "results_waiting": 3, "staleness": 2,
    "engines": {"running": 30, "waiting": 4, "use": 0.41, "preemptions": 0},
    "engine_seconds": {"busy": 10.0, "learner": 10.0},
    "families": {
        "sums [red]": {"target": 0.75, "trained": 6, "pending": 3, "dropped": 1, "dispatched": 1200, "arrived": 80,
                       "running": 30},
        "agent": {"target": 0.25, "trained": 2, "pending": 1, "dropped": 0, "dispatched": 24, "arrived": 16,
                  "running": 7},
    },
    "oldest": [{"session": f"g{i}.0.0", "family": "agent", "waits_for": "model", "seconds": 14.2} for i in range(9)],
}  # fmt: skip


def drawn(view: LiveView, width: int = 200) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(view.table())
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_table_has_shares_engines_limits_ages_and_the_oldest() -> None:
    view = LiveView()
    assert drawn(view) == [GONE] and view.line() == GONE
    view.update(STATUS)
    view.update(STATUS | {"engine_seconds": {"busy": 13.0, "learner": 10.5, "push": 0.5}})
    now, head, sums, agent, *oldest = drawn(view)
    assert now == (
        "weights 12, 37 rollouts of 64 permits, engines busy 75%, 30 running, 4 waiting, cache 41%, "
        "3 results wait for the learner, oldest token 2 updates old"
    )
    assert head.split() == [
        "family",
        "target",
        "share",
        "trained",
        "pending",
        "dropped",
        "dispatched",
        "arrived",
        "running",
    ]
    assert sums.split() == ["sums", "[red]", "75%", "75%", "6", "3", "1", "1,200", "80", "30"]
    assert agent.split() == ["agent", "25%", "25%", "2", "1", "0", "24", "16", "7"]
    assert oldest == [f"g{i}.0.0 (agent) waits for model since 14 s" for i in range(3)]
    assert view.line() == f"{now}, oldest {oldest[0]}"
    assert all(len(line) <= 60 for line in drawn(view, 60)) and len(drawn(view, 60)) == 7
    assert all(ord(c) < 128 for c in view.line())
    view.update(STATUS | {"families": {}, "oldest": [], "staleness": None})
    assert "updates old" not in view.line()
    view.update(None)
    assert view.line() == GONE


def test_a_terminal_shows_the_table_and_a_file_plain_lines() -> None:
    out, view = io.StringIO(), LiveView()
    view.update(STATUS)
    with PipelineProgress(["rl"], console=Console(file=out, width=160, force_terminal=True)) as progress:
        progress.start("rl", 2)
        progress.show(view)
        progress.advance(reward=0.5)
        progress._live.refresh()  # type: ignore[union-attr]
        assert "dispatched" in out.getvalue() and "waits for model" in out.getvalue()
        progress.finish("rl")
        out.truncate(out.seek(0))
        progress._live.refresh()  # type: ignore[union-attr]
        assert "dispatched" not in out.getvalue()
    out = io.StringIO()
    with PipelineProgress(["rl"], console=Console(file=out, width=40), interval=0.0) as progress:
        progress.start("rl", 1)
        progress.show(view)
        progress.advance(reward=0.5)
        progress.show(None)
        progress.advance(reward=0.5)
        progress.finish("rl")
    lines = out.getvalue().splitlines()
    assert lines[2] == f"[1/1] rl: {view.line()}" and len(lines) == 5 and "\x1b" not in out.getvalue()
