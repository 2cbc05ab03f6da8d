"""Every verb of the command line on what the shared run left behind."""

from __future__ import annotations

import functools
import http.client
import json
import math
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from glm5.chat import Tokenizer
from glm5.config.model import GLM5Config
from glm5.data.shards import open_shard
from glm5.engine.engine import Engine
from glm5.launch.adapt import Options
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import read_metrics

PRETRAIN = '[[stages]]\nname = "more"\nkind = "pretrain"\nrows = 2\nrow_length = 64\noptim = {steps = 1, lr = 1e-3}\n'
SFT = '[[stages]]\nname = "talk"\nkind = "sft"\nrows = 1\nrow_length = 64\ndata = "{data}"\n'
SFT += "optim = {{steps = 1, lr = 1e-3}}\n"
POLICY = """
[[stages]]
name = "{kind}"
kind = "{kind}"
prompts = 1
group = 2
max_tokens = 4
max_context = 200
families = [{{name = "{family}", render_tools = false}}]
optim = {{steps = 1, lr = 1e-3}}
{more}
"""


@pytest.fixture
def recipe(tiny: Any, tmp_path: Path) -> Any:
    """Writes a recipe that starts from a stage of the shared run; returns its path and the folder of the run."""

    def write(start: str, stages: str) -> tuple[Path, Path]:
        return tiny.one_more(tmp_path, start, stages), tmp_path / "one"

    return write


def test_train_goes_on_from_a_checkpoint(shell: Any, recipe: Any, tiny: Any) -> None:
    path, run = recipe("dsa-sparse", PRETRAIN)
    done = shell.invoke("train", path, sets=["stages.more.optim.steps=3"])
    assert done.code == 0, done.err
    assert done.out == f"Results: {run / 'results.json'}\n"
    (first, *others) = read_metrics(run / "metrics.jsonl")
    # The stage's first step was on text; its last one asked for needles.
    trained = next(row["loss"] for row in read_metrics(tiny.run / "metrics.jsonl") if row["stage"] == "dsa-sparse")
    assert len(others) == 2 and abs(first["loss"] - trained) < 1 < math.log(400) - first["loss"] + 2
    before, after = (GLM5ForCausalLM.from_pretrained(p) for p in (tiny.model("dsa-sparse"), run / "final"))
    assert before.config == after.config
    assert not before.lm_head.weight.equal(after.lm_head.weight)


def test_train_asks_before_it_resumes(shell: Any, recipe: Any) -> None:
    path, run = recipe("pretrain", PRETRAIN)
    assert shell.invoke("train", path).code == 0
    shell.fails(2, ["one", "--resume"], "train", path)
    results = (run / "results.json").read_bytes()
    assert shell.invoke("train", path, "--resume").code == 0
    assert (run / "results.json").read_bytes() == results


def test_sft_reads_conversations(shell: Any, recipe: Any, tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i)}]} for i in "12"
    ]
    data = tmp_path / "talk.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    path, run = recipe("pretrain", SFT.format(data=data))
    done = shell.invoke("sft", path)
    assert done.code == 0
    assert "talk: 2 conversations, 2 rows, " in done.out and "of them trained, rows filled to " in done.out
    (row,) = read_metrics(run / "metrics.jsonl")
    # In both conversations the same tokens are trained: what the template opens, one digit, and the end of the turn.
    assert row["loss"] > 0 and row["tokens"] % 2 == 0
    shell.fails(2, ["talk", "sft", "glm5 pipeline"], "rl", path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "family", "more"),
    [
        ("reasoning", "arithmetic", ""),
        ("agentic", "bugfix", "concurrency = 2\ntrain_ticks = 1"),
        ("general", "general", "reward_model = {pairs = 1, held_out_pairs = 1, optim = {steps = 1, lr = 1e-3}}"),
        ("distill", "arithmetic", 'teachers = {arithmetic = "start"}'),
    ],
)
def test_rl_stages_run_alone(shell: Any, recipe: Any, kind: str, family: str, more: str) -> None:
    path, run = recipe("sft", POLICY.format(kind=kind, family=family, more=more))
    done = shell.invoke("rl", path)
    assert done.code == 0, done.err
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert results["exact"]["mismatches"] == 0 < results["exact"]["tokens"]
    (stage,) = results["stages"]
    assert done.out.splitlines()[-1].startswith(f"{stage['name']}: reward {stage['numbers']['reward']:.3f}")
    if kind == "distill":  # a student is its own teacher: nothing to learn
        numbers = results["stages"][0]["numbers"]
        assert numbers["reverse_kl"] == 0 and numbers["grad_norm"] < 1e-6


@pytest.mark.long
def test_adapt_makes_a_dense_model_sparse(
    shell: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm5.launch.adapt.build_report", lambda folder: folder / "report.html")
    monkeypatch.setattr(
        "glm5.launch.adapt.Options", functools.partial(Options, held_out_tokens=256)
    )  # scored ten times
    out, dense = tmp_path / "sparse", tiny.model("extend")
    done = shell.invoke(
        *("adapt", dense, "--data", tiny.data, "--out", out, "--steps", 1, "--row-length", 64, "--index-topk", 8)
    )
    assert done.code == 0, done.err
    before, after = GLM5ForCausalLM.from_pretrained(dense), GLM5ForCausalLM.from_pretrained(out)
    assert (before.config.use_dsa, after.config.use_dsa, after.config.index_topk) == (False, True, 8)
    fresh = after.state_dict().keys() - before.state_dict().keys()
    assert fresh and all(".indexer." in name for name in fresh)
    kinds = [row["stage"] for row in read_metrics(tmp_path / "sparse-adapt" / "metrics.jsonl")]
    assert kinds == ["dsa-warmup", "dsa-sparse", "dense-baseline"]


def test_size_counts_what_a_checkpoint_holds(shell: Any, tiny: Any) -> None:
    found = shell.invoke("size", tiny.final, "--context", 128, "--json").json()
    model = GLM5ForCausalLM.from_pretrained(tiny.final)
    tensors = sum(t.numel() for t in model.state_dict().values())
    assert found["total_params_with_mtp"] == tensors
    assert found["kv_bytes_per_token"] == 2 * model.config.num_hidden_layers * (
        model.config.kv_lora_rank + model.config.qk_rope_head_dim
    )
    text = shell.invoke("size", "nano").out
    assert re.search(r"^total_params +1,258,264$", text, re.MULTILINE)


def test_init_writes_a_model_that_loads(shell: Any, tiny: Any, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        done = shell.invoke("init", "nano", "--out", tmp_path / name, "--seed", seed, sets=["num_hidden_layers=2"])
        assert done.code == 0, done.err
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    config = GLM5Config.load(tmp_path / "a")
    assert config.num_hidden_layers == 2 and config.vocab_size == Tokenizer.load(tmp_path / "a").vocab_size
    done = shell.invoke("init", "nano", "--out", tmp_path / "d", "--tokenizer", tiny.final)
    assert done.code == 0 and GLM5Config.load(tmp_path / "d").vocab_size == 400
    assert Tokenizer.load(tmp_path / "d").hash() == Tokenizer.load(tiny.final).hash()


def test_tokenizer_and_data(shell: Any, tiny: Any, tmp_path: Path) -> None:
    out, data = tmp_path / "tokenizer", tmp_path / "data"
    assert shell.invoke("tokenizer", "train", "--out", out, "--vocab-size", 350, tiny.corpus).code == 0
    tokenizer = Tokenizer.load(out)
    assert tokenizer.vocab_size == 350
    built = shell.invoke("data", "build", "--tokenizer", out, "--out", data, tiny.corpus)
    assert built.code == 0, built.err
    shards = {split: open_shard(data, split, tokenizer) for split in ("train", "held_out")}
    for split, shard in shards.items():
        assert f"{split}_tokens {len(shard.tokens):,}, {split}_documents {len(shard)}" in built.out
    texts = {p.read_text(encoding="utf-8") for p in tiny.corpus.iterdir()}
    decoded = {tokenizer.decode(s.document(i)[:-1].tolist()) for s in shards.values() for i in range(len(s))}
    assert decoded == texts


def test_generate(shell: Any, tiny: Any) -> None:
    options = ("--max-tokens", 5, "--temperature", 0)
    found = shell.invoke("generate", tiny.final, "def f", *options, "--json").json()
    assert set(found) == {"text", "ids", "logprobs", "finish_reason", "difference_to_learner"}
    tokens = len(found["ids"])
    assert found["difference_to_learner"] == {"tokens": tokens, "unequal": 0, "mean_abs": 0.0, "max_abs": 0.0}
    fast = shell.invoke("generate", tiny.final, "def f", *options, "--fast", "--json").json()["difference_to_learner"]
    assert fast["tokens"] > 0 and fast["max_abs"] < 1e-3
    engine = Engine.from_pretrained(tiny.final)
    prompt = engine.tokenizer.encode("def f")
    scored = engine.score([[*prompt, *found["ids"]]])[0][len(prompt) - 1 :]
    assert found["logprobs"] == scored
    assert found["text"] == engine.tokenizer.decode(found["ids"])
    assert shell.invoke("generate", tiny.final, "def f", *options).out == found["text"] + "\n"
    listed = ",".join(map(str, prompt))
    assert (
        shell.invoke("generate", tiny.final, listed, "--ids", *options).out == ",".join(map(str, found["ids"])) + "\n"
    )


def test_generate_depends_on_the_seed_alone(shell: Any, tiny: Any) -> None:
    first, again, other = (
        shell.invoke("generate", tiny.final, "1+1", "--max-tokens", 6, "--temperature", 5, "--seed", seed).out
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_eval(shell: Any, tiny: Any) -> None:
    done = shell.invoke(
        *("eval", tiny.final, "--suite", "arithmetic", "--problems", 3, "--json"), sets=["levels=[1]", "thinking=false"]
    )
    ((name, score),) = done.json().items()
    assert name == "arithmetic" and score["n"] == 3
    assert 0 <= score["low"] <= score["score"] <= score["high"] <= 1


def test_report_of_a_run_that_has_not_ended(shell: Any, tiny: Any, tmp_path: Path) -> None:
    rows = (tiny.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    few = [row for row in rows if json.loads(row)["stage"] in ("pretrain", "reasoning-rl")]  # drawing takes long
    (tmp_path / "metrics.jsonl").write_text("".join(few), encoding="utf-8")
    (tmp_path / "recipe.toml").write_bytes((tiny.run / "recipe.toml").read_bytes())
    assert shell.invoke("report", tmp_path).out == f"Report: {tmp_path / 'report.html'}\n"
    assert "reasoning-rl" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_doctor(shell: Any) -> None:
    found = shell.invoke("doctor", "--json").json()
    assert found["cores"] == os.cpu_count() and found["extra serve"] is True
    assert {"glm5", "python", "torch", "cuda", "sandbox"} <= found.keys()


@contextmanager
def request(port: int, method: str, path: str, body: Any = None) -> Iterator[tuple[int, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        yield answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def test_serve_from_start_to_ctrl_c(shell: Any, tiny: Any) -> None:
    with shell.start("serve", tiny.final, "--port", 0) as process:
        ready = process.stdout.readline()
        port = int(re.fullmatch(r"Ready on http://127\.0\.0\.1:(\d+)\n", ready)[1])
        with request(port, "GET", "/health") as (status, _):
            assert status == 200
        body = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 3, "temperature": 0}
        with request(port, "POST", "/v1/chat/completions", body) as (status, answer):
            assert status == 200 and answer["usage"]["completion_tokens"] in (1, 2, 3)
        shell.invoke("serve", tiny.final, "--port", port).check_failure(2, [str(port), "in use", "--port"])
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
