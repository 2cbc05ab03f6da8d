"""Problems, environments and the episode runner for RL and evaluation (§4.2)."""

from __future__ import annotations

from glm5.tasks.contract import AgentProblem, DistinctProblems, Family, Problem, SingleTurnEnv, draw, split_of
from glm5.tasks.difficulty import PassCount, family_key, measure_pass_rates, read_pass_counts, write_pass_counts
from glm5.tasks.episode import Episode, count_forks, open_episodes, play, to_samples
from glm5.tasks.families import FAMILIES, make_family
from glm5.tasks.instructions.general import rules_score
from glm5.tasks.mathematics.answer import Answer, check_answer
from glm5.tasks.mixture import Mixture
from glm5.tasks.needle import needle_text

__all__ = [
    "FAMILIES",
    "AgentProblem",
    "Answer",
    "DistinctProblems",
    "Episode",
    "Family",
    "Mixture",
    "PassCount",
    "Problem",
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
    "split_of",
    "to_samples",
    "write_pass_counts",
]
