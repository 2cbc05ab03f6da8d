"""Muon over four ranks against Muon written out per block in float64 on the gathered tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from glm5.optim.blocks import newton_schulz_cost
from glm5.optim.distributed import CutBlock, _owned
from tests.forks import FSDP

WORLD, STEPS = 4, 3
LR, MOMENTUM, DECAY, BETAS, EPS = 0.03, 0.9, 0.2, (0.8, 0.9), 1e-6
HEIGHTS = {
    "heads": [5, 5, 5, 5],
    "latent": [3, 4, 3, 4, 3, 4],
    "uneven": [7],
    "small": [3],
    "tall": [9, 9],
    "experts": [4, 4],
}
ADAMW = ("embed_tokens.weight", "norm", "short_norm")


@dataclass(frozen=True)
class Run:
    """What the ranks wrote: tensors by case, phase and name; numbers per rank."""

    tensors: dict[str, Tensor]
    numbers: list[dict[str, Any]]

    def __call__(self, case: str, phase: str, name: str) -> Tensor:
        return self.tensors[f"{case}/{phase}/{name}"].double()


@pytest.fixture(scope="module")
def ranks(forks: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("ranks")
    worker = Path(__file__).with_name("sharded_worker.py")
    started = [forks.start(worker, rank, WORLD, folder, load=FSDP, GLOO_SOCKET_IFNAME="lo") for rank in range(WORLD)]
    try:
        codes = [rank.wait(120) for rank in started]
    finally:
        for rank in started:
            rank.kill()
    assert codes == [0] * WORLD, "\n".join(rank.err for rank in started)
    numbers = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]
    return Run(load_file(str(folder / "tensors.safetensors")), numbers)


def newton_schulz(matrix: list[list[float]] | Tensor) -> Tensor:
    """Five quintic iterations of one matrix in float64, in the orientation it has."""
    x = torch.as_tensor(matrix, dtype=torch.float64)
    x = x / (x.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def muon(start: Tensor, gradients: list[Tensor], heights: list[int]) -> Tensor:
    """Every block of every matrix as an optimiser of its own."""
    result = start.clone()
    stack = result if result.ndim == 3 else result[None]
    for index, matrix in enumerate(stack):
        row = 0
        for height in heights:
            block = matrix[row : row + height]
            buffer = torch.zeros_like(block)
            for gradient in gradients:
                g = (gradient if gradient.ndim == 3 else gradient[None])[index, row : row + height]
                buffer = MOMENTUM * buffer + g
                step = 0.2 * max(block.shape) ** 0.5 * newton_schulz(g + MOMENTUM * buffer)
                block.copy_(block - LR * DECAY * block - LR * step)
            row += height
    return result


def adamw(start: Tensor, gradients: list[Tensor]) -> Tensor:
    parameter = torch.nn.Parameter(start.clone())
    decay = DECAY if start.ndim >= 2 else 0.0
    optimizer = torch.optim.AdamW([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=decay)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def expected(ranks: Run, case: str, name: str) -> Tensor:
    gradients = [ranks(case, f"gradient{step}", name) for step in range(STEPS)]
    start = ranks(case, "start", name)
    return adamw(start, gradients) if name in ADAMW else muon(start, gradients, HEIGHTS[name])


@pytest.mark.dist
@pytest.mark.parametrize("name", [*HEIGHTS, *ADAMW])
@pytest.mark.parametrize(("case", "atol"), [("float64", 1e-12), ("float32", 1e-6), ("replicas", 1e-12)])
def test_four_ranks_take_the_steps_of_one(ranks: Run, case: str, atol: float, name: str) -> None:
    torch.testing.assert_close(ranks(case, "end", name), expected(ranks, case, name), rtol=1e-6, atol=atol)


@pytest.mark.dist
@pytest.mark.parametrize("name", HEIGHTS)
def test_newton_schulz_in_bf16_stays_near(ranks: Run, name: str) -> None:
    moved = ranks("bfloat16", "end", name) - ranks("bfloat16", "start", name)
    wanted = expected(ranks, "bfloat16", name) - ranks("bfloat16", "start", name)
    assert float((moved - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "shards", "itemsize", "groups"),
    [("float64", 4, 8, 1), ("float32", 4, 4, 1), ("bfloat16", 4, 2, 1), ("replicas", 2, 8, 2)],
)
def test_only_cut_blocks_travel_and_only_once_each_way(
    ranks: Run, case: str, shards: int, itemsize: int, groups: int
) -> None:
    cut = away = 0
    for name, heights in HEIGHTS.items():
        shape = ranks(case, "start", name).shape
        if len(shape) == 3:
            continue
        chunk, row = -(-shape[0] // shards), 0
        for height in heights:
            rows = [sum(r // chunk == s for r in range(row, row + height)) for s in range(shards)]
            if max(rows) < height:
                cut += height * shape[1] * itemsize
                away += (height - max(rows)) * shape[1] * itemsize
            row += height
    for numbers in ranks.numbers:
        for sent in numbers[case]["sent"]:  # summed over ranks
            # Every owner could at best be the rank that holds most, and nothing goes further than there and back.
            assert 2 * away * groups <= sent <= 2 * cut * groups, (sent, away, cut)


@pytest.mark.dist
def test_a_declaration_lost_to_fully_shard_is_an_error(ranks: Run) -> None:
    for numbers in ranks.numbers:
        assert numbers["float64"]["lost"].startswith("heads is a matrix without declared Muon Split blocks")
        assert "restore_splits" in numbers["float64"]["lost"]
        assert numbers["columns"].startswith(
            "sideways is placed as (Shard(dim=1),); Muon needs matrices sharded by rows"
        )


@pytest.mark.dist
def test_update_table_of_all_ranks_is_that_of_the_whole_model(ranks: Run) -> None:
    texts = {numbers[case]["table"] for numbers in ranks.numbers for case in ("float64", "replicas")}
    assert len(texts) == 1
    rms = {}
    for line in texts.pop().splitlines()[1:]:
        cells = line.replace("muon split", "split").split()
        rms[cells[1], cells[2]] = float(cells[6])
    for name, heights in HEIGHTS.items():
        gradient, squares = ranks("float64", "gradient0", name), {}
        for matrix in gradient if gradient.ndim == 3 else [gradient]:
            for block in matrix.split(heights):
                step = 0.2 * max(block.shape) ** 0.5 * newton_schulz((1 + MOMENTUM) * block)
                squares.setdefault(f"{block.shape[0]}x{block.shape[1]}", []).append(step.square().mean())
        for block_name, values in squares.items():
            wanted = float(torch.stack(values).mean().sqrt())
            assert rms.pop((name, block_name)) == pytest.approx(wanted, abs=6e-4)
    # AdamW's first step is the sign of the gradient.
    assert rms == {(name, "-"): 1.0 for name in ADAMW}


@pytest.mark.dist
def test_gradients_on_different_meshes_share_one_norm(ranks: Run) -> None:
    names = ("rows", "grid", "copied", "plain")
    norm = sum(float(ranks("clip", "before", name).square().sum()) for name in names) ** 0.5
    for numbers in ranks.numbers:
        assert numbers["clip"]["norm"] == pytest.approx(norm, rel=1e-6)
        assert numbers["clip"]["after"] == pytest.approx(0.5, rel=1e-5)
    for name in names:
        scaled = ranks("clip", "before", name) * 0.5 / norm
        torch.testing.assert_close(ranks("clip", "after", name), scaled, rtol=1e-5, atol=1e-8)


def test_owners_are_balanced_and_near() -> None:
    shape = (6, 4)
    cuts = [CutBlock(i, 0, shape, ((0, 0, 4), (1, 4, 6)), -1) for i in range(8)]
    owners = [cut.owner for cut in _owned(cuts, [0] * 4)]
    cost = newton_schulz_cost(shape)
    loads = [owners.count(rank) for rank in range(4)]
    assert sum(loads) == 8 and max(loads) - min(loads) <= 2
    # With nothing else to do, the rank that holds most of a block owns it; a busy one does not.
    assert [cut.owner for cut in _owned(cuts[:1], [0] * 4)] == [0]
    far = CutBlock(0, 0, shape, ((2, 0, 2), (3, 2, 6)), -1)
    assert [cut.owner for cut in _owned([far], [0] * 4)] == [3]
    assert [cut.owner for cut in _owned(cuts[:1], [5 * cost, 5 * cost, 0, 9])] == [2]
