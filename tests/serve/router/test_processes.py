"""`glm5 serve --dp 2` as a whole: real engine processes that are killed, hung, drained, and given new weights."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from fastapi.testclient import TestClient

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.process import python_path
from glm5.serve.app import create_app
from glm5.serve.options import EngineOptions, Limits
from glm5.serve.router.process import WorkerJob
from glm5.serve.router.workers import COMMAND

pytestmark = [pytest.mark.long, pytest.mark.dist]

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
KEY = {"x-api-key": "secret"}
TOKENS = 40
PATIENCE = "Patience(beat=0.3, answer=6.0, misses=2, back_off=0.05, stable=0.5)"
PROMPTS = [f"Question {i}: what is {i} and {i}?" for i in range(6)]


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS, "temperature": 0, **fields}


class Routed:
    """A router with two engines, or as many as asked for, in a process of its own.

    The first `real` of its engines are started as they are everywhere, the others are forked (see `fork_server`).
    """

    def __init__(
        self,
        forks: Any,
        checkpoint: Path,
        folder: Path,
        options: str = "",
        *,
        real: int = 0,
        patience: str = PATIENCE,
        engines: int = 2,
        engine: str = "exact=True",
    ) -> None:
        code = (
            f"fork_engines(after={real}); "
            "from glm5.serve.router.app import run; from glm5.serve.router.workers import Patience; "
            "from glm5.serve.options import EngineOptions, Limits; "
            f"run({str(checkpoint)!r}, port=0, api_key='secret', engines={engines}, options=EngineOptions({engine}), "
            f"patience={patience}{options})"
        )
        folder.mkdir()
        self.folder = folder
        self.process = forks(code, env={"TMPDIR": str(folder)})
        self._watchdog = threading.Timer(400, self.process.kill)
        self._watchdog.start()
        line = self.process.stdout.readline()
        assert line.startswith("Ready on http://127.0.0.1:"), line
        self.client = httpx.Client(
            base_url=line.split()[-1], headers=KEY, timeout=60, trust_env=False, limits=httpx.Limits(max_connections=64)
        )

    def workers(self) -> list[dict[str, Any]]:
        return self.client.get("/workers").json()["workers"]

    def pids(self) -> list[int]:
        return [worker["pid"] for worker in self.workers() if worker["pid"]]

    def until_up(self) -> None:
        wait_until(lambda: all(worker["state"] == "up" for worker in self.workers()), 60)

    def value(self, name: str) -> float:
        """Sum over the workers."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((name + "{", name + " ")))

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = int(self.process.wait(60))
        self._watchdog.cancel()
        self.client.close()
        return code


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    return not alive(pid)


@pytest.fixture(scope="module")
def routed(forks: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    # A short name: the address of a Unix socket has room for some 100 bytes.
    server = Routed(forks, checkpoint, tmp_path_factory.mktemp("r") / "t", real=1)
    pids = server.pids()
    yield server
    pids = [*pids, *server.pids()]
    server.end()
    assert not [pid for pid in pids if alive(pid)] and not list(server.folder.glob("glm5-*"))


@pytest.fixture
def calm(routed: Routed) -> Routed:
    routed.until_up()
    return routed


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[tuple[str, str], str]:
    return quiet_answers(checkpoint)


def quiet_answers(checkpoint: Path) -> dict[tuple[str, str], str]:
    """Greedy answers of a single quiet server, by path and prompt."""
    engine = Engine.from_pretrained(checkpoint)
    assert engine.tokenizer is not None
    app = create_app(engine, engine.tokenizer, model_name=checkpoint.name)
    with TestClient(app) as client:
        answers = {
            (path, p): text_of(path, client.post(path, json=body(p)).json())
            for path in (CHAT, MESSAGES)
            for p in PROMPTS
        }
    assert len(set(answers.values())) > len(PROMPTS)
    return answers


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == CHAT:
        message = answer["choices"][0]["message"]
        return (message.get("reasoning_content") or "") + "|" + (message["content"] or "")
    return "".join(block.get("thinking", "") + "|" + block.get("text", "") for block in answer["content"])


def streamed(path: str, response: httpx.Response) -> tuple[str, str | None]:
    """The text of a stream, and the message of its error event. It must end as streams end."""
    thoughts = text = ""
    error, last = None, ""
    for line in response.iter_lines():
        if line.startswith("data: "):
            last = line[6:]
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            error = event["error"]["message"]
        elif path == CHAT:
            for choice in event["choices"]:
                thoughts += choice["delta"].get("reasoning_content") or ""
                text += choice["delta"].get("content") or ""
        elif event["type"] == "content_block_delta":
            thoughts += event["delta"].get("thinking", "")
            text += event["delta"].get("text", "")
    assert last == "[DONE]" or (path == MESSAGES and json.loads(last)["type"] in ("message_stop", "error"))
    return f"{thoughts}|{text}", error


class Asked(Protocol):
    """A server and its client."""

    client: httpx.Client


class Load:
    """Clients that ask until told to stop, in every manner, and check each answer. `lost` are the statuses and the
    messages of answers whose engine was lost."""

    lost: tuple[tuple[int, ...], tuple[str, ...]] = ((503,), ("engine ended",))

    def __init__(self, server: Asked, expected: dict[tuple[str, str], str], clients: int = 6) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest = 0.0
        self._server, self._expected = server, expected
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *rest: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a request hangs"

    def _ask(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._stop.is_set():
            path, prompt, stream = chance.choice((CHAT, MESSAGES)), chance.choice(PROMPTS), chance.random() < 0.5
            began = time.monotonic()
            try:
                outcome = self._one(path, prompt, stream)
            except Exception as error:  # a broken connection, or an answer that is none
                self.wrong.append(f"{path} stream={stream}: {error!r}")
                outcome = "wrong"
            self.counts[outcome] += 1
            self.slowest = max(self.slowest, time.monotonic() - began)

    def _one(self, path: str, prompt: str, stream: bool) -> str:
        want, client = self._expected[path, prompt], self._server.client
        # Without thoughts, text comes behind the bar at once.
        if not stream:
            answer = client.post(path, json=body(prompt))
            if answer.status_code == 200:
                assert text_of(path, answer.json()) == want
                return "whole"
            assert answer.status_code in self.lost[0] and answer.json()["error"]["message"], answer.text
            return "refused"
        with client.stream("POST", path, json=body(prompt, stream=True)) as response:
            if response.status_code != 200:
                assert response.status_code in self.lost[0] and json.loads(response.read())["error"]["message"]
                return "refused"
            text, error = streamed(path, response)
        if error is None:
            assert text == want
            return "streamed"
        assert any(message in error for message in self.lost[1]), error
        thoughts, _, said = text.partition("|")
        assert want.startswith(thoughts if not said else text), (text, want)
        return "cut"


def kill_under_load(server: Routed, expected: dict[tuple[str, str], str], kills: int, seed: int) -> Load:
    chance, replaced = random.Random(seed), sum(worker["replaced"] for worker in server.workers())
    seen: set[int] = set()
    with Load(server, expected) as load:
        for _ in range(kills):
            time.sleep(chance.uniform(0.2, 1.5))
            wait_until(lambda: bool(server.pids()), 60)
            victim = chance.choice(server.pids())
            seen.update(server.pids())
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            if chance.random() < 0.7:  # otherwise the next one meets a server that is not whole again
                wait_until(partial(gone, victim), 10)
                server.until_up()
        server.until_up()
        before = load.counts.total()
        wait_until(lambda: load.counts.total() > before + 12, 60)
    assert not load.wrong, load.wrong[:3]
    assert load.counts["whole"] > 5 and load.counts["streamed"] > 5
    assert sum(worker["replaced"] for worker in server.workers()) - replaced >= kills // 2
    assert not [pid for pid in seen - set(server.pids()) if alive(pid)]
    wait_until(lambda: server.value("glm5_samples_running") + server.value("glm5_samples_waiting") == 0)
    assert sum(worker["in_flight"] for worker in server.workers()) == 0
    # Nothing is left but what the prefix cache keeps, which new tokens may take.
    assert server.value("glm5_cache_pages_free") == server.value("glm5_cache_pages")
    return load


def test_two_engines_answer_like_one_and_sessions_stay(calm: Routed, expected: dict[tuple[str, str], str]) -> None:
    for (path, prompt), want in expected.items():
        assert text_of(path, calm.client.post(path, json=body(prompt)).json()) == want
    cached = calm.value("glm5_cached_tokens_total")
    for i in range(6):
        for _ in range(3):
            calm.client.post(CHAT, json=body(f"session {i} " * 20, max_tokens=1), headers={"x-session-id": str(i)})
    text = calm.client.get("/metrics").text
    assert calm.value("glm5_cached_tokens_total") - cached > 6 * 2 * 100
    used = [line for line in text.splitlines() if line.startswith("glm5_generated_tokens_total{")]
    assert len(used) == 2 and all(float(line.split()[-1]) > 0 for line in used)
    parser = pytest.importorskip("prometheus_client.parser")
    assert len(list(parser.text_string_to_metric_families(text))) > 20


def test_the_key_is_asked_for_at_the_router(calm: Routed) -> None:
    for method, path in (("POST", CHAT), ("POST", "/flush_cache"), ("GET", "/workers"), ("GET", "/metrics")):
        assert calm.client.request(method, path, headers={"x-api-key": "no"}, json={}).status_code == 401
    assert calm.client.get("/health", headers={"x-api-key": ""}).json()["workers"] == {"up": 2, "of": 2}
    assert "chat" in calm.client.get("/").text and calm.client.post(CHAT, json={"messages": []}).status_code == 400
    shown = [Path(f"/proc/{pid}/{kind}").read_bytes() for pid in calm.pids() for kind in ("cmdline", "environ")]
    assert any(b"router.process" in text for text in shown), "no engine here was started, all were forked"
    assert not any(b"secret" in text for text in shown)  # what they do not know, `ps` does not show
    (sockets,) = {path.parent for path in calm.folder.rglob("*.sock")}
    assert sockets.stat().st_mode & 0o777 == 0o700


def test_clients_that_leave_end_their_work(calm: Routed) -> None:
    long = body("hi", max_tokens=3500, ignore_eos=True, n=8)
    with calm.client.stream("POST", CHAT, json={**long, "stream": True}) as response:
        lines = response.iter_lines()  # a client that lets go of it has left
        next(lines)
        wait_until(lambda: calm.value("glm5_samples_running") + calm.value("glm5_samples_waiting") == 8)
    with pytest.raises(httpx.ReadTimeout):
        calm.client.post(CHAT, json=long, timeout=0.7)
    wait_until(lambda: calm.value("glm5_samples_running") + calm.value("glm5_samples_waiting") == 0)


def test_pause_abort_and_flush_reach_all(calm: Routed) -> None:
    assert calm.client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    done: list[Any] = []
    long = {"text": "x", "rid": "mine", "sampling_params": {"max_new_tokens": 2000}}

    def ask(i: int) -> None:
        done.append(calm.client.post("/generate", json=long, headers={"x-session-id": str(i)}).json())

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(worker["in_flight"] for worker in calm.workers()) == 6)
    assert all(worker["in_flight"] for worker in calm.workers()) and calm.client.get("/workers").json()["paused"]
    wait_until(lambda: calm.client.post("/flush_cache").status_code == 400)
    assert calm.client.post("/abort_request", json={"rid": "mine"}).json()["aborted"] == 6
    assert calm.client.post("/continue_generation").status_code == 200
    for thread in threads:
        thread.join(30)
    assert [one["meta_info"]["finish_reason"]["type"] for one in done] == ["abort"] * 6
    wait_until(lambda: calm.client.post("/flush_cache").status_code == 200)


def test_engines_are_killed_under_load(calm: Routed, expected: dict[tuple[str, str], str]) -> None:
    kill_under_load(calm, expected, 3, seed=1)


def test_an_engine_that_hangs_is_replaced(
    forks: Any, checkpoint: Path, tmp_path: Path, expected: dict[tuple[str, str], str]
) -> None:
    server = Routed(forks, checkpoint, tmp_path / "t", patience=PATIENCE.replace("answer=6.0", "answer=1.0"))
    victim = server.pids()[0]
    os.kill(victim, signal.SIGSTOP)
    with Load(server, expected, clients=3) as load:
        wait_until(lambda: not alive(victim), 30)
        server.until_up()
    assert not load.wrong, load.wrong[:3]
    assert victim not in server.pids()
    server.end()


def test_a_rank_can_be_drained(calm: Routed) -> None:
    with calm.client.stream("POST", CHAT, json=body("hi", max_tokens=250, ignore_eos=True, stream=True)) as response:
        lines = response.iter_lines()
        next(lines)
        (busy,) = [worker for worker in calm.workers() if worker["in_flight"]]
        assert calm.client.post(f"/workers/{busy['id']}/drain").json()["state"] == "draining"
        assert calm.client.post(CHAT, json=body("hi")).status_code == 200  # elsewhere, though its prefix is there
        assert [line for line in lines if line][-1] == "data: [DONE]"
    wait_until(lambda: calm.workers()[busy["id"]]["state"] == "drained" and not alive(busy["pid"]))
    assert calm.client.get("/health").json()["workers"]["up"] == 1
    calm.client.post(f"/workers/{busy['id']}/resume")
    calm.until_up()


def test_engines_are_added_and_taken_away_under_load(
    forks: Any, checkpoint: Path, tmp_path: Path, expected: dict[tuple[str, str], str]
) -> None:
    """One engine, two, and one again, twice, while clients ask: no answer is lost, refused or wrong."""
    calm = PATIENCE.replace("answer=6.0", "answer=60.0")  # on a busy machine no engine must count as hung
    server = Routed(forks, checkpoint, tmp_path / "t", ", most=2", engines=1, patience=calm)

    def resize(count: int) -> None:
        assert server.client.post("/workers", json={"engines": count}).status_code == 200

    assert server.client.post("/workers", json={"engines": 3}).status_code == 400
    long = body("count", max_tokens=400, ignore_eos=True, stream=True)
    with Load(server, expected, clients=4) as load:
        for _ in range(2):
            resize(2)
            wait_until(lambda: server.client.get("/health").json()["workers"] == {"up": 2, "of": 2}, 60)
            before, ran = load.counts.total(), server.value('glm5_router_requests_total{worker="1"}')
            wait_until(lambda: load.counts.total() > before + 12, 60)  # noqa: B023
            assert server.value('glm5_router_requests_total{worker="1"}') > ran
            pid = server.workers()[1]["pid"]
            streams = [
                server.client.stream("POST", CHAT, json=long, headers={"x-session-id": str(i)}) for i in range(8)
            ]
            with contextlib.ExitStack() as open_streams:
                lines = [open_streams.enter_context(stream).iter_lines() for stream in streams]
                for each in lines:
                    next(each)
                assert server.workers()[1]["in_flight"] and server.value("glm5_router_role_running") > 0
                resize(1)
                assert server.workers()[1]["state"] == "draining" and alive(pid)
                for each in lines:
                    assert [line for line in each if line][-1] == "data: [DONE]"
            wait_until(lambda: server.workers()[1]["state"] == "drained" and not alive(pid), 60)  # noqa: B023
            assert server.value("glm5_router_role_tokens_per_second") > 0
    assert not load.wrong, load.wrong[:3]
    assert set(load.counts) <= {"whole", "streamed"} and load.counts.total() > 24, load.counts
    print(f"grown and shrunk twice: {dict(load.counts)}, slowest {load.slowest:.1f} s")
    assert server.value("glm5_router_retries_total") == server.value("glm5_router_streams_cut_total") == 0
    assert [worker["replaced"] for worker in server.workers()] == [0, 0]
    server.end()


def test_new_engines_have_the_weights_that_were_pushed(
    calm: Routed, tokenizer: Tokenizer, tmp_path: Path, checkpoint: Path
) -> None:
    config = GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)
    GLM5ForCausalLM(config, seed=5).save_pretrained(tmp_path / "new")
    ask = {"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}}

    def answers() -> dict[str, Any]:
        """By worker, found by trying sessions."""
        found = {}
        for i in range(8):
            answer = calm.client.post("/generate", json=ask, headers={"x-session-id": str(i)}).json()
            found[str(i)] = (tuple(answer["output_ids"]), tuple(answer["meta_info"]["output_weight_versions"]))
        return found

    before = set(answers().values())
    refused = calm.client.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "nowhere")})
    assert refused.status_code == 400 and set(answers().values()) == before
    pushed = calm.client.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "new")}).json()
    assert pushed["success"] is True and len(pushed["workers"]) == 2
    after = set(answers().values())
    assert len(before) == len(after) == 1 and before.pop()[0] != next(iter(after))[0]
    for pid in calm.pids():
        os.kill(pid, signal.SIGKILL)
    assert set(answers().values()) == after  # asked while no engine is up: they wait
    calm.until_up()
    assert set(answers().values()) == after and next(iter(after))[1] == (1,) * 5
    restored = {"model_path": str(checkpoint), "weight_version": "9"}
    assert calm.client.post("/update_weights_from_disk", json=restored).status_code == 200
    assert calm.client.get("/get_weight_version").json() == {"weight_version": "9"}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_router_that_is_told_to_stop_lets_answers_finish(
    forks: Any, checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    server = Routed(forks, checkpoint, tmp_path / "t", ", limits=Limits(stop_seconds=4.0)")
    pids = server.pids()
    outcomes: dict[int, Any] = {}
    begun = threading.Barrier(3)

    def ask(tokens: int) -> None:
        request = body("hi", max_tokens=tokens, ignore_eos=True, stream=True)
        with server.client.stream("POST", CHAT, json=request) as response:
            lines = response.iter_lines()
            next(lines)
            begun.wait(30)
            outcomes[tokens] = [line.removeprefix("data: ") for line in lines if line]

    threads = [threading.Thread(target=ask, args=(tokens,)) for tokens in (20, 3900)]
    for thread in threads:
        thread.start()
    begun.wait(30)
    began = time.monotonic()
    assert server.end(number) in (0, -number)
    assert time.monotonic() - began < 20
    for thread in threads:
        thread.join(30)
    assert outcomes[20][-1] == "[DONE]" and json.loads(outcomes[20][-2])["choices"][0]["finish_reason"] == "length"
    assert outcomes[3900][-1] == "[DONE]"
    last = json.loads(outcomes[3900][-2])  # a fast machine may have finished it
    assert "error" not in last or last["error"]["code"] == "stopping"
    assert not [pid for pid in pids if alive(pid)] and not list(server.folder.glob("glm5-*"))


def test_a_router_that_is_killed_leaves_nothing(forks: Any, checkpoint: Path, tmp_path: Path) -> None:
    server = Routed(forks, checkpoint, tmp_path / "t")
    pids = server.pids()
    assert len(pids) == 2
    server.end(signal.SIGKILL)
    wait_until(lambda: not [pid for pid in pids if alive(pid)] and not list(server.folder.glob("glm5-*")))


def test_a_model_that_cannot_be_served_is_an_error_of_three_lines_at_most(
    forks: Any, checkpoint: Path, tmp_path: Path
) -> None:
    for options, words in (
        ([str(tmp_path / "nowhere"), "--dp", "2"], "nowhere"),
        ([str(checkpoint), "--dp", "2", "--cache-tokens", "5"], "cache_tokens"),
        ([str(checkpoint), "--dp", "0"], "--dp"),
    ):
        code, pipe = "fork_engines(); from glm5.cli import main; main()", subprocess.PIPE
        process = forks(code, "serve", *options, "--port", 0, stderr=pipe, env={"TMPDIR": str(tmp_path)})
        error = process.stderr.read()
        assert process.wait(120) in (1, 2) and error.startswith("Error: ") and words in error, error
        assert len(error.splitlines()) <= 3 and not process.stdout.read() and not list(tmp_path.glob("glm5-*"))


@pytest.mark.slow
def test_engines_are_killed_twenty_times_under_load(calm: Routed, expected: dict[tuple[str, str], str]) -> None:
    began = time.monotonic()
    load = kill_under_load(calm, expected, 20, seed=2)
    print(f"20 kills in {time.monotonic() - began:.0f} s: {dict(load.counts)}, slowest {load.slowest:.1f} s")


def test_an_engine_on_a_network_address_needs_its_key(checkpoint: Path) -> None:
    """So it runs on other machines. It ends with its stdin, like every engine process."""
    job = WorkerJob(str(checkpoint), "", "policy", Limits(), EngineOptions(), host="127.0.0.1", key="secret")
    process = subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": python_path()}
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(job.to_json().encode() + b"\n")
        process.stdin.flush()
        url = json.loads(process.stdout.readline())["url"]
        for path in ("/get_weight_version", "/pause_generation", "/generate"):
            ask = httpx.get if path.startswith("/get") else partial(httpx.post, json={})
            assert ask(url + path).status_code == 401
            assert ask(url + path, headers={"authorization": "Bearer secret"}).status_code != 401
        process.stdin.close()
        assert process.wait(20) == 1
