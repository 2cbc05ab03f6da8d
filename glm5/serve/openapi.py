"""GET /openapi.json: the requests and answers of the server as OpenAPI 3.1.

`Service.read` parses bodies within limits and reports the first error in one sentence, so FastAPI does not know their
types. This module lists the types once more, for all surfaces; a test compares the table with the routes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from glm5 import __version__
from glm5.serve.errors import speaks_anthropic
from glm5.serve.surfaces.anthropic.schema import CountRequest, MessagesRequest
from glm5.serve.surfaces.fields import Fields
from glm5.serve.surfaces.native.schema import (
    AbortRequest,
    DestroyGroup,
    GenerateRequest,
    InitGroup,
    NoFields,
    PartRequest,
    PauseRequest,
    PrefillRequest,
    UpdateRequest,
)
from glm5.serve.surfaces.openai.responses_schema import ResponsesRequest
from glm5.serve.surfaces.openai.schema import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    TokenizeRequest,
)

BODIES: Mapping[str, type[Fields]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/generate": GenerateRequest,
    "/update_weights_from_disk": UpdateRequest,
    "/init_weights_update_group": InitGroup,
    "/update_weights_from_distributed": PartRequest,
    "/destroy_weights_update_group": DestroyGroup,
    "/prefill": PrefillRequest,
    "/abort_request": AbortRequest,
    "/pause_generation": PauseRequest,
    "/continue_generation": NoFields,
}
OPTIONAL = ("/pause_generation", "/continue_generation")
"""Routes with an optional body."""
MEDIA = {"/": "text/html", "/metrics": "text/plain"}
"""Routes with a media type other than JSON."""
ERRORS: Mapping[str, str] = {
    "400": "The request is not valid; the message says why.",
    "401": "The API key is wrong or missing.",
    "403": "This client is not allowed to send the request.",
    "404": "The model does not exist.",
    "408": "The body did not arrive in time.",
    "409": "The weight version is not greater than the present one.",
    "413": "The body is too large.",
    "429": "The server is at its limit; Retry-After says when to retry.",
    "503": "The server is stopping, or its engine does not answer.",
    "504": "The answer was not complete in time.",
}
_TEXT, _NULL = {"type": "string"}, {"type": "null"}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": _TEXT,
        "type": _TEXT,
        "param": {"anyOf": [_TEXT, _NULL]},
        "code": {"anyOf": [_TEXT, _NULL]},
    },
}
_ANTHROPIC_ERROR = {"type": "object", "required": ["type", "message"], "properties": {"message": _TEXT, "type": _TEXT}}

_PART = {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": _TEXT}}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [_TEXT, _NULL, {"type": "array", "items": _PART}]},
        "reasoning_content": {"anyOf": [_TEXT, _NULL]},
        "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, _NULL]},
    },
}
"""Input of the chat template, which checks the order of messages and the details of calls itself."""


class _Bodies(GenerateJsonSchema):
    """JSON schemas of requests. null stands for an absent field. Of a refused field, only the neutral values are
    valid."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found, kind = super().model_schema(schema), schema["cls"]
        fields, needed = found.setdefault("properties", {}), found.get("required", ())
        if issubclass(kind, Conversation):
            fields["messages"]["items"] = _MESSAGE
        if kind is GenerateRequest:
            found["oneOf"] = [{"required": ["text"]}, {"required": ["input_ids"]}]
        for name in fields.keys() - set(needed):
            if _NULL not in fields[name].get("anyOf", ()):
                fields[name] = {"anyOf": [fields[name], _NULL]}
        for name, refused in getattr(kind, "REFUSED", {}).items():
            text = f"Not supported; {refused.instead}."
            fields.setdefault(name, {"enum": [*refused.neutral, None], "description": text})
        return found


def add_document(app: FastAPI) -> None:
    """Let `app` answer GET /openapi.json with the routes registered so far."""

    @cache
    def written() -> dict[str, Any]:
        return document(app)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(written())


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application. Its POST routes must be those of `BODIES`."""
    kinds = [(kind, "validation") for kind in BODIES.values()]
    _, schemas = models_json_schema(
        kinds,  # type: ignore[arg-type]  # a literal in a list is a str to mypy
        ref_template="#/components/schemas/{model}",
        schema_generator=_Bodies,
    )
    components = {
        **schemas["$defs"],
        "OpenAIError": _wrapped(_OPENAI_ERROR),
        "AnthropicError": _wrapped(_ANTHROPIC_ERROR),
    }
    found = get_openapi(title="glm5", version=__version__, routes=app.routes)  # only for its paths
    paths = {path: {m: _operation(path, m) for m in methods} for path, methods in found["paths"].items()}
    return {
        **found,
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],  # a server without a key requires none
    }


def _wrapped(error: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _operation(path: str, method: str) -> dict[str, Any]:
    kind = BODIES.get(path) if method == "post" else None
    error = {"$ref": f"#/components/schemas/{'AnthropicError' if speaks_anthropic(path) else 'OpenAIError'}"}
    content: dict[str, Any] = {MEDIA.get(path, "application/json"): {}}
    if kind is not None and "stream" in kind.model_fields:
        content["text/event-stream"] = {}
    refused = {"description": "", "content": {"application/json": {"schema": error}}}
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", method + path).rstrip("_"),
        "responses": {"200": {"description": "The answer.", "content": content}}
        | {status: {**refused, "description": text} for status, text in ERRORS.items()},
    }
    if names := re.findall(r"{(\w+)}", path):
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    if kind is not None:
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        found["summary"] = (kind.__doc__ or "").strip().splitlines()[0]
        found["requestBody"] = {"required": path not in OPTIONAL, "content": {"application/json": {"schema": schema}}}
    return found
