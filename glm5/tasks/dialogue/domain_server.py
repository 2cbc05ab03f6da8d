"""Runs in a room: the tools of a dialogue's domain over one database. Orders and answers are lines of JSON.

Run as a program of its own, without glm5: the source of this file is what the room gets. `tools.py` and `user_tools.py`
are the domain's. A function of them takes the database, a dict that it may change, then its arguments; with a docstring
it is a tool, which "call" calls; without one only tasks can call it, by "perform" (set-ups and assertions). An
exception is the tool's answer.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

Functions = dict[str, Callable[..., Any]]

SIDES = {"assistant": "tools.py", "user": "user_tools.py"}
KINDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}


def load(path: str) -> Functions:
    module = types.ModuleType(os.path.basename(path)[:-3])
    with open(path, encoding="utf-8") as file:
        types.FunctionType(compile(file.read(), path, "exec"), module.__dict__)()
    found: Functions = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and not name.startswith("_") and value.__globals__ is module.__dict__:
            found[name] = value
    return found


def spec(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        kind = getattr(parameter.annotation, "__name__", str(parameter.annotation))
        properties[parameter.name] = {"type": KINDS.get(kind.partition("[")[0], "string")}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    schema = {"type": "object", "properties": properties, "required": required}
    about = inspect.getdoc(function)
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def merge(into: dict[str, Any], data: dict[str, Any]) -> None:
    for key, value in data.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def call(functions: Functions, database: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name not in functions:
        return {"ok": False, "value": "no such tool"}
    try:
        value = functions[name](database, **arguments)
        json.dumps(value)
        return {"ok": True, "value": value}
    except Exception as error:
        return {"ok": False, "value": str(error) or type(error).__name__}


def digest(database: Any) -> str:
    """Equal for databases that are equal as JSON, where 21.0 is 21; "" for one that is not JSON."""
    try:
        plain = json.loads(json.dumps(database), parse_float=number)
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    except (TypeError, ValueError, RecursionError):
        return ""


def number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def main(folder: str, database: Any) -> None:
    talk = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tools print is no answer
    sides: dict[str, Functions] = {}
    for side, name in SIDES.items():
        path = os.path.join(folder, name)
        sides[side] = load(path) if os.path.exists(path) else {}
    tools = {side: {n: f for n, f in functions.items() if f.__doc__} for side, functions in sides.items()}
    for line in sys.stdin:
        order = json.loads(line)
        kind: str = order["do"]
        answer: Any = None
        if kind == "tools":
            answer = {side: [spec(n, f) for n, f in functions.items()] for side, functions in tools.items()}
        elif kind == "merge":
            merge(database, order["data"])
        elif kind in ("call", "perform"):
            known = (tools if kind == "call" else sides)[order["side"]]
            answer = call(known, database, order["name"], order["arguments"])
        else:
            answer = digest(database)
        talk.write(json.dumps(answer) + "\n")
        talk.flush()
