"""Manifests of Rust crates that need no other crate."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from glm5.errors import DataError


def simplify(root: Path) -> None:
    """Write `Cargo.toml` without optional and test dependencies, which cargo would look for even if nothing uses them,
    and without the features that need them. Raises DataError if the crate has dependencies that are not optional, or
    takes its edition from a workspace."""
    path = root / "Cargo.toml"
    data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    needed = [
        name
        for name, row in data.get("dependencies", {}).items()
        if not (isinstance(row, dict) and row.get("optional"))
    ]
    if needed:
        raise DataError(f"{path}: needs {', '.join(sorted(needed))}.")
    package = data["package"]
    if any(isinstance(package.get(key), dict) for key in ("version", "edition")):
        raise DataError(f"{path}: is a part of a workspace.")
    lines = ["[package]"]
    for key in ("name", "version", "edition", "license", "build", "links"):
        if key in package and not isinstance(package[key], dict):
            lines.append(f"{key} = {json.dumps(package[key])}")
    lines += ["", "[lib]"] + [
        f"{key} = {json.dumps(data['lib'][key])}"
        for key in ("name", "path", "proc-macro")
        if key in data.get("lib", {})
    ]
    features = data.get("features", {})
    lines += ["", "[features]"] + [
        f"{json.dumps(name)} = {json.dumps([part for part in parts if part in features])}"
        for name, parts in features.items()
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name in ("Cargo.lock", "Cargo.toml.orig"):
        (root / name).unlink(missing_ok=True)
