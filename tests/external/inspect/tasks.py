"""Tasks for Inspect AI: plain questions, and one that is solved with tools in a room that a Dockerfile makes."""

from __future__ import annotations

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes, match
from inspect_ai.solver import basic_agent, generate
from inspect_ai.tool import bash

QUESTIONS = ("The cat says", "The dog says", "What does the cow say?", "two\nlines", "Ünïcödé ☃")


@task
def questions() -> Task:
    return Task([Sample(text, target="x") for text in QUESTIONS], solver=generate(), scorer=match())


@task
def files() -> Task:
    """Two samples, each with a file of its own that only its room has."""
    samples = [
        Sample(f"What is in note{i}.txt?", target=f"number {i}", files={f"note{i}.txt": f"number {i}"}) for i in (1, 2)
    ]
    where = str(Path(__file__).with_name("Dockerfile"))
    agent = basic_agent(tools=[bash(timeout=20)], message_limit=8)
    return Task(samples, solver=agent, scorer=includes(), sandbox=("glm5-room", where))
