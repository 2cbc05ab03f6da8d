"""Builds vLLM's classes for `glm_moe_dsa`, trunk and MTP layer, on the CPU, and gives them the tensors of checkpoints:

    python vllm_weights.py FOLDER RESULT CHECKPOINT...

FOLDER has vLLM's source. What would run on a GPU is left out: attention, activations, kernels. Layers, quantisation
schemes with their parameters, and loaders are vLLM's own, as it chooses them for an H100. RESULT gets, by the name of
each checkpoint: what refused it, or the tensors that no parameter got and the parameters that got none.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.external.serving_parsers import Absent

ABSENT = (
    "aiohttp openai_harmony vllm.distributed.kv_transfer vllm.entrypoints vllm.parser vllm.v1.structured_output "
    "vllm.vllm_flash_attn xgrammar"
)


class Anything(types.SimpleNamespace):
    """Settings of which only some matter; the others are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Operations:
    """Stands for compiled operations, which nobody calls."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Operations()


class Empty(torch.nn.Module):
    """Stands for a module without parameters."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def pretend() -> None:
    """The platform is an H100 without any compiled code."""
    platforms, interface = map(importlib.import_module, ("vllm.platforms", "vllm.platforms.interface"))

    class Hopper(interface.Platform):
        _enum = interface.PlatformEnum.CUDA
        device_name, device_type, dispatch_key, dist_backend = "cuda", "cpu", "CUDA", "gloo"
        supported_quantization: list[str] = []
        get_device_capability = classmethod(lambda cls, device_id=0: interface.DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        check_and_update_config = classmethod(lambda cls, config: None)

    platforms._current_platform = Hopper()
    operations = importlib.import_module("vllm._custom_ops")
    for name in dir(operations):
        if "supports" in name:
            setattr(operations, name, lambda *_: True)
    torch.cuda.Stream = torch.cuda.Event = Anything  # type: ignore[misc, assignment]
    torch.ops._C = Operations()  # type: ignore[assignment]


@contextlib.contextmanager
def copies() -> Iterator[set[int]]:
    """The addresses of the memory that tensors were copied from."""
    found: set[int] = set()
    copy, put = torch.Tensor.copy_, torch.Tensor.__setitem__

    def noted(self: torch.Tensor, source: torch.Tensor, *more: Any) -> torch.Tensor:
        found.add(source.untyped_storage().data_ptr())
        return copy(self, source, *more)

    def noted_put(self: torch.Tensor, place: Any, source: Any) -> None:
        if isinstance(source, torch.Tensor):
            found.add(source.untyped_storage().data_ptr())
        put(self, place, source)

    torch.Tensor.copy_, torch.Tensor.__setitem__ = noted, noted_put  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        torch.Tensor.copy_, torch.Tensor.__setitem__ = copy, put  # type: ignore[method-assign]


def load(model: Any, tensors: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """(tensors that went nowhere, parameters that got nothing)."""
    with copies() as found:
        loaded = model.load_weights(iter(tensors.items()))
    left = [name for name, tensor in tensors.items() if tensor.untyped_storage().data_ptr() not in found]
    return left, sorted(name for name, _ in model.named_parameters() if name not in loaded)


def one(folder: Path, config: Any) -> dict[str, Any]:
    v2, mtp = (
        importlib.import_module(f"vllm.model_executor.models.{name}") for name in ("deepseek_v2", "deepseek_mtp")
    )
    v2.SiluAndMul = v2.SparseAttnIndexer = v2.MultiHeadLatentAttentionWrapper = Empty
    read = AutoConfig.from_pretrained(folder)
    model = {"hf_config": read, "hf_text_config": read, "dtype": torch.bfloat16, "max_model_len": 4096, "is_moe": True}
    config.model_config = Anything(use_mla=True, is_deepseek_mla=True, enforce_eager=True, model=str(folder), **model)
    config.speculative_config = Anything(draft_model_config=config.model_config)
    config.quant_config = None
    if raw := json.loads((folder / "config.json").read_text()).get("quantization_config"):
        place, name = ("fp8", "Fp8Config")
        if raw["quant_method"] == "compressed-tensors":
            place, name = "compressed_tensors.compressed_tensors", "CompressedTensorsConfig"
        module = importlib.import_module(f"vllm.model_executor.layers.quantization.{place}")
        config.quant_config = getattr(module, name).from_config(raw)
        config.quant_config.packed_modules_mapping = v2.GlmMoeDsaForCausalLM.packed_modules_mapping
    tensors = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    last = f"model.layers.{read.num_hidden_layers}."
    trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}
    torch.set_default_dtype(torch.bfloat16)
    try:
        config.compilation_config.static_forward_context.clear()
        whole = v2.GlmMoeDsaForCausalLM(vllm_config=config)
        schemes = {
            name: type(getattr(module, "scheme", None) or module.quant_method).__name__
            for name, module in whole.named_modules()
            if getattr(module, "quant_method", None) is not None
        }
        found = {"trunk": load(whole, trunk), "schemes": schemes}
        config.compilation_config.static_forward_context.clear()
        draft = mtp.DeepSeekMTP(vllm_config=config)
        own = {name: tensor for name, tensor in tensors.items() if name not in trunk or "embed_tokens" in name}
        return {**found, "mtp": load(draft, own)}
    except Exception as error:
        traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {error}"[:400]}


def main() -> None:
    source, result, *folders = map(Path, sys.argv[1:])
    sys.meta_path.insert(0, Absent(ABSENT.split()))
    sys.path.insert(0, str(source))
    pretend()
    settings, distributed = map(importlib.import_module, ("vllm.config", "vllm.distributed"))
    device = importlib.import_module("vllm.config.device").DeviceConfig("cpu")
    config = settings.VllmConfig(device_config=device)
    config.attention_config.sparse_mla_prefill_workspace_factor = 1
    config.model_config = Anything(is_moe=True)
    with settings.set_current_vllm_config(config), tempfile.TemporaryDirectory() as place:
        distributed.init_distributed_environment(1, 0, f"file://{place}/store", 0, "gloo")
        distributed.initialize_model_parallel(1)
        found = {folder.name: one(folder, config) for folder in folders}
    result.write_text(json.dumps(found))


main()
