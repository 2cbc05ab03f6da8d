"""Train a policy on your own agent: this program is the task service of the run `live_rl.toml`.

    export GLM5_ADMIN_KEY=$(openssl rand -hex 16)
    python examples/live_rl.py &
    glm5 rl examples/live_rl.toml --set start=runs/laptop/final

The agent may be any code that takes a base URL and a key, and several services may offer one family.
"""

import os
import random
import sys
from dataclasses import dataclass

from openai import OpenAI

from glm5.obs import setup_logging
from glm5.rollout.service_host import serve
from glm5.tasks import AgentProblem, Family


@dataclass
class Sum(AgentProblem):
    id: str
    key: str  # equal keys mean equal problems
    domain: str
    a: int
    b: int

    def run(self, base_url: str, api_key: str) -> float:
        client = OpenAI(base_url=base_url, api_key=api_key)
        question = {"role": "user", "content": f"{self.a} + {self.b} = ?"}
        answer = client.chat.completions.create(model="policy", messages=[question], reasoning_effort="none")
        return float(str(self.a + self.b) in answer.choices[0].message.content)


class Sums(Family):
    name = domain = "sums"

    def problem(self, split: str, index: int) -> Sum:
        rng = random.Random(f"{split} {index}")
        return Sum(f"sums/{split}/{index}", f"sums/{split}/{index}", "sums", rng.randint(0, 9), rng.randint(0, 9))


if __name__ == "__main__":
    gateway = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
    if not (key := os.environ.get("GLM5_ADMIN_KEY")):
        sys.exit("Set GLM5_ADMIN_KEY to the admin key of the run, as the first lines of this program show.")
    setup_logging()
    serve({"sums": Sums()}, gateway, key, capacity=16)
