"""Text of a tool argument to a value, by the tool's JSON schema.

The template writes strings raw and everything else as JSON, so only the schema can tell the string "2" from the number
2. A value that does not fit its schema is never an error: it is read as leniently as released parsers do, and otherwise
stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.chat.template import function_of

_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
_ALL = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
_MAX_SCHEMA_DEPTH = 32
_MAX_SCHEMA_NODES = 10_000
"""Schemas, or values of an `enum`, that are read for one argument or one `$ref`. A larger one may be of any type."""
_MAX_VALUE_DEPTH = 128
"""Deeper values stay text: writing them as JSON later could exhaust the stack."""


@dataclass(frozen=True)
class ArgumentType:
    """JSON types that an argument may have, and the strings among its enumerated values."""

    types: frozenset[str] = _ALL
    options: frozenset[str] = frozenset()

    @property
    def verbatim(self) -> bool:
        """Whether the value is always the text itself."""
        return self.types == {"string"}

    def read(self, text: str) -> tuple[Any, str]:
        """The value of `text`, and its JSON. Never fails; time is linear in the text.

        If a string is allowed, the result is a string unless `text` is JSON of another allowed type. If not, we accept
        JSON in quotes, JSON with escaped quotes, and Python's spelling. JSON that does not fit the schema stays as it
        is; text that is not JSON at all becomes a string.
        """
        if "string" in self.types:
            found = None if text in self.options else parse_json(text)
            if found is not None and not isinstance(found[0], str) and self.types & _json_types(found[0]):
                return found
            return text, json.dumps(text, ensure_ascii=False)
        unfit: tuple[Any, str] | None = None
        for reading in _readings(text):
            if (found := parse_json(reading)) is None:
                continue
            if isinstance(found[0], float) and found[0].is_integer() and "number" not in self.types:
                found = (int(found[0]), str(int(found[0])))  # JSON schema calls 2.0 an integer
            if self.types & _json_types(found[0]):
                return found
            unfit = unfit or found
        return unfit or (text, json.dumps(text, ensure_ascii=False))


class ToolSchemas:
    """The argument types of a set of tools (OpenAI function format). Unknown tools and arguments may be of any type.

    The samples of a request share one, so each part of a schema is read once.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        self._known: dict[tuple[str, str], ArgumentType] = {}
        self._references: dict[str, dict[str, frozenset[str]]] = {}  # types by `$ref`, per tool
        for tool in tools or ():
            function = function_of(tool) if isinstance(tool, Mapping) else {}
            name, parameters = function.get("name"), function.get("parameters")
            if isinstance(name, str) and isinstance(parameters, Mapping):
                self._parameters[name] = parameters

    def type_of(self, tool: str | None, key: str) -> ArgumentType:
        parameters = self._parameters.get(tool or "", {})
        properties = parameters.get("properties")
        if not isinstance(properties, Mapping) or key not in properties:
            key, schema = "", parameters.get("additionalProperties")
        else:
            schema = properties[key]
        known = self._known.get((tool or "", key))
        if known is None:
            options = frozenset(o for o in _options(schema, parameters) if isinstance(o, str))
            walk = _Walk(parameters, self._references.setdefault(tool or "", {}))
            known = ArgumentType(walk.types(schema) or _ALL, options)
            self._known[tool or "", key] = known
        return known


class _Walk:
    """The JSON types that schemas of one tool allow. `seen` holds the references of `root` already followed."""

    def __init__(self, root: Mapping[str, Any], seen: dict[str, frozenset[str]]) -> None:
        self._root, self._seen = root, seen
        self._left = _MAX_SCHEMA_NODES

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """JSON types that a schema allows; all of them if it does not say, or is too large or too deep."""
        self._left -= 1
        if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH or self._left < 0:
            return _ALL
        ref, declared, enum = schema.get("$ref"), schema.get("type"), schema.get("enum")
        if isinstance(ref, str):
            if ref not in self._seen:
                self._seen[ref] = frozenset()  # a schema that refers to itself adds nothing
                # A limit of its own: the result must not depend on which argument is read first.
                self._seen[ref] = _Walk(self._root, self._seen).types(_target(self._root, ref), depth + 1)
            return self._seen[ref]
        names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list | tuple) else []
        spelled = (name.lower() for name in names[:_MAX_SCHEMA_NODES] if isinstance(name, str))
        found = frozenset(_ALIASES.get(name, name) for name in spelled) & _ALL
        if not found and isinstance(enum, list | tuple):
            found = frozenset().union(*map(_json_types, enum)) if len(enum) <= _MAX_SCHEMA_NODES else _ALL
        if not found and "const" in schema:
            found = _json_types(schema["const"])
        for word in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(word)
            if not found and isinstance(branches, list | tuple) and branches:
                if len(branches) > self._left:
                    return _ALL
                sets = [self.types(branch, depth + 1) for branch in branches]
                found = _ALL.intersection(*sets) if word == "allOf" else frozenset().union(*sets)
        return (found or _ALL) | ({"null"} if schema.get("nullable") is True else frozenset())


def _options(schema: Any, root: Mapping[str, Any]) -> Sequence[Any]:
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = _target(root, schema["$ref"])
    options = schema.get("enum") if isinstance(schema, Mapping) else None
    return options if isinstance(options, list | tuple) and len(options) <= _MAX_SCHEMA_NODES else ()


def _target(root: Mapping[str, Any], ref: str) -> Any:
    """The schema that a reference such as `#/$defs/Unit` points to; None if it leads outside."""
    place: Any = root
    head, *path = ref.split("/")
    for part in path:
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place if head == "#" else None


def _json_types(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if value is None:
        return frozenset({"null"})
    return frozenset({"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"})


def parse_json(text: str) -> tuple[Any, str] | None:
    """A JSON value and how we write it; None if the text is not JSON or could not be sent on."""
    try:
        value = json.loads(text)
        if not _is_shallow(value):
            return None
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # fails for an escaped lone surrogate
    except (ValueError, RecursionError):
        return None
    return value, written


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_VALUE_DEPTH):
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [child for children in inner for child in children]
        if not level:
            return True
    return False


def _readings(text: str) -> Iterator[str]:
    """Possible readings of the text, the likeliest first."""
    yield text
    for quoted in (text, f'"{text}"'):
        try:
            inner = json.loads(quoted, strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(inner, str):
            yield inner
    yield _PYTHON.sub(_as_json, text)


# A string in either kind of quotes, a word, or a comma before a closing bracket. A string also matches without its
# closing quote; otherwise the search for one would restart at every quote.
_PYTHON = re.compile(
    r"""'[^'\\]*+(?:\\.[^'\\]*+)*+'?|"[^"\\]*+(?:\\.[^"\\]*+)*+"?|\b(?:true|false|none|null)\b|,\s*+(?=[}\]])""",
    re.IGNORECASE | re.DOTALL,
)


def _as_json(match: re.Match[str]) -> str:
    part = match[0]
    if part[0] == "'":
        inner = part[1:].removesuffix("'").replace("\\'", "'")
        return '"' + re.sub(r'(\\.)|"', lambda m: m[1] or '\\"', inner, flags=re.DOTALL) + '"'
    if part[0] == '"':
        return part
    return "" if part[0] == "," else "null" if part.lower() == "none" else part.lower()
