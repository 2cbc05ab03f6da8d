"""The processes of a live RL run: which there are, how many, and on which device."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from glm5.config.parallel import DEVICES_PATTERN
from glm5.config.schema import Frozen

OWN_RESOURCES = {
    "CPU": "engine_threads",
    "GPU": "engine_gpus",
    "memory": "not reserved for engines",
    "object_store_memory": "not reserved for engines",
}
"""Ray's own names of resources, and what is instead of each."""
SMALLEST = 1e-4
"""The smallest part of a resource that Ray reserves."""


class ServiceConfig(Frozen):
    """Task services on the nodes of a Ray cluster. Each has its own process and registers at the gateway."""

    families: list[str] = Field(min_length=1)
    """Names of families whose problems are `AgentProblem`s, registered on every node. A stage lists them as `{ name =
    "remote", options = { family = NAME } }`."""
    count: int = Field(1, ge=1)
    capacity: int = Field(8, ge=1)
    """Rollouts that one service plays at the same time."""
    seconds: float = Field(300.0, gt=0)
    """Longest time of a rollout."""
    cpus: float = Field(1.0, ge=0)
    """Cores that Ray reserves for one service."""


class Launch(Frozen):
    """Section `launch` of a recipe. With it, RL stages run live: engines, the rollout process and the learner are
    processes of their own and work at the same time. Without it, that is simulated on a logical clock, with the same
    numbers in every run."""

    backend: Literal["local", "ray"] = "local"
    """Where the engines run: on this machine, or on all nodes of a Ray cluster (`pip install 'glm5[ray]'`). The
    learner, the rollout process and its gateway stay on this machine."""
    ray_address: str = ""
    """HOST:PORT of the cluster's head. Without one: the cluster that RAY_ADDRESS names, else the one that `ray start`
    started on this machine, else a new one on this machine for the time of the run ("local": always a new one)."""
    engine_gpus: float | None = Field(None, ge=0, allow_inf_nan=False)
    """With "ray": GPUs per engine, a whole number or a part of one; None is 1 if the cluster has any."""
    engine_resources: dict[str, float] = {}
    """With "ray": further resources per engine, by the names that the nodes were started with (`ray start
    --resources`)."""
    services: list[ServiceConfig] = []
    """With "ray": task services to start on the cluster. `host` must be an address that its nodes can reach."""
    engines: int = Field(1, ge=1)
    """Engine processes that the run starts; one that dies is replaced."""
    engine_urls: list[str] = []
    """Servers to use instead: SGLang, vLLM (started with VLLM_SERVER_DEV_MODE=1) or ours. They must be able to read the
    folders of pushed weights, unless the transport is "distributed", which vLLM cannot have here."""
    engine_key_file: str = ""
    """File with the API key of these servers; the variable GLM5_ENGINE_KEY is another way."""
    engine_threads: int | None = Field(None, ge=1)
    """CPU threads of each engine process; None divides the cores of this machine among engines and learner. With "ray"
    they are also the CPUs that it reserves."""
    engine_device: str = Field("auto", pattern=DEVICES_PATTERN)
    """Device of the engines: "auto", "cuda" and so on, in turn over all of them, or names such as "cuda:2,cuda:3" that
    they take in turn. The learner's is `parallel.device`."""
    learner_threads: int | None = Field(None, ge=1)
    """CPU threads of the learner; None divides the cores among engines and learner."""
    transport: Literal["memory", "disk", "distributed"] = "memory"
    """How weights reach the engines: through files in shared memory (`/dev/shm`), in the stage's folder, or over
    `torch.distributed`, sent by the learner (gloo; NCCL if it runs on a GPU). With "ray", "memory" sends files to the
    nodes; for "disk" all nodes must see the stage's folder under the same path. For "distributed" the engines must
    reach all ports of this machine at `host`."""
    push_mode: Literal["keep", "retract", "abort", "drain"] = "keep"
    """What happens to running generations at a weight push. "keep": they go on with the new weights and the old cache.
    "retract": they go on with the new weights, and their tokens so far are computed again. "abort": their rollouts
    start again. "drain": the push waits until they end."""
    history: Literal["tokens", "text"] = "tokens"
    """What is trained. "tokens": the ids that were sampled. "text": the answers' text, rendered and tokenised again, as
    trainers without token-in/token-out do; tokens that differ from the sampled ones are masked. Only to compare."""
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, lt=1 << 16)
    """Address of the gateway for agents; port 0 takes a free one."""
    simulate_learner: float | None = Field(None, ge=0)
    """Sleep this many seconds instead of each update, to see how fast rollouts can be. The weights stay the same."""
    simulate_engine: float | None = Field(None, gt=0)
    """Use no engine: answers are meaningless and take this many seconds each, to see how fast the learner can be."""
    simulate_environment: float | None = Field(None, gt=0)
    """Make every episode wait, for this many seconds on average (lognormal, sigma 1)."""
    simulated_waits: int = Field(1, ge=1)
    """Independent waits per episode that `simulate_environment` is divided into."""

    @model_validator(mode="after")
    def _backend_fits(self) -> Self:
        given: dict[str, Any] = {name: getattr(self, name) for name in ("ray_address", "engine_resources", "services")}
        given["engine_gpus"] = self.engine_gpus is not None
        for name, value in given.items():
            if value and self.backend != "ray":
                raise ValueError(f'{name} needs backend = "ray"')
        if self.transport == "distributed" and self.host in ("0.0.0.0", "::"):
            raise ValueError('transport = "distributed" needs an address of this machine that engines reach as host')
        for name, amount in self.engine_resources.items():
            if name in OWN_RESOURCES:
                raise ValueError(f"engine_resources cannot have {name}, which is {OWN_RESOURCES[name]}")
            if not SMALLEST <= amount < math.inf:
                text = f"leave it out, or let it be {SMALLEST:g} or more"
                raise ValueError(f"engine_resources: {name} is {amount:g}; {text}")
        if 0 < (self.engine_gpus or 0) < SMALLEST:
            raise ValueError(f"engine_gpus must be 0 or at least {SMALLEST:g}, the smallest part that Ray reserves")
        if (self.engine_gpus or 0) > 1 and self.engine_gpus != int(self.engine_gpus or 0):
            raise ValueError("engine_gpus above 1 must be a whole number")
        if self.engine_key_file and not self.engine_urls:
            raise ValueError("engine_key_file is the key of engine_urls, of which there are none")
        if self.engine_urls and self.backend == "ray":
            raise ValueError('engine_urls are servers that run already; leave backend = "ray" out')
        return self
