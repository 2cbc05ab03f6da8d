"""datatrove's local executor on processes that notice each other's death.

datatrove's own uses `multiprocessing.Pool`. If the system kills one of its workers, for instance out of memory, it
waits for ever. If the program itself is killed, its workers go on writing beside those of the next run.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datatrove.executor.local import LocalPipelineExecutor

from glm5.errors import CheckpointError, DataError, Glm5Error
from glm5.process import safe_path

_PATIENCE = 30.0  # seconds that processes of an interrupted run have to end


class PoolExecutor(LocalPipelineExecutor):
    """Runs the parts of a pipeline in a pool; the rest is datatrove's."""

    def run(self, pool: ProcessPoolExecutor) -> None:
        """Run the parts that are not done. Raises DataError if a process died or a part failed."""
        ranks = self.get_incomplete_ranks()
        try:
            futures: dict[Future[None], int] = {pool.submit(_run_part, self, rank): rank for rank in ranks}
            for future in as_completed(futures):
                future.result()
        except BrokenProcessPool:
            raise DataError(
                "A process ended unexpectedly, probably out of memory; use fewer --workers, or more `tasks` in a new "
                "recipe. The same command goes on from here."
            ) from None
        except Glm5Error:
            raise
        except Exception as error:
            log = self.logging_dir.resolve_paths(f"logs/task_{futures[future]:05d}.log")
            raise DataError(f"A part failed: {type(error).__name__}: {str(error)[:300]} See {log}.") from error


@contextmanager
def worker_pool(workers: int, folder: Path) -> Iterator[ProcessPoolExecutor]:
    """Processes for `PoolExecutor`. First waits for those of an interrupted run in the same folder to end."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "workers.lock"
    _wait_for_others(lock)
    safe_path()
    others = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (str(lock),))
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        raise


def _wait_for_others(lock: Path) -> None:
    end = time.monotonic() + _PATIENCE
    with lock.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise CheckpointError(
                        f"Processes of an interrupted run still work in {lock.parent}; end them, or wait."
                    ) from None
                time.sleep(0.1)


_held: Any = None


def _start_worker(lock: str) -> None:
    """Set up a worker: it ends with its parent, keeps the lock until then, and uses one thread. Messages go to the logs
    of the parts."""
    global _held
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _held = open(lock, "rb")  # noqa: SIM115 - for the life of the process
    fcntl.flock(_held, fcntl.LOCK_SH)
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _run_part(executor: PoolExecutor, rank: int) -> None:
    executor._run_for_rank(rank, local_rank=1)
