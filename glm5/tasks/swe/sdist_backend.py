"""A build backend that tells pip the metadata which a source distribution carries, for `pip download`, which else runs
the package's own backend. Standard library only: pip runs it in a process without glm5, under the backend's name."""

from __future__ import annotations

import email
import os
import re
import sys
from pathlib import Path
from typing import Any

NAMES = (
    "setuptools.build_meta", "hatchling.build", "flit_core.buildapi", "flit.buildapi", "flit_scm.buildapi",
    "poetry.core.masonry.api", "poetry_dynamic_versioning.backend", "pdm.backend", "pdm.pep517.api", "uv_build",
)  # fmt: skip
"""The backends that it stands in for."""

__legacy__ = sys.modules[__name__]  # setuptools' name for a package without pyproject.toml


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(folder: str, config_settings: Any = None) -> str:
    """Called by pip in the folder of the source distribution."""
    data = Path("PKG-INFO").read_bytes()
    head = email.message_from_bytes(data)
    name = re.sub(r"[-_.]+", "_", str(head["Name"])) + f"-{head['Version']}.dist-info"
    os.makedirs(os.path.join(folder, name))
    Path(folder, name, "METADATA").write_bytes(data)
    return name


def lay_out(folder: Path) -> Path:
    """`folder` as a place to import every name of NAMES from."""
    for name in NAMES:
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Path(__file__).read_bytes())
        for package in path.relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()
    return folder
