"""Marks tests that need the rooms of agents (`glm5.sandbox.agent_room`), which not every machine can have."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from glm5.errors import GradingError
from glm5.sandbox import starter
from glm5.sandbox.agent_room import mechanism


def _missing() -> str:
    try:
        mechanism()
    except GradingError as error:
        return str(error)
    return ""


MISSING = _missing()
needs_rooms = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def rooms_open() -> list[str]:
    """Processes that this process's server has forked for rooms."""
    if starter.STARTER._server is None:
        return []
    server = starter.STARTER._server[1].pid
    return Path(f"/proc/{server}/task/{server}/children").read_text().split()


def rooms_left() -> list[str]:
    """Rooms that stay open; one that has ended may be seen for a moment."""
    deadline = time.monotonic() + 5
    while (found := rooms_open()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
