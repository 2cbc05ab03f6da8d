"""Science with verifiable answers, the fourth domain of Reasoning RL (§3.2)."""
