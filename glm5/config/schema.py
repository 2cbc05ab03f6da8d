"""Base class of every recipe section: frozen, typed, and closed to unknown keys."""

from __future__ import annotations

import pydantic


class Frozen(pydantic.BaseModel):
    """A section of a recipe. A docstring under a field documents it; an unknown key is an error.

    Values cannot be assigned after construction: a run's recipe is fixed and saved with the run.
    `model_copy(update=...)` makes a changed copy.
    """

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )
