"""Agents that edit, fork, retry and talk at once, in every dialect. What is trained is what the engine sampled."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from glm5.rollout.history import CAUSES, History, Node
from glm5.rollout.samples import summary
from glm5.rollout.store import Store
from tests.rollout.conftest import Open, Setting

TOOLS = [
    {"name": name, "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
    for name in ("f", "g")
]
ANSWERS = (
    "a plain answer<|user|>", "  spaces around \n<|user|>", "cut at the limit " * 9, "été 日本<|user|>", "<|user|>",
    "wrong end<|endoftext|>", "wrong end<|observation|>", "stray </think> and <tool_call> broken<|user|>",
    "<tool_call>f<arg_key>x</arg_key><arg_value>a b</arg_value><arg_key>y</arg_key><arg_value>2</arg_value></tool_call>"
    "<|observation|>",
    "both <tool_call>f<arg_key>x</arg_key><arg_value>é</arg_value></tool_call><tool_call>g</tool_call><|observation|>",
)  # fmt: skip
Message = dict[str, Any]


class Agent:
    """One conversation, kept as chat messages, with a taste for trouble."""

    def __init__(self, setting: Setting, http: Any, draw: random.Random) -> None:
        self.setting, self.http, self.draw = setting, http, draw
        self.turns: list[Message] = [{"role": "user", "content": f"task {draw.randint(0, 1)}"}]
        if draw.random() < 0.5:
            self.turns.insert(0, {"role": "system", "content": "you are"})
        self.dialect = draw.choice(("chat/completions", "responses", "messages"))
        self.thinking = draw.random() < 0.5

    async def play(self, turns: int) -> None:
        for _ in range(turns):
            said = await self._ask()
            if said is None:
                return
            self.turns.append(said)
            calls = said.get("tool_calls") or []
            self.turns += [
                {"role": "tool", "tool_call_id": call["id"], "content": f"r{i}"} for i, call in enumerate(calls)
            ]
            if not calls or self.draw.random() < 0.2:
                self.turns.append({"role": "user", "content": self.draw.choice(("go on", "", "日本", "<|user|>"))})
            self._edit()
            if self.draw.random() < 0.1:  # a sub-agent, or the same agent started again from here
                other = Agent(self.setting, self.http, self.draw)
                other.turns = other.turns if self.draw.random() < 0.5 else [*self.turns]
                await asyncio.gather(other.play(2), asyncio.sleep(0))

    def _edit(self) -> None:
        at = self.draw.randrange(len(self.turns))
        turn, kind = self.turns[at], self.draw.randint(0, 12)
        if kind == 0 and turn["role"] == "assistant":
            turn["content"] = (turn["content"] or "") + " edited"
        elif kind == 1 and turn["role"] == "assistant":
            turn["content"] = f" {turn['content'] or ''}\n"
        elif kind == 2 and turn.get("tool_calls"):
            turn["tool_calls"][0]["function"]["arguments"] = '{"x": "other"}'
        elif kind == 3 and turn.get("tool_calls"):
            given = json.loads(turn["tool_calls"][0]["function"]["arguments"])
            turn["tool_calls"][0]["function"]["arguments"] = json.dumps(dict(reversed(given.items())), indent=1)
        elif kind == 4 and turn["role"] == "system":
            turn["content"] += "!"
        elif kind == 5:
            self.turns = [self.turns[0], {"role": "user", "content": "summary of all"}]
        elif kind == 6:
            turn.pop("reasoning_content", None)
        elif kind == 7 and turn.get("reasoning_content"):
            turn["reasoning_content"] = "not what was thought"
        elif kind == 8:
            self.thinking = not self.thinking
        elif kind == 9:
            self.dialect = self.draw.choice(("chat/completions", "responses", "messages"))

    async def _ask(self) -> Message | None:
        make = {"chat/completions": self._chat, "responses": self._responses, "messages": self._messages}[self.dialect]
        raw = json.dumps(
            make() | {"stream": self.draw.random() < 0.3, "metadata": {"n": str(self.draw.randint(0, 99))}}
        )
        asked = [self.http.post(self.dialect, content=raw) for _ in range(self.draw.choice((1, 1, 1, 2, 3)))]
        answers = await asyncio.gather(*asked)
        if answers[0].status_code == 400:  # a template that cannot take it, a context that is full
            return None
        assert {answer.status_code for answer in answers} == {200}, [answer.text[:300] for answer in answers]
        return READ[self.dialect](answers[0].text)

    def _chat(self) -> dict[str, Any]:
        turns = [{k: v for k, v in turn.items() if k != "raw"} for turn in self.turns]
        tools = [{"type": "function", "function": tool} for tool in TOOLS]
        return {"model": "m", "messages": turns, "tools": tools, "max_tokens": 80, "enable_thinking": self.thinking}

    def _responses(self) -> dict[str, Any]:
        items: list[Message] = []
        for turn in self.turns:
            if turn["role"] == "tool":
                items.append(
                    {"type": "function_call_output", "call_id": turn["tool_call_id"], "output": turn["content"]}
                )
                continue
            if turn.get("reasoning_content"):
                thought = [{"type": "reasoning_text", "text": turn["reasoning_content"]}]
                items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": thought})
            if turn.get("content") or turn["role"] != "assistant" or not turn.get("tool_calls"):
                items.append({"role": turn["role"], "content": turn.get("content") or ""})
            for call in turn.get("tool_calls") or []:
                items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
        tools = [{"type": "function", **tool} for tool in TOOLS]
        kwargs = {"enable_thinking": self.thinking}
        return {"input": items, "tools": tools, "max_output_tokens": 80, "chat_template_kwargs": kwargs}

    def _messages(self) -> dict[str, Any]:
        turns: list[Message] = []
        for turn in self.turns:
            if turn["role"] == "system":
                continue
            if turn["role"] == "tool":
                block = {"type": "tool_result", "tool_use_id": turn["tool_call_id"], "content": turn["content"]}
                if turns and turns[-1]["role"] == "user":
                    turns[-1]["content"].append(block)
                else:
                    turns.append({"role": "user", "content": [block]})
                continue
            content: list[Message] = []
            if turn.get("reasoning_content"):
                content.append({"type": "thinking", "thinking": turn["reasoning_content"], "signature": "s"})
            if turn.get("content"):
                content.append({"type": "text", "text": turn["content"]})
            for call in turn.get("tool_calls") or []:
                function = call["function"]
                block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
                content.append(block | {"input": json.loads(function["arguments"])})
            turns.append({"role": turn["role"], "content": content})
        tools = [{"name": tool["name"], "description": "d", "input_schema": tool["parameters"]} for tool in TOOLS]
        system = "".join(turn["content"] for turn in self.turns if turn["role"] == "system")
        kind = {"type": "enabled", "budget_tokens": 1024} if self.thinking else {"type": "disabled"}
        return {"model": "m", "system": system, "messages": turns, "tools": tools, "max_tokens": 80, "thinking": kind}


def events(text: str) -> list[dict[str, Any]]:
    found = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(one) for one in found if one != "[DONE]"]


def read_chat(text: str) -> Message:
    if not text.startswith("data:"):
        message: Message = json.loads(text)["choices"][0]["message"]
    else:
        message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
        for delta in [choice["delta"] for one in events(text) for choice in one["choices"]]:
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    message["tool_calls"].append({**call, "function": {**call["function"]}})
                else:
                    message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    kept = {k: message[k] for k in ("role", "content", "reasoning_content", "tool_calls") if message.get(k)}
    return {"content": "", **kept}


def read_responses(text: str) -> Message:
    whole = json.loads(text) if text.startswith("{") else events(text)[-1]["response"]
    message: Message = {"role": "assistant", "content": ""}
    for item in whole["output"]:
        if item["type"] == "reasoning":
            message["reasoning_content"] = item["content"][0]["text"]
        elif item["type"] == "message":
            message["content"] = item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            message.setdefault("tool_calls", []).append(
                {"id": item["call_id"], "type": "function", "function": function}
            )
    return message


def read_messages(text: str) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    if text.startswith("{"):
        blocks = json.loads(text)["content"]
    else:
        blocks = []
        for one in events(text):
            if one["type"] == "content_block_start":
                blocks.append({**one["content_block"], "partial": ""})
            elif one["type"] == "content_block_delta":
                delta = one["delta"]
                for name in ("text", "thinking"):
                    blocks[-1][name] = blocks[-1].get(name, "") + delta.get(name, "")
                blocks[-1]["partial"] += delta.get("partial_json", "")
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["partial"] or "{}")
    for block in blocks:
        if block["type"] == "thinking":
            message["reasoning_content"] = block["thinking"]
        elif block["type"] == "text":
            message["content"] += block["text"]
        else:
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            message.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
    return message


READ = {"chat/completions": read_chat, "responses": read_responses, "messages": read_messages}


def trained(found: dict[str, Any]) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompt and ids of each trained stretch of the rows."""
    parts: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for row in found["samples"]:
        ids, mask, at = row["ids"], row["loss_mask"], 0
        assert len(ids) == len(mask) == len(row["rollout_logprobs"]) == len(row["weight_versions"])
        while at < len(ids):
            end = at
            while end < len(ids) and mask[end]:
                end += 1
            if end > at:
                parts[tuple(ids[:at]), tuple(ids[at:end])] += 1
            at = max(end, at + 1)
    return parts


def shuffled(nodes: list[Node], draw: random.Random) -> list[Node]:
    """The same turns as another order of arrival would have left them, parents before children."""
    copies: dict[int, Node] = {}
    waiting = draw.sample(nodes, len(nodes))
    history = History()
    while waiting:
        for node in list(waiting):
            if node.parent is None or id(node.parent) in copies:
                parent = None if node.parent is None else copies[id(node.parent)]
                copy = Node(parent, node.given, node.output, node.logprobs, node.versions, node.tail, node.reply,
                            node.head, node.cause)  # fmt: skip
                copies[id(node)] = copy
                history.add(copy)
                waiting.remove(node)
    return history.nodes


async def rounds(opened: Open, seed: int, sessions: int, path: Path) -> Counter[str]:
    """Play some sessions at once and check all that was promised. Returns the number of turns and forks by cause."""
    draw, causes = random.Random(seed), Counter[str]()

    def script(prompt: str) -> str:
        thought = "" if prompt.endswith("</think>") else "some thought</think>" if draw.random() < 0.9 else "unclosed"
        return thought + draw.choice(ANSWERS)

    async with opened(script, seed=seed) as setting:
        made = [await setting.session(group=seed) for _ in range(sessions)]
        agents = [
            Agent(setting, http, random.Random(f"{seed} {i} {j}")) for i, (_, http) in enumerate(made) for j in (0, 1)
        ]
        await asyncio.gather(*(agent.play(6) for agent in agents))
        everything: Counter[Any] = Counter()
        for name, _ in made:
            found = await setting.samples(name)
            assert found["tokens_lost"] == 0 and found["forks"].keys() <= set(CAUSES)
            everything += trained(found)
            causes.update(found["forks"] | {"turns": found["turns"], "rows": len(found["samples"])})
            nodes = (await setting.gateway.session(name)).history.nodes
            for again in (setting.gateway.store.turns(name)[0].nodes, shuffled(nodes, draw)):
                assert summary(again)["samples"] == found["samples"]
        assert everything == Counter(setting.engine.log)
    with Store(path) as store:
        assert sum(len(store.turns(row.id)[0].nodes) for row in store.sessions()) == causes["turns"]
    return causes


def test_what_is_trained_is_what_was_sampled(opened: Open, tmp_path: Path) -> None:
    found = asyncio.run(rounds(opened, 1, 6, tmp_path / "store.db"))
    assert found["turns"] > 40 and found["turns"] > found["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_turns(opened: Open, tmp_path: Path, seed: int) -> None:
    found = asyncio.run(rounds(opened, 100 + seed, 50, tmp_path / "store.db"))
    print(dict(found))
    assert found["turns"] > 500
