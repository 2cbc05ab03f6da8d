"""Engine options of a server. Free of torch, and plain values, so a router can pass them on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    """Keywords of `Engine.from_pretrained`, which explains them, with a server's defaults: fast rather than exact.

    Attributes:
        exact: make an answer's bits independent of the rest of the batch; slower.
        speculative: tokens that the MTP layer drafts per step.
        cache_tokens: size of the cache; None lets the engine choose.
        host_cache_bytes: bytes of host memory for evicted prefixes.
        max_batch: maximum samples per step.
        dtype: of weights and cache; "bfloat16" takes half the memory of "float32" and less time.
        chat_template: a version such as "5.2" or the path of a Jinja file; None uses the checkpoint's template.
    """

    exact: bool = False
    speculative: int = 0
    cache_tokens: int | None = None
    host_cache_bytes: int = 0
    max_batch: int = 64
    dtype: str = "float32"
    chat_template: str | None = None
