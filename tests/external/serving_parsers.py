"""Runs the reasoning and tool parsers of SGLang or vLLM over texts, without the packages for GPUs that they import:

    python serving_parsers.py sglang|vllm FOLDER CASES RESULTS

FOLDER has their unpacked files. A case has `tools`, `thinking` and `parts`, the text as it streams; a result has
`reasoning`, `content` and `calls` (name, arguments) of the whole text and of the stream.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

# What the parsers import and never call, or only for log lines and limits.
ABSENT = {
    "sglang": "IPython aiohttp numpy psutil pybase64 requests torch tqdm transformers xgrammar",
    "vllm": "aiohttp numpy openai_harmony psutil torch transformers vllm.config vllm.entrypoints.mcp "
    "vllm.entrypoints.openai.responses vllm.envs vllm.logger vllm.logprobs vllm.outputs vllm.parser.metrics "
    "vllm.renderers vllm.sampling_params vllm.tokenizers vllm.tool_parsers.structural_tag_registry vllm.utils xgrammar",
}
# Packages whose __init__ imports everything.
SHELLS = {
    "sglang": ["", "srt", "srt.function_call", "srt.entrypoints", "srt.utils"],
    "vllm": ["", "parser", "tool_parsers", "reasoning"],
}


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for modules that are not there."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(name == absent or name.startswith(f"{absent}.") for absent in self.names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name.isupper():
                return 1 << 20
            return Any if name.lstrip("_")[0].isupper() else MagicMock(name=name, return_value="")

        module.__dict__["__getattr__"] = attribute


def prepare(which: str, folder: Path, absent: list[str], shells: list[str]) -> None:
    """Let the modules of a server's package be imported without what is `absent`, and without running the `__init__` of
    the packages in `shells`."""
    sys.meta_path.insert(0, Absent(absent))
    for inner in shells:
        name = ".".join(filter(None, (which, inner)))
        shell = types.ModuleType(name)
        shell.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = shell


def sglang(case: dict[str, Any]) -> dict[str, Any]:
    protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    detectors = importlib.import_module("sglang.srt.function_call.glm47_moe_detector")
    reasoning = importlib.import_module("sglang.srt.parser.reasoning_parser")
    tools = [protocol.Tool.model_validate(tool) for tool in case["tools"]]

    def run(parts: list[str], streamed: bool) -> dict[str, Any]:
        thinker = reasoning.ReasoningParser("glm45", stream_reasoning=True, force_reasoning=case["thinking"])
        detector = detectors.Glm47MoeDetector()
        thoughts, content, calls = "", "", {}
        for part in parts + [""] * streamed * 4:  # it reads one call per piece
            found, text = (thinker.parse_stream_chunk if streamed else thinker.parse_non_stream)(part)
            thoughts += found or ""
            parse = detector.parse_streaming_increment if streamed else detector.detect_and_parse
            got = parse(text or "", tools)
            content += got.normal_text or ""
            for number, call in enumerate(got.calls):
                entry = calls.setdefault(call.tool_index if streamed else number, ["", ""])
                entry[0] += call.name or ""
                entry[1] += call.parameters or ""
        return {"reasoning": thoughts, "content": content, "calls": list(calls.values())}

    return {"whole": run(["".join(case["parts"])], False), "stream": run(case["parts"], True)}


class NoTokenizer:
    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {}


def vllm(case: dict[str, Any]) -> dict[str, Any]:
    parsers = importlib.import_module("vllm.parser.glm47_moe")
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    tools = [protocol.ChatCompletionToolsParam.model_validate(tool) for tool in case["tools"]]
    request = types.SimpleNamespace(
        tools=tools, tool_choice="auto", include_reasoning=True, messages=[], parallel_tool_calls=True
    )
    kwargs = {"chat_template_kwargs": {"enable_thinking": case["thinking"]}}

    def parser() -> Any:
        return parsers.Glm47MoeParser(NoTokenizer(), tools, **kwargs)

    thoughts, content, calls = parser().parse("".join(case["parts"]), request, enable_auto_tools=True)
    whole = {
        "reasoning": thoughts or "",
        "content": content or "",
        "calls": [[c.name, c.arguments] for c in calls or []],
    }
    stream: dict[str, Any] = {"reasoning": "", "content": ""}
    found: dict[int, list[str]] = {}
    one = parser()
    for number, part in enumerate(case["parts"], 1):
        delta = one.parse_delta(part, [], request, finished=number == len(case["parts"]))
        for key in stream:
            stream[key] += (getattr(delta, key, None) or "") if delta else ""
        for call in (delta.tool_calls or []) if delta else []:
            entry = found.setdefault(call.index, ["", ""])
            entry[0] += (call.function.name or "") if call.function else ""
            entry[1] += (call.function.arguments or "") if call.function else ""
    return {"whole": whole, "stream": stream | {"calls": list(found.values())}}


if __name__ == "__main__":
    which, folder, source, target = sys.argv[1:]
    prepare(which, Path(folder), ABSENT[which].split(), SHELLS[which])
    read = {"sglang": sglang, "vllm": vllm}[which]
    Path(target).write_text(json.dumps([read(case) for case in json.loads(Path(source).read_text())]))
