"""The HTTP server: converts between text and token ids. Needs the extra `serve`."""

from __future__ import annotations

import importlib.util

from glm5.errors import MissingExtraError

for _package in ("fastapi", "uvicorn", "httpx"):
    if importlib.util.find_spec(_package) is None:
        raise MissingExtraError(_package, "serve")
