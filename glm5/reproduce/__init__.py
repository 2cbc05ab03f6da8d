"""`glm5 reproduce NAME`: the paper's claims as small experiments that compare variants over several seeds.

One run is one variant with one seed, in a process of one thread. It writes its whole result when it is done, so the
same command resumes after any interruption. Verdicts are computed from intervals over seeds.
"""

from __future__ import annotations

from glm5.reproduce.command import EXPERIMENTS, reproduce, summary

__all__ = ["EXPERIMENTS", "reproduce", "summary"]
