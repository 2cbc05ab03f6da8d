"""Check what works on this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
from typing import Any

import torch

from glm5 import __version__
from glm5.device import choose_device
from glm5.launch import kernels
from glm5.sandbox import sandbox_available


def check() -> dict[str, Any]:
    """Versions, cores, devices, the sandbox's mechanism and the installed extras."""
    extras = {"serve": ("fastapi", "uvicorn"), "report": ("matplotlib",)}
    return {
        "glm5": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": str(choose_device()),
        "cuda": torch.cuda.is_available(),
        "gpu kernels": kernels.verdict(),
        "sandbox": sandbox_available() or "none: code-running tasks will refuse to run",
        **{
            f"extra {name}": all(importlib.util.find_spec(module) for module in modules)
            for name, modules in extras.items()
        },
    }
