"""Anthropic: messages."""
