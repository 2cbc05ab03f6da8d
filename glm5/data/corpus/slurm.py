"""Stages of a corpus as jobs of Slurm: datatrove submits an array of its parts, and we wait for it."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from datatrove.executor.slurm import SlurmPipelineExecutor

from glm5.data.corpus.stages import Stage
from glm5.errors import CheckpointError, ConfigError, DataError

_POLL, _LAG = 2.0, 30.0
"""Seconds between two looks at the queue, and seconds that a shared file system may need to show a file."""
_SILENT = 300
"""Looks in a row that squeue may fail: its server restarts, and jobs go on."""
_JOB, _MOST_JOBS = "slurm.job", 1001
"""Slurm's usual limit of an array. With more parts a job has several, one after the other, so that a stage is one
array: of several, datatrove knows the last only, and the others could not be cancelled."""
_PLAIN, _OPTION = re.compile(r"[\w@.,:=+/~-]+", re.ASCII), re.compile(r"[a-z][a-z-]*")


class ArrayExecutor(SlurmPipelineExecutor):
    """datatrove's executor for jobs that run this Python, whatever is on their PATH."""

    def get_launch_file_contents(self, sbatch_args: dict[str, str], run_script: str) -> str:
        program = f"{shlex.quote(sys.executable)} -m datatrove.tools.launch_pickled_pipeline"
        script = run_script.replace("launch_pickled_pipeline", program, 1)
        return str(super().get_launch_file_contents(sbatch_args, script))

    def launch_merge_stats(self) -> None:
        """Nothing: the account sums the statistics of all parts."""


def check_slurm(options: Mapping[str, str], out: Path) -> None:
    """Raise ConfigError if jobs cannot be submitted from here, or not with these options, or not for this folder."""
    for program in ("sbatch", "squeue", "scancel"):
        if shutil.which(program) is None:
            raise ConfigError(
                f"--executor slurm needs the program {program}, which is not on the PATH of this machine."
            )
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        raise ConfigError("A job of an array of Slurm cannot submit others; run this on a login node.")
    if missing := [name for name in ("partition", "time") if not options.get(name)]:
        raise ConfigError(f"--executor slurm needs --sbatch {missing[0]}=VALUE.")
    for name, value in options.items():
        if not _OPTION.fullmatch(name) or not value.isprintable() or name == "array":
            raise ConfigError(
                f"--sbatch {name!r:.40}={value!r:.40}: give an option of sbatch in one line; the parts set `array`."
            )
    if not _PLAIN.fullmatch(str(out)):
        raise ConfigError(
            f"The scripts of jobs name the folder {str(out)!r:.200}; choose ASCII letters, digits and @.,:=+/~-_."
        )


def run_stage(stage: Stage, name: str, workers: int | None, logs: Path, options: Mapping[str, str]) -> None:
    """Submit the parts of a stage that are not done, at most `workers` at a time, and wait for them. `options` are
    those of sbatch. Interrupted, the job is cancelled.

    Raises DataError if sbatch refuses the job, CheckpointError while a job of an earlier run is in the queue.
    """
    noted = logs / _JOB
    if noted.exists() and _queued(job := noted.read_text(encoding="utf-8").strip()):
        raise CheckpointError(f"Job {job} of an interrupted run still works on {stage.name}; wait, or `scancel {job}`.")
    given = dict(options)
    executor = ArrayExecutor(
        stage.steps, stage.tasks, given.pop("time"), given.pop("partition"), workers=workers or -1,
        job_name=re.sub(r"[^\w.-]+", "_", f"{name:.100}-{stage.name}", flags=re.ASCII),  # the script's shell reads it
        qos=given.pop("qos", ""), sbatch_args=given, logging_dir=str(logs), max_array_size=_MOST_JOBS,
        tasks_per_job=math.ceil(stage.tasks / _MOST_JOBS),
    )  # fmt: skip
    try:
        executor.run()
    except (OSError, subprocess.CalledProcessError) as error:
        raise DataError(
            f"sbatch refuses the stage {stage.name}: {error}. See {logs / 'launch_script.slurm'}."
        ) from error
    if executor.job_id == -1:  # nothing was left to do
        return
    noted.write_text(f"{executor.job_id}\n", encoding="utf-8")
    try:
        _wait(str(executor.job_id))
    except BaseException:
        subprocess.run(["scancel", str(executor.job_id)], check=False)
        raise
    end = time.monotonic() + _LAG
    while executor.get_incomplete_ranks() and time.monotonic() < end:
        time.sleep(_POLL)


def _wait(job: str) -> None:
    failures = 0
    while True:
        try:
            if not _queued(job):
                return
            failures = 0
        except DataError:
            failures += 1
            if failures > _SILENT:
                raise
        time.sleep(_POLL)


def _queued(job: str) -> bool:
    """Whether a job waits or runs. Slurm forgets jobs some minutes after their end, and then reports an error."""
    done = subprocess.run(["squeue", "--noheader", f"--jobs={job}"], capture_output=True, text=True)
    if done.returncode and "Invalid job id" not in done.stderr:
        raise DataError(f"squeue does not answer: {done.stderr.strip()[:200]}")
    return bool(done.stdout.strip())
