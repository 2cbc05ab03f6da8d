"""Runs as processes: chained stages, the local pipeline, and a check of this machine."""
