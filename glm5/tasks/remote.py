"""A family whose problems are played by a task service: another program, reached over HTTP (docs/agentic-rl.md)."""

from __future__ import annotations

from dataclasses import dataclass

from glm5.errors import ConfigError
from glm5.records import StepResult
from glm5.tasks.contract import AgentProblem, Family


@dataclass
class RemoteProblem(AgentProblem):
    """Problem `index` of the service's family."""

    id: str
    key: str
    domain: str
    index: int

    def run(self, base_url: str, api_key: str) -> float | StepResult:
        """Raises ConfigError: the service runs it."""
        raise ConfigError(f"{self.id} is played by a task service, not in this process.")


class RemoteFamily(Family):
    """`family` is the name under which a service registers it. The service makes a task of each index; equal indices
    must give equal tasks."""

    name = "remote"
    domain = "remote"

    def __init__(self, seed: int = 0, family: str = "") -> None:
        if not family:
            raise ConfigError('families: "remote" needs options = { family = "NAME" }, the name that a service offers.')
        self.family = family

    def problem(self, split: str, index: int) -> RemoteProblem:
        name = f"{self.family}/{split}/{index}"
        return RemoteProblem(name, name, self.family, index)
