"""Metrics sinks besides `metrics.jsonl`: TensorBoard and Weights & Biases, each an extra of the package.

A sink only copies the file, so it must not stop a run: a sink that raises is dropped with one warning. Nothing is
written before the first number, and nothing leaves the machine unless the user asks for online mode.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from glm5.errors import ConfigError, nearest

SINKS = ("tensorboard", "wandb")


class Sink(Protocol):
    """A destination of metrics. Steps of a stage count from 1 and rise; `numbers` are plain and finite."""

    def write(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of one step."""

    def rewind(self, stage: str, step: int) -> None:
        """Prepare to write the steps of `stage` above `step` again; they must not show twice."""

    def close(self) -> None:
        """End the output."""


def check_sinks(names: Sequence[str]) -> None:
    """Before a run starts: raise ConfigError for a sink that is unknown, named twice or without its package."""
    for place, name in enumerate(names):
        if name not in SINKS:
            raise ConfigError(f'sinks: "{name}" is unknown{nearest(name, SINKS)}; known are {", ".join(SINKS)}.')
        if name in names[:place]:
            raise ConfigError(f'sinks: "{name}" is named twice.')
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"sinks: {name} is not installed; it comes with `pip install 'glm5[{name}]'`, or take \"{name}\" out."
            )


class TensorBoardSink(Sink):
    """One event folder per stage, `folder/STAGE`, with tags `STAGE/KEY`; every write is on disk at once.

    Each stage has its own folder: TensorBoard forgets the repeated steps of a resumed stage for all tags of a folder,
    and each stage counts its steps from 1.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[str, Any] = {}
        self._purge: dict[str, int] = {}

    def write(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        if not numbers:
            return
        event, summary = _tensorboard("compat.proto.event_pb2"), _tensorboard("compat.proto.summary_pb2")
        values = [summary.Summary.Value(tag=f"{stage}/{key}", simple_value=value) for key, value in numbers.items()]
        writer = self._writer(stage)
        writer.add_event(event.Event(wall_time=time.time(), step=step, summary=summary.Summary(value=values)))
        writer.flush()

    def rewind(self, stage: str, step: int) -> None:
        if writer := self._writers.pop(stage, None):
            writer.close()
        self._purge[stage] = step + 1

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, stage: str) -> Any:
        if stage not in self._writers:
            folder = self.folder / stage
            again = folder.exists()
            self._writers[stage] = _tensorboard("summary.writer.event_file_writer").EventFileWriter(str(folder))
            if again and (first := self._purge.pop(stage, None)) is not None:
                pb = _tensorboard("compat.proto.event_pb2")
                log = pb.SessionLog(status=pb.SessionLog.START)
                self._writers[stage].add_event(pb.Event(wall_time=time.time(), step=first, session_log=log))
        return self._writers[stage]


def _tensorboard(module: str) -> Any:
    """An untyped module of TensorBoard."""
    return importlib.import_module(f"tensorboard.{module}")


class WandbSink(Sink):
    """One W&B run per run folder, with keys `STAGE/KEY` over `STAGE/step`; files below `folder/wandb`.

    WANDB_MODE decides whether it contacts a server, otherwise `mode` does (default offline). W&B cannot remove points,
    so the repeated steps of a resumed stage are not sent again: a seeded run repeats their numbers.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "",
        config: Mapping[str, Any] | None = None,
        mode: str | None = None,
        sent: Mapping[str, int] | None = None,
    ) -> None:
        """`sent` is the last step per stage that earlier processes may have sent."""
        self.folder = folder
        self._name = name or folder.name
        self._config = dict(config or {})
        self._mode = os.environ.get("WANDB_MODE") or mode or "offline"
        self._run: Any = None
        self._known = folder / "wandb" / "glm5.json"
        self._id, self._marks = self._recall()
        if self._id:  # otherwise nothing was sent yet, whatever metrics.jsonl contains
            for stage, step in (sent or {}).items():
                self._marks[stage] = max(step, self._marks.get(stage, 0))
            self._remember()
        self._sent = dict(self._marks)
        self._defined: set[str] = set()

    def write(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        if step <= self._sent.get(stage, 0):
            return
        if self._run is None:
            self._start()
        if stage not in self._defined:
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self._defined.add(stage)
        self._marks[stage] = max(step, self._marks.get(stage, 0))
        # W&B's own step must never fall, even across the processes of a resumed run; this sum only rises.
        row = {f"{stage}/{key}": value for key, value in numbers.items()}
        self._run.log({f"{stage}/step": step, **row}, step=sum(self._marks.values()))

    def rewind(self, stage: str, step: int) -> None:
        self._sent[stage] = max(self._sent.get(stage, 0), self._marks.get(stage, 0))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _start(self) -> None:
        if self._mode != "online":
            # Set before the import, which otherwise opens a connection to report the library's own errors.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb: Any = importlib.import_module("wandb")
        if not self._id:
            self._id = secrets.token_hex(6)
            self._remember()
        self._run = wandb.init(
            project="glm5",
            name=self._name,
            id=self._id,
            dir=str(self.folder),
            config=self._config,
            mode=self._mode,
            resume="allow" if self._mode == "online" else None,
            # Terminal output contains model text and the progress display; neither is a metric.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )

    def _recall(self) -> tuple[str, dict[str, int]]:
        """The W&B run's id and the last steps sent before the previous process; empty for a new run."""
        try:
            saved = json.loads(self._known.read_text(encoding="utf-8"))
            return str(saved["id"]), {str(stage): int(step) for stage, step in saved["sent"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return "", {}

    def _remember(self) -> None:
        self._known.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._known.with_name(f"{self._known.name}.tmp")
        fresh.write_text(json.dumps({"id": self._id, "sent": self._marks}) + "\n", encoding="utf-8")
        os.replace(fresh, self._known)


def make_sinks(
    names: Iterable[str],
    folder: Path,
    *,
    run_name: str = "",
    config: Mapping[str, Any] | None = None,
    wandb_mode: str | None = None,
    sent: Mapping[str, int] | None = None,
) -> dict[str, Sink]:
    """The sinks `names` of the run in `folder`, by name."""
    made: dict[str, Sink] = {}
    for name in names:
        if name == "tensorboard":
            made[name] = TensorBoardSink(folder / "tensorboard")
        else:
            made[name] = WandbSink(folder, run_name, config, wandb_mode, sent)
    return made
