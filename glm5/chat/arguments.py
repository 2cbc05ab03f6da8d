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
_MAX_SCHEMA_NODES = 100_000
"""Schemas and values of `enum` that are read for all tools of a request. Arguments after that may be of any type."""
_MAX_VALUE_DEPTH = 128
"""Deeper values stay text: writing them as JSON later could exhaust the stack."""


@dataclass(frozen=True)
class ArgumentType:
    """JSON types that an argument may have, and the strings among its enumerated values that look like other JSON."""

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


_ANY = ArgumentType()


class ToolSchemas:
    """The argument types of a set of tools (OpenAI function format). Unknown tools and arguments may be of any type.

    All schemas are read here, in the order of the tools and of their arguments, so that grammar and parser agree about
    a schema that is too large. The samples of a request share one object.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._known: dict[str, dict[str, ArgumentType]] = {}
        self._others: dict[str, ArgumentType] = {}  # of the arguments that a tool does not list
        reader = _SchemaReader()
        for tool in tools or ():
            function = function_of(tool) if isinstance(tool, Mapping) else {}
            name, parameters = function.get("name"), function.get("parameters")
            if not isinstance(name, str) or not isinstance(parameters, Mapping):
                continue
            properties = parameters.get("properties")
            listed = properties.items() if isinstance(properties, Mapping) else ()
            known: dict[str, ArgumentType] = {}
            self._known[name] = known
            for key, schema in listed:
                if reader.exhausted:
                    break
                known[key] = reader.read(schema, parameters)
            rest = reader.read(parameters.get("additionalProperties"), parameters)
            self._others[name] = _ANY if reader.exhausted else rest

    def type_of(self, tool: str | None, key: str) -> ArgumentType:
        """The type of the argument `key` of `tool`."""
        known = self._known.get(tool or "", {}).get(key)
        return known or self._others.get(tool or "", _ANY)


class _SchemaReader:
    """Reads the schemas of arguments. The target of a reference is read once, however often and in whatever spelling
    it is referred to, and equal results are one object."""

    def __init__(self) -> None:
        self._left = _MAX_SCHEMA_NODES
        self._targets: dict[int, frozenset[str]] = {}  # by identity: the tools outlive the reader
        self._open: dict[int, int] = {}  # targets that are being read, with their depth
        self._lowest = 0  # depth of the outermost open target met again
        self._enums: dict[int, frozenset[str]] = {}
        self._found: dict[tuple[frozenset[str], frozenset[str]], ArgumentType] = {}

    def read(self, schema: Any, root: Mapping[str, Any]) -> ArgumentType:
        """The type of an argument with this schema, which may refer to parts of `root`."""
        types, options = self._types(schema, root) or _ALL, self._options(schema, root)
        return self._found.setdefault((types, options), ArgumentType(types, options))

    @property
    def exhausted(self) -> bool:
        return self._left < 0

    def _take(self, nodes: int) -> bool:
        self._left -= nodes
        return self._left >= 0

    def _types(self, schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
        """JSON types that a schema allows; all of them for a schema that does not say, or is too large or too deep."""
        if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH or not self._take(1):
            return _ALL
        ref, declared, enum = schema.get("$ref"), schema.get("type"), schema.get("enum")
        if isinstance(ref, str):
            return self._types_of_target(_target(root, ref), root, depth)
        names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list | tuple) else []
        spelled = (name.lower() for name in names if isinstance(name, str)) if self._take(len(names)) else ()
        found = frozenset(_ALIASES.get(name, name) for name in spelled) & _ALL
        if not found and isinstance(enum, list | tuple):
            found = frozenset().union(*map(_json_types, enum)) if self._take(len(enum)) else _ALL
        if not found and "const" in schema:
            found = _json_types(schema["const"])
        for word in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(word)
            if not found and isinstance(branches, list | tuple) and branches:
                if len(branches) > self._left:
                    return _ALL
                sets = [self._types(branch, root, depth + 1) for branch in branches]
                found = _ALL.intersection(*sets) if word == "allOf" else frozenset().union(*sets)
        return (found or _ALL) | ({"null"} if schema.get("nullable") is True else frozenset())

    def _types_of_target(self, target: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
        """A schema that refers to itself adds nothing there. Only results that do not lack the types of a schema still
        being read are kept."""
        key, place = id(target), len(self._open)
        if key in self._targets:
            return self._targets[key]
        if key in self._open:
            self._lowest = min(self._lowest, self._open[key])
            return frozenset()
        self._open[key] = place
        before, self._lowest = self._lowest, place
        found = self._types(target, root, depth + 1)
        del self._open[key]
        if self._lowest >= place:
            self._targets[key] = found
            self._lowest = before
        else:
            self._lowest = min(before, self._lowest)
        return found

    def _options(self, schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
        """The strings of an `enum` that are JSON of another type; for any other text they make no difference."""
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            schema = _target(root, schema["$ref"])
        options = schema.get("enum") if isinstance(schema, Mapping) else None
        if not isinstance(options, list | tuple):
            return frozenset()
        if id(options) not in self._enums:
            strings = [option for option in options if isinstance(option, str)] if self._take(len(options)) else []
            self._enums[id(options)] = frozenset(option for option in strings if parse_json(option) is not None)
        return self._enums[id(options)]


def _target(root: Mapping[str, Any], ref: str) -> Any:
    """The schema that a reference such as `#/$defs/Unit` points to; None for one that leads outside."""
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
    """A JSON value and how we write it; None for text that is not JSON or could not be sent on."""
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
