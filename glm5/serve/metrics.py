"""The server's metrics, in the text format of Prometheus.

A few counters and three histograms do not need a package. They need no locks: each value is written by one thread only
(requests by the event loop, tokens by the engine's thread), and reading a number is atomic.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LONG = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Histogram:
    """Counts by upper bound. `observe` may count one value several times."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str) -> Iterator[str]:
        counts, below = list(self.counts), 0
        for bound, count in zip((*map(_number, self.bounds), "+Inf"), counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {_number(self.total)}"
        yield f"{name}_count {below}"


class Rate:
    """How many of something there were per second, over the last `seconds` whole seconds."""

    def __init__(self, seconds: int = 10, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._counts = [(-1, 0)] * (seconds + 1)  # (second, count), each second in its place

    def add(self, count: int) -> None:
        now = int(self._clock())
        at = now % len(self._counts)
        second, before = self._counts[at]
        self._counts[at] = (now, count + (before if second == now else 0))

    @property
    def value(self) -> float:
        now = int(self._clock())
        return sum(count for second, count in self._counts if now - self._seconds <= second < now) / self._seconds


class Metrics:
    """All metrics since the start of the server."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.scored_tokens = 0
        self.engine_failures = 0
        self.prefill_tokens = 0
        self.prefill_fallbacks = 0
        self.prefill_pages_refused = 0
        self.token_rate = Rate()
        self.time_to_first_token = Histogram(SLOW)
        self.time_per_token = Histogram(FAST)

    def answered(self, path: str, status: int) -> None:
        """An answer began; called from the event loop. `path` is the path of a route, or "other"."""
        self.requests[path, status] += 1

    def accepted(self, prompt_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens

    def first_token(self, tokens: int, seconds: float, cached: int) -> None:
        self.cached_tokens += cached
        self.generated_tokens += tokens
        self.token_rate.add(tokens)
        self.time_to_first_token.observe(seconds)

    def tokens(self, tokens: int, seconds: float) -> None:
        """`tokens` of one sample arrived together, `seconds` after the previous ones."""
        self.generated_tokens += tokens
        self.token_rate.add(tokens)
        self.time_per_token.observe(seconds / tokens, tokens)

    def text(self, engine: Mapping[str, Any]) -> str:
        """The metrics as text. `engine` are the numbers of `Engine.stats`, empty for a failed engine."""
        lines = list(self.answer_lines())

        def family(name: str, kind: str, help_text: str, samples: Iterable[str]) -> None:
            lines.extend(_family(name, kind, help_text, samples))

        for name, text in _COUNTED.items():
            family(f"glm5_{name}_total", "counter", text, (f"glm5_{name}_total {getattr(self, name)}",))
        for name, text in _TIMED.items():
            full = f"glm5_{name}_seconds"
            family(full, "histogram", text, getattr(self, name).lines(full))
        rate = f"glm5_tokens_per_second {_number(self.token_rate.value)}"
        family("glm5_tokens_per_second", "gauge", "Tokens sampled per second, over the last ten seconds.", (rate,))
        family("glm5_up", "gauge", "Whether the engine works.", (f"glm5_up {int(bool(engine))}",))
        for name, (key, help_text) in _ENGINE.items():
            if key in engine:
                kind = "counter" if name.endswith("_total") else "gauge"
                family(f"glm5_{name}", kind, help_text, _samples(f"glm5_{name}", engine[key]))
        return "\n".join(lines) + "\n"

    def answer_lines(self) -> Iterator[str]:
        """The answers by path and status, and the errors among them by class."""
        answered = sorted(dict(self.requests).items())
        yield from _family(
            "glm5_requests_total", "counter", "Answers by path and status.",
            (f'glm5_requests_total{{path="{path}",status="{status}"}} {count}' for (path, status), count in answered),
        )  # fmt: skip
        errors: Counter[str] = Counter()
        for (_, status), count in answered:
            if status >= 400:
                errors[_kind(status)] += count
        yield from _family(
            "glm5_errors_total", "counter", "Answers that were errors, by class.",
            (f'glm5_errors_total{{kind="{kind}"}} {count}' for kind, count in sorted(errors.items())),
        )  # fmt: skip


def _family(name: str, kind: str, help_text: str, samples: Iterable[str]) -> Iterator[str]:
    yield from (f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *samples)


_COUNTED = {
    "prompt_tokens": "Tokens of accepted prompts.",
    "cached_tokens": "Prompt tokens found in the prefix cache, counted for each sample.",
    "generated_tokens": "Tokens that were sampled.",
    "scored_tokens": "Tokens of prompts that were scored.",
    "prefill_tokens": "Tokens of prompts whose pages came from prefill engines.",
    "prefill_fallbacks": "Prompts that no prefill engine could compute to the end; this engine did.",
    "prefill_pages_refused": "Pages from prefill engines that were refused, because their hash was wrong.",
    "engine_failures": "Failures of the engine itself; each ends all requests in progress and rebuilds the engine.",
}
_TIMED = {
    "time_to_first_token": "Time from the acceptance of a request to the first token of a sample.",
    "time_per_token": "Time between tokens of a sample; tokens that come together share the time equally.",
}


# Name of a family, key of `Engine.stats`, help text.
_ENGINE = {
    "samples_running": ("running", "Samples that are being generated."),
    "samples_waiting": ("waiting", "Samples in the queue."),
    "cache_pages": ("total_pages", "Pages of the cache."),
    "cache_pages_free": ("free_pages", "Pages that new tokens may take, those of the prefix cache included."),
    "cache_page_tokens": ("page_tokens", "Tokens of a page."),
    "prefix_cache_tokens": ("cached_tokens", "Tokens in the prefix cache."),
    "host_cache_bytes": ("host_bytes", "Bytes of the prefix cache in host memory."),
    "cache_pages_spilled_total": ("spilled_pages", "Pages moved to host memory."),
    "cache_pages_restored_total": ("restored_pages", "Pages brought back from host memory."),
    "disk_cache_bytes": ("disk_bytes", "Bytes of the prefix cache on disk."),
    "cache_pages_from_disk_total": ("disk_pages", "Pages read from disk."),
    "cache_pages_damaged_total": ("damaged_pages", "Pages in host memory or on disk whose hash did not match."),
    "steps_failed_total": ("failed_steps", "Failed attempts to compute a batch; its halves are retried."),
    "samples_failed_total": ("failed_requests", "Samples that ended because they could not be computed."),
    "preemptions_total": ("preemptions", "Samples whose pages were freed for other samples."),
    "draft_rounds_total": ("rounds", "Verifications of drafted tokens."),
    "drafts_accepted_total": ("accepted", "Verifications that accepted the draft at a position and all before it."),
    "engine_seconds_total": ("seconds", "Time of engine steps by phase."),
    "weight_version": ("weight_version", "Version of the weights."),
}


def _samples(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from (f'{name}{{part="{part}"}} {_number(number)}' for part, number in value.items())
    elif isinstance(value, Sequence):
        yield from (f'{name}{{position="{i}"}} {_number(number)}' for i, number in enumerate(value, 1))
    else:
        yield f"{name} {_number(value)}"


def _kind(status: int) -> str:
    named = {401: "auth", 403: "forbidden", 404: "not_found", 408: "timeout", 413: "too_large", 429: "overload"}
    return (
        named.get(status)
        or {499: "client_gone", 503: "stopping", 504: "timeout"}.get(status)
        or ("server" if status >= 500 else "invalid")
    )


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
