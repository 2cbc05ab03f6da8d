"""Finds the files of installed packages, or of packages unpacked below given folders."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path


def of_module(module: str, names: Sequence[str], roots: Sequence[Path]) -> list[Path] | None:
    """Files of a Python package, without importing it."""
    folders = [root / module for root in roots]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    folders += [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]
    return next((_all(folder, names) for folder in folders if _all(folder, names)), None)


def of_system(names: Sequence[str], roots: Sequence[Path]) -> list[Path] | None:
    """Files below the root of the system; names may be patterns, of which the last match is taken."""
    return next((_all(root, names) for root in (*roots, Path("/")) if _all(root, names)), None)


def _all(folder: Path, names: Sequence[str]) -> list[Path] | None:
    found = [sorted(folder.glob(name)) for name in names]
    return [paths[-1] for paths in found] if all(found) else None
