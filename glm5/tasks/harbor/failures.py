"""Who ended a trial: Harbor's failure causes, and the names of its exceptions that stand for them.

A trial without failure, and one whose agent exhausted its budget or refused, measures the agent. All others do not.
"""

from __future__ import annotations

CAUSES = {
    "sandbox_failed": "EnvironmentStartTimeoutError SandboxBuildFailedError HealthcheckError AddTestsDirError "
    "DownloadVerifierDirError",
    "model_provider_failed": "ApiError ApiConnectionError",
    "unclassified": "NonZeroAgentExitCodeError",
    "agent_exhausted_budget": "AgentTimeoutError ContextWindowExceededError OutputTokenExceededError",
    "agent_refused_task": "AgentSafetyRefusalError",
    "verifier_failed": "VerifierTimeoutError RewardFileNotFoundError RewardFileEmptyError VerifierOutputParseError",
    "cancelled": "CancelledError",
}


def cause_of(error: str | None) -> str | None:
    """The cause that an exception's name stands for; None without one, "unclassified" for an unknown one."""
    return None if error is None else next((c for c, names in CAUSES.items() if error in names.split()), "unclassified")
