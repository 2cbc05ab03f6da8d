"""Session affinity: which requests should go to the same engine.

Requests that share a prefix should go to the engine that has it in its prefix cache. The session id comes from a header
or the body. Without a session id, the system prompt selects the engine. If that engine is overloaded, the system
prompt and the first message after it select another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

HEADERS = ("x-session-id", "x-smg-routing-key")
FIELDS = ("session_id", "prompt_cache_key", "user")
"""Body fields, in descending order of priority."""
BEGINNING = 256
"""Length of the prefix of a plain prompt that selects the engine: this many characters, or a quarter as many ids."""


@dataclass(frozen=True)
class Affinity:
    """`key` selects the engine of a request. `spill` selects another one while this engine is overloaded (see
    `HashRing.pick`)."""

    key: str
    spill: str | None = None


def affinity_of(headers: Mapping[str, str], body: bytes) -> Affinity:
    """The affinity of a request of any surface. A body that is not a JSON object may go to any engine, which
    answers with an error."""
    for name in HEADERS:
        if headers.get(name):
            return Affinity(f"session:{headers[name]}")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Affinity("")
    metadata = fields.get("metadata")
    named = [fields.get(name) for name in FIELDS] + ([metadata.get("user_id")] if isinstance(metadata, dict) else [])
    for value in named:
        if isinstance(value, str | int) and value != "":
            return Affinity(f"session:{value}")
    return _by_beginning(fields)


def _by_beginning(fields: Mapping[str, Any]) -> Affinity:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return Affinity(
            _digest(_start(next((fields[k] for k in ("prompt", "input", "text", "input_ids") if k in fields), "")))
        )
    system = [_text(fields["system"])] if fields.get("system") else []
    first = ""
    for message in (message for message in messages if isinstance(message, dict)):
        if message.get("role") not in ("system", "developer"):
            first = _text(message.get("content"))
            break
        system.append(_text(message.get("content")))
    if not system:
        return Affinity(_digest(first))
    return Affinity(_digest(*system), _digest(*system, first))


def _text(content: Any) -> str:
    """Only the text: clients move marks like `cache_control` from turn to turn."""
    if isinstance(content, list):
        return "".join(str(block.get("text", "")) for block in content if isinstance(block, dict))
    return str(content)


def _start(prompt: Any) -> str:
    """The beginning of a prompt, or of the first of several."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        return _start(prompt[0])
    return str(prompt[: BEGINNING // 4] if isinstance(prompt, list) else prompt)[:BEGINNING]


def _digest(*parts: str) -> str:
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return f"text:{found.hexdigest()}"
