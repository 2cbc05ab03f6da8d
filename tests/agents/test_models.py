"""The model of an agent: a checkpoint directory, served by a child process that ends with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from glm5.agents import wire
from glm5.agents.endpoint import Endpoint, EndpointError
from glm5.agents.models import exact_measure, open_model
from glm5.agents.tools import SPECS
from glm5.chat import Tokenizer, render_chat
from glm5.errors import CheckpointError
from glm5.model.hf_weights import write_checkpoint
from glm5.records import Message, ToolCall
from tests.agents.scripted_model import Say, ScriptedModel


@pytest.mark.slow
def test_a_checkpoint_is_served(small: Callable[..., object], tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_checkpoint(small(vocab_size=tokenizer.vocab_size, max_position_embeddings=8192), tmp_path)  # type: ignore[arg-type]
    tokenizer.save(tmp_path)
    with open_model(str(tmp_path), max_tokens=8, tools=SPECS) as (endpoint, measure):
        asked = [Message("system", "Be brief."), Message("user", "Hello.")]
        reply = endpoint.complete(asked, SPECS)
        assert reply.completion_tokens <= 8 and endpoint.ours
        assert reply.prompt_tokens == measure.overhead + sum(map(measure.count, asked))
    with pytest.raises(EndpointError, match="does not answer"):
        Endpoint(endpoint.base, "name", pauses=()).complete(asked, [])


@pytest.mark.slow
def test_a_folder_without_a_model_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be served"):
        with open_model(str(tmp_path)):
            pass


def test_messages_are_counted_exactly(tokenizer: Tokenizer) -> None:
    messages = [
        Message("system", "s"),
        Message("user", "question"),
        Message("assistant", "text", "thought", (ToolCall("read", {"path": "x"}),)),
        Message("tool", "result"),
        Message("assistant", "answer", "thought"),
    ]
    count = exact_measure(tokenizer).count
    for n in range(1, len(messages) + 1):
        options = dict(tokenizer=tokenizer, add_generation_prompt=False, clear_thinking=False)
        assert len(render_chat(messages[:n], **options).ids) == 2 + sum(map(count, messages[:n]))  # type: ignore[arg-type]


def test_completions_continue_a_text() -> None:
    """Whole, and in events as servers send them."""
    with ScriptedModel([Say(" in Oslo.", finish="length")]) as server:
        reply = (
            Endpoint(server.url, dialect="completions", pauses=())
            .asking(stop=["\n"])
            .complete([Message("system", "Facts."), Message("user", "The tower is")], [])
        )
    assert (reply.message.content, reply.finish_reason) == (" in Oslo.", "length")
    assert server.bodies[0]["prompt"] == "Facts.\n\nThe tower is" and server.bodies[0]["stop"] == ["\n"]
    assert "messages" not in server.bodies[0]
    draft = wire.Draft(lambda kind, text: None)
    for text, finish in ((" in", None), (" Oslo", None), ("", "stop")):
        choice = {"index": 0, "text": text, "finish_reason": finish}
        wire.Completions.feed(draft, {"choices": [choice], "usage": None})
    wire.Completions.feed(draft, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
    assert draft.message()[0].content == " in Oslo" and draft.finish_reason == "stop" and draft.prompt_tokens == 7
