"""FlashComm: sums over ranks in two halves are the sums in one piece, and fewer bytes travel. Ranks are threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.parallel import tensor
from glm5.parallel.tensor import SplitSums, divide_model, fill_divided

Small = Callable[..., GLM5ForCausalLM]
TOKENS = 88
WIDE = {"hidden_size": 64}  # wider than the products that are gathered in place of the stream, 48
KINDS: dict[str, dict[str, Any]] = {
    "sparse": WIDE,
    "IndexShare": {**WIDE, "num_hidden_layers": 3, "index_topk_pattern": "FSF"},
    "dense": {**WIDE, "use_dsa": False, "index_topk": None},
    "narrow": {},
}


@dataclass
class Played:
    """The ranks of a group, each in a thread."""

    world: int
    told: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world, timeout=30)


@dataclass
class Rank:
    """Bytes that this rank sends are counted in `sent`, those of a sum as in a ring."""

    played: Played
    rank: int
    sent: Counter[str] = field(default_factory=Counter)

    @property
    def world(self) -> int:
        return self.played.world

    def _all(self, x: Tensor) -> list[Tensor]:
        self.played.told[self.rank] = x
        self.played.barrier.wait()
        found = [self.played.told[rank].clone() for rank in range(self.world)]
        self.played.barrier.wait()
        return found

    def _added(self, parts: list[Tensor]) -> Tensor:
        for part in parts[1:]:
            parts[0] += part
        return parts[0]

    def sum(self, x: Tensor, exact: bool) -> Tensor:
        self.sent["sum"] += 2 * (self.world - 1) * x.nbytes // self.world
        return self._added(self._all(x))

    def sum_parts(self, parts: Tensor) -> Tensor:
        assert parts.shape[0] == self.world
        self.sent["reduce-scatter"] += (self.world - 1) * parts[0].nbytes
        return self._added([of_rank[self.rank] for of_rank in self._all(parts)])

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        self.sent["gather"] += (self.world - 1) * x.nbytes
        found = torch.cat(self._all(x))
        return lambda: found


def hidden(folder: Path, world: int, form: str | None, *, exact: bool, tokens: int = TOKENS) -> tuple[Any, list[Rank]]:
    """States of the trunk and of the MTP layer on every rank, for one document of `tokens` tokens."""
    played = Played(world)
    ranks = [Rank(played, rank) for rank in range(world)]
    ids = torch.randint(0, 40, (1, tokens), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def compute(rank: Rank) -> tuple[Tensor, Tensor]:
        part = GLM5ForCausalLM.from_pretrained(folder, device="meta")
        split = None if form is None else SplitSums(rank, rounds=form == "int8")
        divide_model(part, rank.rank, world, rank.sum, split)
        fill_divided(part, torch.device("cpu"))
        ctx = packed_context(torch.zeros_like(ids), exact=exact)
        trunk = part.model(ids, ctx)
        return trunk, part.mtp_hidden(ids, trunk, ctx)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(compute, ranks)), ranks


@pytest.fixture
def saved(small: Small, tmp_path: Path) -> Callable[..., Path]:
    def save(**changes: Any) -> Path:
        small(**changes).save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_sums_in_one_piece(saved: Any, kind: str, exact: bool) -> None:
    """In exact mode every bit; otherwise products of half the rows may be rounded in another way."""
    folder = saved(**KINDS[kind])
    expected, _ = hidden(folder, 2, None, exact=exact)
    found, ranks = hidden(folder, 2, "plain", exact=exact)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0.0 if exact else 2e-4)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    assert set(ranks[0].sent) == {"reduce-scatter", "gather"}


def test_four_ranks_and_a_part_of_padding(saved: Any) -> None:
    """88 tokens are 96 rows in exact mode, and these four parts of 32."""
    folder = saved(num_attention_heads=4, **WIDE)
    expected, _ = hidden(folder, 4, None, exact=True)
    found, _ = hidden(folder, 4, "plain", exact=True)
    for mine, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, other))


def test_bytes(saved: Any, small: Small) -> None:
    folder = saved(num_attention_heads=4, **WIDE)
    config = small(**WIDE).config
    layers, world = config.num_hidden_layers + config.num_nextn_predict_layers, 4
    sent = {form: Counter(hidden(folder, world, form, exact=False)[1][0].sent) for form in (None, "plain", "int8")}
    rows, row = (world - 1) * TOKENS // world, 4 * config.hidden_size  # what a rank sends of one element per token
    assert sent[None] == {"sum": 2 * layers * 2 * rows * row}
    products = config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim
    products += config.index_head_dim + config.index_n_heads
    halves = {"reduce-scatter": 2 * layers * rows * row}
    ends = 2 * rows * row  # the last states of trunk and MTP layer
    assert sent["plain"] == {**halves, "gather": layers * rows * (4 * products + row) + ends}
    narrow = config.hidden_size + 4
    assert sent["int8"] == {**halves, "gather": layers * rows * (4 * products + narrow) + ends}


def test_rounded_rows_change_little_and_all_ranks_alike(saved: Any) -> None:
    folder = saved(use_dsa=False, index_topk=None, first_k_dense_replace=2)  # nothing is selected
    (exact, _), _ = hidden(folder, 2, "plain", exact=False)
    found, _ = hidden(folder, 2, "int8", exact=False)
    assert all(map(torch.equal, *found))
    error = float((found[0][0] - exact[0]).norm() / exact[0].norm())
    assert 0 < error < 0.02


def test_few_tokens_are_summed_in_one_piece(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved()
    few = tensor.LEAST_TOKENS - 32
    _, ranks = hidden(folder, 2, "plain", exact=True, tokens=few)
    assert set(ranks[0].sent) == {"sum"}
