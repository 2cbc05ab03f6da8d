"""Names and hashes of cache pages outside of an engine: on their way to another one, and on disk.

A page's link is a hash of everything that its contents depend on: the weights and the form of the cache, the namespace,
and all tokens from the first one to the last of the page. Its digest covers the link and the bytes. So a page that is
damaged, of other weights, of another prompt or at another place has a wrong digest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch

from glm5.device import on_host
from glm5.engine.kv_pool import PAGE
from glm5.model.integer_layers import held_integers
from glm5.parallel.tensor import division_of

if TYPE_CHECKING:
    from glm5.engine.engine import Engine
    from glm5.model.glm5 import GLM5ForCausalLM

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SAMPLE = 16
"""Elements at both ends of every tensor that a fingerprint includes."""


def fingerprint(engine: Engine) -> str:
    """The same for two engines whose pages for the same tokens are the same: equal cache, numerical mode and weights,
    on all ranks of a divided model."""
    found, pool, division = blake2b(digest_size=16), engine.pool, division_of(engine.model)
    ranks = 1 if division is None else (division.world, division.rounds)
    form = [PAGE, pool.page_bytes(1), str(pool.cache.dtype), pool.cache.packed, engine.exact, ranks]
    found.update(repr([*form, str(engine.model.device.type), engine.model.scheme, engine.drafts > 0]).encode())
    found.update(json.dumps(engine.model.config.to_dict(), sort_keys=True).encode())
    found.update(json.dumps(engine.weight_digests()).encode())
    return found.hexdigest()


@torch.no_grad()
def weights_digest(model: GLM5ForCausalLM) -> int:
    """63 bits that stand for the weights in this process: of every tensor the sum of all elements' bits, which is the
    same on every device, and some elements."""
    found = blake2b(digest_size=8)
    weights = [tensor for _, tensor in sorted(model.state_dict().items()) if not tensor.is_meta]
    weights += [t for module in model.modules() for held in held_integers(module) for t in held.tensors]
    flat = [tensor.detach().reshape(-1) for tensor in weights]
    ends = torch.cat([end.double() for one in flat for end in (one[:SAMPLE], one[-SAMPLE:])])
    sums = torch.stack([one.view(INTEGERS[one.element_size()]).sum(dtype=torch.int64) for one in flat])
    for part in on_host([ends, sums]):
        found.update(part.numpy().tobytes())
    return int.from_bytes(found.digest()) >> 1


def root_link(known: str, namespace: str) -> bytes:
    """The link before the first page, for an engine with this fingerprint."""
    return blake2b(f"{known}\0{namespace}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def next_link(link: bytes, tokens: Sequence[int]) -> bytes:
    """The link of a page with these tokens, after the page with `link`."""
    return blake2b(link + np.asarray(tokens, dtype="<u4").tobytes(), digest_size=16).digest()


def links(root: bytes, tokens: Sequence[int]) -> list[bytes]:
    """The links of all pages of a sequence."""
    found = [root]
    for at in range(0, len(tokens), PAGE):
        found.append(next_link(found[-1], tokens[at : at + PAGE]))
    return found[1:]


def page_digest(link: bytes, data: bytes) -> bytes:
    """The digest of a page."""
    return blake2b(data, key=link, digest_size=16).digest()
