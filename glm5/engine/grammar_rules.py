"""Converts a request's grammar spec to a grammar in llguidance's Lark notation.

JSON has one format, that of `json.dumps`: separators `, ` and `: ` and no other white space, so a model cannot fill its
token budget with white space. The chat template writes the same format, and the released models were trained on it.

A tool call is `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>`; the marks are special
tokens. Arguments come in the order of the tool's `properties`, each at most once. The parser (`glm5.chat.parsers`)
reads an argument's text according to its schema. The grammar admits exactly the texts that the parser reads as valid:
plain text for a schema that allows only strings, and JSON for one that allows no strings. A schema that allows strings
and other types, say numbers, admits JSON of the other types, and as a string any text that is not such JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from glm5.chat.arguments import ArgumentType, ToolSchemas
from glm5.chat.messages import function_of
from glm5.chat.tokenizer import Tokenizer
from glm5.engine import given_grammars
from glm5.errors import EngineError
from glm5.records import GrammarSpec

MAX_TEXT = 256 * 1024
"""Maximum characters of a schema, an expression or a list. The library has its own limits for the compiled result."""
MAX_PATTERN = 2000
MAX_CHOICES = 2000
MAX_HOPS = 16
MAX_NESTING = 100
MAX_OPTIONAL = 300
MAX_DIVISORS = 10_000
MAX_WRITTEN = 1 << 20
"""Maximum characters of the grammar passed to the library."""
MAX_SHARED = 4_000_000
"""Maximum characters of the schemas of all arguments together. Each argument with a reference adds the whole schema of
its tool's parameters. The limit bounds the work of this module on forced calls."""

_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
_ANNOTATIONS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title",
                "description", "$schema", "$id", "$comment", "examples", "default", "strict"}  # fmt: skip
_ENDS_KEY = ("</arg_key>", "</tool_call>")
_KEY = "/[A-Za-z_][A-Za-z0-9_.\\-]{0,63}/"


def written(spec: GrammarSpec, tokenizer: Tokenizer) -> str:
    """The grammar of `spec`. Raises EngineError for a spec that is malformed, too large or not supported."""
    if len(spec.value) > MAX_TEXT:
        raise EngineError(f"The grammar has {len(spec.value):,} characters; at most {MAX_TEXT:,} are allowed.")
    text = _written(spec, tokenizer)
    if len(text) > MAX_WRITTEN:
        raise EngineError(f"The grammar expands to {len(text):,} characters; at most {MAX_WRITTEN:,} are allowed.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise EngineError("The grammar has half of a surrogate pair, which is not valid text.") from None
    return text


def _written(spec: GrammarSpec, tokenizer: Tokenizer) -> str:
    if spec.kind == "json":
        return f"start: {_json_rule({'type': 'object'})}\n"
    if spec.kind == "json_schema":
        return f"start: {_json_rule(_parsed(spec.value, dict, 'The JSON schema', 'an object'))}\n"
    if spec.kind == "regex":
        return f"start: TEXT\nTEXT: {_expression(spec.value)}\n"
    if spec.kind == "choice":
        choices = _parsed(spec.value, list, "The list of choices", "a list of strings")
        if not choices or len(choices) > MAX_CHOICES or not all(isinstance(c, str) and c for c in choices):
            raise EngineError(f"The list of choices must have 1 to {MAX_CHOICES} strings that are not empty.")
        return f"start: {' | '.join(map(_literal, choices))}\n"
    if spec.kind == "grammar":
        return given_grammars.checked(spec.value)
    tools = _parsed(spec.value, list, "The list of tools", "a list of tools")
    return _Calls(tools, tokenizer).grammar(spec.many)


def _parsed(text: str, kind: type, what: str, form: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{what} is not valid JSON: {str(error)[:100]}.") from None
    if not isinstance(value, kind):
        raise EngineError(f"{what} must be {form}.")
    _check_size(value, what)
    return value


def _check_size(value: Any, what: str) -> None:
    """Raise EngineError for a `value` that would take too much time or memory to compile. The compile time of an object
    grows with the square of its optional properties. A `multipleOf` needs one state per remainder."""
    level, remainders, together = [value], 0, 1
    for _ in range(MAX_NESTING):
        inner: list[Any] = []
        for node in level:
            inner += node.values() if isinstance(node, dict) else node
            if isinstance(node, dict) and isinstance(node.get("multipleOf"), int | float):
                states = _states(node["multipleOf"])
                remainders, together = remainders + states, math.lcm(together, states)
                if max(remainders, together) > MAX_DIVISORS:
                    text = (
                        f"{what} has a `multipleOf` that is too large or has too many decimal places; at most "
                        f"{MAX_DIVISORS} remainders are allowed."
                    )
                    raise EngineError(text)
            properties = node.get("properties") if isinstance(node, dict) else None
            required = node.get("required") if isinstance(node, dict) else None
            fixed = set(map(str, required)) if isinstance(required, list) else set()
            if isinstance(properties, dict) and len(properties.keys() - fixed) > MAX_OPTIONAL:
                raise EngineError(f"{what} has an object with more than {MAX_OPTIONAL} optional properties.")
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return
    raise EngineError(f"{what} is nested more than {MAX_NESTING} levels deep.")


def _states(divisor: float) -> int:
    """Estimate of the number of remainders: numerator times denominator of the divisor as a fraction. Above the limit
    for a divisor that is not positive."""
    try:
        exact = Fraction(str(divisor))
    except ValueError:
        return MAX_DIVISORS + 1
    return min(exact.numerator * exact.denominator, MAX_DIVISORS + 1) if exact > 0 else MAX_DIVISORS + 1


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: Any) -> str:
    """Inline JSON schema. Our JSON format overrides format options that the schema sets for the library."""
    schema = {**schema, "x-guidance": _WRITING} if isinstance(schema, Mapping) else {"not": {}}
    return "%json " + json.dumps(schema, ensure_ascii=False)


def _expression(pattern: str) -> str:
    """A terminal for a regular expression that must match the whole text."""
    if len(pattern) > MAX_PATTERN or "\n" in pattern:
        raise EngineError(
            f"A regular expression may have at most {MAX_PATTERN} characters and no line breaks; use \\n."
        )
    return "/" + re.sub(r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], pattern) + "/"


class _Calls:
    """The grammar of forced tool calls."""

    def __init__(self, tools: Sequence[Any], tokenizer: Tokenizer) -> None:
        if not tools or not all(isinstance(tool, Mapping) for tool in tools):
            raise EngineError("A forced call needs at least one tool, and every tool must be an object.")
        self._functions = [function_of(tool) for tool in tools]
        self._schemas = ToolSchemas(tools)
        self._special = tokenizer.special
        self._rules: list[str] = []
        self._work = 0

    def grammar(self, many: bool) -> str:
        calls = [self._call(i, function) for i, function in enumerate(self._functions)]
        head = f"start: call{'+' if many else ''}\ncall: {self._mark('<tool_call>')} ({' | '.join(calls)}) "
        return head + self._mark("</tool_call>") + "\n" + "".join(rule + "\n" for rule in self._rules)

    def _mark(self, name: str) -> str:
        return f"<[{self._special[name]}]>"

    def _rule(self, body: str, terminal: bool = False) -> str:
        """Add a rule for `body` and return its name; a terminal is matched as one expression."""
        name = f"{'T' if terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _call(self, index: int, function: Mapping[str, Any]) -> str:
        where = f"tools[{index}]"
        name = _word(function.get("name"), f"{where}: the name", ("<arg_key>", "</tool_call>", "<tool_call>"))
        parameters = function.get("parameters")
        if parameters is None:
            parameters = {"properties": {}, "additionalProperties": False}
        parameters = _References(parameters).resolved(parameters)
        if not isinstance(parameters, Mapping):
            raise EngineError(f"{where}: parameters must be a JSON schema.")
        odd = sorted(key for key in parameters if key not in _ANNOTATIONS and not key.startswith("x-"))
        if odd:
            raise EngineError(f'{where}: a forced call cannot enforce "{odd[0]}" of its parameters; remove it.')
        properties = parameters.get("properties") or {}
        listed = parameters.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(listed, list):
            raise EngineError(f"{where}: properties must be an object and required a list.")
        required = dict.fromkeys(_word(key, f"{where}: an argument", _ENDS_KEY) for key in listed)
        root = _References(parameters)
        extra = parameters.get("additionalProperties", True)
        parts = []
        for key, schema in [*properties.items(), *((key, extra) for key in required if key not in properties)]:
            if schema is False:
                if key in required:
                    raise EngineError(f'{where}: the argument "{key}" is both required and forbidden.')
                continue
            key_text = _literal(_word(key, f"{where}: an argument", _ENDS_KEY))
            pair = self._pair(key_text, self._value(name, key, schema, root))
            parts.append(pair if key in required else f"({pair})?")
        if extra is not False and not properties and not required:
            parts.append(f"({self._pair(self._rule(_KEY, True), self._value(name, '', extra, root))})*")
        return self._rule(" ".join([_literal(name), *parts]))

    def _pair(self, key: str, value: str) -> str:
        opens, closes = self._mark("<arg_key>"), self._mark("</arg_key>")
        return self._rule(f"{opens} {key} {closes} {self._mark('<arg_value>')} {value} {self._mark('</arg_value>')}")

    def _value(self, tool: str, key: str, schema: Any, root: _References) -> str:
        """The rule for the text of an argument."""
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise EngineError(f'The schema of the argument "{key}" must be an object.')
        own = json.dumps(schema)
        refers = '"$ref"' in own
        self._work += len(own) + root.size * refers
        if self._work > MAX_SHARED:
            raise EngineError(
                "The references of the tools' arguments expand too far; use fewer references, or smaller schemas."
            )
        read_as = self._schemas.type_of(tool, key)
        shared = {word: root.schema[word] for word in ("$defs", "definitions") if refers and word in root.schema}
        shared = {word: schemas for word, schemas in shared.items() if word not in schema}
        if "string" not in read_as.types:
            return self._rule(_json_rule({**schema, **shared}))
        texts = _texts(schema, root)
        if read_as.types == {"string"}:
            return self._rule(" | ".join(texts), True)
        return self._mixed(schema, root, texts, shared, read_as)

    def _mixed(
        self, schema: Mapping[str, Any], root: _References, texts: list[str], shared: Mapping[str, Any],
        read_as: ArgumentType,
    ) -> str:  # fmt: skip
        """The rule for an argument that may be a string or of another type, say a number. The parser reads a text as a
        number whenever it can. So if the schema restricts the numbers, they get their own rule, and the rule for
        strings excludes texts that look like numbers."""
        bound = [kind for kind in _TYPES if kind in read_as.types - {"string"} and not _is_free(schema, root, kind)]
        literal = [text for text in texts if text[0] == '"' and isinstance(read_as.read(json.loads(text))[0], str)]
        unlike = "".join(f" & ~{like}" for like in dict.fromkeys(_JSON_LIKE[kind] for kind in bound))
        rules = [self._rule(" | ".join(literal), True)] if literal else []
        rules += [self._rule(f"({text}){unlike}", True) for text in texts if text[0] != '"']
        others = [kind for kind in _TYPES if kind in read_as.types - {"string"}]
        apart = [kind for kind in others if kind in bound or _ANY_TEXT not in texts]
        if apart:
            rules.append(self._rule(_json_rule({"allOf": [schema, {"type": apart}], **shared})))
        if not rules:
            raise EngineError("An argument of a forced call has no possible value.")
        return self._rule(" | ".join(rules))


_ANY_TEXT = "/(?s:.*)/"
_BLANK = "[ \\t\\r\\n]*"
_NUMBER_LIKE = f"/{_BLANK}-?[0-9][0-9.eE+\\-]*{_BLANK}/"
_JSON_LIKE = {
    "integer": _NUMBER_LIKE,
    "number": _NUMBER_LIKE,
    "boolean": f"/{_BLANK}(true|false){_BLANK}/",
    "null": f"/{_BLANK}null{_BLANK}/",
    "array": f"/{_BLANK}\\[(?s:.*)/",
    "object": f"/{_BLANK}\\{{(?s:.*)/",
}
_HARMLESS = {"type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format",
             "$comment", "nullable", "$defs", "definitions"}  # fmt: skip
"""Schema keywords that forbid nothing. `format` is only an annotation by default."""
_ABOUT_OTHERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems",
                 "minItems", "maxItems", "uniqueItems", "contains", "properties", "required", "additionalProperties",
                 "patternProperties", "propertyNames", "minProperties", "maxProperties"}  # fmt: skip
"""Keywords that restrict values of other types, but not strings."""


class _References:
    """Resolves references within a tool's parameters, each once."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self.size = len(json.dumps(schema))
        self._places: dict[str, Any] = {}

    def resolved(self, schema: Any) -> Any:
        """The target of a reference; other schemas unchanged."""
        passed: list[str] = []
        while isinstance(schema, Mapping) and schema.get("$ref") is not None:
            ref = str(schema["$ref"])
            if set(schema) - _HARMLESS - {"$ref"}:
                raise _no_way(ref)
            if len(passed) == MAX_HOPS:
                raise EngineError("A reference of a tool's schema has no target.")
            passed.append(ref)
            schema = self._places[ref] if ref in self._places else self._place(ref)
        self._places.update(dict.fromkeys(passed, schema))
        return schema

    def _place(self, ref: str) -> Any:
        head, *path = ref.split("/", MAX_NESTING + 2)
        place: Any = self.schema if head == "#" else None
        for part in path:
            place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        if place is None:
            raise _no_way(ref)
        return place


def _no_way(ref: str) -> EngineError:
    return EngineError(f"The reference {ref[:100]!r} is not supported in a forced call.")


def _texts(schema: Any, root: _References) -> list[str]:
    """The strings that a schema allows, as alternatives of a terminal: literals and expressions."""
    found, waiting, seen = dict[str, None](), [schema], set[int]()
    while waiting:
        schema = root.resolved(waiting.pop())
        if id(schema) in seen:  # a self-reference adds nothing
            continue
        seen.add(id(schema))
        if schema is True:
            found[_ANY_TEXT] = None
        elif isinstance(schema, Mapping) and "string" in _declared(schema):
            words = set(schema) - _HARMLESS - _ABOUT_OTHERS
            branches = schema[next(iter(words))] if words in ({"anyOf"}, {"oneOf"}, {"allOf"}) else None
            if isinstance(branches, list) and (words != {"allOf"} or len(branches) < 2):
                waiting += reversed(branches)
            else:
                found.update(dict.fromkeys(_own_texts(schema, words)))
    return list(found)


def _own_texts(schema: Mapping[str, Any], words: set[str]) -> list[str]:
    """The strings of a schema without branches; `words` are its keywords that restrict strings."""
    if words & {"enum", "const"}:
        options = schema.get("enum", [schema.get("const")])
        if len(words) > 1 or not isinstance(options, list):
            raise EngineError(
                f"A forced call does not support enum together with {', '.join(sorted(words - {'enum'}))}."
            )
        return [_literal(_free_of(o, ("</arg_value>",), "an option")) for o in options if isinstance(o, str)]
    if odd := sorted(words - {"pattern", "minLength", "maxLength"}):
        raise EngineError(f'A forced call cannot enforce "{odd[0]}" of a string; remove it or do not force a call.')
    parts = [_search(schema["pattern"])] if "pattern" in schema else []
    if words & {"minLength", "maxLength"}:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if type(least) is not int or (most != "" and type(most) is not int):
            raise EngineError("minLength and maxLength must be whole numbers.")
        parts.append(f"/(?s:.){{{least},{most}}}/")
    return ["(" + " & ".join(parts) + ")"] if parts else [_ANY_TEXT]


def _search(pattern: Any) -> str:
    """A JSON schema `pattern`, which may match anywhere, as an expression for the whole text."""
    if not isinstance(pattern, str):
        raise EngineError("pattern must be a regular expression.")
    bare = re.sub(r"\\.", "xx", pattern)
    starts = bare.startswith("^") and "|" not in bare
    ends = bare.endswith("$") and "|" not in bare
    inner = pattern[1 if starts else 0 : -1 if ends else None]
    return _expression(f"{'' if starts else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}")


def _declared(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names; all types without `type`."""
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(map(str, kind)) if isinstance(kind, list) else set(_TYPES)
    return kinds | {"integer"} if "number" in kinds else kinds


def _is_free(schema: Any, root: _References, kind: str) -> bool:
    """Whether a schema certainly allows every value of a type."""
    waiting, seen = [schema], set[int]()
    while waiting:
        schema = root.resolved(waiting.pop())
        if schema is True:
            return True
        if id(schema) in seen or not isinstance(schema, Mapping) or kind not in _declared(schema):
            continue
        seen.add(id(schema))
        words = set(schema) - _HARMLESS
        if words == {"anyOf"} and isinstance(schema["anyOf"], list):
            waiting += schema["anyOf"]
        elif not words - {"pattern", "minLength", "maxLength"}:
            return True
    return False


def _free_of(text: str, marks: Sequence[str], what: str) -> str:
    if any(mark in text for mark in marks):
        raise EngineError(
            f"{what} contains {next(mark for mark in marks if mark in text)}; in a call it would be cut off there."
        )
    return text


def _word(text: Any, what: str, marks: Sequence[str]) -> str:
    """A name that the parser reads back unchanged."""
    if not isinstance(text, str) or not text or text != text.strip():
        raise EngineError(f"{what} must be a string without leading or trailing white space.")
    return _free_of(text, marks, what)
