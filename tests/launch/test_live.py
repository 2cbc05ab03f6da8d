"""Live RL through the command line: separate processes, killed ones, an interrupt, and what is left behind."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from glm5 import GLM5Config, GLM5ForCausalLM
from glm5.chat import Tokenizer
from glm5.config.launch import Launch
from glm5.config.load import load_recipe
from glm5.config.recipe import RunRecipe
from glm5.errors import MissingExtraError
from glm5.launch import pipeline
from glm5.obs.metrics import read_metrics
from glm5.rl.drivers.live import _WeightFolders, weights_prefix
from tests.forks import Forks
from tests.launch.live_run import KINDS, LiveRun
from tests.rollout.foreign_servers import KINDS as KINDS_OF_SERVERS
from tests.rollout.foreign_servers import in_thread
from tests.rooms import needs_rooms

pytestmark = pytest.mark.long

Make = Callable[..., LiveRun]


@pytest.fixture
def live(tmp_path: Path, forks: Forks) -> Iterator[Make]:
    runs: list[LiveRun] = []

    def make(**options: int) -> LiveRun:
        start = tmp_path / "start"
        tokenizer = Tokenizer.byte_level()
        GLM5ForCausalLM(GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size), seed=0).save_pretrained(start)
        tokenizer.save(start)
        runs.append(LiveRun(tmp_path, start, forks=forks, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.stop()


def test_any_process_may_be_killed_and_the_same_command_goes_on(live: Make) -> None:
    run = live(steps=8, prompts=2)
    process = run.start()
    run.wait_for_results(8)
    run.kill("engine")
    run.wait_for_results(20)
    run.kill("rollouts")
    run.wait_for_results(36)
    run.kill("learner")
    process.wait(60)
    run.start()
    run.finish(120)
    run.check()
    rows = read_metrics(run.stage.parent / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(row["mismatch_max"] == 0 for row in rows)  # learner and engine agree bit for bit
    assert rows[3]["staleness_mean"] > 0  # rollouts went on during updates


def test_an_interrupt_leaves_nothing_behind(live: Make) -> None:
    run = live(steps=500)
    process = run.start()
    run.wait_for_results(1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 1 and "Traceback" not in run.output.read_text()
    run.check_nothing_left()


@pytest.mark.slow
def test_a_task_service_comes_leaves_and_comes_again(
    live: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The agent of a user's own program is trained on, over HTTP; its process is killed once."""
    monkeypatch.setenv("GLM5_ADMIN_KEY", "key-for-this-test-only")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = live(steps=4, prompts=2, port=port, families='[{ name = "remote", options = { family = "sums" } }]')
    service = Path(__file__).parents[2] / "examples" / "live_rl.py"
    command = [sys.executable, str(service), f"http://127.0.0.1:{port}"]
    environment = {**os.environ, "GLM5_TEST_MARK": run.mark}
    run.start()
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run.wait_for_results(8)
    first.kill()
    first.wait()
    said = tmp_path / "service.txt"
    with said.open("w") as errors:
        second = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
    run.finish(120)
    second.send_signal(signal.SIGINT)
    assert second.wait(20) == 0 and "Traceback" not in said.read_text()
    run.check()
    turns = run.query("SELECT count(*) FROM turns JOIN sessions s ON s.id = session WHERE trained IS NOT NULL")
    assert turns == [(4 * 2 * 4,)]  # updates, prompts, group


ASK = """
import json, os, urllib.error, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": open("task.md").read()}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
"""


def _agent(tmp_path: Path, program: str) -> str:
    """The entry of a recipe's `families` for an agent in a room that runs this after `ASK`."""
    check = {"command": ["python3", "-c", "import json; exit('usage' not in json.load(open('work/answer')))"]}
    tasks = [{"id": str(i), "files": {"task.md": f"{i}?", "ask.py": ASK + program}, "grade": check} for i in range(8)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    options = f'{{ command = ["python3", "ask.py"], tasks = "{tmp_path / "tasks.jsonl"}" }}'
    return f'{{ name = "agent", options = {options} }}'


@needs_rooms
def test_an_agent_that_is_a_command_needs_nothing_but_a_recipe(live: Make, tmp_path: Path) -> None:
    """It runs in rooms, next to a family of ours; another program grades what it leaves."""
    agent = _agent(tmp_path, 'open("answer", "w").write(urllib.request.urlopen(request).read().decode())')
    run = live(steps=2, prompts=2, families=f'[{agent}, {{ name = "arithmetic" }}]')
    run.start()
    run.finish(120)
    run.check()
    assert run.query("SELECT DISTINCT outcome FROM results WHERE problem LIKE 'agent/%'") == [("solved",)]
    assert not run.stage.joinpath("gateway.sock").exists()


@needs_rooms
def test_the_end_of_a_run_is_no_failure_of_its_agents(live: Make, tmp_path: Path) -> None:
    """These ask as long as there is a gateway."""
    program = """
while True:
    try:
        urllib.request.urlopen(request)
    except urllib.error.HTTPError:
        pass
"""
    run = live(steps=500, families=f"[{_agent(tmp_path, program)}]")
    process = run.start()
    run.wait_for_rows("turns", 8)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 1 and "Traceback" not in run.output.read_text()
    assert run.query("SELECT outcome, detail FROM results") == []
    run.check_nothing_left()


@pytest.mark.parametrize("which", sorted(KINDS_OF_SERVERS))
def test_a_server_of_another_kind_samples(live: Make, tmp_path: Path, which: str) -> None:
    """An engine of ours that speaks as SGLang or vLLM does, in this process, and begins with weights that nobody wants:
    the run trains on the numbers that the learner would compute itself."""
    tokenizer = Tokenizer.byte_level()
    GLM5ForCausalLM(GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size), seed=9).save_pretrained(
        tmp_path / "other"
    )
    tokenizer.save(tmp_path / "other")
    with in_thread(which, tmp_path / "other") as (url, foreign):
        run = live(steps=2, prompts=2, launch=f'engine_urls = ["{url}"]')
        run.start()
        run.finish(120)
    run.check()
    rows = read_metrics(run.stage.parent / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and all(row["mismatch_max"] == 0 for row in rows)
    load = {"sglang": "POST /update_weights_from_disk", "vllm": "POST /collective_rpc"}[which]
    assert [line for line, _ in foreign.asked].count(load) >= 2 and not foreign.wrong


def test_a_server_that_was_restarted_ends_the_run(live: Make, tmp_path: Path) -> None:
    tokenizer = Tokenizer.byte_level()
    model = GLM5ForCausalLM(GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size), seed=9)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save(tmp_path / "other")
    with in_thread("vllm", tmp_path / "other") as (url, foreign):
        run = live(steps=500, prompts=2, launch=f'engine_urls = ["{url}"]')
        process = run.start()
        run.wait_for_results(16)
        foreign.fault = "version"
        assert process.wait(120) == 1
    said = run.output.read_text()
    sampled = "samples with weights of version 99, but was given version"
    pushed = "it says that it has version 99"  # whichever comes first
    assert f"The engine {url} " in said and (sampled in said or pushed in said) and "Traceback" not in said
    versions = [memoryview(row[0]).cast("i") for row in run.query("SELECT versions FROM turns")]  # type: ignore[arg-type]
    assert versions and max(max(row, default=0) for row in versions) < 99


@pytest.mark.slow
def test_weights_go_over_torch_distributed(live: Make) -> None:
    """Everything may be killed as with files of weights, and the results have the same keys."""
    run = live(steps=8, engines=2, launch='transport = "distributed"')
    process = run.start()
    run.wait_for_results(24)
    assert not list(Path("/dev/shm").glob(weights_prefix(run.stage) + "*"))
    run.kill("engine")
    run.wait_for_results(48)
    run.kill("rollouts")  # later than the first push: the next one begins with weights that no file has
    run.wait_for_results(72)
    run.kill("learner")
    process.wait(60)
    run.start()
    run.finish(180)
    run.check()
    assert not list(run.stage.glob(weights_prefix(run.stage) + "*"))
    rows = read_metrics(run.stage.parent / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(row["mismatch_max"] == 0 for row in rows)  # engines have the learner's weights bit for bit
    keys = "corpus exact name notes parameters preset seed software stages times"
    assert set(json.loads((run.stage.parent / "results.json").read_text())) == {*keys.split()}  # of any transport


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memory", "disk", "distributed"])
def test_engines_in_low_precision_round_every_version(live: Make, transport: str) -> None:
    run = live(
        steps=4, launch=f'transport = "{transport}"', stage='rollouts = "fast"\nrollout_dtype = "int8"'
    )  # fmt: skip
    run.start()
    run.finish(240)
    run.check()
    rows = read_metrics(run.stage.parent / "metrics.jsonl")
    assert len(rows) == 4 and 0 < rows[0]["mismatch_max"] < 1  # later ones have tokens of older versions
    assert all(0.9 < row["ratio_mean"] < 1.1 for row in rows)


@pytest.mark.slow
def test_ranks_share_the_updates(live: Make) -> None:
    """Under torchrun a rank is killed, then Ctrl-C ends all; both times nothing is left, and the command goes on."""
    run = live(steps=8, ranks=2)
    process = run.start()
    run.wait_for_results(24)
    (pid,) = run.processes(rank=1)
    assert len(run.processes(rank=0)) == 1 < len(run.processes())  # engines are no ranks
    os.kill(pid, signal.SIGKILL)
    assert process.wait(60) != 0
    run.check_nothing_left()
    process = run.start()
    run.wait_for_results(64)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    run.check_nothing_left()
    said = run.output.read_text()
    assert said.count("rl: interrupted") >= 1 and "RuntimeError" not in said
    run.start()
    run.finish(120)
    run.check()
    rows = read_metrics(run.stage.parent / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(row["mismatch_max"] == 0 for row in rows)
    states = {p.name for p in (run.stage / "state" / "step-00000007").glob("rank-*")}
    assert states == {"rank-00000.safetensors", "rank-00001.safetensors"}


def test_weights_of_a_living_run_are_not_deleted(tmp_path: Path) -> None:
    """Two containers may share /dev/shm, and in both a stage may have the same folder."""
    with _WeightFolders(tmp_path, "memory") as first:
        path = first._folder
        with _WeightFolders(tmp_path, "memory") as second:
            assert path.is_dir() and second._folder != path
        first._lock.close()  # as if its process had been killed
        with _WeightFolders(tmp_path, "memory"):
            assert not path.exists()


RAY = """
name = "a"
start = "b"
[launch]
backend = "ray"
[[stages]]
kind = "agentic"
name = "rl"
families = [{ name = "arithmetic" }]
optim = { steps = 1, lr = 1e-4 }
"""


def test_a_run_on_ray_names_the_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("ray_fleet", "ray_engines"):
        monkeypatch.delitem(sys.modules, f"glm5.rollout.{name}", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'glm5\[ray\]'"):
        importlib.import_module("glm5.rollout.ray_fleet")
    (tmp_path / "ray.toml").write_text(RAY)
    with pytest.raises(MissingExtraError, match=r"pip install 'glm5\[ray\]'"):
        pipeline._check(load_recipe(tmp_path / "ray.toml", RunRecipe))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ray_address": "head:6379"}, 'ray_address needs backend = "ray"'),
        ({"engine_gpus": 0.0}, 'engine_gpus needs backend = "ray"'),
        ({"services": [{"families": ["sums"]}]}, 'services needs backend = "ray"'),
        ({"backend": "ray", "engine_urls": ["http://a"]}, "servers that run already"),
        ({"engine_key_file": "key"}, "the key of engine_urls, of which there are none"),
        ({"transport": "distributed", "host": "0.0.0.0"}, "needs an address of this machine"),
        ({"backend": "ray", "engine_resources": {"CPU": 1.0}}, "cannot have CPU, which is engine_threads"),
        ({"backend": "ray", "engine_resources": {"memory": 1e6}}, "cannot have memory"),
        ({"backend": "ray", "engine_resources": {"fast": -1.0}}, "fast is -1"),
        ({"backend": "ray", "engine_gpus": 1.5}, "must be a whole number"),
        ({"backend": "ray", "engine_gpus": 1e-5}, "at least 0.0001"),
        ({"backend": "ray", "engine_resources": {"fast": 1e-5}}, "let it be 0.0001 or more"),
    ],
)
def test_keys_of_ray_go_with_its_backend(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Launch.model_validate(keys)


def test_processes_of_an_unfinished_run_may_change() -> None:
    work = pipeline._work
    base = 'name = "a"\n'
    assert work(base + "[launch]\nengines = 1\n") == work(base + '[launch]\nengines = 2\ntransport = "disk"\n')
    assert work(base) != work(base + "[launch]\n") == work(base + '[launch]\nhistory = "tokens"\n')
    assert work(base + "[launch]\n") != work(base + '[launch]\nhistory = "text"\n')


@pytest.mark.slow
def test_chaos(live: Make) -> None:
    """Thirty kills of every kind of process during at least 2,000 rollouts."""
    run = live(steps=500, engines=2)
    rng = random.Random(0)
    kills = [kind for kind in KINDS for _ in range(30)]
    rng.shuffle(kills)
    process = run.start()
    for kind in kills:
        time.sleep(rng.uniform(0.0, 12.0))
        run.kill(kind)  # the run must be long enough for all of them
        if kind == "learner":
            process.wait(60)
            process = run.start()
    run.finish(1200)
    run.check()
    assert run.results() >= 2000
