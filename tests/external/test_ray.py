"""Live RL, and a server, with engines on a Ray cluster of simulated nodes, which are killed and join meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glm5 import GLM5Config, GLM5ForCausalLM
from glm5.chat import Tokenizer
from glm5.obs.metrics import read_metrics
from glm5.process import python_path
from tests.external.environments import interpreter
from tests.launch.live_run import LiveRun
from tests.serve.router.test_processes import CHAT, Load, body, quiet_answers

pytestmark = pytest.mark.slow
SECONDS = 240.0
"""Longest time for one thing to happen; it is much on a busy machine."""
SUMS = """
from examples.live_rl import Sums

class SeededSums(Sums):
    def __init__(self, seed=0):
        self.seed = seed
"""
ENGINE, ACTOR = b"glm5.serve.router.process", b"ray::Ray"


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of Ray's environment. It has our packages."""
    return interpreter("ray", ours=True)


class Nodes:
    """A cluster of simulated nodes: CPUs of the head, and of the others."""

    def __init__(self, python: Path, *cpus: int) -> None:
        self.mark = f"glm5-test-{uuid.uuid4().hex}"
        script = Path(__file__).with_name("ray_nodes.py")
        self.process = subprocess.Popen(
            [python, script, *map(str, cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": python_path(), "GLM5_TEST_CLUSTER": self.mark},
            text=True,
            start_new_session=True,
        )
        self.address = self._line()

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the cluster ended"
        return line.strip()

    def processes(self, kind: bytes = b"") -> list[int]:
        """Ids of processes on the nodes."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                mine = entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes()
                if mine and kind in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def wait(self, what: str, true: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Return once `true` is."""
        began = time.monotonic()
        while not true():
            assert time.monotonic() - began < seconds, what
            time.sleep(0.1)

    def stop(self) -> None:
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def nodes(python: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Nodes]]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    made: list[Nodes] = []

    def make(*cpus: int) -> Nodes:
        made.append(Nodes(python, *cpus))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def live(python: Path, tmp_path: Path) -> Iterator[Callable[..., LiveRun]]:
    runs: list[LiveRun] = []

    def make(launch: str, **options: Any) -> LiveRun:
        start = tmp_path / "start"
        tokenizer = Tokenizer.byte_level()
        GLM5ForCausalLM(GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size), seed=0).save_pretrained(start)
        tokenizer.save(start)
        runs.append(LiveRun(tmp_path, start, python=python, launch=f'backend = "ray"\n{launch}', **options))
        return runs[-1]

    yield make
    for run in runs:
        run.stop()


def start(cluster: Nodes, run: LiveRun, engines: int) -> None:
    run.start()
    run.wait_for_results(run.results() + 8, SECONDS)
    cluster.wait("all engines", lambda: len(cluster.processes(ENGINE)) == engines)


class Served:
    """`glm5 serve --ray` in a process of its own."""

    def __init__(self, python: Path, folder: Path, address: str, *options: str) -> None:
        self.checkpoint, self.output = folder / "start", folder / "serve.txt"
        if not self.checkpoint.exists():
            tokenizer = Tokenizer.byte_level()
            config = GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)
            GLM5ForCausalLM(config, seed=0).save_pretrained(self.checkpoint)
            tokenizer.save(self.checkpoint)
        command = [str(python), "-P", "-m", "glm5", "serve", str(self.checkpoint), "--port", "0", "--exact"]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--ray", address, *options], stdout=subprocess.PIPE, stderr=output, text=True,
                env={**os.environ, "PYTHONPATH": python_path(), "GLM5_API_KEY": "secret"}, start_new_session=True,
            )  # fmt: skip
        self.client = httpx.Client(timeout=SECONDS, trust_env=False, headers={"x-api-key": "secret"})

    def ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Ready on http://127.0.0.1:"), self.output.read_text()
        self.client.base_url = line.split()[-1]

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get("/workers").json()["workers"]
        return found

    def states(self) -> list[str]:
        return [worker["state"] for worker in self.workers()]

    def resize(self, count: int) -> None:
        assert self.client.post("/workers", json={"engines": count}).status_code == 200

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Its exit code; the terminal sends Ctrl-C to all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.client.close()
        return code


@pytest.fixture
def served(python: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def make(address: str, *options: str) -> Served:
        servers.append(Served(python, tmp_path, address, *options))
        return servers[-1]

    yield make
    for server in servers:
        server.end(signal.SIGKILL)


def no_actor_left(cluster: Nodes, seconds: float = 30) -> None:
    cluster.wait("no process left", lambda: not cluster.processes(ENGINE) and not cluster.processes(ACTOR), seconds)


def nothing_left(cluster: Nodes, run: LiveRun) -> None:
    run.check_nothing_left()
    no_actor_left(cluster)


def test_nodes_die_and_join(nodes: Callable[..., Nodes], live: Callable[..., LiveRun]) -> None:
    """Every group is trained once, whatever happens to the nodes; a lost engine waits until a node has room for it."""
    cluster = nodes(1, 2, 2)
    run = live(f'ray_address = "{cluster.address}"\nsimulate_environment = 2.0', engines=3, steps=60)
    start(cluster, run, 3)
    first = set(cluster.processes(ENGINE))
    cluster.tell("kill")
    cluster.wait("an engine was lost", lambda: bool(first - set(cluster.processes(ENGINE))))
    cluster.wait("its replacement", lambda: len(cluster.processes(ENGINE)) == 3)
    run.wait_for_results(run.results() + 8, SECONDS)
    cluster.tell("kill")
    cluster.wait("the sentence", lambda: "has room for it" in run.output.read_text())
    cluster.tell("add 2")
    cluster.wait("both", lambda: len(cluster.processes(ENGINE)) == 3)
    run.finish(2 * SECONDS)
    run.check()
    nothing_left(cluster, run)
    assert all(row["mismatch_max"] == 0 for row in read_metrics(run.stage.parent / "metrics.jsonl"))


def test_actors_end_with_the_run(nodes: Callable[..., Nodes], live: Callable[..., LiveRun]) -> None:
    """A killed actor takes its engine along, and both are replaced. Killed drivers and Ctrl-C end them all."""
    cluster = nodes(1, 1)
    run = live(f'ray_address = "{cluster.address}"', engines=2, steps=500)
    start(cluster, run, 2)
    before = set(cluster.processes(ENGINE))
    os.kill(cluster.processes(b"ray::RayEngine")[0], signal.SIGKILL)
    cluster.wait("an engine was lost", lambda: bool(before - set(cluster.processes(ENGINE))))
    cluster.wait("its replacement", lambda: len(cluster.processes(ENGINE)) == 2)
    run.wait_for_results(run.results() + 16, SECONDS)
    run.kill("rollouts")
    run.wait_for_results(run.results() + 16, SECONDS)
    run.kill("learner")
    assert run.process is not None
    run.process.wait()
    no_actor_left(cluster)
    start(cluster, run, 2)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.process.wait(60) == 1 and "Traceback" not in run.output.read_text()
    nothing_left(cluster, run)


def test_weights_over_torch_distributed(nodes: Callable[..., Nodes], live: Callable[..., LiveRun]) -> None:
    """Engines on nodes take part in the learner's group, also one that replaces another."""
    cluster = nodes(1, 1)
    run = live(f'ray_address = "{cluster.address}"\ntransport = "distributed"', engines=2, steps=12)
    start(cluster, run, 2)
    run.wait_for_results(32, SECONDS)
    before = set(cluster.processes(ENGINE))
    os.kill(cluster.processes(b"ray::RayEngine")[0], signal.SIGKILL)
    cluster.wait("an engine was lost", lambda: bool(before - set(cluster.processes(ENGINE))))
    cluster.wait("its replacement", lambda: len(cluster.processes(ENGINE)) == 2)
    run.finish(2 * SECONDS)
    run.check()
    nothing_left(cluster, run)
    assert all(row["mismatch_max"] == 0 for row in read_metrics(run.stage.parent / "metrics.jsonl"))


def test_the_head_is_lost(nodes: Callable[..., Nodes], live: Callable[..., LiveRun]) -> None:
    """The run ends, and nobody tells the other node; its actor and engine end by themselves."""
    cluster = nodes(0, 1)
    run = live(f'ray_address = "{cluster.address}"', steps=500)
    start(cluster, run, 1)
    for pid in cluster.processes(b"gcs_server") + cluster.processes(b"--head"):
        os.kill(pid, signal.SIGKILL)
    assert run.process is not None and run.process.wait(SECONDS) == 1
    no_actor_left(cluster, 150)


def test_an_actor_that_hangs_is_replaced(nodes: Callable[..., Nodes], live: Callable[..., LiveRun]) -> None:
    """Its engine answers heartbeats, but takes no weights; the other one gets them."""
    cluster = nodes(0, 1, 1)
    run = live(f'ray_address = "{cluster.address}"', engines=2, steps=500)
    start(cluster, run, 2)
    os.kill(cluster.processes(b"ray::RayEngine")[0], signal.SIGSTOP)
    cluster.wait("the sentence", lambda: "has not answered for" in run.output.read_text())
    run.wait_for_results(run.results() + 16, SECONDS)


def test_a_server_on_the_nodes(nodes: Callable[..., Nodes], served: Callable[..., Served]) -> None:
    """Engines on three nodes answer like a local one, come and go without a lost stream, and outlive their nodes."""
    cluster = nodes(0, 1, 1, 1)
    server = served(cluster.address, "--dp", "2", "--max-engines", "3")
    server.ready()
    cluster.wait("both", lambda: server.states() == ["up", "up"])
    expected = quiet_answers(server.checkpoint)
    with Load(server, expected, clients=3) as load:
        server.resize(3)
        cluster.wait("the third", lambda: server.states() == ["up"] * 3)
        assert len({worker["node"] for worker in server.workers()}) == 3
        asked = requests_of(server)
        cluster.wait("answers of each", lambda: min(a - b for a, b in zip(requests_of(server), asked, strict=True)) > 2)
        with contextlib.ExitStack() as streams:
            # Requests without a session go to the least loaded engine.
            long = body("count", max_tokens=300, ignore_eos=True, stream=True)
            found = [
                streams.enter_context(server.client.stream("POST", CHAT, json=long, headers={"x-session-id": str(i)}))
                for i in range(9)
            ]
            lines = [stream.iter_lines() for stream in found]
            for each in lines:
                next(each)
            assert server.workers()[2]["in_flight"]
            server.resize(2)
            assert server.states()[2] == "draining"
            assert all([line for line in each if line][-1] == "data: [DONE]" for each in lines)
        cluster.wait("its end", lambda: server.states()[2] == "drained" and len(cluster.processes(ACTOR)) == 2)
    assert not load.wrong and set(load.counts) <= {"whole", "streamed"}, (load.wrong[:3], load.counts)

    with Load(server, expected, clients=3) as load:
        lost = server.workers()[1]
        cluster.tell(f"kill {lost['node']}")
        cluster.wait("another engine", lambda: server.workers()[1]["replaced"] == 1 and server.states()[1] == "up")
        assert server.workers()[1]["node"] != lost["node"]
        asked = requests_of(server)
        cluster.wait("its answers", lambda: requests_of(server)[1] > asked[1] + 6)
        # Now there is no room but where the engines are.
        cluster.tell(f"kill {server.workers()[0]['node']}")
        cluster.wait("the sentence", lambda: "has room for it" in server.output.read_text())
        cluster.tell("add 1")
        cluster.wait("both again", lambda: server.states()[:2] == ["up", "up"])
        before = load.counts.total()
        cluster.wait("later answers", lambda: load.counts.total() > before + 12)
    assert not load.wrong and load.counts["whole"] > 5 and load.counts["streamed"] > 5, (load.wrong[:3], load.counts)
    print(f"two nodes killed: {dict(load.counts)}, slowest {load.slowest:.1f} s")
    os.kill(cluster.processes(b"ray::RayEngine")[0], signal.SIGKILL)
    cluster.wait("the loss", lambda: server.states()[:2] != ["up", "up"])
    cluster.wait("both again", lambda: server.states()[:2] == ["up", "up"])
    assert server.end() == 0 and "Traceback" not in server.output.read_text()
    no_actor_left(cluster)


def requests_of(server: Served) -> list[float]:
    """How many requests each engine got."""
    lines = server.client.get("/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("glm5_router_requests_total{")]


def test_a_server_whose_nodes_see_the_checkpoint(
    nodes: Callable[..., Nodes], served: Callable[..., Served], tmp_path: Path
) -> None:
    """New weights too. A server that is interrupted while its engine waits for room, or is killed, leaves nothing."""
    cluster = nodes(0, 1)
    server = served(cluster.address, "--ray-shared")
    server.ready()
    answer = server.client.post(CHAT, json=body("hi")).json()
    assert answer["model"] == "start"
    pushed = server.client.post("/update_weights_from_disk", json={"model_path": str(server.checkpoint)})
    assert pushed.status_code == 200 and server.client.get("/workers").json()["weight_version"] == "1"
    assert server.client.post(CHAT, json=body("hi")).json()["choices"] == answer["choices"]
    waiting = served(cluster.address, "--engine-threads", "2")
    cluster.wait("the sentence", lambda: "room for it (num_cpus: 2)" in waiting.output.read_text())
    assert waiting.end() == 0
    server.end(signal.SIGKILL)
    no_actor_left(cluster)


def test_services_on_the_nodes(
    nodes: Callable[..., Nodes], live: Callable[..., LiveRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The family of an installed package is played by task services on the cluster; one is killed."""
    metadata = tmp_path / "package" / "sums-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sums\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[glm5.families]\nsums = seeded_sums:SeededSums\n")
    (metadata.parent / "seeded_sums.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", str(metadata.parent))
    cluster = nodes(1, 2)
    run = live(
        f'ray_address = "{cluster.address}"\nservices = [{{ families = ["sums"], count = 2, cpus = 0.5 }}]',
        steps=8,
        families='[{ name = "remote", options = { family = "sums" } }]',
    )
    start(cluster, run, 1)
    os.kill(cluster.processes(b"ray::RayService")[0], signal.SIGKILL)
    run.finish(2 * SECONDS)
    run.check()
    nothing_left(cluster, run)


def test_a_cluster_of_its_own(live: Callable[..., LiveRun]) -> None:
    """Without a cluster the run starts one, which ends with it, also if the learner is killed."""
    run = live('ray_address = "local"\ntransport = "disk"', steps=4)
    process = run.start()
    run.wait_for_results(8, SECONDS)
    run.kill("learner")
    process.wait()
    run.check_no_process_left(90)  # Ray's own agents look for their parent now and then
    run.start()
    run.finish(2 * SECONDS)
    run.check()


def test_no_cluster_at_an_address(live: Callable[..., LiveRun]) -> None:
    run = live('ray_address = "127.0.0.1:1"', steps=1)
    assert run.start().wait(120) == 1
    assert "Cannot connect to the Ray cluster 127.0.0.1:1" in (text := run.output.read_text()), text
