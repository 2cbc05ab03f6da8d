"""Problems, environments, the episode runner and the sandbox for RL and evaluation (§4.2)."""

from __future__ import annotations

from glm5.tasks.contract import DistinctProblems, Family, Problem, SingleTurnEnv, draw, split_of
from glm5.tasks.difficulty import PassCount, family_key, measure_pass_rates, read_pass_counts, write_pass_counts
from glm5.tasks.episode import Episode, count_forks, open_episodes, play, to_samples
from glm5.tasks.families import FAMILIES, make_family
from glm5.tasks.general import rules_score
from glm5.tasks.math_answer import Answer, check_answer
from glm5.tasks.mixture import Mixture
from glm5.tasks.needle import needle_text
from glm5.tasks.sandbox import Job, Limits, Sandbox, SandboxResult, sandbox_available

__all__ = [
    "FAMILIES",
    "Answer",
    "DistinctProblems",
    "Episode",
    "Family",
    "Job",
    "Limits",
    "Mixture",
    "PassCount",
    "Problem",
    "Sandbox",
    "SandboxResult",
    "SingleTurnEnv",
    "check_answer",
    "count_forks",
    "draw",
    "family_key",
    "make_family",
    "measure_pass_rates",
    "needle_text",
    "open_episodes",
    "play",
    "read_pass_counts",
    "rules_score",
    "sandbox_available",
    "split_of",
    "to_samples",
    "write_pass_counts",
]
