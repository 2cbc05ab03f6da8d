"""`glm5 serve DIR --tp 2` as a whole: answers, new weights, and the end of any of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.process import python_path
from glm5.records import SamplingParams

pytestmark = [pytest.mark.dist, pytest.mark.slow]

PROMPT = [5, 4, 3, 2, 1] * 30
PARAMS = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
Build = Callable[[int], Path]


@pytest.fixture
def build(small: Callable[..., GLM5ForCausalLM], tokenizer: Tokenizer, tmp_path: Path) -> Build:
    def make(seed: int) -> Path:
        path = tmp_path / str(seed)
        if not path.exists():  # a router replaces an engine only with the weights that it started with
            small(seed=seed, vocab_size=tokenizer.vocab_size).save_pretrained(path)
            tokenizer.save(path)
        return path

    return make


class Served:
    """The command, its URL, and the ranks that it has started."""

    def __init__(self, path: Path, *options: str) -> None:
        command = [sys.executable, "-m", "glm5", "serve", str(path), "--port", "0", "--tp", "2", *options]
        env = {**os.environ, "PYTHONPATH": python_path()}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Ready on "), self.process.communicate()
        self.client = httpx.Client(base_url=line.split()[-1], timeout=60, trust_env=False)

    def generate(self) -> list[int]:
        answer = self.client.post("/generate", json={"input_ids": PROMPT, "sampling_params": PARAMS})
        assert answer.status_code == 200, answer.text
        return answer.json()["output_ids"]

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def serve(build: Build) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*options: str) -> Served:
        started.append(Served(build(1), *options))
        return started[-1]

    yield start
    for served in started:
        served.close()


def children(pid: int) -> list[int]:
    """Ids of the processes that `pid` has started."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def expected(path: Path) -> list[int]:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    return Engine.from_pretrained(path, exact=False).generate([PROMPT], params)[0].token_ids


def test_answers_and_new_weights_and_the_end_of_a_rank(serve: Callable[..., Served], build: Build) -> None:
    served = serve("--speculative", "2")
    assert served.generate() == expected(build(1))
    update = served.client.post("/update_weights_from_disk", json={"model_path": str(build(2))})
    assert update.status_code == 200, update.text
    assert served.generate() == expected(build(2)) != expected(build(1))
    (rank,) = children(served.process.pid)
    body = {"input_ids": PROMPT, "sampling_params": {**PARAMS, "max_new_tokens": 3000}, "stream": True}
    with served.client.stream("POST", "/generate", json=body) as answer:
        pieces = answer.iter_text()
        next(pieces)
        os.kill(rank, signal.SIGKILL)
        assert "engine_failed" in "".join(pieces)
    assert served.process.wait(60) == 1
    assert served.process.stderr is not None
    said = served.process.stderr.read()
    assert f"Rank 1 of --tp 2 (process {rank}) ended with SIGKILL; start the engine again." in said
    assert "Traceback" not in said and said.splitlines()[-1].startswith("Error: The server has stopped")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_server_is_the_end_of_its_ranks(serve: Callable[..., Served], number: int) -> None:
    served = serve()
    (rank,) = children(served.process.pid)
    served.process.send_signal(number)
    wait_until(lambda: gone(rank))
    served.process.wait(60)
    assert served.process.stderr is not None and served.process.stderr.read() == ""


def test_a_router_replaces_an_engine_that_lost_a_rank(serve: Callable[..., Served], build: Build) -> None:
    served = serve("--dp", "2")
    tokens = served.generate()
    assert tokens == expected(build(1))

    def workers() -> list[dict[str, Any]]:
        return served.client.get("/workers").json()["workers"]

    os.kill(children(workers()[0]["pid"])[0], signal.SIGKILL)
    wait_until(lambda: workers()[0]["replaced"] == 1 and all(worker["state"] == "up" for worker in workers()))
    assert [served.generate() for _ in range(4)] == [tokens] * 4
