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
        families: list[tuple[str, str, str, Mapping[str, int]]] = [
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
        ]  # fmt: skip
        for name, kind, help_text, samples in families:
            full = f"glm5_router_{name}"
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}"]
            lines += [f"{full}{labels} {value}" for labels, value in samples.items()]
        return "\n".join(lines) + "\n" + merged(expositions)


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
