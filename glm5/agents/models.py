"""The model of an agent: a URL, or a checkpoint directory that is served by a child process."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.agents.context import Counter, approximate_tokens
from glm5.agents.endpoint import Dialect, Endpoint
from glm5.chat.template import render_chat, render_tail
from glm5.chat.tokenizer import Tokenizer
from glm5.errors import CheckpointError
from glm5.process import python_path
from glm5.records import Message

START_S = 900.0
STOP_S = 10.0
SILENCE_S = 600.0
MOST_REMEMBERED = 8192
"""Messages whose lengths are remembered."""


@dataclass(frozen=True)
class Measure:
    """How long a prompt is: the tokens of each message, and those that every prompt with the tools has besides."""

    count: Counter = approximate_tokens
    overhead: int = 0


@contextlib.contextmanager
def open_model(
    model: str,
    name: str = "",
    dialect: Dialect = "openai",
    key: str | None = None,
    max_tokens: int = 8192,
    thinking: int = 0,
    tools: Sequence[Mapping[str, Any]] = (),
    silence_s: float = SILENCE_S,
    temperature: float | None = None,
) -> Iterator[tuple[Endpoint, Measure]]:
    """An endpoint, and the measure of its prompts: exact for a checkpoint, approximate for a URL. `silence_s`: longest
    time without a byte of an answer.

    Raises:
        UsageError: `model` is neither a directory nor a URL.
        CheckpointError: the directory cannot be served.
    """
    with contextlib.ExitStack() as stack:
        measure, url = approximate_measure(tools), model
        if Path(model).is_dir():
            measure = exact_measure(Tokenizer.load(Path(model)), tools)
            key = secrets.token_urlsafe(24)
            url = stack.enter_context(served(Path(model), key))
        endpoint = Endpoint(
            url, name, dialect=dialect, key=key, max_tokens=max_tokens, temperature=temperature, thinking=thinking,
            seconds=silence_s,
        )  # fmt: skip
        stack.callback(endpoint.close)
        yield endpoint, measure


def approximate_measure(tools: Sequence[Mapping[str, Any]] = ()) -> Measure:
    """The measure of an endpoint whose tokenizer is not known."""
    return Measure(overhead=len(json.dumps(list(tools))) // 4)


def exact_measure(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> Measure:
    """The measure of a tokenizer's chat template. Sums are exact for results that each follow a reply. Lengths are
    remembered, for a policy measures the whole conversation before every reply."""
    known = dict[tuple[Any, ...], int]()

    def count(message: Message) -> int:
        key = message.role, message.content, message.reasoning, repr(message.tool_calls)
        if key not in known:
            if len(known) >= MOST_REMEMBERED:
                known.clear()
            known[key] = len(render_tail([message], tokenizer=tokenizer, add_generation_prompt=False))
        return known[key]

    empty = Message("user", "")
    return Measure(count, len(render_chat([empty], tools, tokenizer=tokenizer).ids) - count(empty))


@contextlib.contextmanager
def served(directory: Path, key: str, options: Sequence[str] = ()) -> Iterator[str]:
    """`glm5 serve` on a free port, with more `options`; yields its URL. Raises CheckpointError if it does not start."""
    command = [sys.executable, "-P", "-m", "glm5", "serve", str(directory), "--port", "0", *options]
    env = dict(os.environ) | {"GLM5_API_KEY": key, "PYTHONPATH": python_path()}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=env) as child:
        watch = threading.Timer(START_S, child.kill)
        watch.start()
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            watch.cancel()
            if not line.startswith("Ready on "):
                raise CheckpointError(f"{directory} cannot be served; see the message above.")
            yield line.removeprefix("Ready on ").strip()
        finally:
            watch.cancel()
            child.terminate()
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
