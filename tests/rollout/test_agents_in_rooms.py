"""Agents in rooms of the sandbox, with a gateway in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.errors import GradingError, UsageError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.sandbox.agent_room import AgentRun, run_agent
from glm5.sandbox.agent_workers import AgentWorkers
from glm5.sandbox.room import Limits
from glm5.serve.connection import bind_path
from tests.forks import COMMAND_LINE, SERVING, Forks, Program
from tests.rooms import needs_rooms

LIMITS = Limits(cpu_s=60, wall_s=120.0, memory_mb=1024, processes=32, file_mb=16, output_kb=64)

AGENT = """
import json, openai

def solve(base_url, api_key, task):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, timeout=60)
    turns, said = [], []
    for word in task:
        turns.append({"role": "user", "content": word})
        reply = client.chat.completions.create(model="any", messages=turns, max_tokens=8, logprobs=True).choices[0]
        turns.append(reply.message.model_dump(include={"role", "content", "reasoning_content"}))
        said += [token.logprob for token in reply.logprobs.content]
    with open("said.json", "w") as stream:
        json.dump(said, stream)
    return "done"

if __name__ == "__main__":
    import os
    solve(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], ["hi", "and?"])
"""


CALL = ["python3", "-c", "import socket; socket.create_connection(('127.0.0.1', 8100)).recv(1)"]


@dataclass
class Served:
    """A gateway process with one session per call."""

    program: Program
    socket: Path
    key_file: Path
    admin: httpx.Client

    def session(self, **options: Any) -> tuple[str, dict[str, Any]]:
        """The session's id, and the arguments of an agent's run."""
        made = self.admin.post("/sessions", json={"task_id": "t", **options}).raise_for_status().json()
        return made["id"], {"base_path": urlsplit(made["base_url"]).path, "api_key": made["api_key"]}

    def rows(self, session: str) -> list[dict[str, Any]]:
        found: dict[str, Any] = self.admin.get(f"/sessions/{session}/samples").raise_for_status().json()
        assert found["tokens_lost"] == 0
        return list(found["samples"])

    def run(self, command: list[str], session: dict[str, Any], files: dict[str, str], **options: Any) -> AgentRun:
        return run_agent(
            command,
            files,
            gateway_socket=str(self.socket),
            limits=LIMITS,
            read_only=[sys.prefix],
            **session,
            **options,
        )


@pytest.fixture(scope="module")
def served(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    tokenizer = Tokenizer.byte_level()
    config = GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)
    GLM5ForCausalLM(config).save_pretrained(folder / "nano")
    tokenizer.save(folder / "nano")
    path, store = folder / "socket", folder / "s.db"
    options = ["--store", store, "--port", 0, "--socket", path, "--json"]
    program = forks(COMMAND_LINE, "gateway", folder / "nano", *options, load=(*SERVING, "glm5.rollout.process"))
    assert program.stdout is not None
    told = json.loads(program.stdout.readline())
    assert told["socket"] == str(path) and stat.S_IMODE(path.stat().st_mode) == 0o600
    key_file = Path(told["admin_key_file"])
    headers = {"authorization": f"Bearer {key_file.read_text().strip()}"}
    with httpx.Client(base_url=told["url"], headers=headers, timeout=60, trust_env=False) as admin:
        yield Served(program, path, key_file, admin)
    program.send_signal(signal.SIGINT)
    program.wait(60)
    assert not path.exists()


@needs_rooms
def test_an_openai_client_in_a_room(served: Served) -> None:
    name, session = served.session()
    run = served.run([sys.executable, "agent.py"], session, {"agent.py": AGENT})
    assert (run.exit_code, run.killed_reason, run.stderr) == (0, None, "")
    check_samples(served, name, run)


def check_samples(served: Served, name: str, run: AgentRun) -> None:
    """The agent got the log-probabilities that a trainer gets. What a random model says may fork the conversation."""
    trained = [
        score
        for row in served.rows(name)
        for score, on in zip(row["rollout_logprobs"], row["loss_mask"], strict=True)
        if on
    ]
    said = json.loads(run.files["said.json"])
    assert len(said) >= 2 and sorted(said) == pytest.approx(sorted(trained), abs=1e-6)


@needs_rooms
def test_workers_import_the_agent_once(served: Served, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "theirs.py").write_text(AGENT)
    with AgentWorkers(
        "theirs:solve", gateway_socket=str(served.socket), path=[tmp_path], read_only=[sys.prefix],
        python=sys.executable, limits=LIMITS,
    ) as workers:  # fmt: skip
        for _ in range(3):
            name, session = served.session()
            run = workers.run({}, task=["hi", "and?"], **session)
            assert (run.exit_code, run.result, sorted(run.files)) == (0, "done", ["said.json"]), run
            check_samples(served, name, run)
        assert [played for _, played in workers._free] == [3]


ATTACK = """
import json, os, sys, urllib.error, urllib.request
base, root, key = os.environ["GLM5_BASE_URL"], "http://127.0.0.1:8100", os.environ["GLM5_API_KEY"]
found = []

def ask(method, url, key=None, body=b"{}"):
    request = urllib.request.Request(url, body if method == "POST" else None, method=method)
    request.add_header("content-type", "application/json")
    if key: request.add_header("authorization", "Bearer " + key)
    for _ in range(5):
        try:
            return found.append(urllib.request.urlopen(request, timeout=30).status)
        except urllib.error.HTTPError as error:
            return found.append(error.code)
        except OSError:  # refused before its body was read: the answer may be lost with the connection
            pass

session = base.removesuffix("/v1")
for key_ in (None, key, "guess"):
    for method, path in (("POST", root + "/sessions"), ("POST", session + "/reward"), ("POST", session + "/close"),
                         ("GET", session + "/samples"), ("GET", root + "/metrics"), ("GET", root + "/engines")):
        ask(method, path, key_)
chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
ask("POST", root + "/sessions/@OTHER@/v1/chat/completions", key, chat)
ask("POST", base + "/chat/completions", None, chat)
print(found)
for path in ("@KEYS@", "@STORE@", "@SOCKET@"):
    if os.path.exists(path): print("BREACH", path)
"""


@needs_rooms
def test_an_agent_reaches_its_own_session_only(served: Served) -> None:
    other, _ = served.session()
    name, session = served.session()
    words = {"OTHER": other, "KEYS": served.key_file, "STORE": served.key_file.with_name("s.db")}
    source = ATTACK.replace("@SOCKET@", str(served.socket))
    for word, value in words.items():
        source = source.replace(f"@{word}@", str(value))
    run = served.run(["python3", "attack.py"], session, {"attack.py": source})
    assert run.stdout == f"{[401] * 20}\n", run
    assert served.rows(other) == [] and served.rows(name) == []


@needs_rooms
def test_a_gateway_that_is_gone_is_no_verdict(served: Served, tmp_path: Path) -> None:
    """At the start and in the middle; but an agent that does not try again afterwards has had all it wanted."""
    options: dict[str, Any] = {"base_path": "/sessions/a/v1", "api_key": "k", "limits": LIMITS}
    with pytest.raises(GradingError, match="does not answer"):
        run_agent(["true"], {}, gateway_socket=str(tmp_path / "none"), **options)
    with bind_path(tmp_path / "socket") as listener:
        listener.listen()
        accepted = []

        def hang_up() -> None:
            listener.accept()[0].close()  # the trial connection before the start
            accepted.append(listener.accept()[0])
            listener.close()
            os.unlink(tmp_path / "socket")
            accepted[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert run_agent(CALL, {}, gateway_socket=str(tmp_path / "socket"), **options).exit_code == 0
        thread.join(10)
    with bind_path(tmp_path / "socket") as listener:
        listener.listen()

        def vanish() -> None:
            listener.accept()[0].close()
            listener.close()

        thread = threading.Thread(target=vanish)
        thread.start()
        with pytest.raises(GradingError, match="stopped answering"):
            run_agent(
                ["bash", "-c", "sleep 0.5; " + shlex.join(CALL)], {}, gateway_socket=str(tmp_path / "socket"), **options
            )
        thread.join(10)


@needs_rooms
def test_an_agent_finds_the_gateway_again_after_its_restart(tmp_path: Path) -> None:
    source = """
import socket, time
said = []
while said[-1:] != [b"here"]:
    said.append(socket.create_connection(("127.0.0.1", 8100)).recv(10))
    time.sleep(0.05)
print(said[0], b"" in said)
"""

    def serve() -> None:
        for number, word in enumerate((b"first", b"here")):
            with bind_path(tmp_path / "socket") as listener:
                listener.listen()
                begun.set()
                if number == 0:
                    listener.accept()[0].close()  # the trial connection before the start
                one, _ = listener.accept()
                one.sendall(word)
                one.close()
            time.sleep(0.5)

    begun = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    begun.wait(10)
    run = run_agent(
        ["python3", "-c", source],
        {},
        gateway_socket=str(tmp_path / "socket"),
        base_path="/",
        api_key="k",
        limits=LIMITS,
    )
    thread.join(10)
    assert (run.exit_code, run.stdout) == (0, "b'first' True\n")


def test_unix_sockets_of_the_gateway(tmp_path: Path) -> None:
    """Ours alone, replaced if its server is gone, refused if another has it, and never a file of another kind."""
    path = tmp_path / "s"
    with bind_path(path) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for _ in range(2):  # while it loads its model, and while it listens
            with pytest.raises(UsageError, match="Another server"), bind_path(path):
                pass
            listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as other, contextlib.ExitStack() as clients:
        other.bind(str(path))
        other.listen(0)
        for _ in range(3):  # its queue is full
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(str(path))
        with pytest.raises(UsageError, match="Another server"), bind_path(path):
            pass
    with bind_path(path):
        pass
    path.write_text("precious")
    with pytest.raises(UsageError, match="Cannot serve"), bind_path(path):
        pass
    assert path.read_text() == "precious"
    with pytest.raises(UsageError, match="Cannot serve"), bind_path(tmp_path / ("x" * 200)):
        pass
