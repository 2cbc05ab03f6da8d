"""Options of one server: its limits, and its engine's options. Plain values and no import of torch, so a
router can pass them on."""

from __future__ import annotations

from dataclasses import dataclass

from glm5.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """Limits of one server.

    Attributes:
        body_bytes: longest body (413).
        body_seconds: time for a body to arrive (408).
        header_seconds: time for the head of a request to arrive (408).
        send_seconds: how long to wait for a client that does not read its answer; then the connection ends.
        connections: open connections; beyond this number, those without a complete request are dropped. File
            descriptors may allow fewer (see `connection.fitted`).
        requests: concurrent requests of any kind except health checks (429).
        samples: samples waiting and running in the engine at once (429).
        tokens: longest prompt plus answer; None means the engine's maximum (400).
        request_seconds: time for one answer, waiting included (504, or an error event in a stream).
        stop_seconds: time for running answers to finish when the server stops.
        prefill_tokens: tokens that a prompt must lack in the prefix cache to be sent to a prefill engine.
    """

    body_bytes: int = 8 << 20
    body_seconds: float = 60.0
    header_seconds: float = 10.0
    send_seconds: float = 60.0
    connections: int = 4096
    requests: int = 512
    samples: int = 256
    tokens: int | None = None
    request_seconds: float = 1800.0
    stop_seconds: float = 10.0
    prefill_tokens: int = 256


@dataclass(frozen=True)
class PrefillServers:
    """Servers on other machines that read prompts for this one: their URLs, and their admin key."""

    urls: tuple[str, ...] = ()
    key: str = ""

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise UsageError(
                    f"{url!r:.80} is not the URL of a server that prefills; give one like http://host:8000."
                )


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine: keywords of `Engine.from_pretrained`, which explains them. The defaults are fast rather
    than exact.

    Attributes:
        exact: make an answer's bits independent of the rest of the batch; slower.
        speculative: tokens that the MTP layer drafts per step.
        cache_tokens: size of the cache; None lets the engine choose.
        host_cache_bytes: bytes of host memory for evicted prefixes.
        disk_cache: folder for prefixes on disk, or None; engines of a router take folders in it.
        disk_cache_bytes: the most bytes of it.
        max_batch: maximum samples per step.
        dtype: of weights and cache; "bfloat16" takes half the memory of "float32" and less time.
        chat_template: a version such as "5.2" or the path of a Jinja file; None uses the checkpoint's template.
        device: "auto" (CUDA, then another accelerator, then the CPU), "cpu", or a name such as "cuda:1". With `tp`,
            names may be divided by commas, one per rank.
        tp: processes over which every layer is divided.
        ep: engines of a router among which the experts are divided.
        ep_rank: the number of this engine among them; its process sets it.
        ep_meeting: the file by which they find each other; their router sets it.
        graphs: capture decoding on a CUDA device as CUDA graphs; not with `tp`.
        quantize: "int8", "int4" or "fp8" rounds weights while loading, and later ones (see `glm5.quant.in_place`).
        flash_comm: "plain" or "int8": the processes of `tp` divide the tokens of prompts between layers.
        cache_dtype: "int8" keeps latents and index keys in int8; None in `dtype`.
    """

    exact: bool = False
    speculative: int = 0
    cache_tokens: int | None = None
    host_cache_bytes: int = 0
    max_batch: int = 64
    dtype: str = "float32"
    chat_template: str | None = None
    device: str = "auto"
    tp: int = 1
    graphs: bool = True
    quantize: str | None = None
    cache_dtype: str | None = None
    disk_cache: str | None = None
    disk_cache_bytes: int = 1 << 30
    ep: int = 1
    ep_rank: int = 0
    ep_meeting: str = ""
    flash_comm: str | None = None
