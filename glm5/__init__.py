"""`glm5`: the GLM-5 system (arXiv 2602.15763) in one package, from the first pre-training token to a served agent."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5.config.model import GLM5Config
    from glm5.engine.engine import Engine
    from glm5.model.glm5 import GLM5ForCausalLM
    from glm5.records import SamplingParams

__version__ = "0.1.0"

_EXPORTS = {
    "GLM5Config": "glm5.config.model",
    "GLM5ForCausalLM": "glm5.model.glm5",
    "Engine": "glm5.engine.engine",
    "SamplingParams": "glm5.records",
}

__all__ = ["Engine", "GLM5Config", "GLM5ForCausalLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562), so `import glm5` does not import torch."""
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
