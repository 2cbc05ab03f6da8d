"""What all tests share: one thread, no network, no files left in the tree, and the same examples on every run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Set before anything imports torch or matplotlib.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest

if TYPE_CHECKING:  # torch costs seconds, and many tests do without
    import torch

    from glm5.chat import Tokenizer
    from glm5.model.glm5 import GLM5ForCausalLM
    from glm5.train.loop import StageIO

EXAMPLES = int(os.environ.get("GLM5_EXAMPLES", "20"))  # of a property test; `make test-all` takes more
hypothesis.settings.register_profile("glm5", deadline=None, derandomize=True, database=None, max_examples=EXAMPLES)
hypothesis.settings.load_profile("glm5")


SMALL = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    n_routed_experts=4, index_n_heads=4, index_head_dim=8, index_topk=4, initializer_range=0.2,
)  # fmt: skip


@pytest.fixture(scope="session")
def small() -> Callable[..., GLM5ForCausalLM]:
    """Make a random model of a few thousand parameters whose sparse attention really drops keys; keywords override its
    configuration."""
    import torch

    from glm5.config.model import GLM5Config
    from glm5.model.glm5 import GLM5ForCausalLM

    def make(*, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> GLM5ForCausalLM:
        return GLM5ForCausalLM(GLM5Config.preset("nano", **SMALL | overrides), seed=seed).to(dtype)

    return make


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    from glm5.chat import Tokenizer

    return Tokenizer.byte_level("5.0")


@pytest.fixture(params=["compiled", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the compiled CPU kernels and without them, as under GLM5_NATIVE=0."""
    from glm5.ops import native

    if request.param == "torch":
        monkeypatch.setattr(native, "_by_dtype", dict)
    elif not native.available():
        pytest.skip("no compiler here")
    return str(request.param)


FORKED = """
import os, runpy, sys
os.environ.update(environment)
for number, place in enumerate(said, start=1):
    os.dup2(place.fileno() if hasattr(place, "fileno") else os.open(place, os.O_WRONLY | os.O_CREAT, 0o600), number)
sys.argv = argv
runpy.run_path(argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Fork:
    """A script that was started. Its stdout and stderr go to files, `name`.out and `name`.err."""

    process: BaseProcess
    name: Path

    def wait(self, timeout: float) -> int:
        """Its exit code, once it has ended. A process that takes too long is an error; `kill` it then."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"it still runs after {timeout:.0f} s: {self.err[-2000:]}"
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    @property
    def out(self) -> str:
        return self._said(".out")

    @property
    def err(self) -> str:
        return self._said(".err")

    def _said(self, suffix: str) -> str:
        path = self.name.with_suffix(suffix)
        return path.read_text(encoding="utf-8") if path.exists() else ""


class Forks:
    """Runs scripts as forks of one process that has loaded torch, which takes longer than most of them run. That
    process computes nothing itself, and ends with the tests."""

    # FSDP imports torch._dynamo when it is first used; the others bring in all that training needs.
    LOADED = ("torch._dynamo", "glm5.model.glm5", "glm5.parallel.mesh", "glm5.train.loop", "glm5.train.losses")

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(self.LOADED))

    def start(self, script: str | Path, *arguments: object, out: Connection | None = None, **environment: str) -> Fork:
        """A script by its path or its text; keywords are environment variables. `out` takes its stdout."""
        self.count += 1
        place = self.folder / f"{self.count}.py"
        if isinstance(script, str):
            place.write_text(script, encoding="utf-8")
            script = place
        said = (out or place.with_suffix(".out"), place.with_suffix(".err"))
        names = {"argv": [str(part) for part in (script, *arguments)], "said": said, "environment": environment}
        process = self.context.Process(target=exec, args=(FORKED, names), daemon=True)
        process.start()
        return Fork(process, place)

    def run(self, script: str | Path, *arguments: object, timeout: float = 120, **environment: str) -> str:
        """What a script that must end well says on stdout."""
        fork = self.start(script, *arguments, **environment)
        try:
            assert fork.wait(timeout) == 0, fork.err[-2000:]
        finally:
            fork.kill()
        return fork.out


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Forks:
    return Forks(tmp_path_factory.mktemp("forks"))


@pytest.fixture
def stage_io(tmp_path: Path) -> Iterator[Callable[..., StageIO]]:
    """Where a stage writes; `stop_after` raises KeyboardInterrupt once that many steps were reported."""
    from glm5.obs.metrics import MetricsWriter
    from glm5.train.loop import StageIO

    stack = ExitStack()

    def make(folder: str = "run", stop_after: int | None = None, name: str = "stage") -> StageIO:
        reported = 0

        def advance(steps: int, numbers: dict[str, float]) -> None:
            nonlocal reported
            reported += steps
            if stop_after is not None and reported >= stop_after:
                raise KeyboardInterrupt

        root = tmp_path / folder
        (root / name).mkdir(parents=True, exist_ok=True)
        metrics = stack.enter_context(MetricsWriter(root / "metrics.jsonl"))
        return StageIO(name, root / name, metrics, advance)

    with stack:
        yield make


def pytest_collection_finish() -> None:
    """What is loaded by now stays to the end; without this, every full collection of garbage looks at all of it."""
    gc.freeze()


def pytest_configure() -> None:
    """A job in the background starts with Ctrl-C ignored, and so would every process that a test starts and stops."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
