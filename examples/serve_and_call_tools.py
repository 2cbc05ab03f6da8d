"""Serve a checkpoint and let it call a tool through the OpenAI client (`pip install openai`).

python examples/serve_and_call_tools.py runs/laptop/final
"""

from __future__ import annotations

import json
import subprocess
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


def ask(address: str) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = dict(model=client.models.list().data[0].id, tools=[TOOL], parallel_tool_calls=False, max_tokens=128)
    first = client.chat.completions.create(messages=messages, tool_choice="required", **options)  # type: ignore[call-overload]
    (call,) = first.choices[0].message.tool_calls  # a forced call always fits the tool's schema
    print("called", call.function.name, json.loads(call.function.arguments))
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, rain"}]
    second = client.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
    print("answered", second.choices[0].message.content)


def main(directory: str) -> None:
    command = [sys.executable, "-m", "glm5", "serve", directory, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            ask(server.stdout.readline().split()[-1])  # "Ready on http://127.0.0.1:PORT"
        finally:
            server.terminate()


if __name__ == "__main__":
    main(sys.argv[1])
