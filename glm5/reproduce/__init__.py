"""`glm5 reproduce NAME|all`: the paper's claims as small experiments that compare variants over several seeds.

One run is one variant with one seed, in a process of one thread. It writes its whole result when it is done, so the
same command resumes after any interruption. Verdicts are computed from intervals over seeds.
"""

from __future__ import annotations

from glm5.reproduce.command import EXPERIMENTS, reproduce, reproduce_all, summary

__all__ = ["EXPERIMENTS", "reproduce", "reproduce_all", "summary"]
