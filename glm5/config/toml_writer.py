"""Write plain values as TOML: the standard library only reads it, and a recipe is saved with every run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from glm5.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def write_toml(table: Mapping[str, Any]) -> str:
    """TOML text for a table of plain values (text, numbers, booleans, lists, tables). None entries are left out."""
    lines: list[str] = []
    _write_table(table, (), lines.append)
    return "\n".join(lines).strip("\n") + "\n"


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], emit: Callable[[str], None]) -> None:
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping) or _is_table_list(value)}
    for key, value in table.items():
        if value is not None and key not in nested:
            emit(f"{_key(key)} = {toml_value(value)}")
    for key, value in nested.items():
        name = ".".join(_key(part) for part in (*path, key))
        for item in [value] if isinstance(value, Mapping) else value:
            emit(f"\n[{name}]" if isinstance(value, Mapping) else f"\n[[{name}]]")
            _write_table(item, (*path, key), emit)


def _is_table_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def toml_value(value: Any) -> str:
    """One value on one line. Raises ConfigError for None and for types that TOML lacks."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # inf, nan and exponents are spelt alike in Python and TOML
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        items = (f"{_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(items)}}}"
    raise ConfigError(f"{value!r} cannot be written as TOML, so the recipe cannot be saved.")


def _text(text: str) -> str:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ConfigError(f"{text!a} contains a lone surrogate, which TOML does not allow.")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
