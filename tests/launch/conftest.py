"""One tiny run of every stage that the tests of this folder share, and ways to call the command line."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer.main

from glm5 import cli
from glm5.data.sources import Document
from tests.forks import COMMAND_LINE, Forks, Program

ROOT = Path(__file__).parents[2]

# A level of arithmetic without thinking is learnt far enough in a few steps that some rollouts earn a reward; without
# any, all policy gradients would be zero and no test of the RL stages could see a difference.
EASY = '[{name = "arithmetic", options = {levels = [1], thinking = false}}]'

RECIPE = """
extends = "{smoke}"
name = "tiny"
runs = "{runs}"

[evaluation]
problems = 2
max_tokens = 4
max_turns = 2
text_bytes = 600
needle_bytes = [64]
needle_problems = 2
mtp_prompts = 2
mtp_tokens = 4

[[stages]]
name = "tokenizer"
sources = ["{corpus}"]
vocab_size = 400
{training}
[[stages]]
name = "sft"
rows = 4
row_length = 128
conversations = 2000
optim = {{ steps = 24, warmup = 2, final_lr = 6e-3, save_every = 7 }}

[[stages]]
name = "reasoning-rl"
prompts = 8
group = 16
max_tokens = 6
optim = {{ steps = 2, save_every = 1 }}

[[stages]]
name = "agentic-rl"
prompts = 4
group = 16
max_tokens = 6
max_turns = 2
concurrency = 24
train_ticks = 3
optim = {{ steps = 3 }}

[[stages]]
name = "general-rl"
prompts = 2
group = 2
max_tokens = 8
reward_model = {{ pairs = 2, held_out_pairs = 2, optim = {{ steps = 2 }} }}
optim = {{ steps = 2, save_every = 1 }}

[[stages]]
name = "distill"
prompts = 4
max_tokens = 8
max_turns = 2
optim = {{ steps = 2, save_every = 1 }}
"""

TRAINING = """
[[stages]]
name = "{name}"
rows = 2
row_length = 128
optim = {{ steps = {steps}, save_every = {every} }}
"""

COMMANDS = typer.main.get_command(cli.app)  # made once: it takes longer than many commands
SETS = [f"stages.{stage}.families={EASY}" for stage in ("sft", "reasoning-rl", "agentic-rl")]


@dataclass(frozen=True)
class Result:
    """How a command ended. `error` is what it said on stderr apart from progress lines."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.strip() and not line.startswith("[")]

    def check_failure(self, code: int, words: Sequence[str]) -> None:
        """It ended with `code` and said why in at most three lines that hold all `words`, without a traceback."""
        assert self.code == code, self.err
        assert "Traceback" not in self.err
        assert 1 <= len(self.error) <= 3 and self.error[0].startswith("Error: "), self.err
        text = "\n".join(self.error)
        assert [word for word in words if word not in text] == [], text

    def json(self) -> dict[str, Any]:
        """The only object on stdout."""
        parsed = json.loads(self.out)
        assert isinstance(parsed, dict)
        return parsed


class Shell:
    """Ways to call the command line."""

    def __init__(self, forks: Forks) -> None:
        self.forks = forks

    @staticmethod
    def _arguments(parts: Sequence[object], sets: Sequence[str]) -> list[str]:
        return [str(part) for part in parts] + [text for override in sets for text in ("--set", override)]

    def invoke(self, *parts: object, sets: Sequence[str] = ()) -> Result:
        """Run a command in this process, which saves the seconds that torch takes to load."""
        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            mock.patch.object(sys, "argv", ["glm5", *self._arguments(parts, sets)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                cli.main(COMMANDS)
            except SystemExit as end:
                code = int(end.code or 0)
        return Result(code, out.getvalue(), err.getvalue())

    @contextlib.contextmanager
    def start(self, *parts: object, sets: Sequence[str] = ()) -> Iterator[Program]:
        """A command as a process group of its own, as an interactive shell starts it; killed at the end."""
        process = self.forks(COMMAND_LINE, *self._arguments(parts, sets), cwd=ROOT, stderr=subprocess.PIPE)
        try:
            yield process
        finally:
            process.kill()

    def run(self, *parts: object, sets: Sequence[str] = (), timeout: float = 300) -> Result:
        """Run a command as a process."""
        with self.start(*parts, sets=sets) as process:
            out, err = process.communicate(timeout)
        return Result(process.wait(0), out, err)

    def fails(self, code: int, words: Sequence[str], *parts: object, sets: Sequence[str] = ()) -> None:
        """Run a command that must fail; see `Result.check_failure`."""
        self.invoke(*parts, sets=sets).check_failure(code, words)


@dataclass(frozen=True)
class TinyRun:
    """A finished run of every stage."""

    recipe: Path
    corpus: Path
    run: Path
    sets: Sequence[str] = tuple(SETS)

    def results(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run / "results.json").read_text(encoding="utf-8"))
        return loaded

    def model(self, stage: str) -> Path:
        (folder,) = self.run.glob(f"*-{stage}")
        return folder / "model"

    def one_more(self, folder: Path, start: str, stages: str, name: str = "one") -> Path:
        """A recipe of other `stages` that begins with the checkpoint of stage `start`; its run is `folder / name`."""
        path = folder / f"{name}.toml"
        head = f'name = "{name}"\nruns = "{folder}"\nstart = "{self.model(start)}"\ndata = "{self.data}"\n'
        path.write_text(head + stages, encoding="utf-8")
        return path

    def again(self, folder: Path) -> Path:
        """The same recipe, to be run below another folder."""
        return write_recipe(folder / "tiny.toml", self.corpus)

    @property
    def final(self) -> Path:
        return self.run / "final"

    @property
    def data(self) -> Path:
        return self.run / "00-tokenizer" / "data"


def write_corpus(folder: Path) -> None:
    """Some files of the standard library, of which one is held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("abc", "bisect", "calendar", "cmd", "contextlib", "csv", "functools", "heapq", "queue", "textwrap"):
        (folder / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    held_out = next(name for i in range(10_000) if Document(name := f"keyword{i}.py", "").held_out)
    (folder / held_out).write_bytes((library / "keyword.py").read_bytes())


def write_recipe(path: Path, corpus: Path) -> Path:
    steps = [("pretrain", 3, 2), ("extend", 2, 1), ("dsa-warmup", 2, 1), ("dsa-sparse", 2, 1)]
    training = "".join(TRAINING.format(name=name, steps=count, every=every) for name, count, every in steps)
    smoke, runs = ROOT / "recipes" / "smoke.toml", path.parent / "runs"
    path.write_text(RECIPE.format(smoke=smoke, runs=runs, corpus=corpus, training=training), encoding="utf-8")
    return path


@contextlib.contextmanager
def only_once(folder: Path) -> Iterator[bool]:
    """Whether the caller is the first of all worker processes; the others wait until the first one is through."""
    folder.mkdir(exist_ok=True)
    done = folder / "done"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not done.exists()
        done.touch()


@pytest.fixture(scope="session")
def shell(forks: Forks) -> Shell:
    return Shell(forks)


@pytest.fixture(scope="session")
def tiny(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """`glm5 pipeline` over all stage kinds, as a process. Read only: tests that change something take a copy."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    with only_once(folder) as first:
        if first:
            write_corpus(folder / "corpus")
            recipe = write_recipe(folder / "tiny.toml", folder / "corpus")
            done = shell.run("pipeline", recipe, sets=SETS)
            assert done.code == 0, done.err
            (folder / "stdout.txt").write_text(done.out, encoding="utf-8")
    return TinyRun(folder / "tiny.toml", folder / "corpus", folder / "runs" / "tiny")


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the page of a run out; drawing takes longer than the short runs here, and the shared run has one."""
    monkeypatch.setattr("glm5.report.build_report", lambda folder: folder / "report.html")


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`with interrupt_at(owner, name, when)`: Ctrl-C at the call of `owner.name` for which `when(*args)` is true."""

    @contextlib.contextmanager
    def interrupting(owner: Any, name: str, when: Callable[..., bool] = lambda *args: True) -> Iterator[None]:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if when(*args):
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrapped)
            yield

    return interrupting
