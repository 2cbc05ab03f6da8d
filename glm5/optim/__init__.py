"""Optimizers and schedules."""

from glm5.optim.clip import clip_gradients, global_norm
from glm5.optim.groups import muon_groups
from glm5.optim.muon import Muon
from glm5.optim.table import GroupRow, describe, table

__all__ = ["Muon", "muon_groups", "clip_gradients", "global_norm", "GroupRow", "describe", "table"]
