"""A task service of a user: `live_service.py GATEWAY ADMIN_KEY`. Its agent asks twice with the openai client."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import openai

from glm5.rollout.service_host import serve
from glm5.tasks import AgentProblem, Family


@dataclass
class Sum(AgentProblem):
    id: str
    key: str
    domain: str
    numbers: tuple[int, int]

    def run(self, base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=2)
        a, b = self.numbers
        messages = [{"role": "user", "content": f"{a} + {b}?"}]
        for _ in range(2):
            answer = client.chat.completions.create(model="any", messages=messages, max_tokens=8)  # type: ignore[arg-type]
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content or ""},
                {"role": "user", "content": "Are you sure?"},
            ]
        return float(str(a + b) in messages[-2]["content"])


class Sums(Family):
    name = domain = "sums"

    def problem(self, split: str, index: int) -> Sum:
        rng = random.Random(f"{split} {index}")
        return Sum(f"sums/{index}", f"sums/{index}", "sums", (rng.randint(0, 9), rng.randint(0, 9)))


if __name__ == "__main__":
    serve({"sums": Sums()}, sys.argv[1], sys.argv[2], name="test", capacity=8)
