"""The router's own metrics, merged with those of its workers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from glm5.serve.router.pool import WorkerPool

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")


class RouterMetrics:
    """All metrics since the start of the router. Only its event loop writes them."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.requests: Counter[int] = Counter()
        self.moved = 0
        self.retries = 0
        self.cut = 0

    def answered(self, path: str, status: int) -> None:
        """An answer began. `path` is the path of a route, or "other"."""
        self.answers[path, status] += 1

    def sent(self, rank: int, *, again: bool, moved: bool) -> None:
        """A request went to a worker."""
        self.requests[rank] += 1
        self.retries += again
        self.moved += moved

    def text(self, pool: WorkerPool, expositions: Mapping[int, str]) -> str:
        """The router's metrics, then those of the workers by rank, with a label `worker`."""
        places, lines = pool.places, []
        families: list[tuple[str, str, str, Mapping[str, float]]] = [
            ("answers_total", "counter", "Answers of the router by path and status.",
             {f'{{path="{path}",status="{status}"}}': n for (path, status), n in sorted(self.answers.items())}),
            ("requests_total", "counter", "Requests handed to a worker, each attempt counted.",
             {_label(place.rank): self.requests[place.rank] for place in places}),
            ("retries_total", "counter", "Requests that went to another worker because theirs was lost.",
             {"": self.retries}),
            ("streams_cut_total", "counter", "Streams that ended early because their worker was lost.", {"": self.cut}),
            ("requests_moved_total", "counter", "Requests moved to another worker: theirs was overloaded or lost.",
             {"": self.moved}),
            ("workers_replaced_total", "counter", "Processes that took the place of a lost one.",
             {_label(place.rank): place.replaced for place in places}),
            ("worker_up", "gauge", "Whether a worker takes requests.",
             {_label(place.rank): int(place.state == "up") for place in places}),
            ("worker_in_flight", "gauge", "Requests in flight at a worker.",
             {_label(place.rank): place.worker.in_flight if place.worker else 0 for place in places}),
            *_by_role(pool, expositions),
        ]  # fmt: skip
        for name, kind, help_text, samples in families:
            full = f"glm5_router_{name}"
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}"]
            lines += [f"{full}{labels} {value}" for labels, value in samples.items()]
        return "\n".join(lines) + "\n" + merged(expositions)


def _by_role(pool: WorkerPool, expositions: Mapping[int, str]) -> list[tuple[str, str, str, Mapping[str, float]]]:
    """What tells whether a role needs more or fewer engines."""
    seen = {rank: watched(text) for rank, text in expositions.items()}
    samples: list[dict[str, float]] = [{} for _ in range(6)]
    for role in pool.roles:
        own = [place for place in pool.places if place.role == role]
        found = [seen[place.rank] for place in own if seen.get(place.rank)]
        use = [1 - one["cache_pages_free"] / one["cache_pages"] for one in found if one.get("cache_pages")]
        numbers = (
            sum(place.state == "up" for place in own),
            sum(one.get("samples_waiting", 0) for one in found),
            sum(one.get("samples_running", 0) for one in found),
            max(use, default=0.0),
            sum(place.wanted for place in own),
            sum(one.get("tokens_per_second", 0) for one in found),
        )
        for family, number in zip(samples, numbers, strict=True):
            family[f'{{role="{role}"}}'] = number
    return [
        ("role_engines", "gauge", "Engines of a role that take requests.", samples[0]),
        ("role_waiting", "gauge", "Samples in the queues of a role's engines.", samples[1]),
        ("role_running", "gauge", "Samples that a role's engines compute.", samples[2]),
        ("role_cache_use", "gauge", "Share of the cache in use, of the fullest engine of a role.", samples[3]),
        ("role_engines_wanted", "gauge", "Engines that a role should have: those not drained.", samples[4]),
        ("role_tokens_per_second", "gauge", "Tokens that a role's engines sample per second.", samples[5]),
        ("engines_most", "gauge", "The most engines that may be asked for.", {"": pool.most}),
    ]


WATCHED = (
    "samples_running",
    "samples_waiting",
    "cache_pages",
    "cache_pages_free",
    "preemptions_total",
    "tokens_per_second",
)


def watched(text: str) -> dict[str, float]:
    """The values of `WATCHED` in an engine's metrics."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.removeprefix("glm5_").partition(" ")
        if name in WATCHED and line.startswith("glm5_"):
            found[name] = float(value)
    return found


def merged(expositions: Mapping[int, str]) -> str:
    """Merge metric texts, so that each family appears once."""
    heads: dict[str, list[str]] = {}  # HELP and TYPE lines, by family
    samples: dict[str, list[str]] = {}
    for rank, text in expositions.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
            elif found := _SAMPLE.fullmatch(line):
                name, labels, value = found.groups()
                inside = f'worker="{rank}"' + (f",{labels}" if labels else "")
                samples.setdefault(family, []).append(f"{name}{{{inside}}} {value}")
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "\n".join(lines) + "\n" if lines else ""


def _label(rank: int) -> str:
    return f'{{worker="{rank}"}}'
