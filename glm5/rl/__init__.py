"""Reinforcement learning and on-policy distillation: one loop on a logical clock, one small file per algorithm."""
