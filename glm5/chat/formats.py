"""Conversations to prompts of a checkpoint: by the rules of a known template version, or by the checkpoint's own Jinja.

Released checkpoints name no version; they ship a template file. `recognise` finds its version by its digest, or by its
output for a few conversations that distinguish the versions. An unknown template is rendered as it is, in the process
of `glm5.chat.jinja`, so the model gets the prompt that it was trained on.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from glm5.chat.jinja import JinjaTemplate
from glm5.chat.template import RULES, opens_thinking, render_chat
from glm5.chat.tokenizer import Tokenizer
from glm5.chat.tokenizer_files import TemplateSetting
from glm5.errors import CheckpointError, ConfigError, DataError
from glm5.records import Message

DIGESTS = {
    "172dc74a35e1752df75ecfb2b2cf9326d2852bb1379868ebeec9571654489679": "5.2",
    "d63ad536c3c81880043e22ec7fd08db42b4d8fb7c89c7138bc562bfa25281375": "5.0",  # GLM-4.7-Flash: the same text
}
"""SHA-256 of released template files, and their versions."""

RENDER_SECONDS = 5.0

_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "é", "parameters": {"type": "object", "properties": {}}, "strict": True},
}
_DEFERRED = {"type": "function", "function": {"name": "g", "defer_loading": True}, "defer_loading": True}
_CALLS = [
    {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": {"s": "x y", "i": 2, "n": None, "l": ["é"]}},
    },
    {"id": "b", "type": "function", "function": {"name": "f", "arguments": {}}},
]
_TURNS: list[Mapping[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": " a1\n", "reasoning_content": " r1 \n"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "", "reasoning_content": "r2", "tool_calls": _CALLS},
    {"role": "tool", "content": "second", "tool_call_id": "b"},
    {"role": "tool", "content": "first", "tool_call_id": "a"},
]
_ANSWERED: list[Mapping[str, Any]] = [*_TURNS, {"role": "assistant", "content": "a2"}]
_PROBES: tuple[tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], Mapping[str, Any]], ...] = (
    ([{"role": "user", "content": "hi"}], [], {}),
    ([{"role": "user", "content": "hi"}], [], {"enable_thinking": False}),
    ([{"role": "user", "content": "hi"}], [], {"reasoning_effort": "low"}),
    ([{"role": "user", "content": "hi"}], [_TOOL], {"reasoning_effort": "high", "enable_thinking": True}),
    (_TURNS, [_TOOL, _DEFERRED], {}),
    (_TURNS, [], {"clear_thinking": False}),
    (_ANSWERED, [], {"clear_thinking": True, "add_generation_prompt": False}),
    (_ANSWERED, [], {"enable_thinking": False}),
)
"""Conversations, tools and options; no two versions agree on all of them."""


class ChatFormat:
    """The chat template in use. Safe to use from several threads.

    Attributes:
        version: a key of `RULES`, or None for an unknown template.
        origin: who chose it: a file, the command line, or the default.
        guessed: False if the checkpoint or the command line named a version.

    Raises:
        ConfigError: an unknown version.
        CheckpointError: the template is too large or not Jinja.
    """

    def __init__(self, setting: TemplateSetting) -> None:
        self.origin = setting.origin
        self.guessed = setting.version is None or setting == TemplateSetting()
        self._jinja: JinjaTemplate | None = None
        self._lock = threading.Lock()  # one process renders one conversation at a time
        if setting.source is None:
            if setting.version not in RULES:
                known = ", ".join(RULES)
                raise ConfigError(f'unknown chat template "{setting.version}"; name a Jinja file or one of {known}.')
            self.version: str | None = setting.version
            return
        self.version = DIGESTS.get(hashlib.sha256(setting.source.encode()).hexdigest())
        if self.version is None:
            self._jinja = JinjaTemplate(setting.source, seconds=RENDER_SECONDS, name=setting.origin)
            self.version = _agreeing(self._jinja)
            if self.version is not None:
                self._jinja.close()
                self._jinja = None

    def describe(self) -> str:
        """The version or "jinja", and who chose it, for logs and clients."""
        return f"{self.version or 'jinja'} ({self.origin})"

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        tokenizer: Tokenizer,
        enable_thinking: bool = True,
        clear_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        add_generation_prompt: bool = True,
    ) -> tuple[list[int], bool]:
        """Ids of a prompt, and whether it ends inside a think block. Raises DataError for a conversation that the
        template refuses."""
        options: dict[str, Any] = {
            "enable_thinking": enable_thinking,
            "clear_thinking": clear_thinking,
            "reasoning_effort": reasoning_effort,
            "add_generation_prompt": add_generation_prompt,
        }
        if self.version is not None:
            ids = render_chat(messages, tools, tokenizer=tokenizer, version=self.version, **options).ids
            return ids, add_generation_prompt and opens_thinking(self.version, enable_thinking)
        assert self._jinja is not None
        try:
            with self._lock:
                ids = self._jinja.ids(messages, tools, tokenizer=tokenizer, **options)
        except CheckpointError as error:
            raise DataError(f"The conversation cannot be rendered: {error}") from error
        return ids, add_generation_prompt and _inside_thinking(ids, tokenizer)

    def always_thinks(self) -> bool:
        """Whether thinking cannot be switched off."""
        return self.version is not None and RULES[self.version].always_thinks

    def sorts_results(self) -> bool:
        """Whether the template puts tool results into the order of their calls."""
        return self.version is not None and RULES[self.version].sorts_results

    def efforts(self) -> Sequence[str] | None:
        """Allowed values of `reasoning_effort`, strongest last; may be empty. None for an unknown template."""
        if self.version is None:
            return None
        known = RULES[self.version].efforts
        return () if known is None else (*known, "max")


def recognise(source: str) -> str | None:
    """The version of a template file; None for an unknown one. Raises CheckpointError for text that is not Jinja."""
    return ChatFormat(TemplateSetting(None, source, "the chat template")).version


def _agreeing(template: JinjaTemplate) -> str | None:
    """The version whose rules give the same text as `template` for every probe."""
    candidates, tokenizer = list(RULES), Tokenizer.byte_level()
    for messages, tools, options in _PROBES:
        try:
            text = template.text(messages, tools, **options)
        except (CheckpointError, DataError):
            return None
        candidates = [
            version
            for version in candidates
            if text
            == tokenizer.decode(render_chat(messages, tools, tokenizer=tokenizer, version=version, **options).ids)
        ]
        if not candidates:
            return None
    return candidates[0]


def _inside_thinking(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the last think tag after the last `<|assistant|>` opens a block."""
    opened, closed, turn = (tokenizer.special[name] for name in ("<think>", "</think>", "<|assistant|>"))
    for token in reversed(ids):
        if token in (opened, closed, turn):
            return token == opened
    return False
