"""The process of a live run's rollouts: gateway, store, orchestrator, task families; it starts the engines.

`python -m glm5.rl.rollout_process`, started only by `drivers.rollout_client`. It reads one line of JSON from stdin, a
`RolloutJob`, and answers with one on stdout: its URL, or an error. It ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
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
from glm5.rollout.agent_service import AgentService
from glm5.rollout.engines import EnginePool
from glm5.rollout.fleet import Fleet, LocalFleet, RemoteFleet
from glm5.rollout.gateway import Gateway
from glm5.rollout.gateway_app import create_gateway
from glm5.rollout.live import LiveRollouts
from glm5.rollout.orchestrator import Orchestrator
from glm5.rollout.process import LIMITS, admin_key_of
from glm5.rollout.remote import RemoteService, ServiceRegister, service_routes
from glm5.rollout.room_service import RoomService
from glm5.rollout.services import FamilyService, TaskService
from glm5.rollout.session import SessionOptions
from glm5.rollout.simulated import SimulatedFleet, SlowService
from glm5.rollout.store import Store
from glm5.rollout.text_history import text_trajectory_of
from glm5.rollout.timeline import FILE, Trace
from glm5.rollout.trainer_routes import trainer_routes
from glm5.rollout.weight_push import Parts, SenderAddress
from glm5.seeds import derive_seed
from glm5.serve.access import KEY_ALONE, hosts_answered
from glm5.serve.connection import Server, ServerConfig, bind, bind_path, fitted, run_fast, url_of
from glm5.serve.keys import find_key
from glm5.serve.options import EngineOptions, Limits
from glm5.tasks.agents import AgentTask
from glm5.tasks.contract import AgentProblem
from glm5.tasks.env_threads import EnvThreadPool

SOCKET = "gateway.sock"
"""The gateway's Unix socket for agents in rooms; beside the store, or in its own folder if that path is too long."""
LONGEST_PATH = 90
"""Bytes of the path of a Unix socket."""
CANCEL_SECONDS = 1.0
"""Longest time to tell task services that their rollouts end."""
ENV_THREADS = 64
"""Environments that may run at the same time; each mostly waits for the sandbox."""


@dataclass(frozen=True)
class RolloutJob:
    """Input of the process. `folder` is a checkpoint with tokenizer; its weights have the version `weights`. `version`
    is the learner's own, which may be later. `allowed` is the maximum number of groups,
    `taken` the id of the last result that the learner has. `pass_rates` and `policy` are for `PromptStream.measure`.
    If the learner sends weights, `sender` has the fields of its `SenderAddress`; `weights` is the version that it can
    send in these `parts`, and `folder` may have older ones."""

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
    allowed: int = 0
    taken: int = 0
    sender: dict[str, Any] | None = None
    parts: Parts = ()

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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # raises, so that `_serve` ends the engines
    try:
        run_fast(_serve(RolloutJob(**json.loads(line)), control))
    except (Glm5Error, OSError) as error:
        process.tell(control, {"error": str(error), "exit_code": getattr(error, "exit_code", 1)})
        sys.exit(1)


async def _serve(job: RolloutJob, control: TextIO) -> None:
    stage = STAGES[job.stage["kind"]].model_validate(job.stage)
    assert isinstance(stage, PolicyStage)
    launch, folder = Launch.model_validate(job.launch), Path(job.folder)
    tokenizer = Tokenizer.load(folder)
    prompts = PromptStream(stage, job.seed)
    prompts.measure(None, tokenizer, Path(job.pass_rates), job.policy)
    most = stage.concurrency or stage.prompts * stage.group
    fleet = _fleet(stage, launch, folder, most, None if job.sender is None else SenderAddress(**job.sender))
    with (
        bind(launch.host, job.port or launch.port) as listener,
        Store(Path(job.store), full=True) as store,
        EnvThreadPool(ENV_THREADS, stage.env_seconds) as threads,
        contextlib.ExitStack() as rooms,
    ):
        try:
            await fleet.start()
            if job.weights or launch.engine_urls:
                await fleet.load(folder, job.weights, job.parts)
            key, key_file = admin_key_of(find_key("admin", None, None), Path(job.store))
            pool = EnginePool(fleet.sources, tokenizer.vocab_size, most)
            gateway = Gateway(pool, store, tokenizer, key, stage.max_context, fitted(LIMITS, files=2))
            url = url_of(listener)
            register = ServiceRegister(lambda: live.stir())
            listeners, path = [listener], ""
            if any(isinstance(prompts.problem(entry, 0)[0], AgentTask) for entry in range(len(stage.families))):
                path = _socket_path(Path(job.store), rooms)
                listeners.append(rooms.enter_context(bind_path(Path(path))))
                listeners[-1].listen()  # the first agents may be faster than the server
            live = LiveRollouts(
                store,
                pool,
                fleet,
                Orchestrator([family.weight for family in stage.families], stage.group, stage.prompts),
                _services(stage, launch, job.seed, prompts, gateway, threads, register, url, path, rooms),
                family_labels(stage.families),
                Admission(most),
                stage.max_staleness,
                trace=Trace(Path(job.store).with_name(FILE), "rollouts", 2),
            )
            if launch.history == "text":
                live.trajectory_of = partial(text_trajectory_of, tokenizer=tokenizer)
            live.restore(job.version, job.taken)
            live.allow(job.allowed)
            app = create_gateway(gateway, allowed_hosts=hosts_answered(launch.host, key, KEY_ALONE))
            app.include_router(trainer_routes(gateway, live))
            app.include_router(service_routes(gateway, register))
            news = {"url": url, "port": listener.getsockname()[1], "admin_key_file": str(key_file or "")}
            fleet.serve(url, key)
            running = asyncio.create_task(live.run())
            try:
                config = ServerConfig(app, gateway.limits, 1.0)
                ends = partial(_end, register, running)
                # Rollouts end before the gateway: an agent without it fails, and that would be stored as its result.
                await Server(config, lambda _: process.tell(control, news), ends).serve(listeners)
            finally:
                await _end(register, running)
        finally:
            await fleet.close()


async def _end(register: ServiceRegister, running: asyncio.Task[None]) -> None:
    running.cancel()  # first: without their services the rollouts would count as lost
    await asyncio.wait({running}, timeout=CANCEL_SECONDS)
    register.close()
    running.cancel()  # what still waits for a service that hangs
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _services(
    stage: PolicyStage,
    launch: Launch,
    seed: int,
    prompts: PromptStream,
    gateway: Gateway,
    threads: EnvThreadPool,
    register: ServiceRegister,
    url: str,
    path: str,
    rooms: contextlib.ExitStack,
) -> list[TaskService]:
    """The task service of every family of the stage. `path` is the gateway's Unix socket; `rooms` ends what runs in
    the sandbox."""
    params = SamplingParams(
        max_tokens=stage.max_tokens,
        temperature=stage.temperature,
        seed=derive_seed(seed, "policy", stage.name),
        stop_token_ids=gateway.tokenizer.stop_token_ids,
    )
    limits = SessionOptions(stage.max_turns, stage.max_context, stage.max_tokens, stage.temperature)
    played = FamilyService(prompts.problem, gateway.tokenizer, params, gateway.pool, gateway.store, threads)
    agents = AgentService(prompts.problem, gateway, limits, threads, lambda: url)
    found: list[TaskService] = []
    for entry, config in enumerate(stage.families):
        service: TaskService = played
        problem = prompts.problem(entry, 0)[0]
        if config.name == "remote":
            name = str(config.options["family"])
            service = RemoteService(name, prompts.problem, register, gateway, limits, stage.env_seconds, lambda: url)
        elif isinstance(problem, AgentTask):
            service = rooms.enter_context(RoomService(prompts.problem, problem.program, gateway, limits, path))
        elif isinstance(problem, AgentProblem):
            service = agents
        if launch.simulate_environment is not None:
            service = SlowService(service, launch.simulate_environment, launch.simulated_waits)
        found.append(service)
    return found


def _socket_path(store: Path, stack: contextlib.ExitStack) -> str:
    path = str(store.absolute().with_name(SOCKET))
    if len(os.fsencode(path)) <= LONGEST_PATH:
        return path
    return f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='glm5-gateway-'))}/{SOCKET}"


def _fleet(stage: PolicyStage, launch: Launch, folder: Path, most: int, sender: SenderAddress | None) -> Fleet:
    if launch.simulate_engine is not None:
        return SimulatedFleet(launch.simulate_engine)
    if launch.engine_urls:
        key = find_key("engine", None, Path(launch.engine_key_file) if launch.engine_key_file else None)
        return RemoteFleet(launch.engine_urls, key, sender, stage.max_context)
    options = EngineOptions(
        exact=stage.rollouts == "exact", max_batch=most, dtype=stage.engine_dtype, device=launch.engine_device,
        quantize=stage.engine_rounding,
    )  # fmt: skip
    limits = Limits(samples=2 * most, requests=2 * most + 64, tokens=stage.max_context + 1, stop_seconds=0.0)
    if launch.backend == "ray":
        from glm5.rollout.ray_fleet import RayFleet  # the package may be missing

        return RayFleet(folder, options, limits, launch, sender)
    return LocalFleet(folder, launch.engines, options, limits, sender)


if __name__ == "__main__":
    main()
