"""Two more tasks from each repair task, both graded without a model: write a test that shows the bug, and pick the
patch that repairs it."""

from __future__ import annotations

import ast
import difflib
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.tasks.swe.candidate import Candidate, unified
from glm5.tasks.swe.driver import APP, Driver, open_room
from glm5.tasks.swe.folder import read_tests
from glm5.tasks.swe.grading import grade
from glm5.tasks.swe.impact import changed_functions, reached
from glm5.tasks.swe.in_room.grade import ANSWER
from glm5.tasks.swe.mutate import apply, places
from glm5.tasks.swe.test_files import split_id
from glm5.tasks.swe.validate import Baseline, Rejected, solve

TEST_FILE = "test_issue.py"
PATCHES = "/patches"
LETTERS = "abcd"
WRAPPED = (
    ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp,
)  # fmt: skip
"""Expressions that may be put inside of others."""
LOCALS = {"locals", "vars", "eval", "exec", "dir"}  # functions that see the variables of their caller
MOST_TRIES, MOST_DRAWS = 12, 200  # wrong patches that are tried, and drawn
WRITE = (
    f"Do not repair this. Write tests in `{APP}/{TEST_FILE}` that fail because of the issue and pass once it is "
    "repaired. They are run on both states of the source, each also with another layout of the code."
)
PICK = (
    f"Do not repair this. One of the patches in `{PATCHES}` ({{names}}) repairs it without breaking anything; each "
    f"applies with `patch -p1`. Write its letter to `{APP}/{ANSWER}`."
)


def write_test(candidate: Candidate, repair: Path, folder: Path) -> None:
    """Make `folder` from the repair task's folder. Raises Rejected if its own tests do not do as a solution."""
    repository = candidate.repository
    if repository.framework not in ("pytest", "unittest"):
        raise Rejected("not made for this language")
    if any(text is None for text in candidate.changes.values()):
        raise Rejected("the states differ in more than text")
    bugged = {path: text for path, text in candidate.changes.items() if text is not None}
    fixed = {path: repository.read(path) for path in bugged}
    try:
        states = {"bug": bugged, "bug-2": respelled(bugged), "fixed": fixed, "fixed-2": respelled(fixed)}
    except RecursionError:
        raise Rejected("the source is nested too deeply") from None
    spec = _spec(repair)
    spec["runs"] = [
        {"name": name, "overlay": f"states/{name}", "files": [TEST_FILE], "collected": None, "select": None,
         "passes": name.startswith("fixed")}
        for name in states
    ]  # fmt: skip
    file = split_id(spec["FAIL_TO_PASS"][0], repository.framework, repository.test_files)[0]
    part = _copy(repair, folder, {**spec, "task": "write-test", "canary_folder": ""}, WRITE)
    shutil.rmtree(part / "tests/twins", ignore_errors=True)
    for name, files in states.items():
        for path, text in files.items():
            target = part / "tests/states" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", newline="")
    (part / "solution" / TEST_FILE).write_text(repository.read(file), encoding="utf-8", newline="")
    _finish(part, folder, f'cp "$(dirname "$0")/{TEST_FILE}" {APP}/{TEST_FILE}\n', repository.site)


def respelled(files: Mapping[str, str]) -> dict[str, str]:
    """Python texts with the same meaning, another layout, a spare variable in every function, and a third of the
    expressions of functions inside others of the same value: a test that compares the source, its syntax tree or its
    byte code with those it knows, or parts of them, fails where it must not."""
    made = {}
    for path, text in files.items():
        tree, choice = ast.parse(text), random.Random(text)
        for node in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]:
            if not LOCALS & {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}:
                spare = ast.parse(f"spare_{choice.randrange(1000)} = {choice.randrange(1000)}").body
                first = ast.get_docstring(node) is not None
                node.body[first:first] = spare
        for inner in tree.body:
            _wrap(inner, choice, within=False)
        made[path] = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    return made


def _wrap(node: ast.AST, choice: random.Random, within: bool) -> None:
    """Replace expressions below a node, if it is within a function, by longer ones of the same value."""
    within = within or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(value, ast.arguments | ast.pattern):
            continue
        inner = value if isinstance(value, list) else [value]
        for place, child in enumerate(inner):
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):  # its parts are no expressions
                continue
            _wrap(child, choice, within)
            alone = isinstance(node, ast.Expr) or (name == "func" and isinstance(child, ast.Name))  # such as super()
            if within and not alone and isinstance(child, WRAPPED) and choice.random() < 0.33:
                if isinstance(getattr(child, "ctx", ast.Load()), ast.Load):
                    inner[place] = _longer(child, choice)
        if not isinstance(value, list):
            setattr(node, name, inner[0])


def _longer(node: ast.expr, choice: random.Random) -> ast.expr:
    key = ast.Constant(choice.randrange(1, 1000))
    return choice.choice([
        ast.Subscript(ast.List([node], ast.Load()), ast.Constant(0), ast.Load()),
        ast.Subscript(ast.Tuple([node], ast.Load()), ast.Constant(0), ast.Load()),
        ast.Subscript(ast.Dict([key], [node]), key, ast.Load()),
        ast.IfExp(key, node, ast.Constant(None)),
    ])  # fmt: skip


def pick_patch(candidate: Candidate, clean: Baseline, driver: Driver, repair: Path, folder: Path) -> None:
    """Make `folder` from the repair task's folder. Raises Rejected if there are too few wrong patches."""
    if candidate.repository.framework not in ("pytest", "unittest"):
        raise Rejected("not made for this language")
    choice = random.Random(f"pick {candidate.id}")
    patches = [candidate.patch(), *_wrong_patches(candidate, clean, driver, choice)]
    order = choice.sample(patches, len(patches))
    answer = LETTERS[order.index(patches[0])]
    spec = {**_spec(repair), "task": "pick", "answer": answer, "runs": []}
    names = ", ".join(f"`{letter}.patch`" for letter in LETTERS)
    part = _copy(repair, folder, spec, PICK.format(names=names))
    shutil.rmtree(part / "tests/twins", ignore_errors=True)
    (part / "environment/patches").mkdir()
    for letter, patch in zip(LETTERS, order, strict=True):
        (part / f"environment/patches/{letter}.patch").write_text(patch, encoding="utf-8", newline="")
    with (part / "environment/Dockerfile").open("a", encoding="utf-8") as file:
        file.write(f"COPY patches {PATCHES}\n")
    _finish(part, folder, f"echo {answer} > {APP}/{ANSWER}\n", candidate.repository.site)


def _wrong_patches(candidate: Candidate, clean: Baseline, driver: Driver, choice: random.Random) -> list[str]:
    """Patches from the bug to a state in which a test fails: as many lines as the right patch in as many places of the
    same functions, so that neither their sizes nor what they have in common tells the right one."""
    changed = changed_functions(candidate)
    if not changed or len(candidate.changes) > 1:
        raise Rejected("the change is not inside of functions of one file")
    ((path, bugged),) = candidate.changes.items()
    fixed, bugged = candidate.repository.read(path), bugged or ""
    edits = [edit for edit in places(bugged, choice) if f"{path}:{edit.function}" in changed]
    wanted = _size(bugged, fixed)
    found: dict[str, None] = {}
    tried: set[str] = {fixed}
    for _ in range(MOST_DRAWS):
        text = apply(bugged, choice.sample(edits, min(len(edits), wanted[0])))
        if text is None or text in tried or _size(bugged, text) != wanted:
            continue
        tried.add(text)
        other = Candidate(candidate.repository, "pick", {path: text})
        files = reached(other, clean.calls)
        tests = {name for file in files for name in clean.pinned.get(file, ())} & clean.stable
        run = driver.run(candidate.repository, other.changes, files, max(20.0, 3 * clean.wall_s), tests)
        if not run.stopped and tests - run.passed:
            found[unified(path, bugged, text)] = None
        if len(found) == len(LETTERS) - 1:
            return list(found)
        if len(tried) > MOST_TRIES:
            break
    raise Rejected("too few wrong patches")


def _size(old: str, new: str) -> tuple[int, int, int]:
    """The number of places that differ, and of their lines in both texts."""
    pieces = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_opcodes()
    other = [piece for piece in pieces if piece[0] != "equal"]
    return len(other), sum(p[2] - p[1] for p in other), sum(p[4] - p[3] for p in other)


def _spec(repair: Path) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads((repair / "tests/tests.json").read_bytes())
    return spec


def _copy(repair: Path, folder: Path, spec: Mapping[str, Any], order: str) -> Path:
    """The repair task with another order instead of its last two paragraphs."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(repair, part, ignore=shutil.ignore_patterns("fix.patch"))
    (part / "tests/tests.json").write_text(json.dumps(spec, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    text = (part / "instruction.md").read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    told = "\n\n".join([*text[:-2], order, f"The repository is in `{APP}`."])
    (part / "instruction.md").write_text(told + "\n", encoding="utf-8")
    toml = part / "task.toml"
    named = toml.read_text(encoding="utf-8").replace("glm5/swe-", f"glm5/swe-{spec['task']}-", 1)
    toml.write_text(named, encoding="utf-8")
    return part


def _finish(part: Path, folder: Path, solution: str, site: Sequence[str]) -> None:
    """Put the folder in place if its solution scores 1 and no change 0."""
    (part / "solution/solve.sh").write_text(f"#!/bin/bash\nset -e\n{solution}", encoding="utf-8")
    tests = read_tests(part)
    with open_room(part / "environment/repo", site) as room:
        before = grade(room, tests, site)["reward"]
        solve(part, room)
        after = grade(room, tests, site)["reward"]
    if (before, after) != (0.0, 1.0):
        shutil.rmtree(part)
        raise Rejected("solution fails" if after != 1.0 else "no change passes")
    part.replace(folder)
