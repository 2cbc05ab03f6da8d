"""`glm5 reproduce NAME`: the paper's claims as small experiments, arms against each other over several seeds.

One run is one arm with one seed. Runs are processes of one thread; each writes its result as a whole when it is done,
so that the same command goes on after any interruption. What is claimed is computed from intervals over seeds.
"""

from __future__ import annotations

from glm5.launch.reproduce.command import EXPERIMENTS, reproduce, summary

__all__ = ["EXPERIMENTS", "reproduce", "summary"]
