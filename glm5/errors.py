"""Errors that a user can cause; all derive from `Glm5Error`.

A message says what was wrong, where (file, line, key or tensor) and how to fix it. The command line prints it in at
most three lines and exits with `exit_code`. No other code in the package catches these classes to hide them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class Glm5Error(Exception):
    """Base of all errors with a user-facing message."""

    exit_code = 1


class UsageError(Glm5Error):
    """The command line itself is wrong: an unknown verb, a bad `--set`, a missing argument."""

    exit_code = 2


class ConfigError(Glm5Error, ValueError):
    """A recipe, a preset or a `config.json` has an unknown key or an impossible value."""


class DataError(Glm5Error):
    """Training or evaluation data is missing, malformed or damaged."""


class TooLongError(DataError):
    """A text has more tokens than allowed."""


class CheckpointError(Glm5Error):
    """A checkpoint is missing, incomplete, damaged, hostile or of a foreign architecture."""


class EngineError(Glm5Error):
    """The engine cannot serve a request: prompt too long, unknown weight version, no free slot."""


class RequestFailed(EngineError):
    """Computing one request failed inside the engine; other requests continue."""


class EngineBroken(EngineError):
    """The engine cannot compute any more: call `Engine.rebuild`, or restart."""


class EngineLost(EngineBroken):
    """A process of the engine has ended; only a new engine helps."""


class RolloutError(Glm5Error):
    """An episode could not be completed for reasons that are not the policy's fault."""


class EnvironmentTimeout(RolloutError):
    """An environment did not answer within its limit."""


class GradingError(Glm5Error):
    """A grader or a sandbox failed, so there is no verdict on the policy."""


class MissingExtraError(Glm5Error, ImportError):
    """An optional dependency is not installed. The message names the extra that contains it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; it comes with `pip install 'glm5[{extra}]'`.")


def text_of(error: BaseException) -> str:
    """The text of any exception. Those of environments and agents may have code of their own, which may fail."""
    try:
        return "".join((str(error),))  # no subclass of str
    except BaseException:
        return "its text cannot be read"


# Escape sequences in the output of a program or a model could rewrite the screen, or worse; marks of direction could
# show a patch in another order than it has.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def for_screen(text: str) -> str:
    """Text for a terminal: control characters but line ends and tabs are replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Suffix for "unknown key" messages: ` (did you mean "lr"?)`, or an empty string without a close match."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' (did you mean "{matches[0]}"?)' if matches else ""
