"""`glm5 serve --prefill-engines 2 --decode-engines 2` as a whole: real processes, killed, drained, with new weights."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams
from tests.serve.router import test_processes
from tests.serve.router.test_processes import Load, Routed, gone, kill_under_load, wait_until

pytestmark = [pytest.mark.long, pytest.mark.dist]

SPLIT = ", prefill=2, limits=Limits(prefill_tokens=1)"
Expected = dict[tuple[str, str], str]
answers = test_processes.expected  # the fixture


@pytest.fixture(scope="module")
def split(forks: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    server = Routed(forks, checkpoint, tmp_path_factory.mktemp("p") / "t", SPLIT, engines=4)
    yield server
    server.end()
    assert not list(server.folder.glob("glm5-*"))


@pytest.fixture
def calm(split: Routed) -> Routed:
    split.until_up()
    return split


def roles(server: Routed, role: str) -> list[dict[str, Any]]:
    return [worker for worker in server.workers() if worker["role"] == role]


def generate(server: Routed, text: str, session: str = "", **params: Any) -> Any:
    fields = {"text": text, "return_logprob": True, "sampling_params": {"temperature": 0, **params}}
    return server.client.post("/generate", json=fields, headers={"x-session-id": session} if session else {}).json()


def test_answers_are_those_of_one_engine(calm: Routed, checkpoint: Path) -> None:
    engine = Engine.from_pretrained(checkpoint)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    stops = tuple(tokenizer.stop_token_ids)
    for number, length in enumerate((3, 60, 200, 900)):
        ids = tokenizer.encode(f"{number} some words, and more of them. " * 40)[:length]
        for params in (
            SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=stops),
            SamplingParams(max_tokens=8, temperature=1.0, seed=5, top_p=0.9, stop_token_ids=stops),
        ):
            fields = {"max_new_tokens": 8, "temperature": params.temperature, "top_p": params.top_p}
            fields |= {} if params.seed is None else {"sampling_seed": params.seed}
            body = {"input_ids": ids, "return_logprob": True, "sampling_params": fields}
            found = calm.client.post("/generate", json=body, headers={"x-session-id": str(number)}).json()
            want = engine.generate([ids], params)[0]
            assert found["output_ids"] == want.token_ids
            assert [one[0] for one in found["meta_info"]["output_token_logprobs"]] == want.logprobs
            # The first time the prompt was computed elsewhere, for this request; the second time it was there.
            assert found["meta_info"]["cached_tokens"] == (0 if params.seed is None else max(0, length - 1))
    decoding = {str(worker["id"]) for worker in roles(calm, "decode")}
    lines = calm.client.get("/metrics").text.splitlines()
    taken = [line for line in lines if line.startswith("glm5_prefill_tokens_total{")]
    assert sum(float(line.split()[-1]) for line in taken if line.split('"')[1] in decoding) >= 3 + 60 + 200 + 900
    assert calm.value("glm5_prefill_fallbacks_total") == calm.value("glm5_prefill_pages_refused_total") == 0
    for role in ("prefill", "decode"):
        assert f'glm5_router_role_engines{{role="{role}"}} 2' in lines
        assert any(line.startswith(f'glm5_router_role_waiting{{role="{role}"}}') for line in lines)


def test_engines_of_both_roles_are_killed_under_load(calm: Routed, answers: Expected) -> None:
    kill_under_load(calm, answers, 4, seed=3)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_without_engines_is_played_by_the_other(
    calm: Routed,
    answers: Expected,
    role: str,
) -> None:
    """All engines of a role die at once, and again, while clients ask."""
    with Load(calm, answers) as load:
        for _ in range(2):
            victims = [worker["pid"] for worker in roles(calm, role) if worker["pid"]]
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):  # the router may not have seen yet that it is dead
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda pids=victims: all(gone(pid) for pid in pids))  # type: ignore[misc]
            time.sleep(0.3)
        calm.until_up()
        before = load.counts.total()
        wait_until(lambda: load.counts.total() > before + 12, 60)
    assert not load.wrong, load.wrong[:3]
    assert load.counts["whole"] > 5 and load.counts["streamed"] > 5


def test_a_prefill_engine_that_dies_or_hangs_in_the_middle(calm: Routed, checkpoint: Path) -> None:
    """A long prompt, whose engine is lost while it reads: the answer is right, from another engine."""
    engine = Engine.from_pretrained(checkpoint)
    assert engine.tokenizer is not None
    for number, blow in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        text = f"{number} a long story. " * 200
        want = engine.generate([engine.tokenizer.encode(text)], SamplingParams(max_tokens=6, temperature=0.0))[0]
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(generate(calm, text, max_new_tokens=6)))  # noqa: B023
        before = calm.value("glm5_prefill_tokens_total")
        asking.start()
        wait_until(lambda start=before: calm.value("glm5_prefill_tokens_total") > start)  # type: ignore[misc]
        victims = [worker["pid"] for worker in roles(calm, "prefill")]
        for pid in victims:
            os.kill(pid, blow)
        asking.join(60)
        assert not asking.is_alive(), "the request hangs"
        assert found[0]["output_ids"] == want.token_ids
        wait_until(lambda pids=victims: all(gone(pid) for pid in pids), 60)  # type: ignore[misc]
        calm.until_up()


def test_draining_each_role_loses_nothing(calm: Routed, answers: Expected) -> None:
    with Load(calm, answers, clients=4) as load:
        for role in ("prefill", "decode"):
            worker = roles(calm, role)[0]
            assert calm.client.post(f"/workers/{worker['id']}/drain").json()["state"] == "draining"
            wait_until(lambda w=worker: gone(w["pid"]), 60)  # type: ignore[misc]
            before = load.counts.total()
            wait_until(lambda start=before: load.counts.total() > start + 8, 60)  # type: ignore[misc]
            calm.client.post(f"/workers/{worker['id']}/resume")
            calm.until_up()
    assert not load.wrong and set(load.counts) <= {"whole", "streamed"}, (load.wrong[:3], load.counts)


def test_new_weights_reach_both_roles(
    calm: Routed, checkpoint: Path, model: GLM5ForCausalLM, tokenizer: Any, tmp_path: Path
) -> None:
    other = GLM5ForCausalLM(model.config, seed=9)
    other.save_pretrained(tmp_path / "other")
    tokenizer.save(tmp_path / "other")
    text = "the same words, " * 20
    before = generate(calm, text, "s", max_new_tokens=6)
    version = int(before["meta_info"]["weight_version"]) + 1
    body = {"model_path": str(tmp_path / "other"), "weight_version": version}
    assert calm.client.post("/update_weights_from_disk", json=body).status_code == 200
    moved = calm.value("glm5_prefill_tokens_total")
    after = generate(calm, text, "s", max_new_tokens=6)
    want = Engine(other, tokenizer).generate([tokenizer.encode(text)], SamplingParams(max_tokens=6, temperature=0.0))
    assert after["output_ids"] == want[0].token_ids != before["output_ids"]
    assert after["meta_info"]["output_weight_versions"] == [version] * 6
    assert calm.value("glm5_prefill_tokens_total") > moved
    body = {"model_path": str(checkpoint), "weight_version": version + 1}
    assert calm.client.post("/update_weights_from_disk", json=body).status_code == 200
