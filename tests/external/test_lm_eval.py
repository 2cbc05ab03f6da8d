"""lm-eval, unmodified, against `glm5 serve`: its figures are those of its own backend for transformers models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.config.optim import OptimConfig
from glm5.data.packing import Batch
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.train.loop import build_optimizer
from glm5.train.losses import language_loss
from tests.external.environments import interpreter

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
TASKS = ("glm5_choice", "glm5_rolling", "glm5_generation")
LONGEST = 1024
"""Tokens of a window of the rolling task, whose second text is longer."""


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of lm-eval's environment. It has our torch."""
    return interpreter("lm-eval", f"torch=={torch.__version__.partition('+')[0]}", ours=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that has learned what the animals say. Its latent norms are those of transformers."""
    tokenizer = Tokenizer.byte_level()
    config = GLM5Config.preset(
        "nano", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids, latent_norm_eps=1e-6
    )
    model = GLM5ForCausalLM(config)
    facts = [json.loads(line) for line in (HERE / "lm_eval" / "choice.jsonl").read_text("utf-8").splitlines()]
    texts = [f"{fact['question']} {fact['choices'][fact['answer']]}.\n" for fact in facts]
    optimizer = build_optimizer(model, OptimConfig(steps=80, lr=5e-3))
    for step in range(80):
        ids = torch.tensor(tokenizer.encode("".join(texts[(5 * step + 3 * i) % len(texts)] for i in range(24))))[:384]
        rows = ids.view(3, -1)[:, :128]
        batch = Batch(rows, torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool))
        optimizer.zero_grad(set_to_none=True)
        language_loss(model, batch, model.context(rows), mtp_weight=0.1, mtp_depths=1)[0].backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("lm-eval") / "animals"
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    """`glm5 serve` as a user starts it."""
    command = [sys.executable, "-m", "glm5", "serve", str(checkpoint), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        address = next(line for line in server.stdout if "http://" in line)
        yield next(word for word in address.split() if word.startswith("http://")).rstrip("/.")
        server.terminate()
        server.wait(60)


class Harness:
    """lm-eval on the command line; answers are kept for all tests of the module."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._python = python
        self._folder = folder
        self._known: dict[tuple[str, ...], dict[str, Any]] = {}

    def run(self, model: str, arguments: str, *more: str, tasks: tuple[str, ...] = TASKS) -> dict[str, Any]:
        """`results` of a run, and as `texts` what was generated."""
        key = (model, arguments, *more, *tasks)
        if key not in self._known:
            out = self._folder / f"{len(self._known)}"
            command = [str(self._python), "-m", "lm_eval", "--model", model, "--model_args", arguments]
            command += ["--tasks", ",".join(tasks), "--include_path", ".", "--output_path", str(out), "--log_samples"]
            offline = {"HF_HOME": str(self._folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
            proxies = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
            environment = {**proxies, **offline, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [*command, *more], cwd=HERE / "lm_eval", env=environment, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, done.stderr[-3000:]
            self._known[key] = self._read(out)
        return self._known[key]

    def _read(self, out: Path) -> dict[str, Any]:
        (found,) = out.rglob("results_*.json")
        results = json.loads(found.read_text("utf-8"))["results"]
        figures = {
            f"{task} {name.removesuffix(',none')}": value
            for task, measured in results.items()
            for name, value in measured.items()
            if isinstance(value, float) and "stderr" not in name
        }
        lines = [line for path in out.rglob("samples_*generation*") for line in path.read_text("utf-8").splitlines()]
        samples = [json.loads(line) for line in lines]
        return {"figures": figures, "texts": [s["resps"][0][0] for s in sorted(samples, key=lambda s: s["doc_id"])]}


@pytest.fixture(scope="module")
def harness(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(python, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def want(harness: Harness, checkpoint: Path) -> dict[str, Any]:
    """What lm-eval finds with the same files in transformers."""
    # Its windows are of `max_length` tokens; those of the other backend leave a place for a token and one for a prefix.
    return harness.run("hf", f"pretrained={checkpoint},dtype=float32,max_length={LONGEST - 2}", "--device", "cpu")


@pytest.mark.parametrize(
    ("options", "more"),
    [("", ()), (",num_concurrent=2", ("--batch_size", "3")), (",tokenized_requests=False", ())],
    ids=["default", "batches", "text"],
)
def test_figures_are_those_of_transformers(
    harness: Harness, url: str, checkpoint: Path, want: dict[str, Any], options: str, more: tuple[str, ...]
) -> None:
    arguments = f"model={checkpoint.name},tokenizer={checkpoint},base_url={url}/v1/completions,max_length={LONGEST}"
    found = harness.run("local-completions", arguments + options, *more)
    print(json.dumps([found["figures"], want["figures"]], indent=1))
    assert found["figures"].keys() == want["figures"].keys() and len(found["figures"]) == 6
    for name, value in want["figures"].items():
        assert found["figures"][name] == pytest.approx(value, abs=1e-3, rel=1e-3), name
    assert found["texts"] == want["texts"] and any(found["texts"])
    assert want["figures"]["glm5_choice acc"] > 0.5, "the comparison says little about a model that knows nothing"


def test_chat_generation_runs(harness: Harness, url: str, checkpoint: Path) -> None:
    arguments = f"model={checkpoint.name},base_url={url}/v1/chat/completions"
    found = harness.run("local-chat-completions", arguments, "--apply_chat_template", tasks=("glm5_generation",))
    assert len(found["texts"]) == 4


def test_the_verb_runs_lm_eval_and_the_table_reads_its_results(python: Path, checkpoint: Path, tmp_path: Path) -> None:
    """`glm5 eval DIR --suite lm-eval`: the figures are those that lm-eval writes; an unknown task is an error."""
    options = {"tasks": "glm5_choice", "include": str(HERE / "lm_eval"), "program": str(python.with_name("lm_eval"))}
    sets = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    command = [
        sys.executable,
        "-m",
        "glm5",
        "eval",
        str(checkpoint),
        "--suite",
        "lm-eval",
        "--out",
        str(tmp_path / "out"),
    ]
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | offline

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *sets, *more], cwd=HERE / "lm_eval", env=environment, capture_output=True, text=True, timeout=600
        )

    done = run("--json")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["lm-eval"]
    written = json.loads(Path(found["results"]).read_text("utf-8"))
    assert found["glm5_choice"]["acc"] == written["results"]["glm5_choice"]["acc,none"] > 0.5
    assert written["config"]["model"] == "local-completions"
    wrong = run("--set", "tasks=no_such_task")
    assert (
        wrong.returncode == 1 and "lm-eval ended with status" in wrong.stderr and "Traceback" not in wrong.stderr[-200:]
    )
