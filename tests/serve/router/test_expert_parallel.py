"""`glm5 serve --dp 4 --expert-parallel` as a whole: four real processes with a quarter of the experts each."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams
from tests.serve.router import test_processes
from tests.serve.router.test_processes import CHAT, Load, Routed, body, gone, wait_until

pytestmark = [pytest.mark.long, pytest.mark.dist]

ENGINES = 4
Expected = dict[tuple[str, str], str]
answers = test_processes.expected  # the fixture


class LoadOfGroup(Load):
    """An engine may notice the end of another one, and say so, before it is ended itself."""

    lost = ((500, 503), ("engine ended", "engine failed"))


@pytest.fixture(scope="module")
def divided(forks: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    engine = f"exact=True, ep={ENGINES}, speculative=1"
    server = Routed(forks, checkpoint, tmp_path_factory.mktemp("x") / "t", engines=ENGINES, engine=engine)
    yield server
    pids = server.pids()
    server.end()
    assert all(gone(pid) for pid in pids) and not list(server.folder.glob("glm5-*"))


@pytest.fixture
def calm(divided: Routed) -> Routed:
    divided.until_up()
    return divided


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def generate(server: Routed, ids: list[int], session: str, **params: Any) -> Any:
    fields = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": 10, **params}}
    return server.client.post("/generate", json=fields, headers={"x-session-id": session}).json()


def test_answers_are_those_of_one_engine(calm: Routed, checkpoint: Path) -> None:
    """Prompts of all lengths at once, on all engines, bit for bit; drafts of the MTP layer pass between."""
    engine = Engine.from_pretrained(checkpoint, speculative=1)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    stops, found = tuple(tokenizer.stop_token_ids), dict[int, Any]()
    prompts = [tokenizer.encode(f"{i} some words. " * 60)[: 5 + 90 * i] for i in range(9)]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "sampling_seed": 5, "top_p": 0.9}]

    def ask(i: int) -> None:
        found[i] = generate(calm, prompts[i], str(i), **kinds[i % 2])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    greedy = SamplingParams(max_tokens=10, temperature=0.0, stop_token_ids=stops)
    seeded = SamplingParams(max_tokens=10, temperature=1.0, seed=5, top_p=0.9, stop_token_ids=stops)
    for i, prompt in enumerate(prompts):
        want = engine.generate([prompt], seeded if i % 2 else greedy)[0]
        assert found[i]["output_ids"] == want.token_ids
        assert [one[0] for one in found[i]["meta_info"]["output_token_logprobs"]] == want.logprobs
    lines = [one for one in calm.client.get("/metrics").text.splitlines() if one.startswith("glm5_generated_tokens_to")]
    assert len([line for line in lines if float(line.split()[-1]) > 0]) > 1


def test_idle_engines_sleep(calm: Routed) -> None:
    time.sleep(0.3)
    before = {pid: cpu_seconds(pid) for pid in calm.pids()}
    time.sleep(1.5)
    assert len(before) == ENGINES and all(cpu_seconds(pid) - used < 0.3 for pid, used in before.items())


def test_new_weights_are_taken_at_once(
    calm: Routed, model: GLM5ForCausalLM, tokenizer: Any, checkpoint: Path, tmp_path: Path, answers: Expected
) -> None:
    other = GLM5ForCausalLM(model.config, seed=9)
    other.save_pretrained(tmp_path / "other")
    tokenizer.save(tmp_path / "other")
    ids = tokenizer.encode("the same words, " * 9)
    version = int(calm.client.get("/get_weight_version").json()["weight_version"])
    update = {"model_path": str(tmp_path / "other"), "weight_version": version + 1}
    results: list[Any] = []
    running = threading.Thread(target=lambda: results.append(generate(calm, ids, "r", max_new_tokens=200)))
    running.start()
    wait_until(lambda: calm.value("glm5_samples_running") == 1)
    assert calm.client.post("/update_weights_from_disk", json=update).status_code == 200
    want = Engine(other, tokenizer).generate([ids], SamplingParams(max_tokens=10, temperature=0.0))[0].token_ids
    for i in range(4):
        after = generate(calm, ids, str(i), temperature=0)
        assert after["output_ids"] == want and set(after["meta_info"]["output_weight_versions"]) == {version + 1}
    running.join(60)
    assert set(results[0]["meta_info"]["output_weight_versions"]) <= {version, version + 1}
    back = {"model_path": str(checkpoint), "weight_version": version + 2}
    assert calm.client.post("/update_weights_from_disk", json=back).status_code == 200


def test_the_end_of_one_is_the_end_of_all_and_they_start_again(calm: Routed, answers: Expected) -> None:
    before = calm.pids()
    with LoadOfGroup(calm, answers, clients=4) as load:
        wait_until(lambda: load.counts.total() > 4, 60)
        os.kill(before[1], signal.SIGKILL)
        wait_until(lambda: all(gone(pid) for pid in before), 30)
        calm.until_up()
        count = load.counts.total()
        wait_until(lambda: load.counts.total() > count + 8, 60)
    assert not load.wrong, load.wrong[:3]
    assert len(calm.pids()) == ENGINES and not set(calm.pids()) & set(before)
    assert {worker["replaced"] for worker in calm.workers()} == {1}
    wait_until(lambda: calm.value("glm5_samples_running") + calm.value("glm5_samples_waiting") == 0)


def test_an_engine_that_is_drained_still_computes(calm: Routed, answers: Expected) -> None:
    pid = calm.workers()[2]["pid"]
    with Load(calm, answers, clients=3) as load:
        calm.client.post("/workers/2/drain")
        wait_until(lambda: calm.workers()[2]["state"] == "drained", 60)
        count = load.counts.total()
        wait_until(lambda: load.counts.total() > count + 8, 60)
        assert calm.workers()[2]["in_flight"] == 0 and not gone(pid)
        calm.client.post("/workers/2/resume")
        calm.until_up()
    assert not load.wrong and set(load.counts) <= {"whole", "streamed"}, (load.wrong[:3], load.counts)
    assert calm.workers()[2]["pid"] == pid


@pytest.mark.slow
def test_a_hang_of_one_ends_all(calm: Routed) -> None:
    before = calm.pids()
    os.kill(before[3], signal.SIGSTOP)
    wait_until(lambda: all(map(partial(gone), before)), 60)
    calm.until_up()
    assert calm.client.post(CHAT, json=body("hi", max_tokens=2)).status_code == 200
