"""What the command line answers before it loads torch: help, versions, and mistakes on the command line itself."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glm5 import __version__
from glm5.cli import app, main
from glm5.cli.options import show
from glm5.errors import DataError

ROOT = Path(__file__).parents[1]
VERBS = sorted(command.name or command.callback.__name__ for command in app.registered_commands)
GROUPS = {group.name: group.typer_instance for group in app.registered_groups}
SPOKEN = [(verb,) for verb in VERBS] + [
    (name, command.name or command.callback.__name__)
    for name, group in GROUPS.items()
    for command in group.registered_commands
]
# Runs command lines, each in a fork. Torch is made unimportable, so that loading it is an error and not a matter of
# seconds.
SERVER = f"""
import functools, gc, json, os, sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules["torch"] = None
sys.argv[0] = "glm5"
import typer.main
from glm5.cli import app, main
from glm5.config import recipe
from tests.fork_server import run_and_end
commands = typer.main.get_command(app)  # once for all
gc.freeze()
for line in sys.stdin:
    arguments, *streams = json.loads(line)
    child = os.fork()
    if not child:
        for place, name in enumerate(streams, start=1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), place)
        sys.argv[1:] = arguments
        run_and_end(functools.partial(main, commands))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Glm5 = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def glm5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Glm5]:
    """Run a command line."""
    folder, count = tmp_path_factory.mktemp("said"), itertools.count()
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        watchdog = threading.Timer(300, server.kill)
        watchdog.start()

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            said = [folder / f"{next(count)}" for _ in range(2)]
            print(json.dumps([arguments, *map(str, said)]), file=server.stdin, flush=True)
            code = int(server.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, *(one.read_text(encoding="utf-8") for one in said))

        yield run
        watchdog.cancel()
        server.stdin.close()
        assert server.wait(60) == 0


def test_help_lists_every_verb(glm5: Glm5) -> None:
    for arguments in ((), ("--help",)):
        done = glm5(*arguments)
        assert done.returncode == 0 and not done.stderr
        listed = {line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line.strip()}
        assert listed >= {*VERBS, *GROUPS}
    assert {"train", "sft", "rl", "pipeline", "serve", "eval"} <= set(VERBS)


@pytest.mark.parametrize("verb", SPOKEN, ids=" ".join)
def test_help_of_every_verb(glm5: Glm5, verb: tuple[str, ...]) -> None:
    done = glm5(*verb, "--help")
    assert done.returncode == 0 and not done.stderr
    usage, _, text = done.stdout.strip().partition("\n")
    assert usage.startswith(f"Usage: glm5 {' '.join(verb)}")
    assert text.strip() and not text.strip().startswith("Options:")  # it says what the verb does


def test_version(glm5: Glm5) -> None:
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
        (["serve", "m", "--port", "99999"], ["--port", "65535"]),
        (["gateway", "m", "--port", "-1"], ["--port", " 0"]),
    ],
    ids=" ".join,
)
def test_usage_errors(glm5: Glm5, arguments: list[str], words: list[str]) -> None:
    fails(glm5, arguments, 2, words)


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
        (["task", "build", "search", "--out", "README.md"], ["README.md: a folder is needed"]),
    ],
    ids=" ".join,
)
def test_other_errors(glm5: Glm5, arguments: list[str], words: list[str]) -> None:
    fails(glm5, arguments, 1, words)


def fails(glm5: Glm5, arguments: list[str], code: int, words: list[str]) -> None:
    done = glm5(*arguments)
    lines = done.stderr.strip().splitlines()
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert 1 <= len(lines) <= 3 and lines[0].startswith("Error: "), done.stderr
    assert [word for word in words if word not in done.stderr] == [], done.stderr


def test_old_names_of_options_warn(glm5: Glm5) -> None:
    done = glm5("adapt", "nowhere", "--data", "none", "--out", "none", "--no-twin")
    assert done.returncode == 1 and done.stderr.startswith("warning: --twin is now --baseline")


def test_processes_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """It may be a download or a clone, with a json.py of its own."""
    (tmp_path / "json.py").write_text("raise SystemExit(77)")
    child = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'import json']).returncode)"
    for start, code in (("", 77), ("from glm5 import process; process.tune(); ", 0)):
        command = [sys.executable, "-P", "-c", start + child]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("PYTHONSAFEPATH", None)
        assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == code


def test_json_is_the_only_thing_on_stdout(glm5: Glm5) -> None:
    done = glm5("size", "nano", "--json")
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith("{") and done.stdout.endswith("}\n") and done.stdout.count("\n") == 1


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"( sleep 0.2; {sys.executable} -m glm5 size nano; echo ended with $? >&2 ) | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "ended with 1\n"


def test_a_plan_that_does_not_fit_fails(glm5: Glm5) -> None:
    done = glm5("plan", "recipes/eight-gpu.toml", "--gpus", "8", "--json", "--set", "stages.pretrain.micro_rows=32")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["fits"] and found["assumed"] == {"mfu": 0.15, "reserved": 0.1}
    done = glm5("plan", "recipes/eight-gpu.toml", "--device", "h10")
    assert done.returncode == 2 and 'did you mean "h100"?' in done.stderr and len(done.stderr.splitlines()) == 1


def test_nothing_that_a_task_or_a_model_says_controls_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts, reasons and errors hold what programs of a room have written."""

    def failing(**_: object) -> None:
        raise DataError("RUN said \x1b]0;title\x07 \u202e")

    monkeypatch.setattr(sys, "argv", ["glm5", "task"])
    show({"verifier_output": "\x1b[2Jclean\r\n\tagain"}, False)
    with pytest.raises(SystemExit):
        main(failing)
    out, err = capsys.readouterr()
    assert "clean" in out and "\tagain" in out and "RUN said" in err
    assert not set("\x1b\x07\r\u202e") & set(out + err)
