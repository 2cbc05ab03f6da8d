"""Logs by rank: rank 0 logs normally, the other ranks only warnings and errors.

The rank comes from the environment variable RANK, which torchrun and our own launchers set. Logs go to stderr, because
`--json` owns stdout, and to the run's `log.txt` (of other ranks: `log-rankR.txt`) if `setup_logging` gets its path.
`glm5 logs RUN` shows the files as one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from glm5.obs.log_view import rank_file

_ROOT = "glm5"
_OURS = "_glm5_handler"


def rank() -> int:
    """This process's rank in its job; 0 for a single process."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def get_logger(name: str = _ROOT) -> logging.Logger:
    """The logger `name`, below "glm5". Silent until `setup_logging` or the host program configures logging, except for
    warnings and errors, which Python prints by itself."""
    return logging.getLogger(name if name == _ROOT or name.startswith(f"{_ROOT}.") else f"{_ROOT}.{name}")


def setup_logging(
    level: int = logging.INFO, file: Path | None = None, stderr: int | None = None, mark: str = ""
) -> None:
    """Send logs to stderr and to `file` (appended, folder made), other ranks to one beside it (see `rank_file`). A
    second call replaces the first.

    stderr gets levels from `stderr` on (None: like the file), with `mark` before every line. Other ranks log from
    WARNING on, with their rank first.
    """
    logger = logging.getLogger(_ROOT)
    _remove(logger)
    main = rank() == 0
    logger.setLevel(level if main else max(level, logging.WARNING))
    logger.propagate = False
    speaker = _StderrHandler()
    speaker.setLevel(level if stderr is None else stderr)
    _install(logger, speaker, _Marked(mark if main else f"[rank {rank()}] "))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        path = rank_file(file, rank())
        handler = _FileHandler(path, encoding="utf-8", errors="backslashreplace", delay=not main)
        _install(logger, handler, logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))


@contextlib.contextmanager
def logged(file: Path, stderr: int = logging.WARNING) -> Iterator[None]:
    """Logs go to `file`, and from level `stderr` on to stderr, until the context ends.

    Lines on stderr begin with a bracket, as those of the progress display do; errors do not.
    """
    logger = logging.getLogger(_ROOT)
    level, propagate = logger.level, logger.propagate
    setup_logging(file=file, stderr=stderr, mark="[log] ")
    try:
        yield
    finally:
        _remove(logger)
        logger.setLevel(level)
        logger.propagate = propagate


def _remove(logger: logging.Logger) -> None:
    for handler in [h for h in logger.handlers if hasattr(h, _OURS)]:
        logger.removeHandler(handler)
        handler.close()


def _install(logger: logging.Logger, handler: logging.Handler, form: logging.Formatter) -> None:
    setattr(handler, _OURS, True)
    handler.setFormatter(form)
    logger.addHandler(handler)


class _Marked(logging.Formatter):
    """Formats the bare message with a mark before every line."""

    def __init__(self, mark: str) -> None:
        super().__init__("%(message)s")
        self._mark = mark

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(self._mark + line for line in super().format(record).split("\n"))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`: a progress display replaces it while it is on the screen."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        # None in a process that was started without a stderr.
        if sys.stderr is not None and not sys.stderr.closed:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a closed stderr: it must not stop a run. Errors in our own messages are still reported."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _FileHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a full disk too: more important writes will report it themselves."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the disk is also full for the buffered rest
            super().close()
