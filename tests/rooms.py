"""Marks tests that need the rooms of agents (`glm5.sandbox.agent_room`), which not every machine can have."""

from __future__ import annotations

import pytest

from glm5.errors import GradingError
from glm5.sandbox.agent_room import mechanism


def _missing() -> str:
    try:
        mechanism()
    except GradingError as error:
        return str(error)
    return ""


MISSING = _missing()
needs_rooms = pytest.mark.skipif(bool(MISSING), reason=MISSING)
