"""The processes of a live RL run: which there are, how many, and on which device."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glm5.config.schema import Frozen


class Launch(Frozen):
    """Section `launch` of a recipe. With it, RL stages run live: engines, the rollout process and the learner are
    processes of their own and work at the same time. Without it, one process simulates that on a logical clock, with
    the same numbers in every run."""

    engines: int = Field(1, ge=1)
    """Engine processes that the run starts; one that dies is replaced."""
    engine_urls: list[str] = []
    """Servers with SGLang's native API to use instead. They must be able to read the folders of pushed weights."""
    engine_threads: int | None = Field(None, ge=1)
    """CPU threads of each engine process; None divides the cores among engines and learner."""
    learner_threads: int | None = Field(None, ge=1)
    """CPU threads of the learner; None divides the cores among engines and learner."""
    transport: Literal["memory", "disk"] = "memory"
    """How weights reach the engines: through files in shared memory (`/dev/shm`), or in the stage's folder."""
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
