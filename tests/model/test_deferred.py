"""A deferred model gives any rows of any tensor, with the bits of the loaded or initialised model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.model import weight_source
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.weight_source import RowPart
from glm5.train.dsa_adapt import add_indexer, untrained_indexers
from tests.model.test_fp8 import WIDE, quantise_folder
from tests.model.test_streaming import stack

Build = Callable[..., GLM5ForCausalLM]


def check_rows(deferred: GLM5ForCausalLM, whole: GLM5ForCausalLM, ranks: int) -> None:
    """The rows of `ranks` processes, cut as `torch.chunk` cuts them, put together."""
    assert deferred.weight_source is not None
    expected = whole.state_dict()
    assert deferred.state_dict().keys() == expected.keys()
    for rank in range(ranks):
        parts: dict[str, RowPart] = {}
        for name, tensor in expected.items():
            each = -(-tensor.shape[0] // ranks)
            first = min(rank * each, tensor.shape[0])
            own = torch.full_like(tensor[first : first + each], float("nan"))
            parts[name] = RowPart(own, first, tensor.shape[0])
        deferred.weight_source.fill(parts)
        for name, part in parts.items():
            assert torch.equal(part.rows, expected[name][part.first : part.first + len(part.rows)]), (name, rank)


@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.parametrize("drawn", [48, 1 << 24])
def test_random_rows(small: Callable[..., GLM5Config], monkeypatch: pytest.MonkeyPatch, ranks: int, drawn: int) -> None:
    """Also drawn in pieces: of sizes 40 x 28, 7 x 48 x 40 and others, of which 48 numbers are no whole rows."""
    config = small()
    monkeypatch.setattr(weight_source, "DRAWN", drawn)
    check_rows(GLM5ForCausalLM.deferred(config, seed=3), GLM5ForCausalLM(config, seed=3), ranks)


def test_gates_and_attributes(grouped: Callable[..., GLM5Config]) -> None:
    config = grouped(attention_pattern="FSF", efficient_attention="gdn")
    whole, deferred = GLM5ForCausalLM(config, seed=3), GLM5ForCausalLM.deferred(config, seed=3)
    assert any("A_log" in name for name in whole.state_dict())
    check_rows(deferred, whole, 2)
    assert all(tensor.is_meta for tensor in deferred.state_dict().values())
    loaded = deferred.clone().materialise()
    assert loaded.weight_source is None and same(loaded, whole)
    for (name, a), (_, b) in zip(whole.named_parameters(), loaded.named_parameters(), strict=True):
        assert a.__dict__ == b.__dict__ and a.requires_grad == b.requires_grad, name
    assert loaded.materialise() is loaded


def same(a: GLM5ForCausalLM, b: GLM5ForCausalLM) -> bool:
    pairs: list[tuple[Tensor, Tensor]] = list(zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    return a.config == b.config and all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)


@pytest.mark.parametrize("kind", ["plain", "shards", "bf16", "fp8", "stacked", "generated"])
def test_rows_of_a_folder(build: Build, tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"allow_missing": "indexer"} if kind == "generated" else {}
    model, folder = build(1, **(WIDE if kind == "fp8" else {"n_routed_experts": 4})), tmp_path / "model"
    if kind == "fp8":
        quantise_folder(model, folder, (32, 48), 2)
    else:
        model.cast(torch.bfloat16 if kind == "bf16" else torch.float32)
        kept = {"max_shard_size": 20_000} if kind == "shards" else {}
        (model.clone(model.config.replace(use_dsa=False)) if kind == "generated" else model).save_pretrained(
            folder, **kept
        )
    if kind == "stacked":
        (folder / "manifest.json").unlink()
        stack(folder)
    if kind == "generated":
        options |= {"use_dsa": True, "index_topk": 8}
    whole = GLM5ForCausalLM.from_pretrained(folder, **options)
    deferred = GLM5ForCausalLM.from_pretrained(folder, device="meta", **options)
    assert deferred.census == whole.census
    for ranks in (1, 2, 5):
        check_rows(deferred, whole, ranks)


def test_changes_and_copies(build: Build, tmp_path: Path) -> None:
    """Another configuration, new indexers, other dtypes and a copy on disk: as with the loaded model."""
    build(2, use_dsa=False).save_pretrained(tmp_path / "dense")
    dense, deferred = (GLM5ForCausalLM.from_pretrained(tmp_path / "dense", device=d) for d in ("cpu", "meta"))
    assert not untrained_indexers(deferred)  # it has none
    adapted, later = (add_indexer(model, 7, 8) for model in (dense, deferred))
    assert untrained_indexers(later) and untrained_indexers(adapted)
    check_rows(later, adapted, 3)
    changed = adapted.config.replace(rope_theta=5e4)
    check_rows(later.clone(changed), adapted.clone(changed), 2)
    check_rows(later.clone().cast(torch.bfloat16), adapted.clone().cast(torch.bfloat16), 2)
    with torch.no_grad():
        adapted.get_parameter("model.layers.0.self_attn.indexer.k_norm.bias").fill_(0.5)
    assert not untrained_indexers(adapted)
    for name, model in (("loaded", dense), ("deferred", deferred)):
        model.save_pretrained(tmp_path / name, max_shard_size=30_000)
    files = sorted(p.name for p in (tmp_path / "loaded").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "deferred").iterdir()) and len(files) > 6
    for file in files:
        assert (tmp_path / "loaded" / file).read_bytes() == (tmp_path / "deferred" / file).read_bytes(), file
    with pytest.raises(KeyError):
        deferred.clone(deferred.config.replace(num_hidden_layers=2))
