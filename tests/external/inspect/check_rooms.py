"""Inspect AI's own conformance suite for sandboxes, on our rooms. Run by pytest in its environment."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from glm5.eval.inspect_adapter import RoomSandbox


@pytest.fixture
async def sandbox_env() -> AsyncIterator[SandboxEnvironment]:
    rooms = await RoomSandbox.sample_init("check", None, {})
    yield rooms["default"]
    await RoomSandbox.sample_cleanup("check", None, rooms, False)
