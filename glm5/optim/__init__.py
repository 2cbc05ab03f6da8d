"""Optimizers and schedules."""

from glm5.optim.groups import muon_groups
from glm5.optim.muon import Muon

__all__ = ["Muon", "muon_groups"]
