"""The native surface: /generate, control of weights and requests, and who may use it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.engine import weights
from glm5.engine.engine import Engine
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import GrammarSpec, SamplingParams
from glm5.serve.access import GROUP_PATHS
from glm5.serve.app import create_app

URL = "/generate"
Make = Callable[..., tuple[TestClient, Any]]
LOCAL = {"client": ("127.0.0.1", 5)}
ADMIN = ["/update_weights_from_disk", "/pause_generation", "/continue_generation", "/abort_request", "/flush_cache",
         *GROUP_PATHS]  # fmt: skip


def ask(client: TestClient, **fields: Any) -> Any:
    response = client.post(URL, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def test_what_a_trainer_reads(client: TestClient, model: GLM5ForCausalLM, tokenizer: Tokenizer) -> None:
    """The form that rollouts over HTTP are made of, against the engine itself."""
    ids = tokenizer.encode("some prompt")
    params = {"temperature": 1.0, "max_new_tokens": 6, "sampling_seed": 4, "top_p": 1.0, "no_stop_trim": True}
    params |= {"skip_special_tokens": False, "spaces_between_special_tokens": False, "stop": [], "stop_token_ids": [7]}
    answer = ask(client, input_ids=ids, sampling_params=params, return_logprob=True, rid="r1")
    stops = (7, *tokenizer.stop_token_ids)
    want = Engine(model, tokenizer).generate(
        [ids], SamplingParams(max_tokens=6, seed=4, stop_token_ids=stops)
    )[0]  # fmt: skip
    meta = answer["meta_info"]
    assert answer["output_ids"] == want.token_ids and answer["text"] == tokenizer.decode(want.token_ids)
    assert meta["output_token_logprobs"] == [[p, i, None] for p, i in zip(want.logprobs, want.token_ids, strict=True)]
    assert meta["input_token_logprobs"] == [] and meta["weight_version"] == "0"
    assert meta["output_weight_versions"] == want.weight_versions
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r1", len(ids), len(want.token_ids))
    assert meta["finish_reason"]["type"] == want.finish_reason


def test_scores_of_the_prompt(client: TestClient, model: GLM5ForCausalLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("score")
    want = Engine(model).score([ids])[0]
    for start in (0, 2, 99):
        params = {"max_new_tokens": 0}
        answer = ask(client, input_ids=ids, sampling_params=params, return_logprob=True, logprob_start_len=start)
        rows = [[value, token, None] for value, token in zip([None, *want], ids, strict=True)][start:]
        assert answer["meta_info"]["input_token_logprobs"] == rows and answer["output_ids"] == []
        tops = ask(client, input_ids=ids, sampling_params=params, return_logprob=True, logprob_start_len=start,
                   top_logprobs_num=2)["meta_info"]["input_top_logprobs"]  # fmt: skip
        assert len(tops) == len(rows) and all(top is None or (len(top) == 2 and top[0] >= top[1]) for top in tops)
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


@pytest.mark.parametrize(
    ("params", "text", "matched"),
    [
        ({}, "a<think>b", "<|user|>"),
        ({"no_stop_trim": True}, "a<think>b", "<|user|>"),
        ({"skip_special_tokens": False}, "a<think>[MASK]b", "<|user|>"),
        ({"skip_special_tokens": False, "no_stop_trim": True}, "a<think>[MASK]b<|user|>", "<|user|>"),
        ({"stop": "k>b"}, "a<thin", "k>b"),
        ({"stop": ["k>b", "zz"], "no_stop_trim": True}, "a<think>b", "k>b"),
        ({"stop": ["K]b"], "skip_special_tokens": False}, "a<think>[MAS", "K]b"),
        ({"stop": ["a", "b"], "min_tokens": 1}, "a<think>", "b"),
        ({"stop": ["a", "b"], "min_tokens": 1, "skip_special_tokens": False}, "a<think>[MASK]", "b"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_text_is_trimmed_as_asked(
    scripted: Make, tokenizer: Tokenizer, params: Any, text: str, matched: str, stream: bool
) -> None:
    client, _ = scripted("a<think>[MASK]b<|user|>")
    if stream:
        raw = client.post(URL, json={"text": "x", "sampling_params": params, "stream": True}).text
        events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        found = [json.loads(event) for event in events[:-1]]
        assert all(later["text"].startswith(sooner["text"]) for sooner, later in itertools.pairwise(found))
        answer = found[-1]
    else:
        answer = ask(client, text="x", sampling_params=params)
    assert answer["text"] == text
    reason = answer["meta_info"]["finish_reason"]
    assert reason == {"type": "stop", "matched": tokenizer.special.get(matched, matched)}


def streamed(client: TestClient, **fields: Any) -> tuple[list[Any], int]:
    """The events of a stream, and its bytes."""
    raw = client.post(URL, json={"text": "x", "stream": True, **fields}).content
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]], len(raw)


def long_server(engine_of: Any, tokenizer: Tokenizer) -> TestClient:
    engine = engine_of(tokenizer.encode("abc\u20ac"))
    engine.max_length = 1 << 16
    return TestClient(create_app(engine, tokenizer, model_name="script"), client=LOCAL["client"])


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_grows_like_its_answer(
    engine_of: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, incremental: bool, logprobs: bool
) -> None:
    monkeypatch.setattr(
        "glm5.serve.engine_thread.Stream.caught_up", True
    )  # no event is left out because the test is slow
    sizes = []
    with long_server(engine_of, tokenizer) as client:
        for tokens in (250, 500, 1000):
            params = {"max_new_tokens": tokens}
            fields = {"return_logprob": logprobs, "incremental_streaming_output": incremental}
            events, size = streamed(client, sampling_params=params, **fields)
            sizes.append(size)
            assert events[-1]["meta_info"]["completion_tokens"] == tokens
            if not incremental:
                assert len(events) > 150 and [len(e["output_ids"]) for e in events[:100]] == list(range(1, 101))
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0]), sizes
    assert sizes[2] < (1000 * 50 * 40 if not incremental else 1000 * 500)


@pytest.mark.parametrize("every", [None, 1, 7, 64])
def test_the_pieces_of_an_incremental_stream_are_the_answer(
    engine_of: Any, tokenizer: Tokenizer, every: int | None
) -> None:
    with long_server(engine_of, tokenizer) as client:
        # The stop string never matches, and holds text back.
        params = {"max_new_tokens": 50, "stop": "c\u20acabcx", "stream_interval": every}
        fields: dict[str, Any] = {"sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
        want = ask(client, text="x", logprob_start_len=0, **fields)
        events, _ = streamed(client, logprob_start_len=0, incremental_streaming_output=True, **fields)
    assert "".join(e["text"] for e in events) == want["text"]
    assert [i for e in events for i in e["output_ids"]] == want["output_ids"]
    assert all(len(e["output_ids"]) >= (every or 1) for e in events[1:-1]) and len(events) <= 2 + 50 // (every or 1)
    metas = [e["meta_info"] for e in events]
    assert [m["finish_reason"] for m in metas[:-1]] == [None] * (len(metas) - 1)
    names = ("output_token_logprobs", "output_top_logprobs", "input_token_logprobs", "output_weight_versions")
    for name in names:
        assert [row for m in metas for row in m[name]] == want["meta_info"][name], name
    assert metas[-1]["completion_tokens"] == 50 and metas[-1]["finish_reason"] == want["meta_info"]["finish_reason"]


def test_batches_and_samples(scripted: Make) -> None:
    client, engine = scripted("ab<|user|>")
    texts = ask(client, text=["x", "yy"], sampling_params=[{"n": 2}, {"max_new_tokens": 1}], rid=["p", "q"])
    assert [one["meta_info"]["id"] for one in texts] == ["p", "p", "q"]
    assert [one["meta_info"]["prompt_tokens"] for one in texts] == [1, 1, 2]
    assert [one["text"] for one in texts] == ["ab", "ab", "a"]
    assert len(ask(client, input_ids=[[1, 2]])) == 1 and "text" in ask(client, input_ids=[1, 2])
    assert engine.params[-1].max_tokens == 128
    raw = client.post(URL, json={"text": ["x", "y"], "stream": True}).text
    last = {e["index"]: e for e in (json.loads(line[6:]) for line in raw.split("\n\n") if line.startswith("data: {"))}
    assert {i: e["text"] for i, e in last.items()} == {0: "ab", 1: "ab"}


def test_grammars_and_top_logprobs(scripted: Make) -> None:
    pytest.importorskip("llguidance")
    client, engine = scripted("a<|user|>")
    ask(client, text="x", sampling_params={"json_schema": '{"type": "object"}'})
    ask(client, text="x", sampling_params={"regex": "[ab]+", "min_new_tokens": 3})
    assert engine.params[0].grammar == GrammarSpec("json_schema", '{"type": "object"}')
    assert engine.params[1].grammar == GrammarSpec("regex", "[ab]+") and engine.params[1].min_tokens == 3
    meta = ask(client, text="x", return_logprob=True, top_logprobs_num=2)["meta_info"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [1, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": "x", "input_ids": [1]},
        {"input_ids": []},
        {"input_ids": [[1], []]},
        {"input_ids": [-1]},
        {"input_ids": [10**8]},
        {"input_ids": ["a"]},
        {"text": 3},
        {"text": "x" * 5000},
        {"text": ["x", "y"], "sampling_params": [{}]},
        {"text": ["x", "y"], "rid": "r"},
        {"text": "x", "rid": ""},
        {"text": "x", "sampling_params": {"temperature": "hot"}},
        {"text": "x", "sampling_params": {"max_new_tokens": -1}},
        {"text": "x", "sampling_params": {"max_new_tokens": 0}, "stream": True},
        {"text": "x", "sampling_params": {"json_schema": "{", "n": 1}},
        {"text": "x", "sampling_params": {"json_schema": "{}", "regex": "a"}},
        {"text": "x", "sampling_params": {"regex": "("}},
        {"text": "x", "return_hidden_states": True},
        {"text": "x", "image_data": ["http://x"]},
        {"input_ids": [10**8], "return_logprob": True, "logprob_start_len": 0},
    ],
)
def test_bad_requests(client: TestClient, fields: dict[str, Any]) -> None:
    response = client.post(URL, json=fields)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_information(scripted: Make) -> None:
    client, _ = scripted("<|user|>", app={"api_key": "secret"}, headers={"x-api-key": "secret"})
    for path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info", "/get_weight_version"):
        assert client.get(path).json()["weight_version"] == "3", path
        assert client.get(path, headers={"x-api-key": "no"}).status_code == 401
    assert client.get("/get_server_info").json()["limits"]["body_bytes"] == 8 << 20
    assert "secret" not in client.get("/get_server_info").text
    assert client.get("/health_generate").json() == client.get("/ping").json() == {"status": "ok"}


def test_control_needs_the_key_or_this_machine(scripted: Make) -> None:
    far, _ = scripted("<|user|>")
    keyed, _ = scripted("<|user|>", app={"api_key": "k"}, client=LOCAL["client"])
    for path in ADMIN:
        assert far.post(path, json={}).status_code == 403
        assert keyed.post(path, json={}).status_code == 401
        foreign = {"x-api-key": "k", "Origin": "http://evil.example"}
        assert keyed.post(path, json={}, headers=foreign).status_code == 403
    assert far.get("/flush_cache").status_code == 403
    assert keyed.post("/flush_cache", headers={"authorization": "Bearer k"}).status_code == 200


def test_abort(scripted: Make) -> None:
    client, engine = scripted("abc", pause=0.005, **LOCAL)
    answers: list[Any] = []

    def run(rid: str) -> None:
        answers.append(ask(client, text="x", rid=rid, sampling_params={"max_new_tokens": 2000, "n": 2}))

    threads = [threading.Thread(target=run, args=(rid,)) for rid in ("one", "two")]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(engine.running) == 4)
    assert client.post("/flush_cache").status_code == 400 and engine.flushed == 0
    assert client.post("/abort_request", json={}).status_code == 400
    assert client.post("/abort_request", json={"rid": "three"}).json()["aborted"] == 0
    assert client.post("/abort_request", json={"rid": "one"}).json()["aborted"] == 2
    wait_until(lambda: len(answers) == 1)
    assert [one["meta_info"]["finish_reason"]["type"] for one in answers[0]] == ["abort", "abort"]
    assert len(engine.running) == 2
    assert client.post("/abort_request", json={"abort_all": True}).json()["aborted"] == 2
    for thread in threads:
        thread.join()
    assert client.get("/flush_cache").status_code == 200 and engine.flushed == 1


def test_pause_and_continue(scripted: Make) -> None:
    client, engine = scripted("abc", pause=0.002, **LOCAL)
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(ask(client, text="x", sampling_params={"max_new_tokens": 50}))
    )
    thread.start()
    wait_until(lambda: bool(engine.running))
    assert client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    steps = engine.steps
    late = threading.Thread(target=lambda: answers.append(ask(client, text="y")))
    late.start()
    time.sleep(0.1)
    assert engine.steps == steps and not answers and client.get("/get_server_info").json()["paused"]
    assert client.get("/health").status_code == 200
    assert client.post("/continue_generation").status_code == 200
    thread.join()
    late.join()
    assert len(answers) == 2 and answers[0]["meta_info"]["completion_tokens"] in (50, 128)


def test_a_pause_that_ends_what_runs(scripted: Make) -> None:
    client, engine = scripted("abc", pause=0.002, **LOCAL)
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(ask(client, text="x", sampling_params={"max_new_tokens": 2000}))
    )
    thread.start()
    wait_until(lambda: bool(engine.running))
    assert client.post("/pause_generation").status_code == 200
    thread.join()
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort" and not engine.running


def test_weights_from_disk(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def fresh(sign: int) -> GLM5ForCausalLM:
        config = GLM5Config.preset("nano", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)
        model = GLM5ForCausalLM(config)
        model.lm_head.weight.data *= sign
        return model

    other = fresh(-1)
    other.save_pretrained(tmp_path / "other")
    app = create_app(Engine(fresh(1), tokenizer), tokenizer, model_name="nano")
    params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    with TestClient(app, client=LOCAL["client"]) as client:
        before = ask(client, text="abc", sampling_params=params)
        for path in (tmp_path / "nowhere", tmp_path, ""):
            refused = client.post("/update_weights_from_disk", json={"model_path": str(path)})
            assert refused.status_code == 400 and not refused.json().get("success")
        assert ask(client, text="abc", sampling_params=params)["output_ids"] == before["output_ids"]
        body = {"model_path": str(tmp_path / "other"), "weight_version": "7", "load_format": "auto"}
        assert client.post("/update_weights_from_disk", json=body).json()["success"] is True
        after = ask(client, text="abc", sampling_params=params)
        assert client.get("/get_weight_version").json() == {"weight_version": "7"}
        client.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "other")})
        assert client.get("/get_weight_version").json() == {"weight_version": "8"}
        for old in (8, "3", 0):
            refused = client.post("/update_weights_from_disk", json={**body, "weight_version": old})
            assert refused.status_code == 409 and refused.json()["success"] is False
        assert client.get("/get_weight_version").json() == {"weight_version": "8"}
        taken_over = {**body, "weight_version": 0, "any_version": True}
        assert client.post("/update_weights_from_disk", json=taken_over).json()["success"] is True
        assert client.get("/get_weight_version").json() == {"weight_version": "0"}
        again = ask(client, text="abc", sampling_params=params)
        assert (again["output_ids"], again["meta_info"]["output_weight_versions"]) == (after["output_ids"], [0] * 5)
    want = Engine(other, tokenizer).generate(
        [tokenizer.encode("abc")], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    )[0]
    assert after["output_ids"] == want.token_ids != before["output_ids"]
    assert after["meta_info"]["output_weight_versions"] == [7] * 5


def test_updates_take_turns(
    model: GLM5ForCausalLM, tokenizer: Tokenizer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight at once: each gets a version of its own, and one copy of the weights is read at a time."""
    inside, most, lock = 0, 0, threading.Lock()
    stage = weights.stage

    def slowly(*arguments: Any, **options: Any) -> Any:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        try:
            return stage(*arguments, **options)
        finally:
            with lock:
                inside -= 1

    monkeypatch.setattr(weights, "stage", slowly)
    own = GLM5ForCausalLM.from_pretrained(checkpoint)
    answers: list[Any] = []
    with TestClient(create_app(Engine(own, tokenizer), tokenizer, model_name="nano"), client=LOCAL["client"]) as client:

        def push(path: str) -> None:
            answers.append(client.post("/update_weights_from_disk", json={"model_path": path}).json())

        paths = [str(checkpoint), str(checkpoint / "nowhere")] * 4
        threads = [threading.Thread(target=push, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client.get("/get_weight_version").json() == {"weight_version": "4"}
        assert ask(client, text="abc", sampling_params={"max_new_tokens": 2})["meta_info"]["weight_version"] == "4"
    said = sorted(answer["message"] for answer in answers if answer["success"])
    assert most == 1 and said == [f"The weights were updated to version {i}." for i in range(1, 5)]
    assert sum(not answer["success"] for answer in answers) == 4
