"""What all tests share: one thread, no network, no files left in the tree, and the same examples on every run."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Set before anything imports torch or matplotlib.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("RES_OPTIONS", "attempts:0")  # torch asks for the names of peers: 10 s if nobody answers

import hypothesis
import pytest

from glm5 import process
from tests.forks import Forks

process.watch_cores = lambda: None  # tests that call the command line in this process would each start the thread

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


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts programs that need not import torch."""
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()


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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """What is loaded by the end of this stays. To look through it for garbage takes longer than to load it, and again
    and again as long as the tests run."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # as the command line does
    gc.enable()
    return result


def pytest_configure() -> None:
    """A job in the background starts with Ctrl-C ignored, and so would every process that a test starts and stops."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
