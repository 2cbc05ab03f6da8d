"""Does a policy learn to repair code in rooms? SFT, then RL on validated SWE tasks, on a slice that a laptop can train.

    python benchmarks/swe_learning.py [--seeds 1 2 3] [--updates 40]

The slice: modules of two documented functions (`glm5.tasks.coding.pieces`; files of at most 60 lines) with tests. The
factory (`glm5.tasks.swe`) makes the tasks: one mutation each, validated, graded by the hidden tests in rooms of their
own (family `swe`). No function stands in two of demonstrations, prompts of RL and evaluation. Per seed:

1. SFT from a base that the seeds share, which was trained on sessions that read the file, edit one line and end. These
   demonstrations are of mixed quality: some edit without reading, some end without an edit. All are mutations of
   further modules.
2. RL (`agentic`, in one process) on the tasks. Reward: the verdict.
3. Baselines in the same time as step 2: SFT goes on from the same start; and for each held-out task a search through
   the factory's own mutations of the file, which tries the statements of the task's text in a process, without a room
   or a model, and takes the first that no statement and no shown test contradicts. Its time is an episode's.
4. Every policy plays the same held-out tasks once, at temperature 1.

The last line is JSON: solved shares, and gains over the start with their 95 % interval (paired tasks). Deciding: a
gain of at least 15 points with a lower bound above 5, from a start between 15 and 60 %.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import random
import re
import runpy
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _learning import add_arguments, evaluate, policies, rates, write_texts

from glm5.config.evaluation import EvalConfig
from glm5.config.families import FamilyConfig
from glm5.data.sft import Conversation, write_conversations
from glm5.records import Message, ToolCall
from glm5.tasks.coding.generation import Chain, CodeFamily, hidden_cases
from glm5.tasks.coding.pieces import SOURCES
from glm5.tasks.swe.build import Build, Job
from glm5.tasks.swe.candidate import Candidate, Repository
from glm5.tasks.swe.driver import APP
from glm5.tasks.swe.mutate import Mutations, apply, places
from glm5.tasks.swe.text import instruction

HELD_OUT, PROMPTS = 250, 500
DEMONSTRATIONS = {"sft": 4000, "base": 12_000}
PER_MODULE = 2
CASES = 8
LONGEST = 36  # characters of an argument
MIXED = {"careful": 0.5, "blind": 0.25, "gives up": 0.25}
PIECE = re.compile(r"\w+|\s+|[^\w\s]")
TESTS = "test_m.py"
NAMES = """amber birch cedar delta ember fjord grove heron inlet jetty knoll larch maple north ocean pearl quill ridge
slate trail umber vista wharf yield""".split()
RL = """
[[stages]]
name = "rl"
kind = "agentic"
prompts = 8
group = 8
concurrency = 64
max_tokens = 96
max_turns = 6
max_context = 640
max_staleness = 1
optim = { steps = UPDATES, lr = 1e-3, schedule = "constant" }
[[stages.families]]
name = "swe"
render_tools = false
options = { folder = "FOLDER", held_out = 0.0, max_turns = 6, thinking = false }
"""


class OneMutation(Mutations):
    """Bug fixes of one mutation."""

    def candidates(self, repository: Repository, seed: int) -> Iterator[Candidate]:
        found = super().candidates(repository, seed)
        return (one for one in found if (one.kind, one.tier) == ("bug-fix", "single"))


def chains(split: str) -> Iterator[Chain]:
    """Functions from lists to whole numbers; no two splits share one."""
    family, seen = CodeFamily(0, levels=(1, 2), sources=("list", "words")), set[str]()
    for index in range(1_000_000):
        chain = family.problem(split, index).chain
        if chain.words not in seen and all(type(case.want) is int for case in hidden_cases(chain, chain.words)):
            seen.add(chain.words)
            yield chain


def module(functions: dict[str, Chain]) -> str:
    parts = ['"""Functions on lists."""\n']
    for name, chain in functions.items():
        words = chain.words.partition("; ")[2].removeprefix("start with it; ")
        body = "\n".join(chain.program.split("\n")[1:])
        parts.append(
            f'def {name}({SOURCES[chain.source].parameter}):\n    """{words[0].upper()}{words[1:]}."""\n{body}\n'
        )
    return "\n\n".join(parts)


def statements(name: str, chain: Chain) -> list[str]:
    """Statements that hold, shortest arguments first."""
    cases = sorted(hidden_cases(chain, chain.words), key=lambda case: len(repr(case.args[0])))
    cases = [case for case in cases if len(repr(case.args[0])) <= LONGEST]
    return [f"self.assertEqual({name}({case.args[0]!r}), {case.want!r})" for case in cases[:CASES]]


def tests(functions: dict[str, Chain]) -> str:
    lines = [
        "import unittest",
        "",
        f"from m import {', '.join(sorted(functions))}",
        "",
        "",
        "class Tests(unittest.TestCase):",
    ]
    for name, chain in functions.items():
        for number, statement in enumerate(statements(name, chain)):
            lines += [f"    def test_{name}_{number}(self):", f"        {statement}", ""]
    return "\n".join(lines)


def repositories(split: str, root: Path) -> Iterator[Repository]:
    """Repositories with a module each, without end."""
    functions, choice = chains(split), random.Random(split)
    for number in range(1_000_000):
        found = dict(zip(choice.sample(NAMES, 2), functions, strict=False))
        folder = root / split / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "m.py").write_text(module(found), encoding="utf-8")
        (folder / TESTS).write_text(tests(found), encoding="utf-8")
        yield Repository(
            "m", "1.0", "Apache-2.0", f"{split} {number}", folder, (".",), (TESTS,), (TESTS,),
            framework="unittest", sources=("m.py",),
        )  # fmt: skip


def build(root: Path, split: str, count: int) -> Path:
    """Tasks of a split, validated; goes on if it was stopped."""
    out = root / f"tasks-{split}"
    opened = (functools.partial(lambda r: (r, [OneMutation()]), r) for r in repositories(split, root))
    jobs = [Job(f"{split} {number}", next(opened)) for number in range(count)]
    Build(out, root / "work").run(jobs, PER_MODULE, count, 2)
    return out


def failures(text: str, tests: str) -> dict[str, str]:
    """Test id to its statement and exception, for the tests that fail with the module `text`. It runs in this process:
    our own code with a mutation, without loops that might not end."""
    found = {}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write("\n".join([text, *(line for line in tests.split("\n") if not line.startswith("from m "))]))
        file.flush()
        case = runpy.run_path(file.name)["Tests"]
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.FunctionDef):
            try:
                case(node.name).debug()
            except Exception as error:
                found[f"test_m.Tests.{node.name}"] = f"{ast.unparse(node.body[0])}\n\n{type(error).__name__}: {error}"
    return found


def edit(bugged: str, fixed: str) -> tuple[str, str] | None:
    """Old and new text of an edit: what differs, widened by whole words until the old text occurs once; None if lines
    differ at several places."""
    if bugged.count("\n") != fixed.count("\n"):
        return None
    lines = zip(bugged.split("\n"), fixed.split("\n"), strict=True)
    changed = [tuple(PIECE.findall(line) for line in pair) for pair in lines if pair[0] != pair[1]]
    if len(changed) != 1:
        return None
    old, new = changed[0]
    pairs = list(itertools.zip_longest(old, new))
    first = next(i for i, (a, b) in enumerate(pairs) if a != b)
    same = next(i for i, (a, b) in enumerate(itertools.zip_longest(old[::-1], new[::-1])) if a != b)
    last = min(same, len(old) - first, len(new) - first)  # pieces at the end that stay
    while True:
        parts = ["".join(line[first : len(line) - last]) for line in (old, new)]
        if bugged.count(parts[0]) == 1 and all(part.strip() for part in parts):
            return parts[0], parts[1]
        if first == last == 0:
            return None
        first, last = max(0, first - 1), max(0, last - 1)


def conversation(task: str, file: str, bugged: str, fixed: str, kind: str) -> Conversation | None:
    """Read, edit, end; None if one edit does not do. "blind" does not read, "gives up" does not edit."""
    change = edit(bugged, fixed)
    if change is None:
        return None
    read = [Message("assistant", tool_calls=(ToolCall("bash", {"command": f"cat {file}"}),)), Message("tool", bugged)]
    call = ToolCall("edit", {"path": file, "old": change[0], "new": change[1]})
    edited = [Message("assistant", tool_calls=(call,)), Message("tool", "[edited]")]
    steps = {"careful": [*read, *edited], "blind": edited, "gives up": read}[kind]
    return Conversation([Message("user", task), *steps, Message("assistant", "done")])


def demonstrations(root: Path, count: int, mixed: bool) -> Iterator[Conversation]:
    made, choice = 0, random.Random("demonstrators")
    for repository in repositories("train", root):
        fixed, checks = repository.read("m.py"), repository.read(TESTS)
        kept = 0
        for candidate in OneMutation().candidates(repository, 0):
            bugged = candidate.changes["m.py"] or ""
            found = failures(bugged, checks)
            text = instruction(candidate, found, APP) if found else None
            kind = choice.choices(list(MIXED), list(MIXED.values()))[0] if mixed else "careful"
            shown = conversation(text, "m.py", bugged, fixed, kind) if text else None
            if shown is not None:
                yield shown
                made, kept = made + 1, kept + 1
            if kept == 4 or made == count:
                break
        if made == count:
            return


def search(task: Path, seconds: float) -> bool:
    """The baseline without a model: whether the first mutation that contradicts nothing shown is the solution."""
    due, choice = time.monotonic() + seconds, random.Random(task.name)
    bugged, hidden = (task / "environment/repo/m.py").read_text(), (task / "tests/files" / TESTS).read_text()
    shown = (task / "environment/repo" / TESTS).read_text()
    told = [line for line in (task / "instruction.md").read_text().split("\n") if line.startswith("self.assertEqual(")]
    told = [f"    def test_{i}(self):\n        {line}" for i, line in enumerate(told)]
    checks = "\n".join([shown.rstrip(), "", *told])
    edits = list(places(bugged, choice))
    choice.shuffle(edits)
    for edit in edits:
        if time.monotonic() > due:
            return False
        text = apply(bugged, [edit])
        if text is not None and not failures(text, checks):
            return not failures(text, hidden)
    return False


def experiment(seed: int, options: argparse.Namespace, prompts: Path, held_out: Path) -> dict[str, Any]:
    trained, seconds = policies(seed, options, RL.replace("FOLDER", str(prompts.absolute())))
    chosen = {"folder": str(held_out), "held_out": 0.9999, "max_turns": 6, "thinking": False}
    family = FamilyConfig(name="swe", options=chosen, render_tools=False)
    config = EvalConfig(problems=options.held_out, max_tokens=96, max_turns=6, max_context=640, samples=1, ks=[1])
    played = {name: evaluate(policy, family, config) for name, policy in trained.items()}
    solved = {name: wins for name, (wins, _) in played.items()}
    seconds["episode"] = played["rl"][1]
    tasks = sorted((held_out / "tasks").iterdir())[: options.held_out]
    solved["search"] = [search(task, seconds["episode"]) for task in tasks]
    return rates(seed, solved, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, updates=40, text_steps=250, base_steps=1200, sft_steps=100, sft_rate="5e-3")
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--out", type=Path, default=Path("runs/swe-learning"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts = build(options.out / "modules", "rl", options.prompts)
    held_out = build(options.out / "modules", "heldout", options.held_out)
    for name, count in DEMONSTRATIONS.items():
        data = options.out / f"{name}.jsonl"
        if not data.exists():
            shown = list(demonstrations(options.out / "modules", count, name == "sft"))
            if name == "base":
                write_texts(shown, options.out / "texts.txt")
            write_conversations(data, shown)
    found = []
    for seed in options.seeds:
        found.append(experiment(seed, options, prompts, held_out))
        print(json.dumps(found[-1]), flush=True)
    print(json.dumps({"tasks": options.held_out, "updates": options.updates, "runs": found}))


if __name__ == "__main__":
    main()
