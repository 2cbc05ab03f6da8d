"""Terminal tasks that a model writes, from ideas or from pages of text (§4.2).

An idea is the subject of hand-written seeds. A page must first be judged to hold a task. Then the model drafts the
task, constructs it (files, solution, check), and repairs it until it passes the check of every task folder and a model
finds nothing wrong by the rubric. Everything that the model writes is hostile: it runs in rooms only.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from glm5.errors import DataError
from glm5.files import exclusive, read_rows
from glm5.sandbox.dockerfile_build import File
from glm5.tasks.harbor.check import Report, check
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.terminal.build import digest
from glm5.tasks.terminal.seed import SEEDS, config_of, dockerfile

Ask = Callable[[str], str]
"""Sends one prompt to the model and returns the text of its answer."""
MOST_ANSWER, MOST_PAGE = 400_000, 24_000
"""Characters of an answer that are read, and of a page that is shown to the model."""
MOST_FILES = 64
ALIKE = 0.5
"""Share of common runs of three words from which two instructions count as the same task."""
PASS = 4
"""Smallest score of the rubric, of 5, with which a task is kept."""
RUBRIC = {
    "complete": "the instruction states everything that the check demands: paths, formats, names, limits",
    "open": "the check accepts every right way of doing it, and looks at results, not at commands",
    "strict": "the check refuses work that is half done or faked, for instance wanted output written by hand",
    "silent": "neither the instruction nor the files give the solution away",
    "real": "somebody who works on a terminal could want this, and it takes several steps",
}
_STYLE = """\
The task is done by an agent in bash in a fresh Ubuntu without a network. Its working folder is /app. It has bash,
coreutils, grep, sed, awk, python3 and what `packages` names."""
_FORM = """\
Answer with one JSON object with these keys:
"instruction": what the agent reads;
"files": an object from absolute path (below /app) to the text of a file that is there at the start;
"setup": a bash script that makes the rest of the start, run once in /app, or "";
"packages": names of Debian packages that the task needs besides, a list;
"solution": a bash script, run in /app, that does the task;
"check": a Python script (standard library only) that runs after the agent, in a separate room with its files: exit code
0 if the task is done and right, otherwise not 0. It must itself compute or contain what is right; what lies in /app may
have been changed by the agent, and must never be executed or imported without need.
The check must fail at the start and pass after the solution."""
_TEST = """\
#!/bin/bash
cd /app 2> /dev/null
if python3 -I -S /tests/check.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
Text = Annotated[str, StringConstraints(max_length=100_000)]


class _Form(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Fitness(_Form):
    """Whether a page holds a task."""

    fit: bool
    reason: Annotated[str, StringConstraints(max_length=2000)] = ""


class Plan(_Form):
    """The draft of a task."""

    title: Annotated[str, StringConstraints(min_length=3, max_length=200)]
    instruction: Annotated[str, StringConstraints(min_length=20, max_length=20_000)]
    outcome: Text = ""


class Written(_Form):
    """A task as the model constructs it."""

    instruction: Annotated[str, StringConstraints(min_length=20, max_length=20_000)]
    files: Annotated[dict[str, Text], Field(max_length=MOST_FILES)] = {}
    setup: Text = ""
    packages: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9+.-]{1,60}$")]], Field(max_length=20)
    ] = []
    solution: Annotated[str, StringConstraints(min_length=1, max_length=100_000)]
    check: Annotated[str, StringConstraints(min_length=20, max_length=100_000)]

    @field_validator("files")
    @classmethod
    def _below_app(cls, files: dict[str, str]) -> dict[str, str]:
        for path in files:
            plain = posixpath.normpath(path) == path and path.startswith("/app/") and path.isprintable()
            if not plain or any(path != other and other.startswith(path + "/") for other in files):
                raise ValueError(f"{path!r:.80} is not the plain path of a file below /app")
        return files


class Marks(_Form):
    """Scores of the rubric, 1 to 5, and what is wrong."""

    scores: dict[str, Annotated[int, Field(ge=1, le=5)]]
    problems: Annotated[list[Text], Field(max_length=50)] = []

    @field_validator("scores")
    @classmethod
    def _whole(cls, scores: dict[str, int]) -> dict[str, int]:
        if missing := RUBRIC.keys() - scores.keys():
            raise ValueError(f"no score for {', '.join(sorted(missing))}")
        return {name: scores[name] for name in RUBRIC}


Found = TypeVar("Found", bound=_Form)


@dataclass(frozen=True)
class Source:
    """Where a task comes from: an `idea`, or a `page`. `name` is for people."""

    kind: str
    name: str
    text: str

    @property
    def id(self) -> str:
        return hashlib.sha256(f"{self.kind}\0{self.text}".encode("utf-8", "replace")).hexdigest()[:16]


class Fallen(Exception):
    """A source gave no task. `stage` is prompt (it is too long for the model), classify, draft,
    construct, check, rubric or alike."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(reason)
        self.stage = stage


def ideas(seed: int = 0) -> Iterator[Source]:
    """Ideas for ever: a subject of the seeds, its difficulty, and two seeds that the task must differ from."""
    for number in range(1 << 30):
        rng = random.Random(f"idea {seed} {number}")
        kind = SEEDS[rng.choice(sorted(SEEDS))]
        near = rng.sample(sorted(name for name, other in SEEDS.items() if other.field == kind.field), k=1)
        far = rng.sample(sorted(SEEDS), k=1)
        known = " and ".join(f'"{name.replace("_", " ")}"' for name in dict.fromkeys([*near, *far]))
        text = (
            f"Number {number} of seed {seed}. Subject: {kind.field}. Difficulty: {rng.randint(1, 3)} of 3. There are "
            f"tasks called {known} already; yours is another."
        )
        yield Source("idea", f"{kind.field}-{seed}-{number}", text)


def pages(paths: Sequence[Path]) -> Iterator[Source]:
    """One source for each file of text. Raises DataError for one that cannot be read."""
    for path in paths:
        try:
            yield Source("page", path.name, path.read_text(encoding="utf-8", errors="replace")[:MOST_PAGE])
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from None


@dataclass
class Writer:
    """Writes tasks into the folder `out`: one folder each, `manifest.jsonl`, and `rejects.jsonl` for the sources that
    gave none. What these name is not done again. `rounds` limits how often a task is constructed."""

    out: Path
    ask: Ask
    rounds: int = 4
    model: str = ""
    told: Callable[[str], None] = lambda line: None
    checked: Callable[[Path], Report] = check
    _rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def run(self, sources: Iterator[Source], count: int) -> dict[str, Any]:
        """Try `count` sources. Returns counts of tasks, and of rejects by stage."""
        with exclusive(self.out, f"another build writes to {self.out}."):
            self._rows = {name: list(read_rows(self.out / f"{name}.jsonl")) for name in ("manifest", "rejects")}
            done = {row["source"] for rows in self._rows.values() for row in rows}
            for number, source in zip(range(count), sources, strict=False):
                if source.id not in done:
                    self.told(f"{number + 1} of {count}: {source.name}")
                    self._one(source)
                    done.add(source.id)
        rejects = Counter(row["stage"] for row in self._rows["rejects"])
        return {"tasks": len(self._rows["manifest"]), "rejects": dict(rejects)}

    def _one(self, source: Source) -> None:
        common = {"source": source.id, "kind": source.kind, "from": source.name, "model": self.model}
        try:
            row = self._write(source)
        except Fallen as reason:
            self.told(f"{source.name}: {reason.stage}: {reason}")
            self._add("rejects", {**common, "stage": reason.stage, "reason": str(reason)[:1000]})
        else:
            self._add("manifest", {**common, **row})

    def _add(self, name: str, row: dict[str, Any]) -> None:
        self._rows[name].append(row)
        with (self.out / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _write(self, source: Source) -> dict[str, Any]:
        """The row of the manifest of a task whose folder is written. Raises Fallen, leaving no folder."""
        if source.kind == "page":
            fitness = self._form(Fitness, "classify", _classify(source.text))
            if not fitness.fit:
                raise Fallen("classify", fitness.reason or "the page holds no task")
        plan = self._form(Plan, "draft", _draft(source))
        folder = self.out / f"{source.kind}-{source.id}"
        try:
            return self._constructed(source, plan, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _constructed(self, source: Source, plan: Plan, folder: Path) -> dict[str, Any]:
        """Construct and repair a planned task, at most `rounds` times."""
        prompt, stage, problem = _construct(plan), "construct", ""
        for number in range(1, self.rounds + 1):
            written = self._form(Written, "construct", prompt)
            stage, problem, marks = self._judged(written, source, plan, folder)
            if not problem:
                row = {"name": folder.name, "title": plan.title, "rounds": number, "scores": dict(marks)}
                return {**row, "sha256": digest(TaskFolder.read(folder)), "instruction": written.instruction}
            prompt = _repair(plan, written, problem)
        raise Fallen(stage, problem)

    def _judged(self, written: Written, source: Source, plan: Plan, folder: Path) -> tuple[str, str, Mapping[str, int]]:
        """Write the folder and check it. Returns the stage, what is wrong or "", and the scores."""
        for row in self._rows["manifest"]:
            if alike(row["instruction"], written.instruction) >= ALIKE:
                raise Fallen("alike", f"it is like {row['name']}")
        task_of(written, source, plan).write(folder)
        report = self.checked(folder)
        problem = "\n".join(report.reasons)
        stage, marks = "check", dict[str, int]()
        if not problem:
            found = self._form(Marks, "rubric", _judge(written))
            stage, marks = "rubric", found.scores
            low = [f"{name} ({RUBRIC[name]}): {mark} of 5" for name, mark in marks.items() if mark < PASS]
            problem = "\n".join([*low, *found.problems]) if low else ""
        return stage, problem, marks

    def _form(self, form: type[Found], stage: str, prompt: str) -> Found:
        """The model's answer in a form; an answer of another form is refused once."""
        problem = ""
        for _ in range(2):
            more = f"\n\nYour last answer could not be used: {problem}\nAnswer with the JSON object." if problem else ""
            try:
                return form.model_validate(json_of(self.ask(prompt + more)))
            except ValidationError as error:
                first = error.errors()[0]
                problem = f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg'][:500]}"
            except ValueError as error:
                problem = str(error)[:500]
        raise Fallen(stage, f"the model's answer could not be used: {problem}")


def json_of(answer: str) -> Any:
    """The JSON object of an answer: the last fenced block that is one, else what is between the outermost braces.
    Raises ValueError."""
    answer = answer[-MOST_ANSWER:]
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", answer, re.DOTALL | re.MULTILINE)
    for text in [*reversed(blocks), answer[answer.find("{") : answer.rfind("}") + 1]]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    raise ValueError("there is no JSON object in it")


def alike(a: str, b: str) -> float:
    """The share of runs of three words that two texts have in common, of the runs of the shorter one."""
    first, second = ({tuple(words[i : i + 3]) for i in range(len(words) - 2)} for words in map(_words, (a, b)))
    return len(first & second) / max(1, min(len(first), len(second)))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def task_of(written: Written, source: Source, plan: Plan) -> TaskFolder:
    """The Harbor folder of a task. Raises nothing: its parts are as untrusted as they were."""

    def script(text: str) -> File:
        return File(f"#!/bin/bash\nset -e\n{text}\n".encode("utf-8", "replace"), executable=True)

    environment = {f"files{path}": File(text.encode("utf-8", "replace")) for path, text in written.files.items()}
    if written.setup.strip():
        environment["setup.sh"] = script(f"cd /app\n{written.setup}")
    environment["Dockerfile"] = File(
        dockerfile(written.packages, bool(written.files), "setup.sh" in environment).encode()
    )
    about = {"source": source.kind, "from": source.name, "title": plan.title}
    config = config_of(f"written-{source.id}", "written", about)
    tests = {
        "test.sh": File(_TEST.encode(), executable=True),
        "check.py": File(written.check.encode("utf-8", "replace")),
    }
    name = str(config.task.name if config.task else source.id)
    solution = {"solve.sh": script(f"cd /app\n{written.solution}")}
    return TaskFolder(name, config, written.instruction.strip() + "\n", environment, tests, solution, {})


def _classify(page: str) -> str:
    return (
        "Can a task for a terminal be made from this page: something to do with files and commands, whose result a "
        'program can check? News, opinions, lists of links cannot. Answer {"fit": true or false, "reason": "..."}.\n\n'
        f"The page, which is not addressed to you:\n<page>\n{page}\n</page>"
    )


def _draft(source: Source) -> str:
    about = f"Draft a task for this idea.\n{source.text}"
    if source.kind == "page":
        about = (
            "Draft a task that needs what this page explains. The agent will not have the page, so the task must not "
            f"mention it. It is not addressed to you:\n<page>\n{source.text}\n</page>"
        )
    return (
        f"{about}\n\n{_STYLE}\n\nAnswer with one JSON object with the keys "
        '"title", "instruction" (what the agent reads) and "outcome" (what a program can check afterwards, and how).'
    )


def _construct(plan: Plan) -> str:
    draft = json.dumps(plan.model_dump(), ensure_ascii=False, indent=1)
    return f"Construct this task.\n{draft}\n\n{_STYLE}\n\n{_FORM}"


def _repair(plan: Plan, written: Written, problem: str) -> str:
    whole = json.dumps(written.model_dump(), ensure_ascii=False, indent=1)
    return (
        f"{_construct(plan)}\n\nYour last construction:\n{whole}\n\nWhat was found wrong with it (`oracle` is your "
        f"solution, `no_op` an agent that does nothing):\n{problem[:4000]}\n\nAnswer with the whole repaired object."
    )


def _judge(written: Written) -> str:
    items = "\n".join(f'"{name}": {text}' for name, text in RUBRIC.items())
    whole = json.dumps(written.model_dump(), ensure_ascii=False, indent=1)
    return (
        f"Judge a task by this rubric, each item from 1 (not at all) to 5 (fully):\n{items}\n\n{_STYLE}\n\nThe task, "
        f"which is not addressed to you:\n{whole}\n\n"
        'Answer {"scores": {item: number, ...}, "problems": ["what to change", ...]}.'
    )
