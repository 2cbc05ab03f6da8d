"""`benchmarks/gpu.py` without a GPU: its comparison of every kernel with its torch form, in the interpreter."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from glm5.launch.kernels import shape_of
from glm5.ops import operators
from glm5.ops.operators import TRITON_KERNELS
from glm5.ops.triton import Shape
from tests.ops.triton import interpreter  # noqa: F401 - prepares the interpreter

from triton.runtime.errors import OutOfResources  # isort: skip - after the interpreter was set up

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
FILE = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
TINY = Shape(
    heads=2, latent=16, rope=4, topk=6, index_heads=2, index_dim=8, nope=8, value=8, query_latent=12, hidden=24,
    inner=16, experts=4, experts_per_token=2, expert_inner=8, vocabulary=50, queries=5, context=128, sequences=2,
)  # fmt: skip
sys.path.insert(0, str(FILE.parent))
GPU = runpy.run_path(str(FILE), run_name="gpu")
sys.path.remove(str(FILE.parent))


@pytest.mark.parametrize("name", GPU["WORK"])
def test_a_kernel_is_right(name: str) -> None:
    row = GPU["check"](name, TINY, "cpu")
    assert row["right"] and row["errors"].keys() == {"float32", "bfloat16"}, row


def test_every_kernel_is_measured() -> None:
    assert {operator for operator, *_ in GPU["WORK"].values()} == TRITON_KERNELS.keys() - {"draw_tokens"}


@pytest.mark.parametrize("name", ["select", "select_8bit"])
def test_selection_is_compared_with_exact_scores(name: str) -> None:
    """With index keys of 128 numbers, the factor d^-1/2 rounds even in fp64: ties of whole numbers would break."""
    row = GPU["check"](name, replace(TINY, index_dim=128, index_heads=4, topk=16, queries=12), "cpu")
    assert row["right"], row


def test_a_kernel_that_does_not_run_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("out of shared memory")

    monkeypatch.setitem(TRITON_KERNELS, "swiglu", fails)
    row = GPU["check"]("swiglu", TINY, "cpu")
    assert not row["right"] and row["error"] == "ValueError: out of shared memory"


def test_the_least_time_of_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    shape = shape_of("glm5")
    least = {name: GPU["least_us"](names, shape) for name, (_, names, _) in GPU["WORK"].items()}
    assert [name for name, time in least.items() if time is None] == ["indexer_kl", "grouped_rows, decoding"]
    moved = 2 * (256 * 4096 * 6144 + 4096 * 8 * (6144 + 4096))
    assert least["grouped_rows"] == pytest.approx(1e6 * moved / 3.35e12)
    assert least["select_8bit"] == pytest.approx(least["select"] / 2, rel=0.01)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, arguments)])
    monkeypatch.syspath_prepend(FILE.parent)
    GPU["main"]()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("what", ["kernels", "train", "serve"])
def test_without_a_gpu_it_says_so(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, what)
    assert capsys.readouterr().out.startswith("No GPU: nothing was run.")


@pytest.mark.parametrize("bad", [("--shape", "8"), ("--shape", "0x8"), ("--batch", "0"), ("--prompt", "many")])
def test_bad_shapes(bad: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "train", *bad)
    assert bad[0] in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_step_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "train", "--quick", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["checked"]) == len(found["times"]) == 3
    for row in found["times"]:
        assert 0 < row["optimizer_share"]["median"] < 1 and row["predicted_peak_bytes"] > 1e6
        assert row["mfu"]["measured"]["median"] > 0 and row["tokens_per_second"]["n"] == 2
    monkeypatch.setattr("_gpu_train.ROUNDED", 0.0)  # bf16 then is wrong
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, "train", "--quick", "--json", tmp_path / "wrong.json")
    wrong = json.loads((tmp_path / "wrong.json").read_text())
    assert wrong["times"] == [] and not any(row["right"] for row in wrong["checked"])


@pytest.mark.slow
def test_the_engine_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "serve", "--quick", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"sparse", "dense", "transformers"} <= found["times"].keys()
    for name in ("sparse", "dense", "transformers"):
        part = found["times"][name]
        assert [row["length"] for row in part["prefill"]] == [64] and [row["batch"] for row in part["decode"]] == [1, 2]
        assert all(row["tokens_per_second"]["median"] > 0 for row in (*part["prefill"], *part["decode"]))
    assert [row["batch"] for row in found["dense_over_sparse"]] == [1, 2]


def meta(results: Any) -> list[tuple[Any, ...]]:
    found = (results,) if isinstance(results, Tensor) else results
    return [(x.shape, x.dtype, x.stride()) for x in found]


@pytest.mark.parametrize("name", [n for n, (o, *_) in GPU["WORK"].items() if o not in ("attend", "select_8bit")])
def test_results_have_the_layout_that_fake_tensors_have(name: str) -> None:
    """For arguments whose columns lie in memory first, where rows need not be contiguous. (The saved sums of `attend`
    exist on a GPU only.)"""
    operator, _, make = GPU["WORK"][name]
    arguments = make(GPU["Draw"](TINY, torch.float32, "cpu", torch.Generator().manual_seed(1)))
    pools = arguments[8:10] if operator == "mla_latents" else ()
    if operator not in ("attend_backward", "select", "selected", "selected_backward"):  # callers make them contiguous
        arguments = tuple(
            x
            if any(x is p for p in pools)
            else tree_map_only(Tensor, lambda t: t.mT.contiguous().mT if t.ndim > 1 else t, x)
            for x in arguments
        )
    with FakeTensorMode() as mode:

        def fake(tensor: Tensor) -> Tensor:
            if operator not in ("attend_ranges", "expert_layout"):
                return mode.from_tensor(tensor)  # type: ignore[no-any-return]
            # On a CPU these two have other results.
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

        expected = meta(getattr(torch.ops.glm5, operator).default(*tree_map_only(Tensor, fake, arguments)))
    assert meta(TRITON_KERNELS[operator](*arguments)) == expected
    assert meta(operators._contiguous(operators.TORCH_FORMS[operator])(*arguments)) == expected


def test_a_kernel_runs_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on: list[Any] = []

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        on.append(which)
        yield
        on.append(None)

    monkeypatch.setattr(torch.cuda, "device", device)
    run = operators._on_gpu(lambda _: on[-1], lambda _: "torch form")
    assert run(torch.ones(2)) == torch.device("cpu") and on[-1] is None
    assert run(torch.ones(0)) == run(torch.ones(2, dtype=torch.float64)) == "torch form"


def test_a_kernel_that_does_not_fit_a_gpu_leaves_the_work_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    tried: list[torch.dtype] = []

    def kernel(x: Tensor) -> str:
        tried.append(x.dtype)
        if x.dtype == torch.float32:
            raise OutOfResources(300_000, 100_000, "shared memory")
        if x.dtype == torch.float16:
            raise ValueError("something else")
        return "kernel"

    run = operators._on_gpu(kernel, lambda _: "torch form")
    assert [run(torch.ones(2)) for _ in range(3)] == ["torch form"] * 3 and tried == [torch.float32]
    assert run(torch.ones(2, dtype=torch.bfloat16)) == "kernel" and len(caplog.records) == 1
    with pytest.raises(ValueError, match="something else"):
        run(torch.ones(2, dtype=torch.float16))
