"""Servers that somebody else started, as live RL uses them: SGLang's, ours, or vLLM's.

While its weights change, a server keeps its generations. It then computes their tokens so far again with the new
weights, and forgets all that it had computed with the old ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from glm5.errors import EngineError
from glm5.rollout.completions_engine import ServerInfo
from glm5.rollout.engine_events import MALFORMED, message_of
from glm5.rollout.weight_push import PART
from glm5.serve.router.control import CONTINUE
from glm5.serve.router.pool import PAUSE, UPDATE

CALL_SECONDS, LOAD_SECONDS = 60.0, 1800.0
"""Longest time for an answer, and for a server to read weights."""
SILENCE_SECONDS = 900.0
"""Longest time between two events of an answer."""
MOST_BYTES = 1 << 24
"""Longest answer that is read."""
METRICS_SECONDS = 5.0
METRICS = {
    "samples_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "samples_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "preemptions_total": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    "use": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
}
"""Names of vLLM's and SGLang's metrics, by our own; `use` is the share of the cache that is in use."""
_SAMPLE = re.compile(r"([a-z_:]+)(?:\{.*\})? (\S+)")


class Refused(EngineError):
    """A server answered with `status`; None if it did not answer."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class GivenServer(ABC):
    """A server, and requests to change it. `client` has its base URL and its key."""

    def __init__(self, info: ServerInfo, key: str | None = None, client: httpx.AsyncClient | None = None) -> None:
        self.source, self.url = info.source(key), info.url
        self.source.silence = SILENCE_SECONDS
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        self.client = client or httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False)

    async def check(self) -> None:  # noqa: B027
        """Raises EngineError for a server that live RL cannot use."""

    @abstractmethod
    async def load(self, folder: Path, version: int) -> None:
        """Replace its weights by those of a checkpoint folder. Raises EngineError if it did not take them."""

    @abstractmethod
    async def abort(self) -> None:
        """End its running generations."""

    async def metrics(self) -> str:
        """Its Prometheus text; empty if it has none."""
        try:
            answer = await self.answer("GET", "/metrics", METRICS_SECONDS)
        except httpx.HTTPError:
            return ""
        return answer.text if answer.status_code == 200 else ""

    async def close(self) -> None:
        await self.source.close()
        await self.client.aclose()

    async def answer(self, method: str, path: str, seconds: float | None, **options: Any) -> httpx.Response:
        """The whole answer to a request. Raises httpx.TransportError if it is not there in time (None: no limit),
        or has more than `MOST_BYTES`."""
        whole, limits = bytearray(), httpx.Timeout(seconds, connect=5.0)
        try:
            async with (
                asyncio.timeout(seconds),
                self.client.stream(method, path, timeout=limits, follow_redirects=False, **options) as found,
            ):
                async for piece in found.aiter_bytes():
                    whole += piece
                    if len(whole) > MOST_BYTES:
                        raise httpx.RemoteProtocolError(f"its answer has more than {MOST_BYTES:,} bytes")
                return httpx.Response(found.status_code, content=bytes(whole))
        except TimeoutError:
            raise httpx.ReadTimeout("the answer did not end in time") from None
        except httpx.DecodingError as error:
            raise httpx.RemoteProtocolError(str(error)) from None

    async def call(self, path: str, body: Mapping[str, Any] | None = None, seconds: float = CALL_SECONDS) -> Any:
        """The answer to a GET, or to a POST of `body`; {} if it is not JSON. Raises Refused for any status but 200, and
        without an answer."""
        method = "GET" if body is None else "POST"
        try:
            answer = await self.answer(method, path, seconds, json=body)
        except httpx.HTTPError as error:
            raise Refused(f"{self.url} does not answer {path}: {type(error).__name__} {error!s:.200}") from None
        told: Any = {}
        with contextlib.suppress(ValueError, RecursionError):
            told = answer.json()
        if answer.status_code != 200:
            why = message_of(told) or answer.text
            text = f"{self.url} answers {path} with status {answer.status_code}: {why:.300}"
            raise Refused(text, answer.status_code)
        return told


class SglangServer(GivenServer):
    """A server with SGLang's native API."""

    def __init__(self, info: ServerInfo, key: str | None = None, client: httpx.AsyncClient | None = None) -> None:
        super().__init__(info, key, client)
        self.first: dict[str, bool] = {"any_version": True}
        """What our own server is told with the first weights: the versions of another run no longer count."""

    async def load(self, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "weight_version": str(version), "abort_all_requests": False, **self.first}
        async with self.paused():
            told = await self.call(UPDATE, body, LOAD_SECONDS)
        if not (isinstance(told, dict) and told.get("success") is True):
            raise EngineError(f"{self.url} answers {UPDATE} with {json.dumps(told):.300}")

    async def abort(self) -> None:
        await self.call("/abort_request", {"abort_all": True})

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Within the block it does not generate. Without it, SGLang waits until all generations have ended before it
        reads weights from a folder, and replaces every tensor that it receives while it generates."""
        try:
            await self.call(PAUSE, {"mode": "retract"})
            yield
        except BaseException:  # also if the answer was lost: it may have paused
            with contextlib.suppress(EngineError):
                await self.call(CONTINUE, {})
            raise
        await self.call(CONTINUE, {})

    @contextlib.asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Within the block it takes tensors. SGLang wants to be told where they begin and end (0.5.23), others have no
        such request."""
        async with self.paused():
            try:
                await self.call("/begin_weight_update", {})
            except Refused as error:
                if error.status != 404:
                    raise
                yield
                return
            try:
                yield
            finally:
                await self.call("/end_weight_update", {}, LOAD_SECONDS)

    async def ranks(self) -> int:
        """How many ranks it is in a group: SGLang's processes of tensor parallelism join one by one."""
        try:
            return max(1, int((await self.call("/server_info")).get("tp_size", 1)))
        except (EngineError, *MALFORMED):
            return 1

    async def tell(self, method: str, path: str, body: bytes) -> httpx.Response:
        """A request of `WeightPush`, which sets its own limits of time."""
        if path == PART and self.first:
            body = json.dumps(json.loads(body) | self.first).encode()
        headers = {"content-type": "application/json"}
        return await self.answer(method, path, None, content=body, headers=headers)


class VllmServer(GivenServer):
    """vLLM with its requests for trainers, which it has with VLLM_SERVER_DEV_MODE=1."""

    def __init__(self, info: ServerInfo, key: str | None = None, client: httpx.AsyncClient | None = None) -> None:
        super().__init__(info, key, client)
        self._versions = info.versions

    async def check(self) -> None:
        advice = "start vLLM 0.33 or newer with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs."
        if not self._versions:
            raise EngineError(f"The engine {self.url} takes no weights from a trainer; {advice}")
        told = await self.call("/server_info?config_format=json")
        try:
            mode = told["vllm_config"]["model_config"]["logprobs_mode"]
        except MALFORMED:
            mode = "unknown"
        if mode != "processed_logprobs":
            text = f"The engine {self.url} returns {mode!s:.40}, which are not the log-probabilities of its sampling"
            raise EngineError(f"{text}; {advice}")

    async def load(self, folder: Path, version: int) -> None:
        # Without success it stays paused: nobody knows which weights it has.
        await self.call("/pause?mode=keep", {})
        await self.call(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}, LOAD_SECONDS
        )
        await self.call("/update_weight_version", {"new_version": str(version)})
        told = await self.call("/reset_prefix_cache?reset_running_requests=true", {})
        if not (isinstance(told, dict) and told.get("success") is True):
            raise EngineError(f"{self.url} did not empty its cache: {json.dumps(told):.300}")
        await self.call("/resume", {})

    async def abort(self) -> None:
        await self.call("/abort_requests", {})


def watched_elsewhere(text: str) -> dict[str, float]:
    """As `watched`, from the metrics of vLLM or SGLang, which the ranks or models of a server have each."""
    ours = {name: own for own, names in METRICS.items() for name in names}
    found: dict[str, float] = {}
    for line in text.splitlines():
        if (match := _SAMPLE.fullmatch(line)) and (own := ours.get(match[1])):
            known, value = found.get(own, 0.0), 0.0
            with contextlib.suppress(ValueError):
                value = float(match[2])
            value = value if math.isfinite(value) else 0.0
            found[own] = max(known, value) if own == "use" else known + value
    return {**found, "cache_pages": 1.0, "cache_pages_free": 1.0 - found.get("use", 0.0)} if found else {}
