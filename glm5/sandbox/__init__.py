"""Runs untrusted programs in a locked room of this machine (§3.3, §4.2)."""

from __future__ import annotations

from glm5.sandbox.room import Job, Limits
from glm5.sandbox.sandbox import Sandbox, SandboxResult, sandbox_available

__all__ = ["Job", "Limits", "Sandbox", "SandboxResult", "sandbox_available"]
