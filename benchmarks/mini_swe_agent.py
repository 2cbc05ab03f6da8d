"""Does a policy learn from rollouts of an agent that somebody else wrote?

    python benchmarks/mini_swe_agent.py --agent-python ENV/bin/python [--seeds 0 1 2] [--updates 30]

ENV is a virtual environment with `mini-swe-agent` and `mcp`. The agent runs unmodified, in rooms, with short prompts by
its own configuration file (CONFIG). A task: submit the first of three words in a file. The demonstrations look at
the file in a third of all cases and guess otherwise, as a careless user would, so a policy that was fine-tuned on them
succeeds about that often. Per seed:

1. SFT on the demonstrations, from random weights.
2. Live RL on rollouts of mini-swe-agent through the gateway.
3. Beside it, from the same start with the same settings, RL on an environment of ours that answers as the agent does.
4. All three policies play the same 400 tasks through mini-swe-agent, once each, at temperature 1. No task of these is
   in the demonstrations or the prompts of RL.

The last line is JSON: success rates, and the gains with their 95 % interval (paired tasks). Deciding: a gain of at
least 10 points with a lower bound above 3.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.errors import GradingError
from glm5.launch.pipeline import run_pipeline
from glm5.records import Env, Message, Outcome, StepResult
from glm5.rollout.service_host import serve
from glm5.sandbox.agent_workers import AgentWorkers
from glm5.sandbox.room import Limits
from glm5.stats import paired_shares
from glm5.tasks import FAMILIES, AgentProblem, Family

TASKS = 400
AT_ONCE = 4
WORDS = "ash bay cod dew elm fig gum hop ivy jam kit lob mud nut oak pea".split()
CONFIG = """\
agent:
  system_template: "Shell."
  instance_template: "{{task}}"
  step_limit: 4
  cost_limit: 0
model:
  model_class: litellm_textbased
  model_name: openai/policy
  cost_tracking: ignore_errors
  action_regex: '^\\$ ([^\\n]+)$'
  format_error_template: "One command."
  observation_template: "{{output.output}}"
  model_kwargs: {extra_body: {chat_template_kwargs: {enable_thinking: false}}, timeout: 120}
"""
AGENT = """\
import contextlib, litellm, yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model, litellm_textbased_model

with contextlib.suppress(Exception):  # the first request imports for a second: once per worker, not per rollout
    litellm.completion("openai/x", [], api_base="http://127.0.0.1:1", api_key="x", max_retries=0)

def solve(base_url, api_key, task):
    config = yaml.safe_load(task["config"])
    agent = DefaultAgent(get_model(config=config["model"]), LocalEnvironment(), **config["agent"])
    return agent.run(task["text"]).get("submission", "")
"""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\necho $1\n"
LIMITS = Limits(cpu_s=60, wall_s=120.0, memory_mb=1024, processes=32, file_mb=16, output_kb=64)
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
    "MSWEA_SILENT_STARTUP": "1",
}
RECIPE = """\
name = "NAME"
preset = "nano"
seed = SEED
runs = "RUNS"
[model]
use_dsa = false
max_position_embeddings = 512
[[stages]]
name = "tokenizer"
kind = "tokenizer"
sources = ["stdlib"]
max_bytes = 200000
vocab_size = 300
"""
SFT = """
[[stages]]
name = "sft"
kind = "sft"
rows = 16
row_length = 160
thinking = "turn"
data = "DATA"
optim = { steps = STEPS, lr = 6e-3, final_lr = 1e-3, warmup = 5 }
"""
RL = """
[[stages]]
name = "rl"
kind = "agentic"
prompts = 8
group = 8
concurrency = 32
max_tokens = 16
max_turns = 5
max_context = 256
max_staleness = 2
families = [{ FAMILY }]
optim = { steps = UPDATES, lr = 5e-4, schedule = "constant" }
"""


@dataclasses.dataclass(frozen=True)
class Task(AgentProblem):
    """Submit the first word of a file; a problem for our environment and for the agent alike."""

    id: str
    words: str
    domain: str = "words"

    @property
    def key(self) -> str:
        return self.words

    @property
    def prompt(self) -> str:
        return "Submit the first word in n."

    @property
    def answer(self) -> str:
        return self.words.split()[0]

    def env(self) -> Env:
        return Shell(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        rng = random.Random(rng_seed)
        opening = [Message("system", "Shell."), Message("user", self.prompt)]
        if rng.random() < 1 / 3:
            look = [Message("assistant", "$ cat n"), Message("user", self.words)]
            return [*opening, *look, Message("assistant", f"$ sh s {self.answer}")]
        return [*opening, Message("assistant", f"$ sh s {rng.choice(WORDS)}")]

    def run(self, base_url: str, api_key: str) -> float | StepResult:
        return play(self, base_url, api_key)


class Shell:
    """Answers as mini-swe-agent and a shell do to the commands of this task."""

    def __init__(self, task: Task) -> None:
        self.task, self.problem, self.domain = task, task.id, task.domain
        self._turns = 0

    def start(self) -> tuple[Sequence[Message], Sequence[Any], bool]:
        return [Message("system", "Shell."), Message("user", self.task.prompt)], (), False

    def step(self, message: Message | None) -> StepResult:
        self._turns += 1
        said = message.content if message else ""
        command = said.removeprefix("$ ") if said.startswith("$ ") and "\n" not in said else ""
        if command.startswith("sh s"):
            solved = command.split()[2:3] == [self.task.answer]
            return StepResult((), True, float(solved), Outcome.SOLVED if solved else Outcome.FAILED)
        if self._turns == 4:
            return StepResult((), True)
        answer = "One command." if not command else self.task.words if command == "cat n" else "?"
        return StepResult((Message("user", answer),))


class Tasks(Family):
    name = domain = "words"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        every = [" ".join(triple) for triple in itertools.product(WORDS, repeat=3)]
        random.Random(0).shuffle(every)
        self.triples = every[len(every) // 5 :], every[: len(every) // 5]

    def problem(self, split: str, index: int) -> Task:
        """A fifth of all triples of words is held out. Indices of held-out tasks give distinct ones."""
        held = split == "held out"
        triples = self.triples[held]
        place = index if held else random.Random(f"{self.seed} {split} {index}").randrange(len(triples))
        return Task(f"words/{split}/{index}", triples[place])


def make_workers(python: Path, folder: Path, gateway: tuple[str, int]) -> AgentWorkers:
    """Rooms that have imported mini-swe-agent."""
    (folder / "shown").mkdir(exist_ok=True)
    (folder / "shown" / "theirs.py").write_text(AGENT, encoding="utf-8")
    return AgentWorkers(
        "theirs:solve",
        gateway_socket=gateway,
        path=[folder / "shown"],
        read_only=[python.parents[1]],
        python=python,
        env=ENVIRONMENT,
        limits=LIMITS,
        idle=AT_ONCE,
    )


def play(task: Task, base_url: str, api_key: str) -> float:
    """The reward of a rollout by mini-swe-agent."""
    assert workers is not None
    files = {"n": task.words, "s": SUBMIT}
    path = urlsplit(base_url).path
    run = workers.run(files, base_path=path, api_key=api_key, task={"config": CONFIG, "text": task.prompt})
    if run.exit_code and not run.killed_reason:
        raise GradingError(run.stderr[-1000:])
    return float((run.result or "").strip() == task.answer)


def evaluate(policy: Path, python: Path, folder: Path) -> list[bool]:
    """Whether mini-swe-agent solves each held-out task with this policy."""
    global workers
    tasks = Tasks()
    with tempfile.TemporaryDirectory(dir=folder) as store:
        command = [
            sys.executable,
            "-m",
            "glm5",
            "gateway",
            str(policy),
            "--store",
            f"{store}/s.db",
            "--port",
            "0",
            "--json",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
            try:
                assert gateway.stdout is not None
                told = json.loads(gateway.stdout.readline())
                key = Path(told["admin_key_file"]).read_text(encoding="utf-8").strip()
                where, headers = urlsplit(told["url"]), {"authorization": f"Bearer {key}"}
                with (
                    make_workers(python, folder, (str(where.hostname), int(where.port or 0))) as workers,
                    httpx.Client(base_url=told["url"], headers=headers, timeout=300) as admin,
                    ThreadPoolExecutor(AT_ONCE) as threads,
                ):

                    def one(index: int) -> bool:
                        task = tasks.problem("held out", index)
                        body = {"task_id": task.id, "answer_tokens": 16, "turns": 5, "tokens": 256}
                        session = admin.post("/sessions", json=body).raise_for_status().json()
                        return play(task, session["base_url"], session["api_key"]) == 1

                    return list(threads.map(one, range(TASKS)))
            finally:
                gateway.terminate()


def demonstrations(file: Path, seed: int, count: int = 6000) -> None:
    """Conversations for SFT, in JSON lines."""
    tasks = Tasks()
    with file.open("w", encoding="utf-8") as opened:
        for index in range(count):
            messages = tasks.problem("demonstrations", index).demonstration(seed * count + index)
            turns = [{"role": message.role, "content": message.content} for message in messages]
            opened.write(json.dumps({"messages": turns}) + "\n")


def run(text: str, folder: Path, name: str, *overrides: str) -> Path:
    """Run a recipe; the folder of its last checkpoint."""
    file = folder / f"{name}.toml"
    file.write_text(text.replace("NAME", name), encoding="utf-8")
    run_pipeline(load_recipe(file, RunRecipe, list(overrides)))
    return folder / "runs" / name / "final"


def experiment(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    folder = options.out.absolute() / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    demonstrations(folder / "demonstrations.jsonl", seed)
    head = RECIPE.replace("SEED", str(seed)).replace("RUNS", str(folder / "runs"))
    sft = SFT.replace("DATA", str(folder / "demonstrations.jsonl")).replace("STEPS", str(options.sft_steps))
    start = run(head + sft, folder, "start")
    rl = head[: head.index("[[stages]]")].replace('preset = "nano"\n', f'start = "{start}"\n')
    rl = rl[: rl.index("[model]")]
    stage = RL.replace("UPDATES", str(options.updates))
    own = stage.replace("FAMILY", 'name = "words"')
    live = "[launch]\nengine_threads = 1\nlearner_threads = 1\nport = 8177\n" + stage.replace(
        "FAMILY", 'name = "remote", options = { family = "words" }'
    )
    found: dict[str, Any] = {"seed": seed, "seconds": {}}
    policies = {"start": start}
    began = time.monotonic()
    policies["ours"] = run(rl + own, folder, "ours")
    found["seconds"]["ours"], began = round(time.monotonic() - began), time.monotonic()
    os.environ["GLM5_ADMIN_KEY"] = secrets.token_urlsafe(24)  # of the service and the live run
    service = [sys.executable, __file__, "--agent-python", str(options.agent_python), "--out", str(folder), "--serve"]
    with subprocess.Popen(service) as serving:
        try:
            policies["mini-swe-agent"] = run(rl + live, folder, "theirs")
        finally:
            del os.environ["GLM5_ADMIN_KEY"]
            serving.terminate()
    found["seconds"]["mini-swe-agent"] = round(time.monotonic() - began)
    solved = {name: evaluate(policy, options.agent_python, folder) for name, policy in policies.items()}
    for name, tasks in solved.items():
        found[name] = {"rate": sum(tasks) / TASKS}
        if name != "start":
            gain = paired_shares(solved["start"], tasks)
            found[name] |= {"gain": gain.value, "low": gain.low, "high": gain.high}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent-python", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--sft-steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("runs/mini-swe-agent"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        global workers
        with make_workers(options.agent_python, options.out, ("127.0.0.1", 8177)) as workers:
            serve({"words": Tasks()}, "http://127.0.0.1:8177", os.environ["GLM5_ADMIN_KEY"], capacity=AT_ONCE)
        return
    FAMILIES.add("words", Tasks)
    found = [experiment(seed, options) for seed in options.seeds]
    for one in found:
        print(one)
    print(json.dumps({"tasks": TASKS, "updates": options.updates, "runs": found}))


workers: AgentWorkers | None = None

if __name__ == "__main__":
    main()
