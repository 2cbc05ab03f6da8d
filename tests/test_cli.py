"""What the command line answers before it loads torch: help, versions, and mistakes on the command line itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from glm5 import __version__
from glm5.cli import app

ROOT = Path(__file__).parents[1]
VERBS = sorted(command.name or command.callback.__name__ for command in app.registered_commands)
GROUPS = {group.name: group.typer_instance for group in app.registered_groups}
SPOKEN = [(verb,) for verb in VERBS] + [
    (name, command.name or command.callback.__name__)
    for name, group in GROUPS.items()
    for command in group.registered_commands
]
# Starts the command line with torch made unimportable, so that loading it is an error and not a matter of seconds.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'glm5'; from glm5.cli import main; main()"


def glm5(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_help_lists_every_verb() -> None:
    for arguments in ((), ("--help",)):
        done = glm5(*arguments)
        assert done.returncode == 0 and not done.stderr
        listed = {line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line.strip()}
        assert listed >= {*VERBS, *GROUPS}
    assert {"train", "sft", "rl", "pipeline", "serve", "eval"} <= set(VERBS)


@pytest.mark.parametrize("verb", SPOKEN, ids=" ".join)
def test_help_of_every_verb(verb: tuple[str, ...]) -> None:
    done = glm5(*verb, "--help")
    assert done.returncode == 0 and not done.stderr
    usage, _, text = done.stdout.strip().partition("\n")
    assert usage.startswith(f"Usage: glm5 {' '.join(verb)}")
    assert text.strip() and not text.strip().startswith("Options:")  # it says what the verb does


def test_version() -> None:
    assert glm5("version").stdout == f"{__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pipelin"], ["pipelin", "--help"]),
        (["tokenizer"], ["Missing command", "glm5 tokenizer --help"]),
        (["tokenizer", "tain"], ["tain"]),
        (["pipeline"], ["recipe", "glm5 pipeline --help"]),
        (["size", "nano", "--contxt", "5"], ["--contxt", "--context"]),
        (["size", "nano", "--context", "many"], ["--context", "integer"]),
        (["adapt", "m", "--data", "d", "--out", "o", "--steps", "0"], ["--steps"]),
        (["init", "nano"], ["--out"]),
        (["pipeline", "recipes/smoke.toml", "--set", "seed"], ["--set seed", "key.subkey=value"]),
        (["pipeline", "recipes/smoke.toml", "--set", "stages.sftt.rows=1"], ["sftt", "sft"]),
        (["train", "recipes/smoke.toml"], ["sft", "glm5 pipeline"]),
    ],
    ids=" ".join,
)
def test_usage_errors(arguments: list[str], words: list[str]) -> None:
    fails(arguments, 2, words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["size", "nanoo"], ["nanoo", '"nano"']),
        (["size", "/nowhere"], ["/nowhere"]),
        (["pipeline", "nowhere.toml"], ["nowhere.toml"]),
        (["pipeline", "recipes"], ["recipes"]),
        (["pipeline", "recipes/smoke.toml", "--set", "sed=1"], ["--set sed=1", '"seed"']),
        (
            ["pipeline", "recipes/smoke.toml", "--set", "stages.sft.optim.stepps=1"],
            ["stages.sft.optim.stepps", '"steps"'],
        ),
        (["pipeline", "recipes/smoke.toml", "--set", "seed=1.5"], ["seed is 1.5", "integer"]),
        (["pipeline", "recipes/smoke.toml", "--set", "stages.sft.kind=sfft"], ["stages.sft", "sfft"]),
        (["pipeline", "recipes/smoke.toml", "--set", "stages.sft.name=pretrain"], ["pretrain"]),
        (["pipeline", "recipes/smoke.toml", "--set", "stages.sft.name=../x"], ["../x"]),
        (
            ["pipeline", "recipes/smoke.toml", "--set", "stages.distill.teachers.general=ttt"],
            ["general", "ttt", "earlier"],
        ),
        (["report", "/nowhere"], ["/nowhere"]),
    ],
    ids=" ".join,
)
def test_other_errors(arguments: list[str], words: list[str]) -> None:
    fails(arguments, 1, words)


def fails(arguments: list[str], code: int, words: list[str]) -> None:
    done = glm5(*arguments)
    lines = done.stderr.strip().splitlines()
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert 1 <= len(lines) <= 3 and lines[0].startswith("Error: "), done.stderr
    assert [word for word in words if word not in done.stderr] == [], done.stderr


def test_json_is_the_only_thing_on_stdout() -> None:
    done = glm5("size", "nano", "--json")
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith("{") and done.stdout.endswith("}\n") and done.stdout.count("\n") == 1


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"( sleep 0.2; {sys.executable} -m glm5 size nano; echo ended with $? >&2 ) | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "ended with 1\n"
