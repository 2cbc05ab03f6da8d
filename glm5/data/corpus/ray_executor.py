"""Stages of a corpus as tasks of Ray: datatrove's executor on a cluster, or on one of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import ray
from datatrove.executor.ray import RayPipelineExecutor

from glm5.data.corpus.stages import Stage


@contextmanager
def ray_connection() -> Iterator[None]:
    """A connection that this run opens is closed with it. What Ray prints, such as that a node is dead, goes to stderr:
    stdout has the account."""
    own = not ray.is_initialized()
    with redirect_stdout(sys.stderr):
        if own:
            ray.init(log_to_driver=False)
        try:
            yield
        finally:
            if own:
                ray.shutdown()  # and with it the threads that print


def run_on_ray(stage: Stage, workers: int, logs: Path) -> None:
    RayPipelineExecutor(stage.steps, stage.tasks, workers, logging_dir=str(logs)).run()
