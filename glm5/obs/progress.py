"""Progress of a pipeline: its stages with state, time, time left and the latest numbers.

A terminal shows the list in place. Elsewhere (a file, a pipe, CI) plain lines are printed, few enough to read. All
output goes to stderr, because `--json` owns stdout. A closed stream is not an error; it only ends the output.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_MARKS = {"waiting": "·", "running": "▸", "done": "✓", "skipped": "-", "failed": "✗"}
_ASCII_MARKS = {"waiting": ".", "running": ">", "done": "+", "skipped": "-", "failed": "!"}
_SHORT_NAMES = {"tokens_per_second": "tok/s", "held_out_bits_per_byte": "held-out bits/byte"}
_STYLES = {"waiting": "dim", "running": "bold", "done": "green", "skipped": "dim", "failed": "red"}


@dataclass
class _Stage:
    name: str
    expected: float | None  # seconds, measured or computed by the recipe's author
    state: str = "waiting"
    total: int | None = None
    count: int = 0
    began: float = 0.0
    base: tuple[float, int] | None = None  # time and count at the start of the pace measurement
    seconds: float = 0.0  # final, after the stage has ended
    text: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


class View(Protocol):
    """More about the running stage: rows below the list on a terminal, one line elsewhere."""

    def table(self) -> RenderableType: ...

    def line(self) -> str: ...


class PipelineProgress:
    """Context manager around a pipeline; stages run one at a time, in any order of `stage_names`.

    `expected_seconds` gives each stage's weight in the total estimate; finished stages correct it for the speed of this
    machine. `interval` is the minimum time in seconds between two plain lines of a running stage. It grows with the
    stage's age, up to five minutes: a day of training gives some hundred lines.
    """

    def __init__(
        self,
        stage_names: Sequence[str],
        expected_seconds: Mapping[str, float] | None = None,
        console: Console | None = None,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        expected = expected_seconds or {}
        self._stages = {name: _Stage(name, expected.get(name)) for name in stage_names}
        if len(self._stages) != len(stage_names):
            raise ValueError(f"stage names must differ: {list(stage_names)}")
        self._console = console or QuietConsole()
        self._interval = interval
        self._clock = clock
        self._began = clock()
        self._current: _Stage | None = None
        self._last_line = 0.0
        self._broken = False
        self._view: View | None = None
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._shown, console=self._console, refresh_per_second=4)

    def __enter__(self) -> PipelineProgress:
        self._began = self._clock()
        if self._live is not None:
            self._guard(self._live.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._current is not None:
            self._end(self._current, "failed", "interrupted" if kind is KeyboardInterrupt else "failed")
        if self._live is not None:
            self._guard(self._live.stop)

    def start(self, stage: str, total: int | None = None) -> None:
        """Start `stage`; it will `advance` by `total` in all (None: unknown)."""
        if self._current is not None:
            raise ValueError(f"{self._current.name} has not finished; {stage} cannot start")
        current = self._stages[stage]
        current.state, current.total, current.count = "running", total, 0
        current.began = self._last_line = self._clock()
        current.base = None
        self._current = current
        self._line(current, f"started{'' if total is None else f', {total} steps'}")

    def advance(self, n: int = 1, **numbers: float) -> None:
        """Advance the running stage by `n`; `numbers` are its latest, shown beside it. A stage's first call without
        numbers reports the steps of an earlier process: they count, but not for the pace."""
        current = self._running()
        current.count += n
        current.numbers.update(numbers)
        now = self._clock()
        if current.base is None:
            current.base = (current.began, 0) if numbers else (now, current.count)
        if now - self._last_line >= max(self._interval, min((now - current.began) / 30, 300.0)):
            self._last_line = now
            self._line(current, ", ".join(part for part in self._report(current, now) if part))
            if self._view is not None:
                self._line(current, self._view.line())

    def show(self, view: View | None) -> None:
        """Show more about the running stage from now on, until its end or None."""
        self._view = view

    def finish(self, stage: str, summary: str = "") -> None:
        """End the running stage."""
        if self._running().name != stage:
            raise ValueError(f"{stage} is not the running stage, {self._running().name} is")
        self._end(self._running(), "done", summary)

    def skip(self, stage: str, reason: str = "already done") -> None:
        """Mark `stage` as not run, for `reason`."""
        skipped = self._stages[stage]
        skipped.state, skipped.text = "skipped", reason
        self._line(skipped, reason)

    def stage_seconds_left(self) -> float | None:
        """Remaining time of the running stage, from its own pace, or from its expected time before the first step. None
        without either, and while nothing runs."""
        current = self._current
        if current is None:
            return None
        spent, steps = self._measured(current)
        if current.total and steps:
            return spent * max(current.total - current.count, 0) / steps
        spent = self._clock() - current.began
        return None if current.expected is None else max(current.expected * self._slowness() - spent, 0.0)

    def seconds_left(self) -> float | None:
        """Time until the pipeline's end; None while a remaining stage has no expected time."""
        left = 0.0
        if self._current is not None:
            own = self.stage_seconds_left()
            if own is None:
                return None
            left = own
        slowness = self._slowness()
        for stage in self._stages.values():
            if stage.state == "waiting":
                if stage.expected is None:
                    return None
                left += stage.expected * slowness
        return left

    def _slowness(self) -> float:
        """Real seconds per expected second, over the finished stages and the running one."""
        pairs = [(s.seconds, s.expected) for s in self._stages.values() if s.state == "done" and s.expected]
        current = self._current
        if current is not None and current.expected and current.total:
            spent, steps = self._measured(current)
            if steps:
                pairs.append((spent, current.expected * min(steps / current.total, 1.0)))
        expected = sum(e for _, e in pairs)
        return sum(s for s, _ in pairs) / expected if expected > 0 else 1.0

    def _measured(self, stage: _Stage) -> tuple[float, int]:
        """(seconds, steps) of this process in the running stage."""
        since, before = stage.base or (stage.began, 0)
        return self._clock() - since, stage.count - before

    def _running(self) -> _Stage:
        if self._current is None:
            raise ValueError("no stage is running; call start() first")
        return self._current

    def _end(self, stage: _Stage, state: str, text: str) -> None:
        stage.state, stage.text = state, text
        stage.seconds = self._clock() - stage.began
        self._current = self._view = None
        took = _duration(stage.seconds)
        self._line(stage, f"{text} after {took}" if state == "failed" else f"done in {took}{text and f': {text}'}")

    def _report(self, stage: _Stage, now: float) -> tuple[str, ...]:
        left = self.stage_seconds_left()
        whole = self.seconds_left()
        return (
            f"{stage.count}/{stage.total}" if stage.total else str(stage.count),
            f"{_duration(now - stage.began)} elapsed",
            "" if left is None else f"{_duration(left)} left",
            "" if whole is None or whole == left else f"{_duration(whole)} for all",
            _numbers(stage.numbers),
        )

    def _line(self, stage: _Stage, text: str) -> None:
        """Print one plain line, except on a terminal, which already shows the list."""
        if self._live is None:
            position = f"[{list(self._stages).index(stage.name) + 1}/{len(self._stages)}]"
            self._guard(lambda: self._print(f"{position} {stage.name}: {text}"))

    def _print(self, line: str) -> None:
        encoding = self._console.encoding
        line = line.encode(encoding, "backslashreplace").decode(encoding)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _guard(self, output: Callable[[], None]) -> None:
        """Run `output`; silent after the first failure of the stream."""
        if self._broken:
            return
        try:
            output()
        except (OSError, ValueError):  # ValueError: the program closed the file object itself
            self._broken = True

    def _shown(self) -> RenderableType:
        view = self._view
        return self._table() if view is None else Group(self._table(), view.table())

    def _table(self) -> Table:
        marks = _MARKS if self._console.encoding.startswith("utf") else _ASCII_MARKS
        now = self._clock()
        table = Table.grid(padding=(0, 2))
        for stage in self._stages.values():
            elapsed, left, text = "", "", stage.text
            if stage.state == "running":
                _, _, own, _, latest = self._report(stage, now)
                count = f"{stage.count}/{stage.total}" if stage.total else ""
                elapsed, left, text = _duration(now - stage.began), own, f"{count}  {latest}".strip()
            elif stage.state in ("done", "failed"):
                elapsed = _duration(stage.seconds)
            style = _STYLES[stage.state]
            table.add_row(
                Text(marks[stage.state], style), Text(stage.name, style), Text(elapsed), Text(left), Text(text, "dim")
            )
        whole = self.seconds_left()
        left = "" if whole is None or all(s.state != "waiting" for s in self._stages.values()) else _duration(whole)
        table.add_row("", Text("all", "dim"), Text(_duration(now - self._began)), Text(left and f"{left} left"), "")
        return table


class QuietConsole(Console):
    """A rich console on stderr that goes silent when its reader closes; rich's own ends the program."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # The buffered rest would fail again when Python flushes at exit, and spoil the exit code.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _numbers(numbers: Mapping[str, float]) -> str:
    """The first four numbers, short: `loss 3.21 tok/s 12.3k`."""
    shown = list(numbers.items())[:4]
    return " ".join(f"{_SHORT_NAMES.get(name, name)} {_short(value)}" for name, value in shown)


def _short(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size:
            return f"{value / size:.{max(0, 2 - int(math.log10(abs(value) / size)))}f}{unit}"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
