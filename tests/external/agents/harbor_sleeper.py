"""An agent for Harbor that waits for a command without end."""

from __future__ import annotations

import os
from typing import Any

from harbor.agents.base import BaseAgent


class Sleeper(BaseAgent):
    @staticmethod
    def name() -> str:
        return "sleeper"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await environment.exec(f"sleep {os.environ['SLEEP_S']}")
