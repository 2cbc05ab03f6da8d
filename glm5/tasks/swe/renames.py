"""Kind `refactor`: what a state of Python modules lacks only because it has another name or file there."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

Key = tuple[str, str]
"""Path of a module, and a name in it: "function", "Class" or "Class.method"."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Bindings = dict[Key, ast.stmt]
NAMES = {"name", "id", "attr", "names"}  # fields of nodes that hold the name of something that can be renamed
LEFT_OUT = {"annotation", "returns", "ctx", "type_comment", "type_ignores", "kind"}


def renamed(old: Mapping[str, str | None], new: Mapping[str, str | None]) -> tuple[Key, ...]:
    """The public functions and classes that `new` has and `old` lacks, if `old` has each of them under another name or
    in another file with an equal body, and nothing else differs in the public surface. Otherwise ().

    Both map paths to texts, or None for an absent file; files that `old` does not name are equal in both. The public
    surface are the names that a module or a class defines or assigns, signatures
    and base classes. Bodies are equal if they differ only in the names that were renamed; docstrings and annotations
    do not count. If the old name is still defined in `new`, its body must use the new one.
    """
    try:
        before, after = _bindings(old), _bindings({path: new[path] for path in old})
        missing = _only(after, before)
        if not missing or not all(isinstance(after[key], Definition) for key in missing):
            return ()
        pairs, names = _paired(missing, before, after)
        left = {key for key in before if _public(key) and not any(_inside(key, other) for other in pairs.values())}
        same = all(_surface(before[key], names) == _surface(after[key], {}) for key in left & after.keys())
        gone = left.intersection(_only(before, after))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(missing) if same and not gone and pairs.keys() == set(missing) else ()


def _bindings(modules: Mapping[str, str | None]) -> Bindings:
    trees = {path: ast.parse(text or "") for path, text in modules.items()}
    return {(path, name): node for path, tree in trees.items() for name, node in _bound(tree.body, "")}


def _bound(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    """Every name that a module or a class binds by a definition, an assignment or an import."""
    for node in body:
        if isinstance(node, Definition):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _bound(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield prefix + part.id, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield prefix + (alias.asname or alias.name.split(".")[0]), node
        else:
            for part in (node, *getattr(node, "handlers", ())):
                for field in ("body", "orelse", "finalbody"):
                    yield from _bound(getattr(part, field, ()), prefix)


def _public(key: Key) -> bool:
    """Whether callers may use a name; special methods count."""
    first, *rest = key[1].split(".")
    special = (name for name in rest if not (name.startswith("__") and name.endswith("__")))
    return not any(name.startswith("_") for name in (first, *special))


def _inside(key: Key, other: Key) -> bool:
    """Whether a name is another one, or belongs to it."""
    return key[0] == other[0] and f"{key[1]}.".startswith(f"{other[1]}.")


def _only(here: Bindings, there: Bindings) -> list[Key]:
    """Public names that only `here` defines or assigns, without those inside of a class that only `here` has."""
    found = (key for key, node in here.items() if not isinstance(node, ast.Import | ast.ImportFrom))
    found = (key for key in found if key not in there and _public(key))
    owners = ((key, (key[0], key[1].rpartition(".")[0])) for key in found)
    return sorted(key for key, owner in owners if not owner[1] or isinstance(there.get(owner), ast.ClassDef))


def _paired(missing: Sequence[Key], before: Bindings, after: Bindings) -> tuple[dict[Key, Key], dict[str, str]]:
    """The counterpart of each missing name that has one, and the new name of each old one. A body may use others that
    were renamed, so this goes on until no more are found."""
    free = [key for key, node in before.items() if isinstance(node, Definition)]
    shapes = {key: _plain(before[key], None) for key in free}
    pairs, names = dict[Key, Key](), dict[str, str]()
    found = True
    while found:
        found = False
        for key in (key for key in missing if key not in pairs):
            shape, new = _plain(after[key], None), key[1].rpartition(".")[2]
            for other in (other for other in free if shapes[other] == shape and other not in pairs.values()):
                tried = names | {other[1].rpartition(".")[2]: new}
                body = _plain(before[other], tried)
                if body == _plain(after[key], {}) and _gives_way(before[other], after.get(other), new):
                    pairs[key], names, found = other, tried, True
                    break
    return pairs, names


def _gives_way(old: ast.stmt, now: ast.stmt | None, new: str) -> bool:
    """Whether what still has the old name, if anything, is no definition, or another one that uses the new name."""
    if not isinstance(now, Definition):
        return True
    uses = (new in (getattr(part, "id", None), getattr(part, "attr", None)) for part in ast.walk(now))
    return _plain(old, {}) != _plain(now, {}) and any(uses)


def _surface(node: ast.stmt, names: Mapping[str, str]) -> object:
    """What callers see of a binding besides its name."""
    if isinstance(node, ast.ClassDef):
        return _plain(node.bases, names)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return type(node).__name__, _plain(node.args, names)
    return None


def _plain(value: object, names: Mapping[str, str] | None, field: str = "") -> object:
    """A part of a syntax tree as nested tuples, with the names replaced, or left out if `names` is None."""
    if isinstance(value, list):
        return tuple(_plain(item, names, field) for item in value)
    if isinstance(value, str) and field in NAMES:
        return None if names is None else names.get(value, value)
    if isinstance(value, ast.Constant):
        return type(value.value).__name__, repr(value.value)
    if not isinstance(value, ast.AST):
        return value
    parts = {name: inner for name, inner in ast.iter_fields(value) if name not in LEFT_OUT}
    if isinstance(value, Definition) and ast.get_docstring(value, clean=False) is not None:
        parts["body"] = value.body[1:]
    return (type(value).__name__, *(_plain(inner, names, name) for name, inner in parts.items()))
