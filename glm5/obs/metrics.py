"""`metrics.jsonl`: one JSON object per line with `stage`, `step`, `time` and flat numeric keys.

The file is append-only during a run. A resumed run repeats the steps after its checkpoint, so their lines are removed
first (`MetricsWriter.rewind`); a line cut off by a crash is dropped when the file is opened.

The file is the source of truth. `open_metrics` returns a run's writer: on rank 0 the file and the sinks of the recipe
(`glm5.obs.sinks`), on the other ranks nothing.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, SupportsFloat, SupportsIndex

from glm5.errors import DataError
from glm5.obs.logs import get_logger, rank
from glm5.obs.sinks import Sink, check_sinks, make_sinks

Number = SupportsFloat | SupportsIndex
_RESERVED = frozenset({"stage", "step", "time"})


class MetricsLog(Protocol):
    """Interface for the numbers of stages: `MetricsWriter` alone, `Metrics` with sinks, or `NullMetrics`."""

    def write(self, stage: str, step: int, numbers: Mapping[str, Number]) -> None: ...

    def rewind(self, stage: str, step: int) -> int: ...

    def close(self) -> None: ...


class _Closing:
    """Makes a class with `close` a context manager."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsWriter(_Closing):
    """Appends to one metrics file. Every line is flushed when `write` returns. Thread-safe.

    One process writes a file; in a job of many ranks, rank 0.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        if self.path.exists():
            read_metrics(self.path)  # raises DataError for a damaged line other than the last
            _repair_last_line(self.path)
        self._file = self.path.open("ab")

    def write(self, stage: str, step: int, numbers: Mapping[str, Number]) -> None:
        """Append one line. Tensors of one element and numpy scalars count as numbers. nan and infinities become null,
        because JSON cannot spell them. `time` is in seconds since the epoch."""
        if clash := _RESERVED & numbers.keys():
            raise ValueError(f"the metric names {sorted(clash)} are taken by the line itself")
        line: dict[str, Any] = {"stage": stage, "step": int(step), "time": round(time.time(), 3)}
        line.update((name, _plain(name, value)) for name, value in numbers.items())
        data = json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            self._file.write(data)
            self._file.flush()

    def rewind(self, stage: str, step: int) -> int:
        """Remove the lines of `stage` with a step above `step`; returns their number. The file is replaced as a whole,
        so a crash leaves either the old or the new one."""
        with self._lock:
            self._file.flush()
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if not _is_after(json.loads(line), stage, step)]
            if len(kept) < len(lines):
                self._file.close()
                fresh = self.path.with_name(f"{self.path.name}.tmp")
                with fresh.open("wb") as file:
                    file.writelines(kept)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(fresh, self.path)
                self._file = self.path.open("ab")
            return len(lines) - len(kept)

    def close(self) -> None:
        with self._lock:
            self._file.close()


class Metrics(_Closing):
    """The metrics file and copies of its numbers in sinks. A sink that fails is dropped with one warning."""

    def __init__(self, writer: MetricsWriter, sinks: Mapping[str, Sink]) -> None:
        self.writer = writer
        self._sinks = dict(sinks)
        self._lock = threading.Lock()

    def write(self, stage: str, step: int, numbers: Mapping[str, Number]) -> None:
        """As `MetricsWriter.write`; sinks get the finite numbers."""
        self.writer.write(stage, step, numbers)
        if self._sinks:
            plain = ((name, _plain(name, value)) for name, value in numbers.items())
            finite = {name: value for name, value in plain if value is not None}
            self._each(lambda sink: sink.write(stage, int(step), finite))

    def rewind(self, stage: str, step: int) -> int:
        """As `MetricsWriter.rewind`; sinks prepare for repeated steps."""
        removed = self.writer.rewind(stage, step)
        self._each(lambda sink: sink.rewind(stage, step))
        return removed

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self.writer.close()

    def _each(self, use: Callable[[Sink], None]) -> None:
        with self._lock:
            for name, sink in list(self._sinks.items()):
                try:
                    use(sink)
                except Exception as error:  # any error of a foreign package: the run matters more than a copy
                    del self._sinks[name]
                    said = " ".join(str(error).split())[:300] or type(error).__name__
                    get_logger(__name__).warning(
                        "The sink %s failed (%s) and gets no more metrics; metrics.jsonl goes on.", name, said
                    )


class NullMetrics(_Closing):
    """Discards metrics: for the ranks that do not write."""

    def write(self, stage: str, step: int, numbers: Mapping[str, Number]) -> None:
        return None

    def rewind(self, stage: str, step: int) -> int:
        return 0

    def close(self) -> None:
        return None


def open_metrics(
    path: Path | str,
    sinks: Sequence[str] = (),
    *,
    run_name: str = "",
    config: Mapping[str, Any] | None = None,
    wandb_mode: str | None = None,
    main: bool | None = None,
) -> Metrics | NullMetrics:
    """The metrics writer of this process: on rank 0 the file `path` and the sinks, in the folder of the file.

    W&B shows `run_name` and `config` (the resolved recipe). WANDB_MODE overrides `wandb_mode`; without both it is
    offline. `main` says whether this process is rank 0; the default is to ask RANK. Raises ConfigError on every rank
    for a sink that is not possible.
    """
    check_sinks(sinks)
    if not (rank() == 0 if main is None else main):
        return NullMetrics()
    writer = MetricsWriter(path)
    sent: dict[str, int] = {}
    for row in read_metrics(writer.path) if sinks else []:
        sent[row["stage"]] = max(row["step"], sent.get(row["stage"], 0))
    folder = writer.path.parent
    return Metrics(
        writer, make_sinks(sinks, folder, run_name=run_name, config=config, wandb_mode=wandb_mode, sent=sent)
    )


def read_metrics(path: Path | str, stage: str | None = None) -> list[dict[str, Any]]:
    """All lines of a metrics file in order, or those of one stage. None replaces a number that was not finite.

    A last line without its line break was cut off; it is left out unless it is complete. Raises DataError for any other
    line that is not an object with stage and step.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"The metrics {path} cannot be read: {error.strerror}.") from None
    *lines, last = raw.split(b"\n")
    rows = [_parse(line, path, number) for number, line in enumerate(lines, start=1)]
    if last and (row := _row(last)) is not None:
        rows.append(row)
    return [row for row in rows if stage is None or row["stage"] == stage]


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    row = _row(line)
    if row is None:
        raise DataError(
            f'{path}, line {number}: not a metrics line ({{"stage": ..., "step": ...}}). Remove it to use this file.'
        )
    return row


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and isinstance(row.get("stage"), str) and isinstance(row.get("step"), int)
    return row if whole else None


def _repair_last_line(path: Path) -> None:
    raw = path.read_bytes()
    last = raw.rpartition(b"\n")[2]
    if not last:
        return
    with path.open("r+b") as file:
        if _row(last) is None:
            file.truncate(len(raw) - len(last))
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _is_after(row: Mapping[str, Any], stage: str, step: int) -> bool:
    return bool(row["stage"] == stage and row["step"] > step)


def _plain(name: str, value: Number) -> int | float | None:
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"the metric {name} is {value!r}, which is not a number")
    number = float(value)
    return number if math.isfinite(number) else None
