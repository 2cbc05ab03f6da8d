"""Prompts of General RL in the paper's three dimensions: correctness, emotional intelligence, task quality (§3.4)."""
