"""Rollouts by agents that others wrote: the token-in/token-out gateway, its sessions and their store (§4.1)."""
