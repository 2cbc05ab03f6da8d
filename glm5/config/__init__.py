"""Typed, frozen, torch-free configuration: model presets, recipes, loading."""

from glm5.config.model import GLM5Config

__all__ = ["GLM5Config"]
