"""Keys of servers from options, files and the environment."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from glm5.errors import UsageError

MAX_KEY_BYTES = 4096
"""Maximum bytes of a key, and of its file."""


def find_key(name: str, given: str | None, file: Path | None) -> str | None:
    """The key for `name`: "api", "admin", or of another model, "judge" or "user". As given, from a file, or
    from the variable such as GLM5_API_KEY, which is removed, so that no process started later inherits it. None without
    a key.

    Raises:
        UsageError: more than one source, a file that others may read, or a value that is not a valid key.
    """
    variable = f"GLM5_{name.upper()}_KEY"
    found = {
        f"--{name}-key": given,
        f"--{name}-key-file": None if file is None else _read_key(file),
        variable: os.environ.pop(variable, None),
    }
    there = {source: key for source, key in found.items() if key is not None}
    if len(there) > 1:
        raise UsageError(f"The {name} key is given more than once: {' and '.join(there)}; keep one.")
    for source, key in there.items():
        if not key or len(key) > MAX_KEY_BYTES or not (key.isascii() and key.isprintable()) or " " in key:
            raise UsageError(f"{source} is not a valid key; use visible ASCII characters without spaces.")
        return key
    return None


def _read_key(file: Path) -> str:
    """The content of a key file, without the line end. A pipe works too."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & 0o077:
                raise UsageError(f"Other users can read {file}; run: chmod 600 {file}")
            raw = opened.read(MAX_KEY_BYTES + 2)
    except OSError as error:
        raise UsageError(f"Cannot read the key file {file}: {(error.strerror or str(error)).lower()}.") from None
    return raw.decode("utf-8", "replace").rstrip("\r\n")
