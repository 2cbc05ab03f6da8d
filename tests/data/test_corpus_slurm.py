"""Scripts for Slurm: what a recipe or a folder is called runs nothing, and a stage is one array."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("datatrove")

from glm5.data.corpus import slurm
from glm5.data.corpus.stages import Stage
from glm5.errors import ConfigError, DataError

OPTIONS = {"partition": "cpu", "time": "1:00:00"}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sbatch that keeps its scripts, squeue that fails twice and then knows no job."""
    here = tmp_path / "bin"
    here.mkdir()
    texts = {
        "sbatch": f'cp "${{@: -1}}" {here}/script; echo x >> {here}/submitted; echo Submitted batch job 7',
        "squeue": f"echo x >> {here}/asked; [ $(wc -l < {here}/asked) -gt 2 ] || {{ echo down >&2; exit 1; }}",
        "scancel": f"echo $1 >> {here}/cancelled",
    }
    for name, text in texts.items():
        (here / name).write_text(f"#!/bin/bash\n{text}\n")
        (here / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "_POLL", 0.01)
    monkeypatch.setattr(slurm, "_LAG", 0.0)
    return here


def test_a_name_runs_nothing_and_many_parts_are_one_array(programs: Path, tmp_path: Path) -> None:
    name = f'a\n$(touch {tmp_path}/ran)`touch {tmp_path}/ran`"; touch {tmp_path}/ran; "'
    slurm.run_stage(Stage("read", [], 2500), name, 64, tmp_path / "logs", OPTIONS)
    text = (programs / "script").read_text()
    assert (programs / "submitted").read_text() == "x\n" and "#SBATCH --array=0-833%64" in text
    echo = next(line for line in text.splitlines() if line.startswith("echo"))
    subprocess.run(["bash", "-c", echo], check=True, capture_output=True)
    assert not (tmp_path / "ran").exists()
    assert not (programs / "cancelled").exists()  # squeue failed for a moment


def test_jobs_are_cancelled_when_squeue_never_answers(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_SILENT", 1)
    with pytest.raises(DataError, match="squeue does not answer: down"):
        slurm.run_stage(Stage("read", [], 2), "test", None, tmp_path / "logs", OPTIONS)
    assert (programs / "cancelled").read_text() == "7\n"


@pytest.mark.parametrize(
    ("options", "folder", "match"),
    [
        ({"account": "a\nrm -rf x"}, "out", "in one line"),
        ({"array": "0-3"}, "out", "the parts set `array`"),
        ({"--x": "1"}, "out", "an option of sbatch"),
        ({}, "my $(corpus)", "choose ASCII letters"),
    ],
)
@pytest.mark.usefixtures("programs")
def test_what_a_script_cannot_say_is_refused(options: dict[str, str], folder: str, match: str) -> None:
    slurm.check_slurm(OPTIONS, Path("/data/out-1.0"))
    with pytest.raises(ConfigError, match=match):
        slurm.check_slurm({**OPTIONS, **options}, Path("/data") / folder)
