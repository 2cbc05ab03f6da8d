"""The process of a live run's rollouts: gateway, store, orchestrator, task families; it starts the engines.

`python -m glm5.rl.rollout_process`, started only by `drivers.rollout_client`. It reads one line of JSON from stdin, a
`RolloutJob`, and answers with one on stdout: its URL, or an error. It ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from glm5 import process
from glm5.chat import Tokenizer
from glm5.config.families import family_labels
from glm5.config.launch import Launch
from glm5.config.recipe import STAGES, PolicyStage
from glm5.errors import Glm5Error
from glm5.records import SamplingParams
from glm5.rl.prompts import PromptStream
from glm5.rollout.admission import Admission
from glm5.rollout.engines import EnginePool
from glm5.rollout.fleet import Fleet, LocalFleet, RemoteFleet
from glm5.rollout.gateway import Gateway, create_gateway
from glm5.rollout.live import LiveRollouts
from glm5.rollout.orchestrator import Orchestrator
from glm5.rollout.process import KEEP_ALIVE_SECONDS, LIMITS, admin_key_of
from glm5.rollout.services import FamilyService
from glm5.rollout.store import Store
from glm5.rollout.trainer_routes import trainer_routes
from glm5.seeds import derive_seed
from glm5.serve.access import KEY_ALONE, hosts_answered
from glm5.serve.connection import Server, ServerConfig, bind, fitted
from glm5.serve.options import EngineOptions, Limits
from glm5.tasks.env_threads import EnvThreadPool

ENV_THREADS = 64
"""Environments that may run at the same time; each mostly waits for the sandbox."""


@dataclass(frozen=True)
class RolloutJob:
    """Input of the process. `folder` is a checkpoint with tokenizer; its weights have the version `weights`. `version`
    is the learner's own, which may be later. `pass_rates` and `policy` are for `PromptStream.measure`."""

    stage: dict[str, Any]
    launch: dict[str, Any]
    seed: int
    folder: str
    weights: int
    version: int
    store: str
    port: int
    pass_rates: str
    policy: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    """Run until the learner is gone or sends SIGTERM."""
    process.tune()
    control = process.reserve_stdout()
    line = process.read_job()
    if not line:
        return
    process.end_with_parent()
    try:
        asyncio.run(_serve(RolloutJob(**json.loads(line)), control))
    except (Glm5Error, OSError) as error:
        _tell(control, {"error": str(error), "exit_code": getattr(error, "exit_code", 1)})
        sys.exit(1)


async def _serve(job: RolloutJob, control: TextIO) -> None:
    stage = STAGES[job.stage["kind"]].model_validate(job.stage)
    assert isinstance(stage, PolicyStage)
    launch, folder = Launch.model_validate(job.launch), Path(job.folder)
    tokenizer = Tokenizer.load(folder)
    prompts = PromptStream(stage, job.seed)
    prompts.measure(None, tokenizer, Path(job.pass_rates), job.policy)
    most = stage.concurrency or stage.prompts * stage.group
    fleet = _fleet(stage, launch, folder, most)
    with (
        bind(launch.host, job.port or launch.port) as listener,
        Store(Path(job.store)) as store,
        EnvThreadPool(ENV_THREADS, stage.env_seconds) as threads,
    ):
        try:
            await fleet.start()
            if job.weights or launch.engine_urls:
                await fleet.load(folder, job.weights)
            pool = EnginePool(fleet.sources, tokenizer.vocab_size, most)
            params = SamplingParams(
                max_tokens=stage.max_tokens,
                temperature=stage.temperature,
                seed=derive_seed(job.seed, "policy", stage.name),
                stop_token_ids=tokenizer.stop_token_ids,
            )
            service = FamilyService(prompts.problem, tokenizer, params, pool, store, threads)
            live = LiveRollouts(
                store,
                pool,
                fleet,
                Orchestrator([family.weight for family in stage.families], stage.group, stage.prompts),
                [service] * len(stage.families),
                family_labels(stage.families),
                Admission(most),
                stage.max_staleness,
            )
            live.restore(job.version)
            await _answer(job, launch, stage, tokenizer, live, listener, control)
        finally:
            await fleet.close()


async def _answer(
    job: RolloutJob,
    launch: Launch,
    stage: PolicyStage,
    tokenizer: Tokenizer,
    live: LiveRollouts,
    listener: socket.socket,
    control: TextIO,
) -> None:
    """Serve agents and the learner until told to stop, and run rollouts meanwhile."""
    key, key_file = admin_key_of(None, Path(job.store))
    limits = fitted(LIMITS, files=2)
    gateway = Gateway(live.pool, live.store, tokenizer, key, stage.max_context, limits)
    app = create_gateway(gateway, allowed_hosts=hosts_answered(launch.host, key, KEY_ALONE))
    app.include_router(trainer_routes(gateway, live))

    def ready(sockets: Iterable[socket.socket]) -> None:
        host, port = next(iter(sockets)).getsockname()[:2]
        _tell(control, {"url": f"http://{host}:{port}", "port": port, "admin_key_file": str(key_file or "")})

    running = asyncio.create_task(live.run())
    try:
        await Server(ServerConfig(app, limits, 1.0, timeout_keep_alive=KEEP_ALIVE_SECONDS), ready).serve([listener])
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def _fleet(stage: PolicyStage, launch: Launch, folder: Path, most: int) -> Fleet:
    if launch.engine_urls:
        return RemoteFleet(launch.engine_urls)
    options = EngineOptions(exact=stage.rollouts == "exact", max_batch=most, dtype=stage.rollout_dtype)
    limits = Limits(samples=2 * most, requests=2 * most + 64, tokens=stage.max_context + 1, stop_seconds=0.0)
    return LocalFleet(folder, launch.engines, options, limits)


def _tell(control: TextIO, news: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the learner is gone
        print(json.dumps(news), file=control, flush=True)


if __name__ == "__main__":
    main()
