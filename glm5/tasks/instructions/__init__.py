"""Texts that follow instructions: rules that a program checks, and courtesies for General RL (§3.4)."""
