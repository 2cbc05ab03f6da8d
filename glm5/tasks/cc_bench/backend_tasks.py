"""Backend tasks: small services in six languages with hidden unit tests, as Harbor folders (§6.2, App. B.4).

A task gives the program that reads commands, and asks for the service that answers them. The tests build the program
and compare its answers with those that the Python service gives; there is one correct service per language.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from glm5.errors import ConfigError, nearest
from glm5.sandbox.dockerfile_build import File
from glm5.tasks.cc_bench.backend_services import SERVICES, TEXTS, cases_of, source
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.terminal.harness import Tests
from glm5.tasks.terminal.seed import Draft, Seed, folder_of

NUMBERS = 2
"""Tasks of each service and language."""


@dataclass(frozen=True)
class Language:
    """`main` is given, `service` is written; `build` makes the program, `run` starts it; `packages` are Debian's."""

    name: str
    main: str
    service: str
    build: str
    run: str
    packages: tuple[str, ...]
    form: str


LANGUAGES = {
    one.name: one
    for one in (
        Language(
            "python",
            "main.py",
            "service.py",
            "true",
            "python3 main.py",
            ("python3",),
            "a class Service with a method answer(command: list[str]) -> str",
        ),
        Language(
            "go",
            "main.go",
            "service.go",
            "export HOME=/tmp; test -f go.mod || go mod init service; go build -o /tmp/program .",
            "/tmp/program",
            ("golang-go",),
            "a function NewService() and a method Answer(command []string) string on what it returns",
        ),
        Language(
            "cpp",
            "main.cpp",
            "service.hpp",
            "g++ -std=c++17 -O1 -o /tmp/program main.cpp",
            "/tmp/program",
            ("g++",),
            "a class Service with std::string answer(const std::vector<std::string>& command)",
        ),
        Language(
            "rust",
            "main.rs",
            "service.rs",
            "rustc --edition 2021 -o /tmp/program main.rs",
            "/tmp/program",
            ("rustc",),
            "a pub struct Service with new() and answer(&mut self, command: &[&str]) -> String",
        ),
        Language(
            "java",
            "Main.java",
            "Service.java",
            "javac -d /tmp/classes Main.java Service.java",
            "java -XX:+UseSerialGC -Xmx256m -cp /tmp/classes Main",
            ("default-jdk-headless",),
            "a class Service with String answer(String[] command)",
        ),
        Language(
            "typescript",
            "main.ts",
            "service.ts",
            "tsc --target es2020 --module commonjs --strict --outDir /tmp/js main.ts service.ts",
            "node /tmp/js/main.js",
            ("nodejs", "node-typescript"),
            "an exported class Service with answer(command: string[]): string",
        ),
    )
}

STATEMENT = """\
In /app there is a program in {language} that reads commands, one a line, and prints an answer to each. {main} is
complete. Write {service} with {form}; `command` are the words of a line. Use the standard library alone.

The service is {about}

Numbers are whole and well-formed. The program is built in /app with

    {build}

and run with `{run}`. It is judged by unit tests, all of which must pass."""


def check_service(t: Tests) -> None:
    """Build once, then run every unit test; named by the first that fails."""
    built = t.run(t.data["build"], seconds=90.0)
    t.true(built.code == 0, f"the build fails: {built.err[-300:]!r}")
    for name, commands, wanted in t.data["cases"]:
        done = t.run(t.data["run"], "".join(f"{one}\n" for one in commands).encode())
        t.true(done.code == 0, f'the program fails in the test "{name}"')
        t.true(done.text.splitlines() == wanted, f'the test "{name}" fails')


def backend_task(service: str, language: str, number: int) -> TaskFolder:
    """Task `number` of a service in a language; the same on every machine. Raises ConfigError for unknown names."""
    for name, known in ((service, SERVICES), (language, LANGUAGES)):
        if name not in known:
            raise ConfigError(f'backend: there is no "{name}"{nearest(name, known)}: {", ".join(known)}.')
    spoken = LANGUAGES[language]
    rng = random.Random(f"cc-bench backend/{service}/{number}")  # the same tests in every language
    values = SERVICES[service][1](rng)
    about = TEXTS[service].format(**values)
    statement = STATEMENT.format(
        about=about,
        language=language,
        main=spoken.main,
        service=spoken.service,
        form=spoken.form,
        build=spoken.build,
        run=spoken.run,
    )
    draft = Draft(
        statement,
        f"cp /solution/{spoken.service} /app/",
        check_service,
        {f"/app/{spoken.main}": source("skeleton", spoken.main, {})},
        {"build": f"cd /app; {spoken.build}", "run": spoken.run, "cases": cases_of(service, rng, values)},
        packages=spoken.packages,
    )
    task = folder_of(Seed(f"{service}_{language}", "backend", 2, lambda rng: draft), number, draft)
    solution = {**task.solution, spoken.service: File(source(service, spoken.service, values).encode())}
    return TaskFolder(
        task.name.replace("terminal", "backend"),
        task.config,
        task.instruction,
        task.environment,
        task.tests,
        solution,
        {},
    )


def backend_tasks(languages: Sequence[str] = ()) -> list[tuple[str, TaskFolder]]:
    """All tasks with the names of their folders, or those of some languages."""
    return [
        (f"{service}-{language}-{number}", backend_task(service, language, number))
        for number in range(NUMBERS)
        for service in SERVICES
        for language in languages or LANGUAGES
    ]
