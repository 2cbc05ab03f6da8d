"""The generative reward model (GRM): a model that compares answers, asked in both orders and never trusted (§3.4)."""

from __future__ import annotations

from glm5.rl.judge.backends import Backend, EndpointBackend, EngineBackend, Question, Verdict
from glm5.rl.judge.cache import JudgeCache
from glm5.rl.judge.judge import AnswerGroup, Comparison, Judge, JudgeCounts, judge_groups, stage_judge

__all__ = [
    "AnswerGroup",
    "Backend",
    "Comparison",
    "EndpointBackend",
    "EngineBackend",
    "Judge",
    "JudgeCache",
    "JudgeCounts",
    "Question",
    "Verdict",
    "judge_groups",
    "stage_judge",
]
