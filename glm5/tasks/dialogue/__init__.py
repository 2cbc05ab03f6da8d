"""Dialogues with a simulated user, tools and a database, in the task format of tau2-bench (§6.1, App. B)."""
