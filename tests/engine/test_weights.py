"""New weights for a running engine: all of them or none, checked first, and every token belongs to one version."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.engine.weights import WeightUpdate, apply, stage, tensor_hash, tensor_hashes
from glm5.errors import CheckpointError, EngineError, Glm5Error
from glm5.files import MANIFEST
from glm5.model.hf_weights import save_checkpoint
from glm5.records import SamplingParams

FILE = "model.safetensors"
PARAMS = SamplingParams(max_tokens=10, seed=3, ignore_eos=True)


def load_weights(engine: Engine, source: Any, version: int, *, hashes: Any = None) -> WeightUpdate:
    """Both phases, one after the other."""
    return apply(engine, stage(engine.model, source, hashes=hashes, tokenizer=engine.tokenizer), version, hashes=hashes)


def stored(model: Any, path: Path) -> Path:
    save_checkpoint(model, path)
    return path


def by_one_model(model: Any, prompt: list[int], params: SamplingParams = PARAMS) -> list[int]:
    return Engine(model).generate([prompt], params)[0].token_ids


@pytest.mark.parametrize("form", ["directory", "shards", "tensors"])
def test_an_update_gives_an_engine_of_the_new_weights(small: Any, tmp_path: Path, form: str) -> None:
    old, new = small(seed=1), small(seed=2)
    engine = Engine(old)
    prompt = [3, 1, 4, 1, 5] * 4
    engine.generate([prompt], PARAMS)  # leaves latents of the old weights, which must not be used again
    expected = by_one_model(new, prompt)
    assert expected != by_one_model(small(seed=1), prompt)
    source: Any = new.state_dict()
    if form == "directory":
        source = stored(new, tmp_path / "new")
    elif form == "shards":
        save_checkpoint(new, tmp_path / "new", max_shard_size="20KB")
        source = str(tmp_path / "new")
    update = load_weights(engine, source, 7, hashes=tensor_hashes(new))
    assert tensor_hashes(engine.model) == tensor_hashes(new)
    size = sum(t.numel() * t.element_size() for t in new.state_dict().values())
    assert (update.version, update.tensors, update.bytes) == (7, len(new.state_dict()), size)
    assert engine.weight_version == 7 and update.seconds > 0
    (done,) = engine.generate([prompt], PARAMS)
    assert (done.token_ids, set(done.weight_versions)) == (expected, {7})
    with torch.no_grad():
        new.lm_head.weight.zero_()
    assert engine.generate([prompt], PARAMS)[0].token_ids == expected  # copies, no views


def test_each_token_of_a_running_request_is_of_one_version(small: Any, tmp_path: Path) -> None:
    old, new = small(seed=1), small(seed=2)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    engine = Engine(small(seed=1))
    (running,) = engine.submit([1, 2, 3], greedy)
    while len(running.completion.token_ids) < 5:
        engine.step()
    staged = stage(engine.model, stored(new, tmp_path / "new"))  # while the request goes on
    engine.step()
    assert set(running.completion.weight_versions) == {0}
    said = list(running.completion.token_ids)
    apply(engine, staged, 4)
    while engine.busy:
        engine.step()
    rest = 12 - len(said)
    assert running.completion.weight_versions == [0] * len(said) + [4] * rest
    assert said == by_one_model(old, [1, 2, 3], greedy)[: len(said)]
    assert running.completion.token_ids[len(said) :] == by_one_model(new, [1, 2, 3, *said], greedy)[:rest]


def flip(path: Path, name: str = "model.safetensors", back: int = 5) -> None:
    data = bytearray((path / name).read_bytes())
    data[-back] ^= 64
    (path / name).write_bytes(data)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change config.json of a checkpoint whose manifest is gone."""
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    (path / MANIFEST).unlink()


def drop_tensor(path: Path) -> None:
    (path / MANIFEST).unlink()
    data = (path / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["model.other.weight"] = header.pop("model.norm.weight")
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (flip, "is missing or damaged"),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "missing or damaged"),
    "a cut file": (lambda p: (p / FILE).write_bytes((p / FILE).read_bytes()[:-9]), "damaged"),
    "no folder": (lambda p: p.rename(p.with_name("gone")), "not a checkpoint directory"),
    "another theta": (lambda p: rewrite(p, lambda c: c["rope_parameters"].update(rope_theta=9.0)), "rope_parameters"),
    "another top-k": (lambda p: rewrite(p, lambda c: c.update(index_topk=2)), "index_topk is 2, not 4"),
    "a renamed tensor": (drop_tensor, "model.other.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_foreign_directory_changes_nothing(small: Any, tmp_path: Path, name: str) -> None:
    harm, message = DAMAGE[name]
    path = stored(small(seed=2), tmp_path / "new")
    harm(path)
    unchanged(small, lambda engine: load_weights(engine, path, 1), message)


def unchanged(small: Any, attempt: Callable[[Engine], Any], message: str) -> None:
    """The attempt fails, and a request that runs meanwhile gets what it gets without it."""
    engine = Engine(small(seed=1))
    before = tensor_hashes(engine.model)
    (running,) = engine.submit([1, 2, 3], PARAMS)
    for _ in range(4):
        engine.step()
    with pytest.raises(Glm5Error, match=message):
        attempt(engine)
    assert tensor_hashes(engine.model) == before and engine.weight_version == 0
    while engine.busy:
        engine.step()
    assert running.completion.token_ids == by_one_model(small(seed=1), [1, 2, 3])
    assert set(running.completion.weight_versions) == {0}


def last(tensors: dict[str, Tensor]) -> str:
    return list(tensors)[-1]


def changed(tensors: dict[str, Tensor], name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    rest = {key: value for key, value in tensors.items() if key != name}
    return rest if tensor is None else {**rest, name: tensor}


@pytest.mark.parametrize("kind", ["missing", "extra", "shape", "type", "hash", "no hash", "foreign hash", "version"])
def test_tensors_that_do_not_fit_change_nothing(small: Any, kind: str) -> None:
    new = small(seed=2)
    tensors, hashes = dict(new.state_dict()), tensor_hashes(new)
    name, version, message = last(tensors), 1, "is missing"
    given: dict[str, str] | None = None
    if kind == "missing":
        tensors = changed(tensors, name, None)
    elif kind == "extra":
        tensors["more"], message = torch.zeros(2), "is not in the model"
    elif kind == "shape":
        tensors, message = changed(tensors, name, tensors[name].flatten()[:1]), "has shape \\[1\\]"
    elif kind == "type":
        tensors, message = changed(tensors, name, tensors[name].to(torch.int64)), "is torch.int64"
    elif kind == "version":
        version, message = -1, "must be an integer of at least 0"
    else:
        given = hashes
        if kind == "hash":
            tensors, message = changed(tensors, name, tensors[name] + 1e-3), "is corrupt"
        elif kind == "no hash":
            given, message = {k: v for k, v in hashes.items() if k != name}, "must come together"
        else:
            given, message = {**hashes, "more": "00"}, "must come together"
    unchanged(small, lambda engine: load_weights(engine, tensors, version, hashes=given), message)
    if kind != "version":
        with pytest.raises(EngineError, match=message):
            stage(small(seed=1), tensors, hashes=given)


def test_another_tokenizer_is_refused(small: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = stored(small(seed=2), tmp_path / "new")
    other = Tokenizer.train(["some other words, some other merges"] * 20, 320)
    other.save(path)
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="has a different tokenizer"):
        load_weights(Engine(small(seed=1), tokenizer), path, 1)
    tokenizer.save(path)
    assert load_weights(Engine(small(seed=1), tokenizer), path, 1).version == 1


def test_a_hash_is_that_of_the_bytes() -> None:
    tensor = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
    raw = struct.pack("<4f", 1.5, -2.0, 0.25, 3.0)
    assert tensor_hash(tensor) == hashlib.sha256(raw).hexdigest()
    assert tensor_hash(tensor.T.contiguous().T) == tensor_hash(tensor)
    assert tensor_hash(torch.tensor(1.5)) == hashlib.sha256(raw[:4]).hexdigest()
    assert (
        tensor_hash(tensor.bfloat16()) == hashlib.sha256(struct.pack("<4H", 0x3FC0, 0xC000, 0x3E80, 0x4040)).hexdigest()
    )
    assert tensor_hash(torch.zeros(0)) == hashlib.sha256(b"").hexdigest()


def test_a_narrower_type_is_converted(small: Any, tmp_path: Path) -> None:
    new = small(seed=2, dtype=torch.bfloat16)
    engine = Engine(small(seed=1))
    update = load_weights(engine, dict(new.state_dict()), 2, hashes=tensor_hashes(new))
    assert isinstance(update, WeightUpdate)
    assert all(torch.equal(engine.model.state_dict()[k], v.float()) for k, v in new.state_dict().items())


def test_a_copy_that_arrives_differently_is_noticed(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    new, engine = small(seed=2), Engine(small(seed=1))
    real = engine.update_weights

    def broken(tensors: Any, version: int) -> None:
        real(tensors, version)
        engine.model.lm_head.weight.data[0, 0] += 1

    monkeypatch.setattr(engine, "update_weights", broken)
    with pytest.raises(EngineError, match=r'"lm_head\.weight" differs in the engine'):
        load_weights(engine, new.state_dict(), 1, hashes=tensor_hashes(new))
