"""What a run notes about its place."""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import platform
from pathlib import Path

import pytest

from glm5.obs.environment import describe, write_environment


def test_versions_and_job_are_noted_and_nothing_personal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    write_environment(tmp_path / "run")
    [path] = (tmp_path / "run").iterdir()
    noted = json.loads(path.read_text())
    assert path.name == "environment.json"
    assert noted["torch"] == importlib.metadata.version("torch") and noted["python"] == platform.python_version()
    assert noted["processes"] == 4 and noted["cores"] >= 1
    text = path.read_text()
    assert platform.node() not in text and str(tmp_path) not in text
    assert f'"{getpass.getuser()}"' not in text


def test_what_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError("no /proc")))
    monkeypatch.setenv("WORLD_SIZE", "many")
    found = describe()
    assert "torch" not in found and found["processes"] == 1 and found["processor"]
