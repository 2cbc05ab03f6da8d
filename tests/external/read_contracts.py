"""The routes and request fields of SGLang's and vLLM's servers, read from their source without importing it.

Prints what tests/rollout/serving_contracts.json records: `python -m tests.external.read_contracts sglang|vllm FOLDER`.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SGLANG = {
    "GET /model_info": None,
    "GET /server_info": None,
    "POST /generate": ("api/v1/api_types.py", "GenerateRequest"),
    "sampling_params": ("api/v1/api_types.py", "SamplingParams"),
    "POST /pause_generation": ("srt/managers/io_struct.py", "PauseGenerationReqInput"),
    "POST /continue_generation": ("srt/managers/io_struct.py", "ContinueGenerationReqInput"),
    "POST /abort_request": ("srt/managers/io_struct.py", "AbortReq"),
    "POST /update_weights_from_disk": ("srt/managers/io_struct.py", "UpdateWeightFromDiskReqInput"),
    "POST /begin_weight_update": ("srt/managers/io_struct.py", "BeginWeightUpdateReqInput"),
    "POST /end_weight_update": ("srt/managers/io_struct.py", "EndWeightUpdateReqInput"),
    "POST /init_weights_update_group": ("srt/managers/io_struct.py", "InitWeightsUpdateGroupReqInput"),
    "POST /destroy_weights_update_group": ("srt/managers/io_struct.py", "DestroyWeightsUpdateGroupReqInput"),
    "POST /update_weights_from_distributed": ("srt/managers/io_struct.py", "UpdateWeightsFromDistributedReqInput"),
}
"""What we ask SGLang, and the class of each body within the package."""
VLLM = {
    "GET /v1/models": "entrypoints/openai/models/api_router.py",
    "POST /v1/completions": "entrypoints/openai/completion/api_router.py",
    "GET /weight_info": "entrypoints/rl/online/api_router.py",
    "GET /server_info": "entrypoints/serve/dev/server_info/api_router.py",
    "POST /pause": "entrypoints/rl/online/api_router.py",
    "POST /resume": "entrypoints/rl/online/api_router.py",
    "POST /abort_requests": "entrypoints/rl/online/api_router.py",
    "POST /update_weight_version": "entrypoints/rl/online/api_router.py",
    "POST /collective_rpc": "entrypoints/serve/dev/rpc/api_router.py",
    "POST /reset_prefix_cache": "entrypoints/serve/dev/cache/api_router.py",
}
"""What we ask vLLM, and the file of each handler within the package."""


def classes(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}


def fields(file: Path, name: str) -> dict[str, bool]:
    """The fields of a class and of its bases in the same file; whether each must be given."""
    known = classes(file)
    found: dict[str, bool] = {}
    for base in known[name].bases:
        if isinstance(base, ast.Name) and base.id in known:
            found |= fields(file, base.id)
    for node in known[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            found[node.target.id] = node.value is None
    return found


def handlers(file: Path) -> Iterator[tuple[str, ast.AsyncFunctionDef]]:
    """("GET /path", function) of every route that a decorator in the file names."""
    for node in ast.parse(file.read_text()).body:
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
                if not isinstance(call.args[0], ast.Constant):
                    continue
                path, verb = call.args[0].value, call.func.attr.upper()
                for option in call.keywords if verb == "API_ROUTE" else ():
                    if option.arg == "methods":
                        yield from ((f"{method} {path}", node) for method in ast.literal_eval(option.value))
                if verb in ("GET", "POST"):
                    yield f"{verb} {path}", node


def sglang(folder: Path) -> dict[str, Any]:
    routes = dict(handlers(folder / "srt" / "entrypoints" / "http_server.py"))
    assert not (missing := [route for route in SGLANG if " " in route and route not in routes]), missing
    return {route: {} if place is None else fields(folder / place[0], place[1]) for route, place in SGLANG.items()}


def vllm(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for route, place in VLLM.items():
        handler = dict(handlers(folder / place))[route]
        taken = [argument for argument in handler.args.args if argument.arg not in ("raw_request", "request")]
        optional = len(handler.args.defaults)
        found[route] = {argument.arg: i < len(taken) - optional for i, argument in enumerate(taken)}
    found["POST /v1/completions"] = fields(folder / "entrypoints/openai/completion/protocol.py", "CompletionRequest")
    found["POST /collective_rpc"] = dict.fromkeys(("method", "args", "kwargs", "timeout"), False) | {"method": True}
    found["POST /abort_requests"] = {"request_ids": False}
    return found


if __name__ == "__main__":
    read = {"sglang": sglang, "vllm": vllm}[sys.argv[1]]
    print(json.dumps(read(Path(sys.argv[2]) / sys.argv[1]), indent=1))
