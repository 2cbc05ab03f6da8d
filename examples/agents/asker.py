"""An agent for the family "agent": it asks the policy and returns what it believes.

    glm5 rl examples/agent_in_a_recipe.toml

Nothing of it imports glm5: it is any code that speaks to a chat API. It runs in a room of the sandbox, in which the
policy is the whole network.
"""

import json
import re
import urllib.request


def solve(base_url, api_key, task):
    """`task` is that of the line in agent_in_a_recipe.jsonl; the returned text is graded."""
    messages = [{"role": "user", "content": task["question"]}]
    body = {"model": "policy", "messages": messages, "reasoning_effort": "none"}
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    numbers = re.findall(r"-?\d+", answer or "")
    return numbers[-1] if numbers else ""
