"""The prefix cache: a radix tree over pages, so that only the part of a prompt that is not cached is computed.

A node is one page and the tokens in it. The page's latents and indexer keys depend only on the path from the root.
Unreferenced pages are evicted in LRU order, leaves first, and either dropped or moved to a bounded store in host
memory. Stored pages return after a check of their hash.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from glm5.engine.kv_pool import PAGE, KVPool
from glm5.engine.page_files import PageFiles
from glm5.engine.page_hash import next_link, root_link


@dataclass(eq=False)
class Node:
    """The tokens of one page, after those of `parent`. Either `page` is the number of a page in the pool, or `stored`
    has the page's bytes and `digest` their hash (none for those of an accelerator). The root of a namespace only has
    children."""

    tokens: tuple[int, ...]
    parent: Node | None
    page: int | None = None
    stored: bytes | Tensor | None = None
    digest: bytes = b""
    used: int = 0
    namespace: str = ""  # only set for a root
    link: bytes = b""  # see `page_hash`; set at first use
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


@dataclass
class Match:
    """The longest cached prefix of a sequence: `pages`, with a reference for the caller, and `length` in tokens. A
    partly filled last page is the caller's own copy."""

    pages: list[int]
    length: int


class RadixCache:
    """Prefixes of earlier sequences, by namespace. Sequences of different namespaces never share a page.

    `host_bytes` is the size of the host store for evicted pages; with 0 they are dropped. Counters: `hit_tokens`; pages
    `spilled` to the store and `restored` from it; `damaged` pages, which failed the hash check and counted as a miss;
    pages `from_files`.
    """

    def __init__(
        self,
        pool: KVPool,
        host_bytes: int = 0,
        identity: Callable[[], str] = lambda: "",
        files: PageFiles | None = None,
    ) -> None:
        """`identity` gives the present `fingerprint`. Whole pages are also written to `files`."""
        self.pool, self.files = pool, files
        self._identity, self._fingerprint = identity, ""
        self.host_bytes = host_bytes
        self.hit_tokens = self.spilled = self.restored = self.damaged = self.from_files = 0
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._oldest: list[tuple[int, int, Node]] = []  # nodes by last use; entries may be stale
        self._host: OrderedDict[Node, None] = OrderedDict()  # oldest first
        self._host_used = 0
        self._tokens = 0
        pool.reclaim = self._reclaim

    @property
    def tokens(self) -> int:
        """Tokens in pages of the pool that the cache pins."""
        return self._tokens

    @property
    def host_used(self) -> int:
        """Bytes in the host store."""
        return self._host_used

    @property
    def fingerprint(self) -> str:
        """What the contents of pages depend on besides namespace and tokens (see `page_hash`)."""
        self._fingerprint = self._fingerprint or self._identity()
        return self._fingerprint

    def match(self, namespace: str, tokens: Sequence[int]) -> Match:
        """The longest cached prefix of `tokens`. The caller gets a reference to each page of the result."""
        node, found = self._root(namespace), Match([], 0)
        while node is not None and found.length < len(tokens):
            key = tuple(tokens[found.length : found.length + PAGE])
            child = node.children.get(key) or self._from_file(node, key) if len(key) == PAGE else None
            if child is None:
                self._match_part(node, key, found)
                break
            if not self._resident(child):
                break
            assert child.page is not None
            self.pool.incref(child.page)
            self._touch(child)
            found.pages.append(child.page)
            found.length += PAGE
            node = child
        return found

    def _root(self, namespace: str) -> Node | None:
        """The root of a namespace; a new one, which is not kept without children, if files may have its pages."""
        found = self._roots.get(namespace)
        return Node((), None, namespace=namespace) if found is None and self.files is not None else found

    def _link(self, node: Node) -> bytes:
        if not node.link:
            if node.parent is None:
                node.link = root_link(self.fingerprint, node.namespace)
            else:
                node.link = next_link(self._link(node.parent), node.tokens)
        return node.link

    def _from_file(self, parent: Node, key: tuple[int, ...]) -> Node | None:
        """The node of a page that only a file has, now stored in host memory too."""
        if self.files is None or not self.pool.available:
            return None
        data = self.files.get(next_link(self._link(parent), key), self.pool.page_bytes())
        if data is None:
            return None
        node = parent.children[key] = Node(key, parent, stored=data, digest=_hash(data))
        root = parent
        while root.parent is not None:
            root = root.parent
        self._roots[root.namespace] = root
        self._host[node] = None
        self._host_used += len(data)
        self.from_files += 1
        return node

    def _match_part(self, node: Node, key: tuple[int, ...], found: Match) -> None:
        """Copy the child page that shares the longest prefix with `key`."""
        best, most = None, 0
        for child in node.children.values():
            if child.tokens[0] == key[0] and (same := common_prefix(child.tokens, key)) > most:
                best, most = child, same
        if best is None or not self._resident(best):
            return
        assert best.page is not None
        self.pool.incref(best.page)  # do not evict it to make room for its own copy
        if self.pool.available:
            (own,) = self.pool.alloc(1)
            self.pool.copy(best.page, own)
            found.pages.append(own)
            found.length += most
        self._touch(best)
        self.pool.free([best.page])

    def insert(self, namespace: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Insert a sequence with its `pages`. The caller leaves out a partly filled last page that a request still
        writes to."""
        root = node = self._roots.get(namespace) or Node((), None, namespace=namespace)
        for at, page in zip(range(0, len(tokens), PAGE), pages, strict=False):
            key = tuple(tokens[at : at + PAGE])
            child = node.children.get(key)
            if child is None:
                if len(key) < PAGE and any(other.tokens[: len(key)] == key for other in node.children.values()):
                    return  # nothing new
                self._absorb(node, key)
                child = node.children[key] = Node(key, node)
                self._roots[namespace] = root  # removed with its last child
            if child.page is None:
                self._unstore(child)
                child.page = page
                self.pool.pin(page)
                self._tokens += len(key)
                if self.files is not None and len(key) == PAGE and self._link(child) not in self.files:
                    self.files.put(child.link, self.pool.to_bytes(self.pool.dump(page, PAGE)))
            self._touch(child)
            node = child

    def _absorb(self, node: Node, key: tuple[int, ...]) -> None:
        """Drop a partly filled page that a fuller page is about to replace."""
        for other in [c for c in node.children.values() if len(c.tokens) < len(key)]:
            if key[: len(other.tokens)] == other.tokens:
                self._forget(other)

    def known(self, namespace: str, tokens: Sequence[int]) -> tuple[int, int]:
        """How many whole pages of a prefix of `tokens` are cached, in the pool or stored; and the length of the prefix
        that is cached."""
        node, pages = self._root(namespace), 0
        while node is not None:
            key = tuple(tokens[pages * PAGE : (pages + 1) * PAGE])
            child = node.children.get(key) if len(key) == PAGE else None
            if child is None:
                partly = max((common_prefix(one.tokens, key) for one in node.children.values()), default=0)
                more = 0 if self.files is None else self._in_files(self._link(node), tokens[pages * PAGE :])
                return pages + more, pages * PAGE + max(partly, more * PAGE)
            node, pages = child, pages + 1
        return pages, pages * PAGE

    def _in_files(self, link: bytes, tokens: Sequence[int]) -> int:
        """How many whole pages after the one with `link` have files."""
        for number in range(len(tokens) // PAGE):
            link = next_link(link, tokens[number * PAGE : (number + 1) * PAGE])
            if self.files is None or link not in self.files:
                return number
        return len(tokens) // PAGE

    def dump(self, namespace: str, tokens: Sequence[int], first: int) -> list[bytes | Tensor]:
        """The contents (see `KVPool.dump`) of the cached pages of `tokens` from page number `first` on. The last page
        of `tokens` may be partly filled, and may be the beginning of a cached one."""
        node, pages, found = self._roots.get(namespace), list[int](), list[bytes | Tensor]()
        for number, at in enumerate(range(0, len(tokens), PAGE)):
            key = tuple(tokens[at : at + PAGE])
            children = {} if node is None else node.children
            node = children.get(key) or next((c for c in children.values() if c.tokens[: len(key)] == key), None)
            if node is None or not self._resident(node):
                break
            assert node.page is not None
            self.pool.incref(node.page)
            self._touch(node)
            pages.append(node.page)
            if number >= first:
                found.append(self.pool.dump(node.page, len(key)))
        self.pool.free(pages)
        return found

    def load(self, namespace: str, tokens: Sequence[int], first: int, contents: Sequence[bytes]) -> int:
        """Insert pages that another engine has computed: `contents` are those of `tokens` from page number `first` on,
        up to the end of `tokens`. The pages before them must be cached. Returns the length of the prefix that is now
        cached; shorter if there is no room."""
        found = self.match(namespace, tokens[: first * PAGE])
        pages, length = found.pages, found.length
        if length == first * PAGE:
            for at, data in zip(range(length, len(tokens), PAGE), contents, strict=True):
                if not self.pool.available:
                    break
                pages += self.pool.alloc(1)
                length = min(at + PAGE, len(tokens))
                self.pool.load(pages[-1], length - at, data)
            self.insert(namespace, tokens[:length], pages)
        self.pool.free(pages)
        return length

    def clear(self) -> None:
        """Drop all entries (needed after a weight update). Sequences keep their own pages."""
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                self._forget(child)
        self._oldest.clear()
        self._fingerprint = ""
        if self.files is not None:
            self.files.clear()

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock
        heapq.heappush(self._oldest, (node.used, id(node), node))
        if len(self._oldest) > 64 + 8 * (self.pool.total + 1):
            self._sort()

    def _sort(self) -> None:
        """Remove stale entries."""
        self._oldest = [entry for entry in self._oldest if entry[0] == entry[2].used and entry[2].page is not None]
        heapq.heapify(self._oldest)

    def _reclaim(self, count: int) -> None:
        """Evict `count` pages in LRU order. At least `count` cached pages must be unreferenced."""
        goal = self.pool.unused + count
        while self.pool.unused < goal:
            if not self._oldest:
                self._collect()
                continue
            used, _, node = heapq.heappop(self._oldest)
            if used != node.used or node.page is None or self.pool.held(node.page):
                continue  # used since, evicted or referenced; the next use adds a new entry
            if any(child.page is not None for child in node.children.values()):
                continue  # evicted after its children
            parent = node.parent
            self._give_up(node)
            if parent is not None and parent.page is not None:
                heapq.heappush(self._oldest, (parent.used, id(parent), parent))

    def _collect(self) -> None:
        """Search the whole tree for leaves to evict. There may be none: a sequence with its own copy of a cached page
        may reference the children of that page, but not the page itself. Then drop the oldest unreferenced page and all
        its descendants."""
        nodes = [node for root in self._roots.values() for node in _below(root)]
        loose = [node for node in nodes if node.page is not None and not self.pool.held(node.page)]
        leaves = [node for node in loose if all(child.page is None for child in node.children.values())]
        if not leaves:
            self._forget(min(loose, key=lambda node: node.used))
        self._oldest = [(node.used, id(node), node) for node in leaves]
        heapq.heapify(self._oldest)

    def _give_up(self, node: Node) -> None:
        """Move a node's page to the host store, or drop it."""
        assert node.page is not None
        size = self.pool.page_bytes(len(node.tokens))
        if size > self.host_bytes:
            self._forget(node)
            return
        data = self.pool.dump(node.page, len(node.tokens))
        while self._host_used + size > self.host_bytes:
            self._forget(next(iter(self._host)))
        self._evict_page(node)
        node.stored, node.digest = data, _hash(data) if isinstance(data, bytes) else b""
        self._host[node] = None
        self._host_used += size
        self.spilled += 1

    def _evict_page(self, node: Node) -> None:
        if node.page is not None:
            self.pool.unpin(node.page)
            node.page = None
            self._tokens -= len(node.tokens)

    def _unstore(self, node: Node) -> None:
        if node.stored is not None:
            self._host_used -= len(node.stored)
            del self._host[node]
            node.stored = None

    def _resident(self, node: Node) -> bool:
        """Whether the node's page is in the pool, after restoring it from the host store if possible."""
        if node.page is not None:
            return True
        if node.stored is None or (isinstance(node.stored, bytes) and _hash(node.stored) != node.digest):
            self.damaged += 1
            self._forget(node)
            return False
        if not self.pool.available:
            return False
        data, size = node.stored, len(node.tokens)
        self._unstore(node)  # first: making room for the page could drop its stored copy
        (page,) = self.pool.alloc(1)
        self.pool.load(page, size, data)
        node.page = page
        self.pool.pin(page)
        self._tokens += size
        self.pool.free([page])
        self._touch(node)
        self.restored += 1
        return True

    def _forget(self, node: Node) -> None:
        """Remove a node and all its descendants."""
        assert node.parent is not None
        parent = node.parent
        if parent.children.get(node.tokens) is node:
            del parent.children[node.tokens]
        if not parent.children and self._roots.get(parent.namespace) is parent:
            del self._roots[parent.namespace]
        for one in [node, *_below(node)]:
            self._unstore(one)
            self._evict_page(one)
        node.children = {}


def _below(node: Node) -> list[Node]:
    """All descendants of a node."""
    found = list(node.children.values())
    for one in found:
        found += one.children.values()
    return found


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix of two sequences."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
