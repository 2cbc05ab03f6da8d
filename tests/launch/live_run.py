"""A live run of the command line as tests see it: its processes, its store, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections import Counter
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import load_file

from glm5.process import python_path
from glm5.rl import replay
from glm5.rl.buffer import staleness
from glm5.rl.drivers.live import weights_prefix
from tests.forks import COMMAND_LINE, Forks, Program

KINDS = {"learner": b"\0rl\0", "rollouts": b"glm5.rl.rollout_process", "engine": b"glm5.serve.router.process"}

RECIPE = """
name = "live"
start = "{start}"
runs = "{runs}"

[launch]
engines = {engines}
port = {port}
engine_threads = 1
learner_threads = 1
{launch}

[[stages]]
kind = "agentic"
name = "rl"
prompts = {prompts}
group = 4
concurrency = 24
max_tokens = 12
max_turns = 2
max_context = 128
max_staleness = 2
record = true
{stage}
families = {families}
optim = {{ steps = {steps}, lr = 1e-4, save_every = {save_every} }}
"""


class LiveRun:
    """Runs `glm5 rl` on a recipe in `folder`, as often as it takes; the learner is forked if there are `forks`."""

    def __init__(
        self,
        folder: Path,
        start: Path,
        *,
        steps: int,
        prompts: int = 4,
        save_every: int = 1,
        engines: int = 1,
        port: int = 0,
        ranks: int = 1,
        launch: str = "",
        stage: str = "",
        python: Path = Path(sys.executable),
        families: str = '[{ name = "arithmetic", weight = 3.0 }, { name = "toolcall" }]',
        forks: Forks | None = None,
    ) -> None:
        self.folder, self.steps, self.prompts = folder, steps, prompts
        self.recipe = folder / "live.toml"
        fields = {"start": start, "runs": folder / "runs", "steps": steps, "prompts": prompts}
        fields |= {"save_every": save_every, "engines": engines, "port": port, "families": families, "launch": launch}
        fields["stage"] = stage
        self.recipe.write_text(RECIPE.format(**fields))
        self.ranks, self.python, self.forks = ranks, python, forks
        self.stage = folder / "runs" / "live" / "00-rl"
        self.mark = f"glm5-test-{uuid.uuid4().hex}"
        self.output = folder / "output.txt"
        self.process: subprocess.Popen[bytes] | Program | None = None

    def start(self) -> subprocess.Popen[bytes] | Program:
        environment = {**os.environ, "GLM5_TEST_MARK": self.mark, "PYTHONPATH": python_path()}
        command = [str(self.python), "-P", "-m"]
        if self.ranks > 1:
            command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks), "-m"]
            environment |= {"GLOO_SOCKET_IFNAME": "lo"}
        with self.output.open("ab") as output:
            if self.forks is not None and self.ranks == 1:
                said, load = output.fileno(), ["glm5.rl.drivers.live"]
                self.process = self.forks(
                    COMMAND_LINE, "rl", self.recipe, env=environment, stdout=said, stderr=said, load=load
                )
            else:
                self.process = subprocess.Popen(
                    [*command, "glm5", "rl", str(self.recipe)],
                    stdout=output, stderr=output, env=environment, start_new_session=True,
                )  # fmt: skip
        return self.process

    def finish(self, seconds: float) -> None:
        """Wait for the end of the command. It must succeed."""
        assert self.process is not None
        assert self.process.wait(seconds) == 0, self.output.read_text()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self, kind: str | None = None, rank: int | None = None) -> list[int]:
        """Ids of running processes, of one kind, of one rank or of all, sandboxes excepted."""
        # The environment of a fork, as the system shows it, is that of the process it was forked from.
        forked = self.forks is not None and self.running and rank is None and kind in (None, "learner")
        found = [self.process.pid] if forked and self.process is not None else []
        wanted = [self.mark.encode()] + ([] if rank is None else [b"\0RANK=%d\0" % rank])
        for entry in Path("/proc").iterdir():
            try:
                variables = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
                mine = all(text in variables for text in wanted)
                line = (entry / "cmdline").read_bytes() if mine else b""
            except OSError:
                continue
            if line and int(entry.name) not in found and (kind is None or KINDS[kind] in line):
                found.append(int(entry.name))
        return found

    def wait_for(self, kind: str, seconds: float = 60.0) -> int:
        """The id of a running process of this kind."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.running, self.output.read_text()
            if found := self.processes(kind):
                return found[0]
            time.sleep(0.02)
        raise AssertionError(f"no {kind} within {seconds} seconds")

    def wait_for_results(self, count: int, seconds: float = 60.0) -> None:
        """Return once the store has this many results."""
        self.wait_for_rows("results", count, seconds)

    def wait_for_rows(self, table: str, count: int, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while self.rows(table) < count:
            assert time.monotonic() < deadline and self.running, self.output.read_text()
            time.sleep(0.05)

    def results(self) -> int:
        return self.rows("results")

    def rows(self, table: str) -> int:
        try:
            return int(self.query(f"SELECT count(*) FROM {table}")[0][0])
        except sqlite3.Error:
            return 0

    def query(self, text: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(f"file:{self.stage / 'sessions.db'}?mode=ro", uri=True)) as db:
            return db.execute(text).fetchall()

    def kill(self, kind: str) -> None:
        os.kill(self.wait_for(kind), signal.SIGKILL)

    def stop(self) -> None:
        """End everything, whatever its state."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(60)

    def check(self) -> None:
        """Every group trained once, on the tokens that the store has; nothing too stale; finite weights; no process and
        no weights left behind."""
        trained = self.query("SELECT number, version FROM groups WHERE spent = 'trained'")
        versions = Counter(version for _, version in trained)
        assert versions == dict.fromkeys(range(1, self.steps + 1), self.prompts)
        used: Counter[int] = Counter()
        for (_, step), groups in replay.batches(self.stage.parent / replay.FILE):
            for group in groups:
                used[group[0].group] += 1
                assert (group[0].group, step) in trained
                for trajectory in group:
                    assert staleness(trajectory, step - 1) <= 2
                    name = trajectory.detail["session"]
                    rows = self.query(f"SELECT output, trained FROM turns, sessions s WHERE session = '{name}' "
                                      "AND s.id = session ORDER BY turns.id")  # fmt: skip
                    stored = [tuple(memoryview(output).cast("i")) for output, _ in rows]  # type: ignore[arg-type]
                    assert sorted(turn.output_ids for turn in trajectory.turns) == sorted(stored)
                    assert {version for _, version in rows} <= {step}
        assert set(used.values()) == {1} and len(used) == self.steps * self.prompts
        weights = load_file(self.stage.parent / "final" / "model.safetensors")
        assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        """No process of the run is left, and no folder of weights."""
        self.check_no_process_left()
        assert not list(Path("/dev/shm").glob(weights_prefix(self.stage) + "*"))

    def check_no_process_left(self, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
