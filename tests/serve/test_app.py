"""The page, who may ask, and the process as a whole."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from glm5.chat import formats
from glm5.chat.tokenizer import Tokenizer
from glm5.errors import CheckpointError, ConfigError, UsageError
from glm5.records import SamplingParams
from glm5.serve.app import load_app, load_defaults, run
from glm5.serve.options import EngineOptions, Limits

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
Make = Callable[..., tuple[TestClient, Any]]


def test_api_key(scripted: Make) -> None:
    client, _ = scripted("<|user|>", app={"api_key": "secret"})
    assert client.get("/health").status_code == client.get("/").status_code == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer "}):
        for response in (client.get("/v1/models", headers=headers), client.post(URL, json={}, headers=headers)):
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    good = {"Authorization": "Bearer secret"}
    assert client.post(URL, json={"messages": HI}, headers=good).status_code == 200


def test_pages_of_other_sites_are_turned_away(scripted: Make) -> None:
    client, engine = scripted("<|user|>", app={"allowed_hosts": {"testserver", "localhost"}})
    body = {"messages": HI}
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert client.post(URL, json=body, headers=headers).status_code == 403
    for host in ("evil.example", "localhost.evil.example", "[::1", ""):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 403
    assert not engine.prompts
    own = {"Host": "localhost:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}
    answer = client.post(URL, json=body, headers=own)
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_defaults_of_a_directory(tmp_path: Path, checkpoint: Path) -> None:
    assert load_defaults(tmp_path) == SamplingParams()
    assert load_defaults(checkpoint) == SamplingParams(temperature=1.0, top_p=0.95)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 50, "do_sample": True, "eos_token_id": [1]}))
    assert load_defaults(tmp_path) == SamplingParams(temperature=0.6, top_k=50)
    file.write_text('{"do_sample": false}')
    assert load_defaults(tmp_path).temperature == 0
    for bad in ("{", "[]", '{"temperature": -3}', '{"top_p": "high"}', "[" * 100_000):
        file.write_text(bad)
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            load_defaults(tmp_path)


def test_the_template_of_the_checkpoint_makes_the_prompt(checkpoint: Path, tmp_path: Path) -> None:
    """A directory as a release has it: its template file decides, and clients are told."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("[gMASK]{{ messages[0].content }}<|assistant|>")
    with TestClient(load_app(tmp_path, Limits(), EngineOptions())) as client:
        ids = client.post("/tokenize", json={"messages": HI}).json()["tokens"]
        shown = client.get("/v1/models").json()["data"][0]["chat_template"]
    tokenizer = Tokenizer.load(checkpoint)
    assert ids == [tokenizer.special["[gMASK]"], *tokenizer.encode("hi"), tokenizer.special["<|assistant|>"]]
    assert shown == f"jinja ({tmp_path / 'chat_template.jinja'})"
    with TestClient(load_app(tmp_path, Limits(), EngineOptions(chat_template="5.1"))) as client:
        assert client.get("/v1/models").json()["data"][0]["chat_template"] == "5.1 (the command line)"


def test_run_refuses(checkpoint: Path, model: Any, tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "", "example.com"):
        with pytest.raises(UsageError, match="API key"):
            run(checkpoint, host=host)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"Port {port} on 127.0.0.1 is in use"):
            run(checkpoint, port=port)
    with pytest.raises(UsageError, match="Cannot serve"):
        run(checkpoint, port=99_999)
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        run(tmp_path / "bare", port=0)


@contextlib.contextmanager
def server(forks: Any, checkpoint: Path, options: str = "") -> Iterator[tuple[Any, str]]:
    """A server in a process of its own, and its address."""
    code = "from glm5.serve.app import run; from glm5.serve.options import Limits; "
    process = forks(f"{code}run({str(checkpoint)!r}, port=0{options})")
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        assert line.startswith("Ready on http://127.0.0.1:"), line
        yield process, line.split()[-1]
    finally:
        process.terminate()
        process.wait(60)
        watchdog.cancel()


SCORED: dict[str, Any] = {"prompt": [1, 2, 3] * 700, "echo": True, "logprobs": 0, "max_tokens": 0}
"""A row of seconds."""


def wait_for(client: httpx.Client, line: str) -> None:
    """Until the metrics hold a line."""
    deadline = time.monotonic() + 30
    while line not in client.get("/metrics").text.splitlines():
        assert time.monotonic() < deadline, f"the metrics never say {line}"
        time.sleep(0.05)


def test_a_server_that_is_told_to_stop_says_so(forks: Any, checkpoint: Path) -> None:
    """What streams ends with a sentence in time, what is scored with a status, and the process ends well."""
    scored: list[httpx.Response] = []

    def score(address: str) -> None:
        with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
            scored.append(client.post("/v1/completions", json={**SCORED, "prompt": [SCORED["prompt"]] * 30}))

    long = {"messages": HI, "max_tokens": 4000, "ignore_eos": True, "n": 32, "stream": True}
    with server(forks, checkpoint, ", limits=Limits(stop_seconds=0.5)") as (process, address):
        with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
            with client.stream("POST", URL, json=long) as response:
                lines = response.iter_lines()
                next(lines)
                scorer = threading.Thread(target=score, args=(address,))
                scorer.start()
                wait_for(client, "glm5_samples_running 33")  # 32 that stream, and rows to score
                process.terminate()
                events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == "stopping"
        scorer.join()
        assert scored[0].status_code == 503 and scored[0].json()["error"]["code"] == "stopping"
        assert process.wait(60) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health", trust_env=False)


def test_a_real_server_streams_and_drops_work_of_clients_that_left(forks: Any, checkpoint: Path) -> None:
    long = {"messages": HI, "max_tokens": 4000, "ignore_eos": True, "seed": 1}
    with (
        server(forks, checkpoint) as (_, address),
        httpx.Client(base_url=address, timeout=60, trust_env=False) as client,
    ):
        assert client.get("/health").status_code == 200
        # Rows of the engine's batch are free again only if it noticed that each of these clients hung up.
        for _ in range(4):
            with client.stream("POST", URL, json={**long, "n": 64, "stream": True}) as response:
                assert response.status_code == 200
                lines = response.iter_lines()
                while "reasoning_content" not in next(lines):
                    pass
        with pytest.raises(httpx.ReadTimeout):
            client.post(URL, json={**long, "n": 64}, timeout=1)
        deadline = time.monotonic() + 60
        while client.post(URL, json={"messages": HI, "n": 128, "max_tokens": 1}).status_code == 429:
            assert time.monotonic() < deadline, "work of clients that left still fills the server"
            time.sleep(0.1)
        for _ in range(10):
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json={**SCORED, "prompt": [SCORED["prompt"]] * 20}, timeout=0.3)
        wait_for(client, "glm5_samples_running 0")
        wait_for(client, "glm5_samples_waiting 0")
        parts = [
            json.loads(line.removeprefix("data: "))
            for line in client.post(URL, json={**long, "max_tokens": 8, "stream": True}).text.splitlines()
            if line.startswith("data: {")
        ]
        assert parts[-1]["choices"][0]["finish_reason"] == "length"

        def pieces() -> Iterator[bytes]:
            for _ in range(300):
                yield b" " * 2**16

        assert client.post(URL, content=pieces()).status_code == 413  # without an announced length
        assert client.get("/health").status_code == 200


@pytest.mark.long
def test_a_slow_foreign_template_holds_up_no_other_requests(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many conversations wait for it, bodies are read and plain prompts answered; and they wait in time."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "slow.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(formats, "RENDER_SECONDS", 0.2)
    app = load_app(tmp_path, Limits(request_seconds=2.0), EngineOptions(chat_template=str(tmp_path / "slow.jinja")))
    with TestClient(app) as client, ThreadPoolExecutor(40) as pool:
        chats = [pool.submit(client.post, URL, json={"messages": HI}) for _ in range(40)]
        while not any(one.done() for one in chats):  # the template is at work on one, and the others wait
            time.sleep(0.05)
        assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200
        assert not all(one.done() for one in chats)
        found = {one.result().status_code for one in chats}
    assert 504 in found and found <= {400, 504}
