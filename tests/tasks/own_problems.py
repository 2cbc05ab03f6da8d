"""The families that make problems and demonstrations of their own, without files and browsers."""

from __future__ import annotations

from typing import Any

import pytest

from glm5.sandbox import sandbox_available
from glm5.tasks import FAMILIES

needs_sandbox = pytest.mark.skipif(sandbox_available() is None, reason="this machine cannot isolate programs")
RUN_CODE = ("bugfix", "code", "python_tool")
MADE_ELSEWHERE = (
    "agent browsecomp chained dialogue evalplus exploration frontend judged livecodebench mcp_atlas questions remote "
    "search swe terminal tool_decathlon toolcall_rows verifiers".split()
)
"""Families whose problems are those of files, folders or services, or are all held out."""
WITHOUT_DEMONSTRATIONS = ("vending",)  # nobody knows the best year


def names_of_families(*left_out: str) -> list[Any]:
    """Parameters of a test."""
    names = [name for name in FAMILIES if name not in (*MADE_ELSEWHERE, *WITHOUT_DEMONSTRATIONS, *left_out)]
    return [pytest.param(name, marks=needs_sandbox if name in RUN_CODE else ()) for name in names]
