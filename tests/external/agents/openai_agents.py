"""An agent of the OpenAI Agents SDK with an output type; its tools are a function and another agent.

    openai_agents.py responses|chat [stream] [impatient]

The address and the key come from OPENAI_BASE_URL and OPENAI_API_KEY. `impatient` gives up on every request after half a
second and repeats it. Prints the final answer.
"""

import asyncio
import sys

from agents import (
    Agent,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    millimetres: int


@function_tool
def rainfall(city: str, day: int) -> str:
    """Millimetres of rain in a city on a day of this month."""
    return {("Paris", 3): "12", ("Oslo", 3): "7"}[city, day]


async def main(api: str, *options: str) -> None:
    set_default_openai_api("responses" if api == "responses" else "chat_completions")
    set_tracing_disabled(True)  # else it is sent to OpenAI
    if "impatient" in options:
        set_default_openai_client(AsyncOpenAI(timeout=0.5, max_retries=8))
    adder = Agent(name="adder", instructions="You add numbers.", model="policy")
    agent = Agent(
        name="weather",
        instructions="You know the weather.",
        model="policy",
        tools=[rainfall, adder.as_tool("add", "Adds numbers.")],
        output_type=Answer,
    )
    question = "How much rain fell in Paris and Oslo on day 3 together?"
    if "stream" in options:
        run = Runner.run_streamed(agent, question)
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, question)
    print(run.final_output)


asyncio.run(main(*sys.argv[1:]))
