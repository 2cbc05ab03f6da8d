"""Recipes: TOML files with `extends` and `--set a.b=c`, checked against a schema, and written back.

The layers of a recipe are merged lowest first: the file at the end of the `extends` chain, each file that extends it,
the overrides of the command line. Tables merge key by key. Lists of tables that all have a `name` merge by name, so a
short recipe can change one stage of a long one. Any other value replaces the one below it.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pydantic

from glm5.config.by_kind import ByKind
from glm5.config.toml_reader import MAX_BYTES, parse_toml
from glm5.config.toml_writer import toml_value, write_toml
from glm5.errors import ConfigError, UsageError, nearest
from glm5.files import read_small

Model = TypeVar("Model", bound=pydantic.BaseModel)
_MOST_FINDINGS = 100  # that are looked at for one message
Layer = tuple[str, Mapping[str, Any]]  # (origin of the values, for messages; the values)


def load_recipe(path: Path | str, schema: type[Model], overrides: Sequence[str] = ()) -> Model:
    """Read the TOML recipe at `path`, apply `overrides` (`"a.b=c"`), and validate it as a `schema`.

    Values must have the schema's type: text is not turned into numbers. An override's value is read as TOML, or as text
    if it is not TOML. Address a list's table by its `name` or index (`stages.pretrain.steps=10`).

    Raises ConfigError for a file that is missing, malformed or does not fit the schema, UsageError for an override that
    is malformed or addresses nothing.
    """
    layers = _read_layers(Path(path))
    data: dict[str, Any] = {}
    try:
        for where, layer in layers:
            data = _merge(data, layer, where)
    except RecursionError:
        raise ConfigError(f"{path}: values are nested too deeply for a recipe.") from None
    for override in overrides:
        layers.append(_apply_override(data, override))
    return _validate(data, schema, layers)


def dump_recipe(model: pydantic.BaseModel) -> str:
    """Write `model` as TOML that `load_recipe` reads back as an equal model.

    TOML has no null: a field that is None is left out, so its default must be None too. Raises ConfigError if it is
    not, or if the model does not survive the round trip for another reason.
    """
    text = write_toml(_plain(model))
    layers: list[Layer] = [("the saved recipe", tomllib.loads(text))]
    again = _validate(dict(layers[0][1]), type(model), layers)
    if write_toml(_plain(again)) != text:
        raise ConfigError(
            f"{type(model).__name__} cannot be saved: some values change when they are read back. A field that "
            "is None needs None as its default, because TOML has no null."
        )
    return text


def _plain(model: pydantic.BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, round_trip=True)


# ---------------------------------------------------------------------------------------------------------------------
# Reading and merging


def _read_layers(path: Path) -> list[Layer]:
    """The recipe at `path` and those it extends, lowest layer first, without the `extends` keys."""
    layers: list[Layer] = []
    chain: list[Path] = []
    while True:
        resolved = path.resolve()
        if resolved in chain:
            names = " > ".join(str(p) for p in [*chain[chain.index(resolved) :], resolved])
            raise ConfigError(
                f"{chain[-1]}: the recipes extend each other in a circle ({names}); remove one `extends`."
            )
        chain.append(resolved)
        data = _read_toml(path)
        base = data.pop("extends", None)
        layers.insert(0, (str(path), data))
        if base is None:
            return layers
        if not isinstance(base, str):
            raise ConfigError(f"{path}: extends = {_show(base)} is not the name of a recipe file.")
        path = path.parent / base


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        raw = read_small(path, MAX_BYTES)
        text = raw.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"The recipe {path} does not exist. The recipes of glm5 are in recipes/.") from None
    except OSError as error:
        raise ConfigError(f"The recipe {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not valid UTF-8.") from None
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = re.search(r"\s*\(at line (\d+), column \d+\)$", message)
        line = int(found[1]) if found else text.count("\n") + 1
        reason = re.sub(r"\s*\(at [^()]*\)$", "", message)
        raise ConfigError(f"{path}, line {line}: not valid TOML: {reason}.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{path}: values are nested too deeply for a recipe.") from None


def _merge(low: Mapping[str, Any], high: Mapping[str, Any], where: str, at: str = "") -> dict[str, Any]:
    merged = copy.deepcopy(dict(low))
    for key, value in high.items():
        old, here = merged.get(key), f"{at}{key}"
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(old, value, where, f"{here}.")
        elif old is not None and _is_named(old) and _is_named(value):
            tables = _by_name(old, where, here)
            for name, table in _by_name(value, where, here).items():
                tables[name] = _merge(tables.get(name, {}), table, where, f"{here}.{name}.")
            merged[key] = list(tables.values())
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _is_named(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value)


def _by_name(tables: list[dict[str, Any]], where: str, at: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for table in tables:
        if table["name"] in found:
            raise ConfigError(
                f'{where}: {at} contains two tables named "{table["name"]}"; names must differ to be merged.'
            )
        found[table["name"]] = table
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Overrides


def _apply_override(data: dict[str, Any], override: str) -> Layer:
    """Change `data` in place; returns the override as a layer, so messages can point to it."""
    where = f"--set {override}"
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"{where} is not of the form key.subkey=value.")
    parts = _split_key(key.strip(), where)
    value = _parse_value(text.strip())
    node: Any = data
    written: dict[str, Any] = {}
    shadow = written
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            index = _list_index(node, part, where, ".".join(parts[:depth]))
            name = _label(node, index)
            node[index] = value if last else node[index]
            node = node[index]
        elif isinstance(node, dict):
            name = part
            node[part] = value if last else node.get(part, {})
            node = node[part]
        else:
            raise UsageError(f"{where}: {'.'.join(parts[:depth])} is {_show(node)}, which has no keys.")
        shadow[name] = value if last else {}
        shadow = shadow[name] if not last else shadow
    return where, written


def _split_key(key: str, where: str) -> list[str]:
    """`a.b."c.d"` > ["a", "b", "c.d"], by TOML's own rules for dotted keys."""
    try:
        node: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        raise UsageError(f"{where}: {key} is not a dotted key such as optim.lr.") from None
    parts: list[str] = []
    while isinstance(node, dict):
        if len(node) != 1:
            raise UsageError(f"{where}: {key} is not one dotted key.")
        [(part, node)] = node.items()
        parts.append(part)
    return parts


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _list_index(items: list[Any], part: str, where: str, at: str) -> int:
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if names.count(part) > 1:
        raise UsageError(f'{where}: {at} contains {names.count(part)} tables named "{part}"; use an index.')
    if part in names:
        return names.index(part)
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    known = [name for name in names if isinstance(name, str)]
    have = (
        f"it has {', '.join(known)}" if known else f"its indices are 0 to {len(items) - 1}" if items else "it is empty"
    )
    raise UsageError(f'{where}: {at} has no entry "{part}"{nearest(part, known)}; {have}.')


def _label(items: Sequence[Any], index: int) -> str:
    """Name of a list entry in messages: its `name` if that is unique, otherwise its index."""
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    name = names[index] if index < len(names) else None
    return name if isinstance(name, str) and names.count(name) == 1 else str(index)


# ---------------------------------------------------------------------------------------------------------------------
# Validation: pydantic's findings as one sentence


def _validate(data: dict[str, Any], schema: type[Model], layers: Sequence[Layer]) -> Model:
    try:
        # Strict JSON mode fits TOML: it accepts lists for tuples and text for paths, but not "3" for 3.
        return schema.model_validate_json(json.dumps(data, default=str), strict=True)
    except pydantic.ValidationError as error:
        _explain(error, data, schema, layers)


def _explain(error: pydantic.ValidationError, data: Any, schema: type, layers: Sequence[Layer]) -> NoReturn:
    """Raise ConfigError about the first finding, with the number of the others. Unknown keys come first, because a
    misspelt key often also causes a missing one."""
    found = sorted(error.errors(include_url=False), key=lambda finding: finding["type"] != "extra_forbidden")
    findings = [(f, *_locate(f["loc"], data, schema)) for f in found[:_MOST_FINDINGS]]
    first, path, models = findings[0]
    key = ".".join(path)
    where = _origin(path, layers)
    if first["type"] == "extra_forbidden":
        known = {name for model in models for name in _field_names(model)}
        what = f'unknown key "{key}"{nearest(path[-1], known) or _choices(known)}'
    elif first["type"] == "missing":
        what = f"{key} is missing"
    else:
        same = [f for f, other, _ in findings if other == path]
        what = _wrong_value(same, key)
    others = len({tuple(p) for _, p, _ in findings}) - 1 + len(found) - len(findings)
    more = f" ({others} more {'problem' if others == 1 else 'problems'} in this recipe.)" if others else ""
    raise ConfigError(f"{where}: {what}.{more}") from None


def _choices(known: set[str]) -> str:
    return f"; known here: {', '.join(sorted(known))}" if 0 < len(known) <= 12 else ""


def _wrong_value(findings: Sequence[Any], key: str) -> str:
    message = findings[0]["msg"]
    at = key or "the recipe"
    if findings[0]["type"] in ("value_error", "assertion_error"):  # raised by one of our validators
        text = message.partition(", ")[2].rstrip(".")
        return text if key and text.startswith(key) else f"{at}: {text}"
    expected = dict.fromkeys(_expectation(f["msg"]) for f in findings)
    value = _show(findings[0]["input"])
    return f"{at} is {value}, expected {' or '.join(expected)}"


def _expectation(message: str) -> str:
    text = re.sub(r"^Input should be (a valid )?", "", message).rstrip(".")
    text = {"object": "table", "array": "list", "an object": "a table", "dictionary": "table"}.get(text, text)
    text = re.sub(r", unable to parse.*$|, got a number with a fractional part$", "", text)
    if text in ("integer",):
        return "an integer"
    return f"a {text}" if text in ("number", "string", "boolean", "table", "list", "tuple") else text


def _origin(path: Sequence[str], layers: Sequence[Layer]) -> str:
    """The topmost layer that sets `path`; the recipe itself if none does."""
    for where, layer in reversed(layers):
        node: Any = layer
        for part in path:
            if isinstance(node, list):
                found = [item for i, item in enumerate(node) if _label(node, i) == part]
                node = found[0] if found else None
            else:
                node = node.get(part) if isinstance(node, Mapping) else None
            if node is None:
                break
        else:
            return where
    return next(where for where, _ in reversed(layers) if not where.startswith("--set "))


def _locate(loc: Sequence[int | str], data: Any, schema: Any) -> tuple[list[str], list[type[pydantic.BaseModel]]]:
    """Turn pydantic's location into the keys as the user wrote them, and the models that contain the last key.

    A location also names the chosen member of a union. Only the types distinguish it from a key, so we follow both.
    """
    path: list[str] = []
    candidates: list[Any] = [schema]
    holders: list[type[pydantic.BaseModel]] = []
    at_union = False
    for part in loc:
        by_kind = [meta for candidate in candidates for meta in _by_kind(candidate)]
        members = [m for meta in by_kind for m in meta.schemas_of(data)]
        members = members or [m for candidate in candidates for m in _members(candidate)]
        if len(members) > 1 and not at_union and not by_kind:
            narrowed = [m for m in members if _is_tag(m, part)]
            candidates, at_union = narrowed or members, True
            continue
        at_union = False
        holders = [m for m in members if _is_model(m)]
        path.append(_label(data, part) if isinstance(data, list) and isinstance(part, int) else str(part))
        data = _child(data, part)
        candidates = [child for member in members for child in _child_types(member, part)]
    return path, holders


def _by_kind(annotation: Any) -> list[ByKind]:
    return [meta for meta in getattr(annotation, "__metadata__", ()) if isinstance(meta, ByKind)]


def _members(annotation: Any) -> Iterator[Any]:
    """The non-None members of a union; any other annotation is its own only member."""
    annotation = getattr(annotation, "__value__", annotation)  # a `type X = ...` alias
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from _members(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            if member is not type(None):
                yield from _members(member)
    else:
        yield annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)


def _is_tag(member: Any, part: int | str) -> bool:
    if not _is_model(member):
        return getattr(member, "__name__", None) == part
    literals = (typing.get_args(field.annotation) for field in member.model_fields.values())
    return member.__name__ == part or any(part in values for values in literals)


def _child(data: Any, part: int | str) -> Any:
    try:
        return data[part]
    except (LookupError, TypeError):
        return None


def _child_types(annotation: Any, part: int | str) -> list[Any]:
    if _is_model(annotation):
        return [f.annotation for name, f in annotation.model_fields.items() if part in (name, f.alias)]
    args = typing.get_args(annotation)
    if isinstance(part, str):  # a dict's value
        return list(args[1:2])
    if typing.get_origin(annotation) is tuple and part < len(args) and args[-1] is not Ellipsis:
        return [args[part]]
    return list(args[:1])


def _field_names(model: type[pydantic.BaseModel]) -> Iterator[str]:
    return (field.alias or name for name, field in model.model_fields.items())


def _show(value: Any) -> str:
    """A value in a message, as short TOML."""
    try:
        text = toml_value(value)
    except ConfigError:
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
