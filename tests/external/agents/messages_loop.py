"""The tool loop of the `anthropic` package: `messages_loop.py [stream] [impatient]`.

The address (without /v1) and the key come from ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. `impatient` gives up on every
request after half a second and repeats it. Prints the final answer.
"""

import sys

from anthropic import Anthropic, beta_tool


@beta_tool
def weight(animal: str) -> str:
    """Weight of an animal.

    Args:
        animal: its name
    """
    return {"ox": "900 kg", "hen": "2 kg"}[animal]


client = Anthropic(max_retries=8, timeout=0.5 if "impatient" in sys.argv else 600)
options = dict(
    model="policy",
    max_tokens=2000,
    system=[{"type": "text", "text": "You know animals.", "cache_control": {"type": "ephemeral"}}],
    tools=[weight],
    thinking={"type": "enabled", "budget_tokens": 1024},
    messages=[{"role": "user", "content": "Is an ox heavier than a hen?"}],
)
said = ""
if "stream" in sys.argv:
    for stream in client.beta.messages.tool_runner(**options, stream=True):
        said = "".join(stream.text_stream)
else:
    for message in client.beta.messages.tool_runner(**options):
        said = "".join(block.text for block in message.content if block.type == "text")
print(said)
