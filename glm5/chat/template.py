"""Messages to token ids and a loss mask, in the chat formats of GLM-5, 5.1, 5.2 and 5.3 (§3.1 of the paper).

Tokenisation is piecewise. Each of these is one piece, encoded alone as plain text: the content of a message, its
reasoning, a tool's name, an argument's key, an argument's value, a tool result, the effort line, and the tool block up
to its last line. Special tokens between pieces are inserted as ids. So text of users and tools can never become a
special token. If no message spells out a special token, the ids equal those of tokenising the whole rendered text. SFT
rows, prompts and the continuations of agent loops all use the code below: SFT trains on the same ids as inference.

GLM has no end-of-turn token. The role marker of the next turn ends an assistant turn, and the model samples it last:
`<|user|>` after an answer and `<|observation|>` after tool calls.

The thinking modes of §3.1: every version has interleaved thinking, because an assistant turn between tool results has
its own think block. Preserved thinking is `clear_thinking=False`. Turn-level thinking is `enable_thinking` of each
request, and for SFT `glm5.chat.messages.split_by_thinking`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glm5.chat.messages import canonical, check_tools, function_of, normalise
from glm5.chat.tokenizer import Tokenizer
from glm5.errors import ConfigError, DataError
from glm5.records import Message

# Wire constants: the released weights were trained on exactly these bytes. The format line is trusted text, the only
# one in which strings of special tokens are encoded as special ids.
_TOOLS_HEAD = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_TAIL = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
)
_TOOLS_FORMAT = (
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)


@dataclass(frozen=True)
class TemplateRules:
    """Differences between template versions. `card` gives the source of each."""

    card: str
    efforts: Mapping[str, str] | None  # `reasoning_effort` to the word in the effort line, default "Max"; None: no line
    always_thinks: bool  # `enable_thinking=False` is ignored
    empty_think: Literal["never", "current", "always"]  # which turns without shown reasoning get `<think></think>`
    keeps_reasoning: bool  # default if `clear_thinking` is None, for reasoning before the last user message
    strips_reasoning: bool
    unwraps_tools: bool  # pass the function object alone, without serving hints, not the object as given
    sorts_results: bool  # sort tool results into the order of their calls if all ids are known


_RENDERED = "Agrees with known renderings of the released template: plain, thinking off, several turns, tools."
_DESCRIBED = "Unverified: follows a description of the released template and was never compared with it."
_DESCRIBED_5_3 = f"{_DESCRIBED} A plain dialogue of two turns agrees with a known rendering."

RULES: Mapping[str, TemplateRules] = {
    "5.0": TemplateRules(_RENDERED, None, False, "never", False, True, False, False),
    "5.1": TemplateRules(_DESCRIBED, None, False, "current", False, True, True, False),
    "5.2": TemplateRules(_RENDERED, {"high": "High"}, False, "always", False, False, True, False),
    "5.3": TemplateRules(_DESCRIBED_5_3, {"low": "Low", "high": "High"}, True, "always", True, False, True, True),
}


@dataclass(frozen=True)
class Rendered:
    """Token ids and a loss mask of the same length: True for tokens that the policy must produce."""

    ids: list[int]
    loss_mask: list[bool]


class _Row:
    """Ids and mask under construction."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.mask: list[bool] = []

    def add(self, ids: Sequence[int], train: bool) -> None:
        self.ids += ids
        self.mask += [train] * len(ids)

    def mark(self, *names: str, train: bool = False) -> None:
        self.add([self.tokenizer.special[name] for name in names], train)

    def text(self, text: str, train: bool = False) -> None:
        self.add(self.tokenizer.encode(text), train)


def render_chat(
    messages: Sequence[Message | Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    tokenizer: Tokenizer,
    version: str | None = None,
    enable_thinking: bool = True,
    clear_thinking: bool | None = None,
    reasoning_effort: str | None = None,
    add_generation_prompt: bool = True,
    close_last: bool = False,
) -> Rendered:
    """Render a conversation.

    The mask is True for what the model must produce in each assistant turn with `train=True`: reasoning, `</think>`,
    content, tool calls, and the marker that closes the turn, unless it is the wrong one for such a turn. The mask is
    False for the prompt: `<|assistant|>`, `<think>`, a `</think>` that a generation prompt contains (of this version
    and mode, or a lone one), and a `</think>` after which the template removed reasoning (training on it would teach
    the model not to think).

    Args:
        tools: tool specifications in OpenAI function format.
        version: a key of `RULES`; None takes the tokenizer's.
        clear_thinking: True drops and False keeps reasoning before the last user message; None takes the version's
            default. Agents want False: their prompts then only grow.
        close_last: append the marker that ends a final assistant turn. SFT needs it, with no generation prompt.

    Raises:
        DataError: no messages, a malformed message or tool, or `close_last` together with a generation prompt.
        ConfigError: unknown version.
    """
    rules = _rules(version, tokenizer)
    if close_last and add_generation_prompt:
        raise DataError("close_last ends the last turn and add_generation_prompt opens a new one; give one of them.")
    thinking = enable_thinking or rules.always_thinks
    turns = canonical(messages, rules.sorts_results)
    row = _Row(tokenizer)
    row.mark("[gMASK]", "<sop>")
    _effort_line(row, rules, thinking, reasoning_effort)
    _tool_block(row, tools or (), rules)
    last_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
    keep = rules.keeps_reasoning if clear_thinking is None else not clear_thinking
    for i, turn in enumerate(turns):
        previous = turns[i - 1] if i else None
        if turn.role in ("system", "user"):
            row.mark(f"<|{turn.role}|>", train=turn.role == "user" and _closes(previous, calls=False))
            row.text(turn.content)
        elif turn.role == "assistant":
            _assistant_turn(row, turn, rules, thinking, current=i > last_user, keep=keep)
        else:
            if previous is None or previous.role != "tool":
                row.mark("<|observation|>", train=_closes(previous, calls=True))
            _tool_response(row, turn)
    if add_generation_prompt:
        _generation_prompt(row, rules, thinking)
    elif close_last and turns[-1].role == "assistant":
        row.mark("<|observation|>" if turns[-1].tool_calls else "<|user|>", train=turns[-1].train)
    return Rendered(row.ids, row.mask)


def render_tail(
    messages: Sequence[Message | Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    version: str | None = None,
    enable_thinking: bool = True,
    after: int | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Ids of the messages that follow a sampled assistant turn, up to and including the next generation prompt.

    `after` is the last sampled id; if it is the role marker of the first message, the marker is not repeated. Appending
    these ids to prompt and output gives the ids of `render_chat(..., clear_thinking=False)` without tokenising sampled
    text a second time (§4.1). Tool results must come in the order of the calls.

    Raises DataError for a sampled turn that ended with another marker than the first message has.
    """
    rules = _rules(version, tokenizer)
    thinking = enable_thinking or rules.always_thinks
    turns = [normalise(message, f"messages[{i}]") for i, message in enumerate(messages)]
    row = _Row(tokenizer)
    for i, turn in enumerate(turns):
        marker = _MARKERS[turn.role]
        repeated = turn.role == "tool" and i > 0 and turns[i - 1].role == "tool"
        if i == 0 and after is not None and after in tokenizer.stop_token_ids:
            if after != tokenizer.special[marker]:
                sampled = tokenizer.decode([after])
                raise DataError(f'messages[0] has the role "{turn.role}", which cannot follow the sampled {sampled}.')
            repeated = True
        if turn.role == "assistant":  # writes its own marker
            _assistant_turn(row, turn, rules, thinking, current=True, keep=True)
            continue
        if not repeated:
            row.mark(marker)
        if turn.role == "tool":
            _tool_response(row, turn)
        else:
            row.text(turn.content)
    if add_generation_prompt:
        _generation_prompt(row, rules, thinking)
    return row.ids


_MARKERS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>", "tool": "<|observation|>"}


def opens_thinking(version: str, enable_thinking: bool = True) -> bool:
    """Whether the generation prompt ends inside `<think>`; this is the `thinking` of `ChatParser`."""
    return _known_rules(version).always_thinks or enable_thinking


def appends_only(version: str, *, enable_thinking: bool = True, clear_thinking: bool | None = None) -> bool:
    """Whether a longer conversation, rendered with the same options, always starts with the ids of the shorter one.

    Preserved thinking (`clear_thinking=False`, the default of 5.3) appends only: caches stay valid, and one SFT row
    holds the prompts of all its turns. Otherwise a new user message removes the reasoning of earlier turns. In 5.1 it
    also rewrites `<think></think>` of earlier turns without reasoning to `</think>`, even with preserved thinking. Two
    limits remain. 5.3 sorts tool results: results of one run must come together or in the order of their calls. And a
    generation prompt is a prefix only of a turn in its own mode: 5.0 and 5.1 render a turn without reasoning as one not
    asked to think, and `enable_thinking=False` is for turns without reasoning.
    """
    rules = _known_rules(version)
    keep = rules.keeps_reasoning if clear_thinking is None else not clear_thinking
    return keep and not (rules.empty_think == "current" and (enable_thinking or rules.always_thinks))


def _known_rules(version: str) -> TemplateRules:
    if version not in RULES:
        raise ConfigError(f'unknown chat template version "{version}"; choose one of {", ".join(RULES)}.')
    return RULES[version]


def _rules(version: str | None, tokenizer: Tokenizer) -> TemplateRules:
    return _known_rules(tokenizer.template_version if version is None else version)


def _generation_prompt(row: _Row, rules: TemplateRules, thinking: bool) -> None:
    row.mark("<|assistant|>")
    if thinking or rules.empty_think == "always":
        row.mark("<think>")
    if not thinking:
        row.mark("</think>")


def _effort_line(row: _Row, rules: TemplateRules, thinking: bool, effort: str | None) -> None:
    if rules.efforts is not None and thinking:
        row.mark("<|system|>")
        row.text("Reasoning Effort: " + rules.efforts.get(effort or "", "Max"))


def _closes(previous: Message | None, calls: bool) -> bool:
    """Whether the next marker correctly ends a trained turn: `<|observation|>` after calls, otherwise `<|user|>`."""
    return (
        previous is not None and previous.role == "assistant" and previous.train and bool(previous.tool_calls) == calls
    )


def _assistant_turn(
    row: _Row, turn: Message, rules: TemplateRules, thinking: bool, *, current: bool, keep: bool
) -> None:
    row.mark("<|assistant|>")
    if turn.reasoning and (current or keep):
        row.mark("<think>")
        row.text(turn.reasoning.strip() if rules.strips_reasoning else turn.reasoning, turn.train)
        row.mark("</think>", train=turn.train)
    elif rules.empty_think == "always" or (rules.empty_think == "current" and current and thinking):
        row.mark("<think>")
        row.mark("</think>", train=turn.train and thinking and not turn.reasoning)
    else:
        row.mark("</think>")
    row.text(turn.content.strip(), turn.train)
    for call in turn.tool_calls:
        row.mark("<tool_call>", train=turn.train)
        row.text(call.name, turn.train)
        for key, value in call.arguments.items():
            row.mark("<arg_key>", train=turn.train)
            row.text(key, turn.train)
            row.mark("</arg_key>", "<arg_value>", train=turn.train)
            row.text(value if isinstance(value, str) else _json(value, f"argument {key} of {call.name}"), turn.train)
            row.mark("</arg_value>", train=turn.train)
        row.mark("</tool_call>", train=turn.train)


def _tool_response(row: _Row, result: Message) -> None:
    row.mark("<tool_response>")
    row.text(result.content)
    row.mark("</tool_response>")


def _tool_block(row: _Row, tools: Sequence[Mapping[str, Any]], rules: TemplateRules) -> None:
    lines = []
    check_tools(tools)
    for i, tool in enumerate(tools):
        if not rules.unwraps_tools:
            lines.append(_json(tool, f"tools[{i}]") + "\n")
        elif not (tool.get("defer_loading") or function_of(tool).get("defer_loading")):
            spec = {k: v for k, v in function_of(tool).items() if k not in ("defer_loading", "strict")}
            lines.append(_json(spec, f"tools[{i}]") + "\n")
    if lines:
        row.mark("<|system|>")
        row.text(_TOOLS_HEAD + "".join(lines) + _TOOLS_TAIL)
        row.add(row.tokenizer.encode(_TOOLS_FORMAT, allow_special=True), train=False)


def _json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where} cannot be written as JSON: {error}.") from error
