"""MCP servers in rooms, with the real client of the package `mcp`: the tests of `mcp/check_servers.py`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.external.environments import interpreter

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def test_servers_in_rooms() -> None:
    python = interpreter("mcp", ours=True)
    checks = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        str(HERE / "mcp" / "check_servers.py"),
    ]
    done = subprocess.run(checks, cwd=HERE.parent.parent, capture_output=True, text=True, timeout=300)
    print(done.stdout[-3000:], done.stderr[-2000:])
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout
