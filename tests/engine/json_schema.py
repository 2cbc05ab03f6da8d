"""A validator for the part of JSON Schema that the grammar tests use, and random schemas; independent of the engine."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st


def kind_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if float(value).is_integer() else {"number"}
    return {{str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]}


def same(a: Any, b: Any) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def fits(value: Any, schema: Any, root: Any = None) -> bool:
    """Whether a value is valid; raises KeyError for a word that this validator does not know."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    return all(_WORDS[word](value, wanted, schema, root) for word, wanted in schema.items())


def _target(ref: str, root: Any) -> Any:
    for part in ref.split("/")[1:]:
        root = root[part]
    return root


def _object(value: Any, schema: Any, root: Any) -> bool:
    if not isinstance(value, dict):
        return True
    known, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(fits(v, known.get(key, extra), root) for key, v in value.items())


def _text(check: Any) -> Any:
    return lambda v, w, s, r: not isinstance(v, str) or check(v, w)


def _number(check: Any) -> Any:
    return lambda v, w, s, r: isinstance(v, bool) or not isinstance(v, int | float) or check(v, w)


_WORDS: dict[str, Any] = {
    "type": lambda v, w, s, r: bool(kind_of(v) & ({w} if isinstance(w, str) else set(w))),
    "enum": lambda v, w, s, r: any(same(v, option) for option in w),
    "const": lambda v, w, s, r: same(v, w),
    "anyOf": lambda v, w, s, r: any(fits(v, branch, r) for branch in w),
    "allOf": lambda v, w, s, r: all(fits(v, branch, r) for branch in w),
    "$ref": lambda v, w, s, r: fits(v, _target(w, r), r),
    "$defs": lambda v, w, s, r: True,
    "title": lambda v, w, s, r: True,
    "description": lambda v, w, s, r: True,
    "default": lambda v, w, s, r: True,
    "minLength": _text(lambda v, w: len(v) >= w),
    "maxLength": _text(lambda v, w: len(v) <= w),
    "pattern": _text(lambda v, w: re.search(w, v) is not None),
    "minimum": _number(lambda v, w: v >= w),
    "maximum": _number(lambda v, w: v <= w),
    "items": lambda v, w, s, r: not isinstance(v, list) or all(fits(x, w, r) for x in v),
    "minItems": lambda v, w, s, r: not isinstance(v, list) or len(v) >= w,
    "maxItems": lambda v, w, s, r: not isinstance(v, list) or len(v) <= w,
    "required": lambda v, w, s, r: not isinstance(v, dict) or set(w) <= set(v),
    "properties": lambda v, w, s, r: _object(v, s, r),
    "additionalProperties": lambda v, w, s, r: _object(v, s, r),
}

NAMES = st.sampled_from(["a", "b_c", "naïve", "x y", "<k>", "Z-9", 'quo"te'])
NUMBERS = st.builds(lambda low, size: {"minimum": low, "maximum": low + size}, st.integers(-50, 50), st.integers(0, 99))
TEXTS = st.one_of(
    st.just({"type": "string"}),
    st.builds(
        lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, st.integers(0, 3), st.integers(0, 5)
    ),
    st.sampled_from(["^[a-z]{2,4}$", "b+", "^(GET|PUT) /", "[0-9]{2}$", "^\\d{3}-\\d$", "a/b"]).map(
        lambda p: {"type": "string", "pattern": p}
    ),
    st.lists(st.sampled_from(["", "red", "5", "null", "a b", "é\n", "tr/ue", "\\"]), min_size=1, unique=True).map(
        lambda options: {"enum": options}
    ),
)
SCALARS = st.one_of(
    TEXTS,
    TEXTS,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "integer"}, {"type": "number"}]),
    NUMBERS.map(lambda bounds: {"type": "integer", **bounds}),
    st.sampled_from([{"const": 7}, {"const": "x"}, {"enum": [1, "one", None, "5"]}, {"enum": [True, "yes", 2.5]}]),
    st.just({"type": ["string", "null"], "maxLength": 6}),
    NUMBERS.map(lambda bounds: {"type": ["string", "integer"], **bounds}),
)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    return st.one_of(arrays, objects(inner), st.lists(inner, min_size=1, max_size=2).map(lambda b: {"anyOf": b}))


def objects(inner: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[Any]:
    """Schemas of objects with some of their properties required."""

    def build(properties: dict[str, Any], chosen: set[str]) -> dict[str, Any]:
        required = [name for name in properties if name in chosen]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(build, st.dictionaries(NAMES, inner, min_size=least, max_size=4), st.sets(NAMES))


VALUES = st.recursive(SCALARS, _larger, max_leaves=5)
OBJECTS = objects(VALUES)
