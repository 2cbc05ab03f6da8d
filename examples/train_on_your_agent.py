"""Let your own agent draw from a policy, and get the rows to train on (`pip install openai`).

python examples/train_on_your_agent.py runs/laptop/final     (without a checkpoint: a small random policy)

`agent` may be anything that gets a base URL and a key, also a program in another language: see docs/agentic-rl.md.
"""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

TASKS = ("Name a colour.", "Name a river.", "Name a metal.")
GROUP = 4
GLM5 = [sys.executable, "-m", "glm5"]


def agent(base_url: str, api_key: str, task: str) -> str:
    client = OpenAI(base_url=base_url, api_key=api_key)
    turns: list[Any] = [{"role": "user", "content": task}]
    for question in ("Are you sure?", "Say it again."):
        answer = client.chat.completions.create(model="policy", messages=turns, reasoning_effort="none")
        turns += [answer.choices[0].message, {"role": "user", "content": question}]
    return "".join(turn.content for turn in turns[1::2])


def rollout(trainer: httpx.Client, task: str) -> dict[str, Any]:
    """The samples of a session with their reward: here the share of letters in what the agent returns."""
    session = trainer.post("/sessions", json={"task_id": task, "group": task, "answer_tokens": 16}).json()
    said = agent(session["base_url"], session["api_key"], task)
    reward = sum(map(str.isalpha, said)) / max(1, len(said))
    trainer.post(f"/sessions/{session['id']}/reward", json={"reward": reward}).raise_for_status()
    trainer.post(f"/sessions/{session['id']}/close").raise_for_status()
    return trainer.get(f"/sessions/{session['id']}/samples").raise_for_status().json()


with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
    policy, store = sys.argv[1] if len(sys.argv) > 1 else f"{folder}/policy", Path(folder, "sessions.db")
    if len(sys.argv) == 1:
        subprocess.run([*GLM5, "init", "nano", "--out", policy], check=True, stdout=subprocess.DEVNULL)
    command = [*GLM5, "gateway", policy, "--store", str(store), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
        try:
            url = json.loads(gateway.stdout.readline())["url"]
            headers = {"authorization": f"Bearer {Path(f'{store}.admin-key').read_text().strip()}"}
            with httpx.Client(base_url=url, headers=headers, timeout=600) as trainer:
                done = list(pool.map(lambda task: rollout(trainer, task), [t for t in TASKS for _ in range(GROUP)]))
        finally:
            gateway.terminate()
for task in TASKS:
    group = [one for one in done if one["group"] == task]
    mean = sum(one["reward"] for one in group) / GROUP
    rows = [(row, one["reward"] - mean) for one in group for row in one["samples"]]  # token ids, and their advantage
    print(f"{task} {len(rows)} rows, {sum(sum(row['loss_mask']) for row, _ in rows)} tokens, mean reward {mean:.2f}")
