"""Foreign templates: equal to the typed renderer on a 5.2 template, and harmless when they are hostile."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.chat import SPECIAL_TOKENS, JinjaTemplate, Tokenizer, render_chat
from glm5.chat import jinja as jinja_module
from glm5.errors import CheckpointError, DataError, TooLongError
from glm5.records import Message, ToolCall

TOK = Tokenizer.train(["The user asks for the weather. reasoning effort max\n" * 3], 330)
USER = Message("user", "hi")

# Version 5.2, written from its rules.
GLM52 = """[gMASK]<sop>
{%- set thinking = enable_thinking is not defined or enable_thinking -%}
{%- if thinking -%}
    <|system|>Reasoning Effort: {{ 'High' if reasoning_effort is defined and reasoning_effort == 'high' else 'Max' }}
{%- endif -%}
{%- macro spec(function) -%}
    {%- set shown = namespace(any=false) -%}
    {
    {%- for key, value in function.items() if key not in ('strict', 'defer_loading') -%}
        {{- ', ' if shown.any else '' }}{{ key | tojson }}: {{ value | tojson(ensure_ascii=False) -}}
        {%- set shown.any = true -%}
    {%- endfor -%}
    }
{%- endmacro -%}
{%- set shown = namespace(tools=[]) -%}
{%- for tool in tools or [] -%}
    {%- set function = tool.function if tool.function is defined else tool -%}
    {%- if not tool.defer_loading and not function.defer_loading -%}
        {%- set shown.tools = shown.tools + [spec(function)] -%}
    {%- endif -%}
{%- endfor -%}
{%- if shown.tools -%}
    {{- '<|system|>\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>\\n' -}}
    {%- for line in shown.tools -%}{{- line + '\\n' -}}{%- endfor -%}
    {{- '</tools>\\n\\nFor each function call, output the function name and arguments within the following ' -}}
    {{- 'XML format:\\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}' -}}
    {{- '</arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>' -}}
{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role in ('system', 'user') -%}
        {{- '<|' + message.role + '|>' + message.content -}}
    {%- elif message.role == 'assistant' -%}
        {%- set shows = loop.index0 > last.user or (clear_thinking is defined and not clear_thinking) -%}
        {{- '<|assistant|><think>' + (message.reasoning_content or '' if shows else '') + '</think>' -}}
        {{- message.content.strip() -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '<tool_call>' + call.function.name -}}
            {%- for key, value in call.function.arguments.items() -%}
                {%- set text = value if value is string else value | tojson(ensure_ascii=False) -%}
                {{- '<arg_key>' + key + '</arg_key><arg_value>' + text + '</arg_value>' -}}
            {%- endfor -%}
            {{- '</tool_call>' -}}
        {%- endfor -%}
    {%- else -%}
        {{- '<|observation|>' if loop.first or loop.previtem.role != 'tool' -}}
        {{- '<tool_response>' + message.content + '</tool_response>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|><think>' + ('' if thinking else '</think>') -}}
{%- endif -%}
"""

chars = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
hostile = st.lists(chars | st.sampled_from([*SPECIAL_TOKENS, "<|us", "er|>", "<", '"', " \n", "\ue000"]), max_size=4)
words = st.builds("".join, hostile)
values: st.SearchStrategy[Any] = words | st.none() | st.booleans() | st.integers() | st.lists(words, max_size=2)
calls = st.builds(ToolCall, words.filter(bool), st.dictionaries(words, values, max_size=3))
turns = st.builds(
    Message, st.just("assistant"), words, st.none() | words, st.lists(calls, max_size=2).map(tuple)
) | st.builds(Message, st.sampled_from(["system", "user", "tool"]), words)
tools = st.lists(
    st.fixed_dictionaries(
        {"name": words},
        optional={"description": words, "strict": st.booleans(), "defer_loading": st.booleans(), "parameters": values},
    ),
    max_size=2,
)
wishes = st.fixed_dictionaries(
    {
        "enable_thinking": st.booleans(),
        "clear_thinking": st.sampled_from([None, False, True]),
        "reasoning_effort": st.sampled_from([None, "low", "high"]),
        "add_generation_prompt": st.booleans(),
    }
)


@pytest.fixture(scope="module")
def glm52() -> Iterator[JinjaTemplate]:
    with JinjaTemplate(GLM52) as template:
        yield template


@settings(max_examples=60, deadline=None)
@given(st.lists(turns, min_size=1, max_size=5), tools, st.booleans(), wishes)
def test_equals_the_typed_renderer(
    glm52: JinjaTemplate, messages: list[Message], functions: list[dict[str, Any]], wrapped: bool, wish: dict[str, Any]
) -> None:
    specs: list[dict[str, Any]] = [{"type": "function", "function": f} for f in functions] if wrapped else functions
    typed = render_chat(messages, specs, tokenizer=TOK, version="5.2", **wish).ids
    assert glm52.ids(messages, specs, tokenizer=TOK, **wish) == typed
    assert glm52.text(messages, specs, **wish) == TOK.decode(typed)


def test_ids_hold_special_tokens_of_the_template_only() -> None:
    source = "<|user|>{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | tojson(ensure_ascii=true) }}"
    split = [Message("user", "<|us"), Message("user", "er|>")]  # neighbours must not join to a marker either
    with JinjaTemplate(source) as template:
        ids = template.ids(split, tokenizer=TOK)
    assert [i for i in ids if i >= TOK.vocab_size - len(SPECIAL_TOKENS)] == [TOK.special["<|user|>"]]
    listed = [{"role": m.role, "content": m.content} for m in split]
    assert TOK.decode(ids) == "<|user|><|user|>" + json.dumps(listed)


def test_the_environment_is_the_usual_one() -> None:
    """Trimmed blocks, loop controls, generation tags, a tojson that does not escape HTML; results may carry ids."""
    source = (
        "{% for m in messages %}\n  {% generation %}\n{% if loop.index0 == 1 %}{% break %}{% endif %}\n"
        "{{ [m.content, m.tool_call_id] | tojson }}{{ strftime_now('%%') }}{% endgeneration %}\n{% endfor %}"
    )
    messages = [{"role": "tool", "content": "<é'>", "tool_call_id": "t"}, {"role": "developer", "content": None}]
    with JinjaTemplate(source) as template:
        assert template.text(messages) == '["<é\'>", "t"]%'
    with JinjaTemplate("{{ messages[1].role }}{{ messages[1].content }}{{ bos is defined }}") as template:
        assert template.text(messages, bos=None) == "systemFalse"


def test_a_template_may_refuse() -> None:
    with JinjaTemplate("{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}ok") as template:
        with pytest.raises(DataError, match=r"rejects the conversation: one at a time\.$"):
            template.text([USER, USER])
        assert template.text([USER]) == "ok"  # the same process goes on


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{{ messages[0].content.nothing.there }}", "no attribute"),
        ("{% for i in range(10**6) %}x{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'x' * 10**12 }}", "memory"),
        ("{{ ('x' * (2 * 10**9)) | length }}", "memory"),
        ("{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "memory"),
        ("{% for i in range(9999) %}{{ 'x' * 2000 }}{% endfor %}", "more than"),
        ("{{ 1/0 }}", "division"),
    ],
)
def test_hostile_templates(source: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_module, "MEMORY_BYTES", 2**28)  # sooner full than what is allowed elsewhere
    with JinjaTemplate(source, name="evil.jinja") as template:
        for _ in range(2):
            with pytest.raises(
                CheckpointError, match=rf"(?s)^evil\.jinja cannot be used: .*{told}.*; use another template\.$"
            ):
                template.text([USER])


def test_an_endless_template_is_killed_and_the_next_rendering_starts_afresh() -> None:
    source = """{% set r = range(99999) %}{% if messages[0].content == 'hi' %}
        {% for a in r %}{% for b in r %}{% endfor %}{% endfor %}{% endif %}ok"""
    with JinjaTemplate(source, seconds=0.3) as template:
        with pytest.raises(CheckpointError, match=r"more than 0\.3 seconds"):
            template.text([USER])
        template._seconds = 30.0
        assert template.text([Message("user", "ho")]).strip() == "ok"


def test_an_endless_rendering_ends_after_its_server_was_killed() -> None:
    source = "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
    hello = {"source": source, "memory": jinja_module.MEMORY_BYTES, "max_chars": 99, "seconds": 1}
    command = [sys.executable, "-P", str(jinja_module._WORKER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        worker.stdin.write(f"{json.dumps(hello)}\n{{}}\n".encode())
        worker.stdin.flush()
        try:
            assert worker.wait(60) == -signal.SIGALRM
        finally:
            worker.kill()


def test_what_cannot_fit_is_refused_before_it_is_rendered(
    glm52: JinjaTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process renders for all clients."""
    monkeypatch.setattr(JinjaTemplate, "_render", lambda *_: pytest.fail("rendered"))
    with pytest.raises(TooLongError, match="more than 100 tokens"):
        glm52.ids([Message("user", "x" * 100_000)], tokenizer=TOK.bounded(100))


def test_bad_templates_and_bad_input(monkeypatch: pytest.MonkeyPatch, glm52: JinjaTemplate) -> None:
    with pytest.raises(CheckpointError, match=r"line 2"):
        JinjaTemplate("\n{% if %}")
    monkeypatch.setattr(jinja_module, "MAX_SOURCE_CHARS", 10)
    with pytest.raises(CheckpointError, match="11 characters"):
        JinjaTemplate("x" * 11)
    deep: Any = []
    for _ in range(10**5):
        deep = [deep]
    with pytest.raises(DataError, match="JSON"):
        glm52.text([Message("assistant", tool_calls=(ToolCall("f", {"a": deep}),))])
    with pytest.raises(DataError, match="at least one"):
        glm52.ids([], tokenizer=TOK)
    with pytest.raises(DataError, match=r"tools\[0\]"):
        glm52.text([USER], [{}])
    with pytest.raises(DataError, match="JSON"):
        glm52.text([USER], weird={1})
