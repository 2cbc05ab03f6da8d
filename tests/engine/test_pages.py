"""Pages and the prefix tree over them: who holds what, what is given up first, and what comes back unharmed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.engine.kv_pool import PAGE, KVPool, token_bytes
from glm5.engine.radix_cache import RadixCache, _below, common_prefix
from glm5.errors import EngineError
from glm5.ops.pages import Pages

Pool = Callable[[int], KVPool]


@pytest.fixture
def pool(small: Any) -> Pool:
    config = small().config
    return lambda pages: KVPool(config, pages * PAGE, states=2, dtype=torch.float32)


def fill(pool: KVPool, page: int, value: float) -> None:
    pool.cache.latents[:, page] = value
    pool.cache.index_keys[:, page] = -value


def value(pool: KVPool, page: int, places: int = PAGE) -> set[float]:
    latents, keys = pool.cache.latents[:, page, :places], pool.cache.index_keys[:, page, :places]
    assert torch.equal(latents[0, 0, 0], -keys[0, 0, 0])
    return set(latents.unique().tolist()) | set((-keys).unique().tolist())


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


# -------------------------------------------------------------------------------------------------------------- pool


def test_pages_are_counted_by_their_holders(pool: Pool) -> None:
    p = pool(5)
    first, second = p.alloc(2), p.alloc(1)
    assert 0 not in first + second and len(set(first + second)) == 3
    assert (p.available, p.unused) == (2, 2)
    p.incref(first[0])
    p.free(first)
    assert (p.available, p.unused) == (3, 3)
    with pytest.raises(EngineError, match="3 free pages, 4 are needed"):
        p.alloc(4)
    p.free(first[:1])
    assert sorted(p.alloc(4) + second) == [1, 2, 3, 4, 5]


def test_kept_pages_are_available_but_not_unused(pool: Pool) -> None:
    p = pool(2)
    (page,) = p.alloc(1)
    p.pin(page)
    p.free([page])
    assert (p.available, p.unused) == (2, 1)
    p.incref(page)
    assert (p.available, p.unused) == (1, 1)
    p.unpin(page)  # still held
    assert (p.available, p.unused) == (1, 1)
    p.free([page])
    assert (p.available, p.unused) == (2, 2)


def test_memory_grows_with_use_and_keeps_what_is_there(pool: Pool) -> None:
    p = pool(1000)
    few = p.cache.latents.shape[1]
    pages = p.alloc(few - 1)
    for page in pages:
        fill(p, page, float(page))
    more = p.alloc(3)
    assert few < p.cache.latents.shape[1] <= 2 * few
    assert all(value(p, page) == {float(page)} for page in pages)
    assert max(more) < p.cache.rows
    p.alloc(1000 - few - 2)
    assert p.cache.latents.shape[1] == 1001


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.float32, {"index_topk_freq": 2, "index_skip_topk_offset": 2})],
)
def test_dump_and_load_are_inverse(small: Any, dtype: torch.dtype, changes: dict[str, int]) -> None:
    config = small(**changes).config
    p = KVPool(config, 4 * PAGE, states=1, dtype=dtype)
    one, other, third = p.alloc(3)
    p.cache.latents[:, one] = torch.randn(p.cache.latents[:, one].shape).to(dtype)
    p.cache.index_keys[:, one] = torch.randn(p.cache.index_keys[:, one].shape).to(dtype)
    data = p.dump(one, 17)
    assert len(data) == p.page_bytes(17) == 17 * token_bytes(config, dtype)
    p.load(other, 17, data)
    assert torch.equal(p.cache.latents[:, other, :17], p.cache.latents[:, one, :17])
    assert torch.equal(p.cache.index_keys[:, other, :17], p.cache.index_keys[:, one, :17])
    assert not p.cache.latents[:, other, 17:].any()
    with pytest.raises(EngineError, match="stored page"):
        p.load(other, 17, data + b"x")
    p.copy(one, third)
    assert torch.equal(p.cache.index_keys[:, third], p.cache.index_keys[:, one])


def test_places_of_tokens_by_hand() -> None:
    pages = Pages(torch.tensor([[7, 2, 9], [4, 4, 0]]), torch.tensor([1, 0, 0]), 64, 6)
    rows, positions = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 63, 64, 5, 70])
    assert pages.place(rows, positions).tolist() == [448, 511, 128, 261, 262]
    whole = Pages(torch.tensor([[3], [1]]), torch.tensor([0]), 192)
    assert whole.place(torch.tensor([0, 1]), torch.tensor([191, 0])).tolist() == [767, 192]
    pool = torch.arange(10 * 64).view(10, 64, 1)
    found = pages.read(pool, torch.tensor([1, 0]), 66)
    assert found.shape == (2, 66, 1)
    assert found.flatten(1).tolist() == [[*range(256, 320), 256, 257], [*range(448, 512), 128, 129]]


# -------------------------------------------------------------------------------------------------------------- tree


def learn(p: KVPool, tree: RadixCache, ids: list[int], namespace: str = "", mark: float = 0.0) -> list[int]:
    """A sequence comes, is remembered and goes."""
    pages = p.alloc(-(-len(ids) // PAGE))
    for i, page in enumerate(pages):
        fill(p, page, mark + i)
    tree.insert(namespace, ids, pages)
    p.free(pages)
    return pages


def test_the_longest_beginning_is_found(pool: Pool) -> None:
    p = pool(40)
    tree = RadixCache(p)
    ids = tokens(0, 3 * PAGE + 20)
    pages = learn(p, tree, ids, mark=10.0)
    assert tree.tokens == len(ids) and p.available == 40
    for length in (1, 20, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 7, len(ids)):
        found = tree.match("", ids[:length] + [5000, 5001])
        assert found.length == length
        assert found.pages[: length // PAGE] == pages[: length // PAGE]
        if length % PAGE:  # a copy of one's own
            assert found.pages[-1] not in pages
            assert value(p, found.pages[-1], length % PAGE) == {10.0 + length // PAGE}
        p.free(found.pages)
    assert tree.match("", [5000]).length == 0
    assert p.available == 40 and p.unused == 40 - 4


def test_branches_and_pages_that_fill_up(pool: Pool) -> None:
    p = pool(40)
    tree = RadixCache(p)
    stem = tokens(1, PAGE)
    learn(p, tree, stem + [1, 2, 3], mark=1)
    learn(p, tree, stem + [1, 2, 3, 4, 5], mark=2)  # swallows the shorter one
    learn(p, tree, stem + [1, 9], mark=3)
    learn(p, tree, stem + [1, 2], mark=4)  # known already
    assert tree.tokens == PAGE + 5 + 2
    assert p.unused == 40 - 3
    for end, length, mark in (([1, 2, 3, 4, 6], 4, 3.0), ([1, 9, 9], 2, 4.0), ([2], 0, None)):
        found = tree.match("", stem + end)
        assert found.length == PAGE + length
        if mark is not None:
            assert value(p, found.pages[1]) == {mark}
        p.free(found.pages)


def test_namespaces_do_not_see_each_other(pool: Pool) -> None:
    p = pool(10)
    tree = RadixCache(p)
    ids = tokens(2, 100)
    learn(p, tree, ids, "alice")
    assert tree.match("bob", ids).length == tree.match("", ids).length == 0
    assert tree.match("alice", ids).length == 100


def test_what_was_used_longest_ago_goes_first_and_leaves_before_stems(pool: Pool) -> None:
    p = pool(6)
    tree = RadixCache(p)
    first, second, third = (tokens(s, 2 * PAGE) for s in (3, 4, 5))
    for ids in (first, second, third):
        learn(p, tree, ids)
    p.free(tree.match("", first).pages)
    assert p.unused == 0

    def known() -> list[int]:
        lengths = []
        for ids in (first, second, third):  # looked at without being touched
            node, count = tree._roots[""], 0
            while (child := node.children.get(tuple(ids[count : count + PAGE]))) is not None:
                node, count = child, count + PAGE
            lengths.append(count)
        return lengths

    p.alloc(1)
    assert known() == [2 * PAGE, PAGE, 2 * PAGE]
    p.alloc(1)
    assert known() == [2 * PAGE, 0, 2 * PAGE]
    p.alloc(3)
    assert known() == [PAGE, 0, 0]


def test_pages_in_use_are_never_given_up(pool: Pool) -> None:
    p = pool(4)
    tree = RadixCache(p)
    ids = tokens(6, 2 * PAGE)
    learn(p, tree, ids, mark=5.0)
    found = tree.match("", ids)
    held = p.alloc(2)
    assert p.available == 0
    with pytest.raises(EngineError):
        p.alloc(1)
    assert [value(p, page) for page in found.pages] == [{5.0}, {6.0}]
    p.free(held + found.pages)
    assert p.available == 4


def test_a_page_behind_which_others_are_held_can_be_given_up(pool: Pool) -> None:
    """A sequence with pages of its own for a known beginning extends the tree; its stem belongs to nobody."""
    p = pool(4)
    tree = RadixCache(p)
    ids = tokens(7, 2 * PAGE)
    learn(p, tree, ids[:PAGE])
    own = p.alloc(2)
    tree.insert("", ids, own)
    assert p.available == 2
    more = p.alloc(2)
    assert len({*own, *more}) == 4
    p.free(own + more)
    assert p.available == p.unused == 4 and tree.tokens == 0


def test_clear_forgets_all_but_takes_nothing_from_holders(pool: Pool) -> None:
    p = pool(8)
    tree = RadixCache(p, host_bytes=1 << 20)
    ids = tokens(8, 2 * PAGE + 5)
    learn(p, tree, ids)
    found = tree.match("", ids[: 2 * PAGE])
    tree.clear()
    assert tree.tokens == 0 and tree.match("", ids).length == 0
    assert p.available == 6 and p.unused == 6
    p.free(found.pages)
    assert p.unused == 8


# -------------------------------------------------------------------------------------------------------- host memory


def spill(p: KVPool) -> None:
    """Push everything that nobody holds out of the pool."""
    p.free(p.alloc(p.available))


def test_pages_come_back_from_host_memory(pool: Pool) -> None:
    p = pool(4)
    tree = RadixCache(p, host_bytes=10 * p.page_bytes())
    ids = tokens(9, 3 * PAGE + 9)
    learn(p, tree, ids, mark=1.0)
    spill(p)
    assert tree.tokens == 0 and tree.spilled == 4 and tree.host_used == 3 * p.page_bytes() + p.page_bytes(9)
    for page in range(1, 5):
        fill(p, page, 99.0)
    found = tree.match("", [*ids[: 2 * PAGE], 7000])
    assert found.length == 2 * PAGE
    assert [value(p, page) for page in found.pages] == [{1.0}, {2.0}]
    assert tree.restored == 2 and tree.host_used == p.page_bytes() + p.page_bytes(9)
    p.free(found.pages)
    found = tree.match("", ids)
    assert found.length == 3 * PAGE  # the last part would need a page to come back to and one for its copy
    p.free(found.pages)
    assert p.available == 4


def test_a_damaged_page_counts_as_a_miss(pool: Pool) -> None:
    p = pool(8)
    tree = RadixCache(p, host_bytes=10 * p.page_bytes())
    ids = tokens(10, 3 * PAGE)
    learn(p, tree, ids)
    spill(p)
    node = next(n for n in tree._host if n.tokens == tuple(ids[PAGE : 2 * PAGE]))
    assert node.stored is not None
    node.stored = node.stored[:100] + bytes([node.stored[100] ^ 1]) + node.stored[101:]
    found = tree.match("", ids)
    assert (found.length, tree.damaged) == (PAGE, 1)
    assert tree.host_used == 0  # what hung on it is gone too
    p.free(found.pages)
    learn(p, tree, ids, mark=3.0)
    again = tree.match("", ids)
    assert again.length == 3 * PAGE
    p.free(again.pages)


def test_the_host_store_is_bounded_and_drops_its_oldest(pool: Pool) -> None:
    p = pool(6)
    tree = RadixCache(p, host_bytes=3 * p.page_bytes() + 1)
    rows = [tokens(20 + i, 2 * PAGE) for i in range(3)]
    for ids in rows:
        learn(p, tree, ids)
    spill(p)
    assert tree.host_used == 3 * p.page_bytes() and tree.spilled == 6
    lengths = []
    for ids in rows:
        found = tree.match("", ids)
        lengths.append(found.length)
        p.free(found.pages)
    assert lengths == [0, PAGE, 2 * PAGE]


def test_an_inserted_page_replaces_its_stored_copy(pool: Pool) -> None:
    p = pool(4)
    tree = RadixCache(p, host_bytes=4 * p.page_bytes())
    ids = tokens(30, PAGE)
    learn(p, tree, ids, mark=1.0)
    spill(p)
    assert tree.host_used
    learn(p, tree, ids, mark=2.0)
    assert tree.host_used == 0
    found = tree.match("", ids)
    assert value(p, found.pages[0]) == {2.0}


@pytest.mark.parametrize("host", [0, 5])
def test_the_tree_against_a_plain_list_of_sequences(pool: Pool, host: int) -> None:
    """Random sequences over three tokens and short pages' worth of stems: what is found is always a true beginning of
    something known, its contents are those of that beginning, and no page is lost."""
    rng = random.Random(host)
    p = pool(12)
    tree = RadixCache(p, host_bytes=host * p.page_bytes())
    known: list[list[int]] = []
    held: list[list[int]] = []
    stems = [tokens(40 + i, 4 * PAGE) for i in range(3)]
    hits = 0
    for _ in range(300):
        ids = rng.choice(stems)[: rng.randrange(1, 4 * PAGE)] + rng.choices(range(3), k=rng.randrange(0, 9))
        found = tree.match("", ids)
        assert found.length <= max([common_prefix(ids, other) for other in known], default=0)
        hits += found.length > 0
        for i, page in enumerate(found.pages):
            here = ids[i * PAGE : min(found.length, (i + 1) * PAGE)]
            assert p.cache.latents[0, page, : len(here), 0].tolist() == here
        need = -(-len(ids) // PAGE) - len(found.pages)
        if need > p.available:
            p.free(found.pages)
        else:
            pages = found.pages + p.alloc(need)
            for at in range(found.length, len(ids)):
                p.cache.latents[:, pages[at // PAGE], at % PAGE] = ids[at]
            tree.insert("", ids, pages)
            known.append(ids)
            held.append(pages)
        while held and (rng.random() < 0.5 or p.available < 4):
            p.free(held.pop(rng.randrange(len(held))))
    for pages in held:
        p.free(pages)
    assert p.available == 12 and hits > 50
    tree.clear()
    assert p.unused == 12
    assert (tree.restored > 10) == (host > 0)


@settings(max_examples=40)
@given(
    uses=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2), st.integers(0, 2 * PAGE + 5)), max_size=40),
    host=st.sampled_from([0, 3]),
)
def test_a_namespace_is_known_while_something_of_it_is_kept(
    small: Any, uses: list[tuple[int, int, int]], host: int
) -> None:
    """One root per namespace that holds a page, in the pool or in the host store, and none for any other."""
    pool = KVPool(small().config, 4 * PAGE, states=1, dtype=torch.float32)
    tree = RadixCache(pool, host * pool.page_bytes())
    for salt, stem, length in uses:
        ids = tokens(stem, length)
        found = tree.match(str(salt), ids)
        pages = found.pages + pool.alloc(-(-length // PAGE) - len(found.pages))
        tree.insert(str(salt), ids, pages)
        pool.free(pages)
        kept = [node for root in tree._roots.values() for node in _below(root)]
        assert all(root.children for root in tree._roots.values())
        assert len(tree._roots) <= len(kept) <= pool.total - pool.unused + len(tree._host)
        assert str(salt) in tree._roots or not length
        for node in kept:
            while node.parent is not None:
                node = node.parent
            assert tree._roots[node.namespace] is node
    tree.clear()
    assert tree._roots == {} and tree.tokens == tree.host_used == 0 and pool.unused == pool.total
