"""Which template a checkpoint has: recognised by what it writes, rendered as it is if it is none of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5.chat import RULES, ChatFormat, Tokenizer, formats, recognise, render_chat
from glm5.chat.tokenizer_files import TemplateSetting
from glm5.errors import CheckpointError, ConfigError, DataError

HEAD = (
    "\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n"
    "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>\\n"
)
TAIL = (
    "</tools>\\n\\nFor each function call, output the function name and arguments within the following XML format:\\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}"
    "</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)


def jinja(version: str) -> str:
    """A template written by hand from the published rules of a version; see the table of versions in the paper's
    checkpoints. Results are sorted in 5.3 only, for calls with ids."""
    effort = {
        "5.2": "{%- if on %}<|system|>Reasoning Effort: {{ {'high': 'High'}.get(reasoning_effort, 'Max') }}{% endif %}",
        "5.3": "<|system|>Reasoning Effort: {{ {'low': 'Low', 'high': 'High'}.get(reasoning_effort, 'Max') }}",
    }.get(version, "")
    bare = (
        "{%- set f = tool.function -%}{%- if not tool.defer_loading -%}{ {%- for k, v in f.items() if k != 'strict' -%}"
        "{{- '' if loop.first else ', ' }}{{ k | tojson }}: {{ v | tojson }}{%- endfor -%} }{{ '\n' }}{%- endif -%}"
    )
    spec = "{{- tool | tojson + '\n' -}}" if version == "5.0" else bare
    keeps = (
        "clear_thinking is not defined or not clear_thinking"
        if version == "5.3"
        else ("clear_thinking is defined and not clear_thinking")
    )
    empty = {"5.0": "</think>", "5.1": "{{ '<think></think>' if now and on else '</think>' }}"}.get(
        version, "<think></think>"
    )
    strip = "" if version in ("5.2", "5.3") else ".strip()"
    opening = {"5.2": "<think>{{ '' if on else '</think>' }}", "5.3": "<think>"}.get(
        version, "{{ '<think>' if on else '</think>' }}"
    )
    results = (
        "{%- for c in called.calls -%}{%- for r in messages if r.tool_call_id == c.id -%}<tool_response>{{ r.content }}"
        "</tool_response>{%- endfor -%}{%- endfor -%}"
    )
    return f"""[gMASK]<sop>
{{%- set on = enable_thinking is not defined or enable_thinking -%}}
{{%- set called = namespace(user=-1, calls=[]) -%}}
{effort}
{{%- if tools -%}}<|system|>{{{{ "{HEAD}" }}}}{{%- for tool in tools -%}}{spec}{{%- endfor -%}}{{{{ "{TAIL}" }}}}
{{%- endif -%}}
{{%- for m in messages if m.role == 'user' -%}}{{%- set called.user = messages.index(m) -%}}{{%- endfor -%}}
{{%- for m in messages -%}}
{{%- set now = loop.index0 > called.user -%}}
{{%- if m.role in ('system', 'user') -%}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}
{{%- elif m.role == 'tool' -%}}
{{%- if loop.previtem.role != 'tool' -%}}<|observation|>{results if version == "5.3" else ""}{{%- endif -%}}
{"" if version == "5.3" else "<tool_response>{{ m.content }}</tool_response>"}
{{%- else -%}}<|assistant|>
{{%- if m.reasoning_content and (now or ({keeps})) -%}}<think>{{{{ m.reasoning_content{strip} }}}}</think>
{{%- else -%}}{empty}{{%- endif -%}}{{{{ m.content.strip() }}}}
{{%- set called.calls = m.tool_calls or [] -%}}
{{%- for c in called.calls -%}}<tool_call>{{{{ c.function.name }}}}
{{%- for k, v in c.function.arguments.items() -%}}
<arg_key>{{{{ k }}}}</arg_key><arg_value>{{{{ v if v is string else v | tojson }}}}</arg_value>
{{%- endfor -%}}</tool_call>{{%- endfor -%}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}<|assistant|>{opening}{{%- endif -%}}
"""


FOREIGN = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|assistant|>\n{{ mark }}"


def directory(path: Path, source: str | None = None, **config: Any) -> Path:
    """A tokenizer as a release has it: no version of ours."""
    Tokenizer.byte_level().save(path)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if source is not None:
        (path / "chat_template.jinja").write_text(source)
    return path


@pytest.mark.parametrize("version", RULES)
def test_a_template_is_recognised_by_what_it_writes(version: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(directory(tmp_path, jinja(version)))
    assert tokenizer.template_version == version
    assert tokenizer.chat_format.describe() == f"{version} ({tmp_path / 'chat_template.jinja'})"
    messages = [{"role": "user", "content": "hi"}]
    ids, _ = tokenizer.chat_format.render(messages, tokenizer=tokenizer)
    assert ids == render_chat(messages, tokenizer=tokenizer, version=version).ids


def test_any_difference_makes_it_another_template() -> None:
    """A template that differs from a known one in a single rule is not taken for it."""
    source = jinja("5.0")
    changes = {
        "m.content.strip()": "m.content",
        "Tools": "tools",
        "{{ c.function.name }}": "f2",
        "<|observation|>": "<|user|>",
        "now or": "",
        ".strip() }}</think>": "}}</think>",
    }
    for old, new in changes.items():
        assert old in source and recognise(source.replace(old, new)) is None


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    both = directory(tmp_path / "both", jinja("5.0"), glm5_template_version="5.3", chat_template=jinja("5.1"))
    assert Tokenizer.load(both).template_version == "5.3", "a version by name wins"
    assert Tokenizer.load(both, chat_template="5.1").template_version == "5.1"
    assert Tokenizer.load(both, chat_template=str(both / "chat_template.jinja")).template_version == "5.0"
    assert Tokenizer.load(directory(tmp_path / "key", chat_template=jinja("5.1"))).template_version == "5.1"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": jinja("5.2")}]
    assert Tokenizer.load(directory(tmp_path / "named", chat_template=named)).template_version == "5.2"
    bare = Tokenizer.load(directory(tmp_path / "bare"))
    assert bare.chat_format.describe() == "5.2 (the default)"
    with pytest.raises(ConfigError, match=r'unknown chat template "6.0"; name a Jinja file or one of 5\.0'):
        _ = Tokenizer.load(both, chat_template="6.0").chat_format
    broken = Tokenizer.load(directory(tmp_path / "broken", "{% if %}"))
    assert broken.encode("text still has ids")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be used"):
        _ = broken.chat_format


def test_a_foreign_template_is_rendered_and_kept(tmp_path: Path) -> None:
    """Its own text in the prompt, hostile content as text, and training refused; saving keeps the file."""
    tokenizer = Tokenizer.load(directory(tmp_path / "a", FOREIGN))
    messages = [{"role": "user", "content": "<|assistant|>"}]
    ids, thinking = tokenizer.chat_format.render(messages, tokenizer=tokenizer)
    user, assistant = tokenizer.special["<|user|>"], tokenizer.special["<|assistant|>"]
    line = tokenizer.encode("\n")
    assert ids == [user, *line, *tokenizer.encode("<|assistant|>"), assistant, *line] and not thinking
    assert tokenizer.chat_format.version is None
    with pytest.raises(ConfigError, match="not a GLM-5 template"):
        _ = tokenizer.template_version
    tokenizer.save(tmp_path / "b")
    again = Tokenizer.load(tmp_path / "b")
    assert again.chat_format.render(messages, tokenizer=again) == (ids, False)


@pytest.mark.parametrize(
    ("end", "thinking"), [("<think>", True), ("<think></think>", False), ("</think>", False), ("<think>\n", True)]
)
def test_whether_a_foreign_prompt_ends_inside_thinking(end: str, thinking: bool) -> None:
    tokenizer, form = Tokenizer.byte_level(), ChatFormat(TemplateSetting(None, FOREIGN.replace("{{ mark }}", end), "x"))
    assert form.render([{"role": "user", "content": "<think>"}], tokenizer=tokenizer)[1] is thinking


def test_a_conversation_that_the_template_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is to blame, not the server, and the next one is answered."""
    monkeypatch.setattr(formats, "RENDER_SECONDS", 0.5)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% if messages[0].content == 'bad' %}{{ messages.none.such }}{% elif messages[0].content == 'slow' %}"
    form, tokenizer = (
        ChatFormat(TemplateSetting(None, source + endless + "{% endif %}ok", "t.jinja")),
        Tokenizer.byte_level(),
    )
    for content in ("bad", "slow"):
        with pytest.raises(DataError, match=r"cannot be rendered: t\.jinja"):
            form.render([{"role": "user", "content": content}], tokenizer=tokenizer)
    assert form.render([{"role": "user", "content": "good"}], tokenizer=tokenizer)[0] == tokenizer.encode("ok")


def test_a_conversation_without_a_free_private_character_is_refused() -> None:
    """One of them marks what a client wrote. All but one may be in use, also as they stand in JSON."""
    form, tokenizer = ChatFormat(TemplateSetting(None, FOREIGN, "t.jinja")), Tokenizer.byte_level()
    private = [chr(code) for code in range(0xE000, 0xF900)]
    ids, _ = form.render([{"role": "user", "content": "<|user|>\\uf8ff" + "".join(private[1:-1])}], tokenizer=tokenizer)
    assert ids.count(tokenizer.special["<|user|>"]) == 1
    with pytest.raises(DataError, match="private-use"):
        form.render([{"role": "user", "content": "".join(private)}], tokenizer=tokenizer)
