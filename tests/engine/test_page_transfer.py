"""Pages that one engine computes and another one uses: the same tokens as with one engine, or a refusal."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.engine.kv_pool import PAGE
from glm5.engine.page_hash import links, page_digest, root_link
from glm5.engine.page_transfer import (
    InStream,
    PageError,
    SharedMemory,
    Sheaf,
    ToSharedMemory,
    adopt,
    cache_of,
    export,
    sender,
)
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import Completion, GrammarSpec, SamplingParams
from tests.engine.test_variants import make

Small = Callable[..., GLM5ForCausalLM]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=7, top_p=0.9, repetition_penalty=1.2, top_logprobs=2, n=2)
ONE = replace(GREEDY, max_tokens=1)
LENGTHS = (1, PAGE - 1, PAGE, 2 * PAGE + 17)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 40, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def carried(source: Engine, target: Engine, ids: list[int], namespace: str = "") -> int:
    """Compute a prompt in one engine, move its pages to another. Returns how many tokens of it that one then has."""
    source.submit(ids, ONE, namespace=namespace)
    while source.busy:
        source.step()
    first = cache_of(target).known(namespace, ids)[0]
    sheaf = export(source, namespace, ids, first)
    return adopt(target, namespace, ids[: (first + len(sheaf.contents)) * PAGE], sheaf)


def key(done: Completion) -> Any:
    return done.token_ids, done.logprobs, done.top_logprobs, done.finish_reason


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ({}, {}),
        ({}, {"speculative": 2}),
        pytest.param({"use_dsa": False}, {}, marks=pytest.mark.long),
        ({}, {"exact": False, "cache_dtype": "int8"}),
        ({"num_hidden_layers": 4, "index_topk_pattern": "FSSF"}, {"speculative": 2}),
        pytest.param("gqa", {}, marks=pytest.mark.slow),
    ],
    ids=["exact", "drafts", "dense", "int8", "IndexShare", "gqa"],
)
def test_tokens_are_those_of_one_engine(small: Small, kind: Any, options: dict[str, Any]) -> None:
    model = make(kind) if isinstance(kind, str) else small(**kind)
    alone, source, target = (Engine(model, **options) for _ in range(3))
    for number, length in enumerate(LENGTHS):
        ids = prompt(length, seed=number)
        assert carried(source, target, ids) == length
        for params in (GREEDY, SEEDED):
            expected, found = alone.generate([ids], params), target.generate([ids], params)
            assert [key(done)[0] for done in found] == [key(done)[0] for done in expected]
            if alone.exact and kind != "gqa":  # whose results depend on the batch in the last digits
                assert [key(done) for done in found] == [key(done) for done in expected]
        assert found[0].cached_len >= length - 1


def test_a_longer_conversation_needs_only_its_new_pages(small: Small) -> None:
    model = small()
    source, target, alone = Engine(model), Engine(model), Engine(model)
    ids = prompt(2 * PAGE + 9)
    carried(source, target, ids)
    ids = [*ids, *target.generate([ids], GREEDY)[0].token_ids, *prompt(PAGE, seed=5)]
    source.submit(ids, ONE)
    while source.busy:
        source.step()
    first = cache_of(target).known("", ids)[0]
    assert first == 2 and len(export(source, "", ids, first).contents) == 2
    carried(source, target, ids)
    assert list(map(key, target.generate([ids], SEEDED))) == list(map(key, alone.generate([ids], SEEDED)))


def test_stop_strings_and_grammars(parrot: GLM5ForCausalLM, tokenizer: Tokenizer, line: str) -> None:
    pytest.importorskip("llguidance")
    alone, source, target = (Engine(parrot, tokenizer, speculative=2) for _ in range(3))
    ids = tokenizer.encode(line * 3)
    carried(source, target, ids)
    for params in (
        replace(GREEDY, stop=("def",)),
        replace(GREEDY, grammar=GrammarSpec("regex", "[a-c]{3}[0-9]+"), temperature=1.0, seed=3),
    ):
        assert key(target.generate([ids], params)[0]) == key(alone.generate([ids], params)[0])


def test_pages_of_other_weights_models_or_namespaces_are_refused(small: Small) -> None:
    model, other = small(), small(seed=1)
    source, target = Engine(model), Engine(model)
    ids = prompt(PAGE + 3)
    with pytest.raises(PageError, match="weight version"):
        carried(Engine(other), target, ids)
    with pytest.raises(PageError):
        carried(Engine(model, exact=False), target, ids)
    target.update_weights(other.state_dict(), 1)
    with pytest.raises(PageError, match="version 0 do not fit this engine's 1"):
        carried(source, target, ids)
    source.update_weights(other.state_dict(), 1)
    assert carried(source, target, ids, "tenant") == len(ids)
    assert cache_of(target).known("", ids) == (0, 0) and not export(target, "", ids, 0).contents
    with pytest.raises(PageError, match="recurrent"):
        export(Engine(model, prefix_cache=False), "", ids, 0)


def test_a_full_cache_takes_what_fits(small: Small) -> None:
    source, target = Engine(small()), Engine(small(), cache_tokens=4 * PAGE)
    ids = prompt(6 * PAGE)
    assert carried(source, target, ids) == 4 * PAGE
    assert target.pool.available == target.pool.total  # what the prefix cache keeps, new tokens may take


def test_a_prefix_that_was_evicted_meanwhile(small: Small) -> None:
    source, target = Engine(small()), Engine(small())
    ids = prompt(3 * PAGE)
    carried(source, target, ids)
    sheaf = export(source, "", ids, 2)
    target.flush_cache()
    assert adopt(target, "", ids, sheaf) == 0 and target.pool.available == target.pool.total


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(0, 199), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_a_link_depends_on_every_token_before_it(ids: list[int], at: int, token: int) -> None:
    other = list(ids)
    other[at % len(ids)] = token
    ours, theirs = links(root_link("w", "n"), ids), links(root_link("w", "n"), other)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a == b) == (ids[: (number + 1) * PAGE] == other[: (number + 1) * PAGE])
    assert links(root_link("w", "m"), ids)[0] != ours[0] != links(root_link("v", "n"), ids)[0]
    assert page_digest(ours[0], b"x") != page_digest(root_link("w", "n"), b"x") != page_digest(ours[0], b"y")


def test_shared_memory_has_one_size_and_only_engines_write_to_it(tmp_path: Any) -> None:
    room = SharedMemory(10)
    to = sender(room.place, local=True)
    assert isinstance(to, ToSharedMemory) and to.write(b"01234") == b"" and to.write(b"56789") == b""
    with pytest.raises(PageError, match="too small"):
        to.write(b"x")
    assert room.read(4) == b"0123" and room.read(6) == b"456789"
    with pytest.raises(PageError, match="more than it was asked"):
        room.read(1)
    to.close()
    with (tmp_path / "next").open("wb") as opened, pytest.raises(PageError, match="has ended"):
        to.write(b"x")  # its descriptor is another file's by now
    assert (tmp_path / "next").read_bytes() == b"" and opened.closed
    to.close()
    room.close()
    file = tmp_path / "file"
    file.write_bytes(b"kept")
    with file.open("rb") as opened:
        paths = (str(file), f"/proc/{os.getpid()}/fd/{opened.fileno()}", "/proc/1/fd/../../etc/passwd", "")
        for path in paths:
            with pytest.raises(PageError):
                sender({"kind": "memory", "path": path}, local=True)
    assert file.read_bytes() == b"kept"
    with pytest.raises(PageError, match="of kind 'memory' from here"):
        sender(room.place, local=False)
    with pytest.raises(PageError, match="rdma"):
        sender({"kind": "rdma"}, local=True)
    assert isinstance(sender({"kind": "stream"}, local=False), InStream)
    assert Sheaf(0, [], "", 0).contents == []
