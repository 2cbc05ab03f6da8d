"""Reinforcement learning and on-policy distillation: one asynchronous loop, algorithms as small files."""
