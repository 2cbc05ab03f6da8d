"""What a live run's rollouts do now, as JSON: `GET /trainer/status`, and the view of `glm5 rl` on a terminal."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5.rollout.live import LiveRollouts

OLDEST = 8


def status_of(live: LiveRollouts) -> dict[str, Any]:
    """Limits, engines, groups and rollouts by family, and the oldest rollouts with what they wait for. `staleness` is
    the age of the oldest token in flight, in updates; None without a token. `dispatched` counts attempts."""
    orchestrator, jobs = live.orchestrator, list(live.jobs.values())
    running = Counter(job.rollout.family for job in jobs)
    versions = [live.services[job.rollout.family].oldest(job) for job in jobs]
    first = min((version for version in versions if version is not None), default=None)
    families = zip(live.labels, orchestrator.shares, orchestrator.counts, strict=True)
    return {
        "version": live.version,
        "in_flight": orchestrator.in_flight,
        "permits": orchestrator.permits,
        "allowed": orchestrator.allowed,
        "results_waiting": max(0, live.results - live.taken),
        "staleness": None if first is None else max(0, live.version - first),
        "engines": vars(live.signals),
        "engine_seconds": live.waits.engines,
        "families": {
            label: {
                "target": share,
                "pending": counts.pending,
                "trained": counts.trained,
                "dropped": counts.dropped,
                "dispatched": live.dispatched[i],
                "arrived": live.arrived[i],
                "running": running[i],
            }
            for i, (label, share, counts) in enumerate(families)
        },
        "oldest": oldest_jobs(live),
    }


def oldest_jobs(live: LiveRollouts) -> list[dict[str, Any]]:
    """The rollouts that have waited longest for one thing."""
    now = time.monotonic()
    return [
        {
            "session": job.session,
            "family": live.labels[job.rollout.family],
            "waits_for": job.stage,
            "seconds": round(now - job.since, 3),
        }
        for job in sorted(live.jobs.values(), key=lambda job: job.since)[:OLDEST]
    ]
