"""Error answers: one sentence and a status, in the format of the client's surface.

The text of an unexpected error never leaves the server: it is logged, and the client gets a fixed sentence. This
module imports neither torch nor the engine, so a router can use the same formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from glm5.errors import EngineError, Glm5Error, RequestFailed, TooLongError

CLIENT_GONE = 499
"""Status of an answer after the client has disconnected; only logs and metrics show it."""
LONGEST = 1000
"""Maximum characters of a message; some quote client input."""
INTERNAL = "Internal error; see the server's log."


class Overloaded(EngineError):
    """The server has reached its limit of waiting and running samples; retry later."""


class Stopping(EngineError):
    """The server is shutting down."""


class EngineFailed(EngineError):
    """The engine failed, and with it all requests in progress. Requests are accepted again after it is rebuilt."""


class TooLate(EngineError):
    """A request was not complete within the server's time limit."""


# HTTP status and error code, by class of error.
_STATUS: Mapping[type[Glm5Error], tuple[int, str]] = {
    Overloaded: (429, "rate_limit_exceeded"),
    Stopping: (503, "stopping"),
    EngineFailed: (500, "engine_failed"),
    RequestFailed: (500, "request_failed"),
    TooLate: (504, "timeout"),
    TooLongError: (400, "context_length_exceeded"),
}
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Glm5Error):
    """An error answer. `param` is the field at fault, `code` names the error for programs, `retry_after` is in
    seconds."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: float = 1.0
    ) -> None:
        message = message if len(message) <= LONGEST else message[:LONGEST] + "..."
        super().__init__(message.encode("utf-8", "replace").decode())  # it may quote half a character
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @classmethod
    def of(cls, error: Glm5Error) -> ApiError:
        """The answer to an error of the layers below: 400 unless its class has another status."""
        if isinstance(error, ApiError):
            return error
        for kind, (status, code) in _STATUS.items():
            if isinstance(error, kind):
                return cls(status, str(error), code=code)
        text = str(error)
        field = text.split("[", 1)[0].split(".", 1)[0]
        return cls(400, text, param=field if field in ("messages", "tools") else None)

    def body(self, anthropic: bool = False) -> dict[str, Any]:
        """The error in OpenAI format, which the native surface shares, or in Anthropic format."""
        if anthropic:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            details = {"details": {"error_code": self.code}} if self.code else {}
            return {"type": "error", "error": {"type": kind, "message": str(self), **details}}
        kind = _OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def error_response(error: ApiError, path: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer in the format of the surface that `path` belongs to, with the headers of its status."""
    own = {
        401: {"WWW-Authenticate": "Bearer"},
        408: {"Connection": "close"},
        413: {"Connection": "close"},  # do not read the rest of the body
        429: {"Retry-After": str(math.ceil(error.retry_after))},
        503: {"Retry-After": str(math.ceil(error.retry_after))},
    }
    body = error.body(anthropic=speaks_anthropic(path))
    return JSONResponse(body, error.status, {**own.get(error.status, {}), **(headers or {})})


async def on_error(request: Request, error: Exception) -> Response:
    """The answer to any exception of a route. Register it for every type in `HANDLED`."""
    path: str = request.scope["path"]
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):
        text = f"{request.method} {path:.200}: {error.detail}."
        return error_response(ApiError(error.status_code, text), path, error.headers)
    if isinstance(error, Glm5Error):
        return error_response(ApiError.of(error), path)
    return error_response(ApiError(500, INTERNAL), path)


HANDLED: tuple[type[Exception], ...] = (Glm5Error, HTTPException, ClientDisconnect, Exception)
"""Exception types that an application passes to `on_error`."""


def speaks_anthropic(path: str) -> bool:
    """Whether a path, which may have a prefix, belongs to the Anthropic surface."""
    return "/v1/messages" in path
