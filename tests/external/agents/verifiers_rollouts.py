"""Rollouts of `verifiers` in the environment `fruit_shop`, one per session: `verifiers_rollouts.py BASE_URL=KEY ...`.

Prints one line of JSON with the rewards. The program of the harness `null` would run in an environment that uv makes;
here it is run by this interpreter, which has the same packages.
"""

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import load_environment


async def rollout(env: vf.Env, number: int, session: str) -> float:
    url, _, key = session.partition("=")
    os.environ[f"SESSION_{number}"] = key
    client = vf.EvalClientConfig(base_url=url, api_key_var=f"SESSION_{number}")
    (slot,) = env.slots(next(iter(env.taskset)))
    episode = await env.run_slot(slot, vf.ModelContext(model="policy", client=client))
    assert episode.ok, episode.model_dump_json(indent=1)
    return episode.traces[0].reward


async def main(sessions: list[str]) -> None:
    program = Path(SubprocessRuntime.scripts_dir, hashlib.sha256(CHAT_PROGRAM_SOURCE.encode()).hexdigest() + ".py")
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(CHAT_PROGRAM_SOURCE)
    SubprocessRuntime._interpreters[str(program)] = sys.executable
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = load_environment(vf.SingleAgentEnvConfig(taskset={"id": "fruit_shop"}, agent=agent))
    async with env.serving():
        print(json.dumps(await asyncio.gather(*(rollout(env, i, session) for i, session in enumerate(sessions)))))


asyncio.run(main(sys.argv[1:]))
