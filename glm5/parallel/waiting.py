"""What a rank says if it waits for another one in vain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from glm5.errors import Glm5Error


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Say in a sentence that another rank has ended, or did not come in time."""
    try:
        yield
    except RuntimeError as error:
        raise Glm5Error(
            f"Another rank of this job has ended, or takes too long; its own message says more. ({error!s:.120})"
        ) from error
