"""Parametric seeds of terminal tasks: a function of a seeded generator gives a `Draft`, which becomes a task folder.

A check is an ordinary function whose source goes into the task's tests; it may use its argument and what it imports
itself. What it compares with is either in `data`, which lies beside it, or recomputed: never in the environment.
"""

from __future__ import annotations

import inspect
import json
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.errors import ConfigError
from glm5.sandbox.dockerfile_build import File
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.harbor.schema import Agent, Environment, TaskConfig, TaskInfo, Verifier
from glm5.tasks.terminal import harness
from glm5.tasks.terminal.harness import Tests

_DOCKERFILE = """\
FROM ubuntu:24.04
RUN apt-get update && apt-get install -y --no-install-recommends {packages} && rm -rf /var/lib/apt/lists/*
WORKDIR /app
{copies}"""
_TEST = "#!/bin/bash\nexec python3 -I -S /tests/check.py\n"
_SETUP = "COPY setup.sh /tmp/setup.sh\nRUN bash -e /tmp/setup.sh && rm /tmp/setup.sh\n"


@dataclass(frozen=True)
class Draft:
    """A task before it is a folder. `files` are those of the environment by absolute path; `setup` is a bash script
    that runs over them when the image is made; `data` is any JSON. Without a check, `data` are the wanted contents of
    files by path (`harness.outputs`)."""

    instruction: str
    solution: str
    check: Callable[[Tests], None] = harness.outputs
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    data: Any = None
    setup: str = ""
    packages: tuple[str, ...] = ()


Make = Callable[[random.Random], Draft]


@dataclass(frozen=True)
class Seed:
    """A kind of task: `field` is what it is about, `level` 1 (minutes for a person) to 3."""

    name: str
    field: str
    level: int
    make: Make

    def task(self, seed: int) -> TaskFolder:
        """Task number `seed` of this kind; the same on every machine."""
        rng = random.Random(f"terminal/{self.name}/{seed}")
        return folder_of(self, seed, self.make(rng))


SEEDS: dict[str, Seed] = {}


def python(code: str, cwd: str = "/app") -> str:
    """A solution in Python."""
    return f"\ncd {cwd}\npython3 - <<'END'\n{textwrap.dedent(code).lstrip()}END\n"


def seed(about: str, level: int = 1) -> Callable[[Make], Make]:
    """Register a seed under the name of its function."""

    def register(make: Make) -> Make:
        if make.__name__ in SEEDS:
            raise ConfigError(f"two terminal seeds are called {make.__name__}.")
        SEEDS[make.__name__] = Seed(make.__name__, about, level, make)
        return make

    return register


def dockerfile(packages: Sequence[str], files: bool, setup: bool) -> str:
    """The image of a task; `files` and `setup` say whether it has files/ and setup.sh."""
    names = " ".join(sorted({"bash", "coreutils", "python3", *packages}))
    return _DOCKERFILE.format(packages=names, copies=("COPY files/ /\n" if files else "") + (_SETUP if setup else ""))


def config_of(name: str, field: str, about: dict[str, Any]) -> TaskConfig:
    """The task.toml of a terminal task; `about` is its metadata."""
    return TaskConfig(
        schema_version="1.4",
        task=TaskInfo(name=f"glm5/{name}", keywords=["terminal", field]),
        metadata=about,
        agent=Agent(timeout_sec=900.0),
        verifier=Verifier(timeout_sec=120.0),
        environment=Environment(memory_mb=1024, storage_mb=256, network_mode="no-network", workdir="/app"),
    )


def folder_of(kind: Seed, number: int, draft: Draft) -> TaskFolder:
    """The Harbor folder of a draft."""
    environment = {f"files{path}": _file(data) for path, data in draft.files.items()}
    if draft.setup:
        environment["setup.sh"] = File(draft.setup.encode())
    environment["Dockerfile"] = File(dockerfile(draft.packages, bool(draft.files), bool(draft.setup)).encode())
    source = "" if draft.check is harness.outputs else textwrap.dedent(inspect.getsource(draft.check))
    script = f"{inspect.getsource(harness)}\n\n{source}\n\nmain({draft.check.__name__})\n"
    tests = {
        "test.sh": File(_TEST.encode(), executable=True),
        "check.py": File(script.encode()),
        "data.json": File(json.dumps(draft.data).encode()),
    }
    name = kind.name.replace("_", "-")
    about = {"seed": kind.name, "number": number, "field": kind.field, "level": kind.level}
    config = config_of(f"terminal-{name}-{number}", kind.field, about)
    solution = {"solve.sh": File(b"#!/bin/bash\nset -e\n" + textwrap.dedent(draft.solution).encode(), executable=True)}
    instruction = textwrap.dedent(draft.instruction).strip() + "\n"
    return TaskFolder(
        str(config.task.name if config.task else name), config, instruction, environment, tests, solution, {}
    )


def _file(data: str | bytes) -> File:
    raw = data.encode() if isinstance(data, str) else data
    return File(raw, executable=raw.startswith(b"#!"))
