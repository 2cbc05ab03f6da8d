"""The register of problem families: literal names to classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from glm5.errors import ConfigError, nearest
from glm5.tasks.arithmetic import ArithmeticFamily
from glm5.tasks.bugfix import BugfixFamily
from glm5.tasks.contract import Family
from glm5.tasks.general import GeneralFamily
from glm5.tasks.instructions import InstructionFamily
from glm5.tasks.maths import MathFamily
from glm5.tasks.programming import CodeFamily
from glm5.tasks.python_tool import PythonToolFamily
from glm5.tasks.toolcall import ToolCallFamily
from glm5.tasks.verifiers_adapter import VerifiersFamily

FAMILIES: Mapping[str, Callable[..., Family]] = {
    "arithmetic": ArithmeticFamily,
    "bugfix": BugfixFamily,
    "code": CodeFamily,
    "general": GeneralFamily,
    "instructions": InstructionFamily,
    "math": MathFamily,
    "python_tool": PythonToolFamily,
    "toolcall": ToolCallFamily,
    "verifiers": VerifiersFamily,
}


def make_family(name: str, seed: int = 0, **options: Any) -> Family:
    """The family `name` with its own options; see the class for them."""
    if name not in FAMILIES:
        raise ConfigError(
            f'unknown task family "{name}"{nearest(name, FAMILIES)}; choose one of {", ".join(FAMILIES)}.'
        )
    try:
        return FAMILIES[name](seed, **options)
    except TypeError as error:
        raise ConfigError(f'task family "{name}": {error}; options given: {", ".join(options) or "none"}.') from error
